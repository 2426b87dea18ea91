"""Compares learning in agentrl with TRL and with other settings, for docs/learning.md.

    python benchmarks/learning.py [--rows trl,ppo] [--seeds 1,2,3] [--again] [--write-docs]

Each arm of a row is run once for each seed, in processes with one thread. What
docs/learning/results.json has of the same arm is taken from there and not run; an arm whose
commands or run file changed since is run again, and `--again` runs all. A run that is done is kept
under `--out` until `--write-docs` puts it into that file, so an interrupted command goes on where
it was. At the end the tables of the rows are printed; `--write-docs` also puts the tables and
curves of all rows into docs/learning.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from learning_report import RESULTS, Results, digest, pages, tables
from learning_rows import APART, ROOT, ROWS, SEEDS, Arm


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
    before = cpu_seconds()
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
    made = {
        "arm": arm.fingerprint(),
        "commit": commit(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "cpu_s": round(cpu_seconds() - before),
    }
    unfinished.write_text(json.dumps(json.loads(unfinished.read_text()) | {"made": made}))
    unfinished.rename(out)
    return True


def cpu_seconds() -> float:
    """Returns the CPU time of all processes that this one started and waited for."""
    return os.times().children_user + os.times().children_system


def commit() -> str:
    """The last that changed agentrl's code; with a + where files differ from it."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words, "--", "agentrl", "environments", "rewards"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    last = git("log", "-1", "--format=%h", "--abbrev=7") or "unknown"
    return last + "+" * bool(git("diff", "HEAD"))


def collect(folder: Path, known: Results) -> Results:
    """Arm -> seed -> digest, in the order of the rows: `known` and what `folder` has of today's
    arms, which takes the place of the same run there."""
    done = {}
    for name, arm in {arm.name: arm for row in ROWS.values() for arm in row.arms}.items():
        runs = dict(known.get(name, {}))
        for path in (folder / name).glob("*.json"):
            result = json.loads(path.read_text())
            if result.get("made", {}).get("arm") == arm.fingerprint():
                runs[path.stem] = digest(result)
        if runs:
            done[name] = dict(sorted(runs.items()))
    return done


def missing(rows: Sequence[str], seeds: Sequence[int], done: Results) -> list[tuple[Arm, int]]:
    """Runs of these rows and seeds that `done` has not, or has of an arm that changed since."""
    return [
        (arm, seed)
        for arm in {arm.name: arm for name in rows for arm in ROWS[name].arms}.values()
        for seed in seeds
        if seed in arm.seeds
        and done.get(arm.name, {}).get(str(seed), {}).get("made", {}).get("arm")
        != arm.fingerprint()
    ]


def cpu_left(todo: Sequence[tuple[Arm, int]], results: Results) -> float:
    """Seconds, by what each arm took; the mean of all where one was not measured."""
    took = {
        arm: statistics.fmean(seconds)
        for arm, runs in results.items()
        if (seconds := [run["made"]["cpu_s"] for run in runs.values() if "cpu_s" in run["made"]])
    }
    usual = statistics.fmean(took.values()) if took else 0.0
    return sum(took.get(arm.name, usual) for arm, _ in todo)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    usual = ",".join(name for name in ROWS if name not in APART)
    parser.add_argument("--rows", default=usual, help="comma-separated; '' runs none")
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
    parser.add_argument("--again", action="store_true", help="also what the results file has")
    parser.add_argument("--write-docs", action="store_true", help="results, tables and curves")
    args = parser.parse_args()
    rows = [name for name in args.rows.split(",") if name]
    if unknown := [name for name in rows if name not in ROWS]:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(ROWS)}")
    seeds = [int(seed) for seed in args.seeds.split(",")]
    interpreters = {"trl": args.trl, "vllm": args.vllm}
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}

    failed, started = 0, time.perf_counter()
    taken = collect(args.out, {} if args.again else known)
    todo = missing(rows, seeds, taken)
    print(f"{len(todo)} of {len(missing(rows, seeds, {}))} runs to do", flush=True)
    for number, (arm, seed) in enumerate(todo, 1):
        name = f"{number}/{len(todo)} {arm.name}, seed {seed}"
        for need, path in interpreters.items():
            if arm.needs(need) and not Path(path).exists():
                print(f"{name}: left out, there is no {path} (--{need} PYTHON)")
                break
        else:
            done = play(arm, seed, args.out / arm.name / f"{seed}.json", interpreters)
            failed += not done
            slowness = (time.perf_counter() - started) / cpu_seconds()
            left = slowness * cpu_left(todo[number:], collect(args.out, known)) / 60
            said = "done" if done else "FAILED"
            print(f"{name}: {said}, about {left:.0f} min left", flush=True)

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
        for name in results:  # they are in the results file now
            for path in (args.out / name).glob("*.json"):
                path.unlink()
        print(f"\nwritten: {RESULTS.relative_to(ROOT)}, docs/learning.md and its curves")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
