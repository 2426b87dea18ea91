"""What agentrl learns, beside TRL and beside itself with other settings: docs/learning.md.

    python benchmarks/learning.py [--rows trl,ppo] [--seeds 1,2,3] [--trl PYTHON] [--write-docs]

Each arm of a row is run once for each seed, in processes with one thread. What is done is kept
under `--out`, one file for each arm and seed, and not run again. At the end the tables of the rows
are printed, from these files and, for runs that are not there, docs/learning/results.json;
`--write-docs` puts all results into that file and its tables and curves into docs/learning.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from learning_report import RESULTS, digest, pages, tables
from learning_rows import ROOT, ROWS, SEEDS, Arm


def play(arm: Arm, seed: int, out: Path, interpreters: Mapping[str, str]) -> bool:
    """Run one arm for one seed; False when it fails, with the end of what it said."""
    sources = [ROOT, ROOT / "rewards", *sorted((ROOT / "environments").glob("*/"))]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, sources)),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_suffix(".unfinished")
    with tempfile.TemporaryDirectory() as work:
        filled = {"seed": seed, "work": work, "out": unfinished, **interpreters}
        filled["models"] = out.parents[1] / "models"
        for command in arm.commands:
            done = subprocess.run(
                [part.format(**filled) for part in command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if done.returncode:
                print(f"{arm.name}, seed {seed} FAILED:\n{done.stdout[-1500:]}", file=sys.stderr)
                return False
    unfinished.rename(out)
    return True


def collect(folder: Path, known: Mapping[str, Mapping[str, dict]]) -> dict[str, dict[str, dict]]:
    """Arm -> seed -> digest, of all that is finished, in the order of the rows.

    `known` is what the page shows already: a run in `folder` takes the place of the same one there.
    """
    names = dict.fromkeys(arm.name for row in ROWS.values() for arm in row.arms)
    done = {
        name: dict(known.get(name, {}))
        | {
            path.stem: digest(json.loads(path.read_text()))
            for path in sorted((folder / name).glob("*.json"))
        }
        for name in names
    }
    return {name: dict(sorted(seeds.items())) for name, seeds in done.items() if seeds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS), help="comma-separated; '' runs none")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)), help="comma-separated")
    parser.add_argument(
        "--trl",
        metavar="PYTHON",
        default=str(ROOT / ".venv-adapters" / "bin" / "python"),
        help="of an environment with TRL 1.16; `make test-adapters` makes one",
    )
    parser.add_argument(
        "--vllm",
        metavar="PYTHON",
        default=os.environ.get("AGENTRL_VLLM_PYTHON", str(ROOT / ".venv-vllm" / "bin" / "python")),
        help="of an environment with vLLM; `make vllm` makes one",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "learning")
    parser.add_argument("--write-docs", action="store_true", help="results, tables and curves")
    args = parser.parse_args()
    rows = [name for name in args.rows.split(",") if name]
    if unknown := [name for name in rows if name not in ROWS]:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    seeds = [int(seed) for seed in args.seeds.split(",")]
    interpreters = {"trl": args.trl, "vllm": args.vllm}
    missing = {name: path for name, path in interpreters.items() if not Path(path).exists()}

    failed = 0
    for name in rows:
        for seed in seeds:
            for arm in ROWS[name].arms:
                out = args.out / arm.name / f"{seed}.json"
                if seed not in arm.seeds or out.exists():
                    continue
                if absent := [each for each in missing if arm.needs(each)]:
                    path = missing[absent[0]]
                    print(f"{arm.name}: left out, there is no {path} (--{absent[0]} PYTHON)")
                    continue
                started = time.perf_counter()
                done = play(arm, seed, out, interpreters)
                failed += not done
                seconds = time.perf_counter() - started
                said = json.loads(out.read_text()).get("reward", [0])[-1] if done else "failed"
                print(f"{name}: {arm.name}, seed {seed}: {said} ({seconds:.0f} s)", flush=True)

    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results = collect(args.out, known)
    for name, made in tables(results).items():
        if name in rows:
            print(f"\n{ROWS[name].title}\n\n{made}")
    if args.write_docs:
        RESULTS.parent.mkdir(exist_ok=True)
        lines = [f" {json.dumps(arm)}: {json.dumps(seeds)}" for arm, seeds in results.items()]
        RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        for path, text in pages(results).items():
            path.write_text(text)
        print(f"\nwritten: {RESULTS.relative_to(ROOT)}, docs/learning.md and its curves")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
