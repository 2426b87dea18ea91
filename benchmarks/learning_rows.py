"""Defines what `learning.py` runs: the report's rows, their arms and each arm's commands."""

from __future__ import annotations

import hashlib
import json
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
QUICKSTART = ROOT / "examples" / "quickstart" / "run.toml"
SMOLLM2 = ROOT / "examples" / "smollm2"
NUM_STEPS = 60
REAL_STEPS = 40
TOOLS_STEPS = 20
SHORTER = 40
TURNS_STEPS = 40
SEEDS = (1, 2, 3)


@dataclass(frozen=True, slots=True)
class Arm:
    """One line of a row's table: one run for each seed."""

    name: str
    commands: Sequence[Sequence[str]]
    """One after the other. `{seed}`, `{work}` (an empty folder), `{out}` (the file in which the
    last leaves its result), `{models}` (a folder that stays) and the interpreters `{trl}` and
    `{vllm}` are filled in."""
    seeds: Sequence[int] = SEEDS
    about: str = ""
    """What stands beside the name in the table."""

    def needs(self, name: str) -> bool:
        """Returns whether a command contains `{name}`."""
        return any(f"{{{name}}}" in command for command in self.commands)

    def fingerprint(self) -> str:
        """Hashes the commands and the content of their run files, alike in every checkout.

        Results with equal fingerprints belong to the same arm. Changes of agentrl do not count.
        """
        python, root = sys.executable, f"{ROOT}/"
        words = [["python" if w == python else w for w in command] for command in self.commands]
        files = sorted({w for command in words for w in command if w.endswith(".toml")})
        said = [words, [tomllib.loads(Path(file).read_text()) for file in files]]
        text = json.dumps(said, sort_keys=True, ensure_ascii=False).replace(root, "")
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    arms: Sequence[Arm]
    goal: float = 0.8
    """Reward that the table counts the samples to."""
    samples_per_step: int = 64


def run(
    *overrides: str, folder: str = "run", run_file: Path = QUICKSTART, steps: int = NUM_STEPS
) -> list[str]:
    """A run of agentrl; of several commands the last writes `{out}`."""
    return [
        *(sys.executable, str(HERE / "learning_run.py"), str(run_file), "--out", "{out}"),
        *("--run.dir", f"{{work}}/{folder}", "--run.seed", "{seed}"),
        *("--run.num_steps", str(steps), "--run.save_every", str(steps)),
        *overrides,
    ]


def quickstart(*overrides: str, folder: str = "run", steps: int = NUM_STEPS) -> list[str]:
    """The same on the quickstart's tasks, which are others for each seed."""
    return run("--env.config.seed", "{seed}", *overrides, folder=folder, steps=steps)


def settings(text: str) -> list[str]:
    """`a.b=1 c=2` as arguments."""
    return [part for pair in text.split() for part in ("--" + pair.replace("=", " ", 1)).split(" ")]


def one(name: str, text: str = "", about: str = "") -> Arm:
    return Arm(name, [quickstart(*settings(text), steps=SHORTER)], about=about)


# Both sides alike: Hugging Face's warm-up begins at 0, agentrl's above it; the eps is TRL's.
SAME = settings("train.warmup_steps=0 objective.scale.eps=1e-4")


def trl_arm(name: str, how: str, about: str) -> Arm:
    command = ["{trl}", str(HERE / "learning_trl.py"), how, str(QUICKSTART), "--out", "{out}"]
    steps = ["--run.num_steps", str(NUM_STEPS), "--run.seed", "{seed}"]
    return Arm(name, [[*command, *steps, "--env.config.seed", "{seed}", *SAME]], about=about)


def replay_arm(preset: str, epochs: int, steps: int) -> Arm:
    text = f"objective.preset={preset} train.num_epochs={epochs} run.save_every=1"
    if preset != "dr_grpo":
        text += " objective.scale.eps=1e-4"
    else:
        text += " objective.aggregate.max_tokens=72"
    text += f" train.warmup_steps=0 run.keep_checkpoints={steps + 1} track.signals=0"
    if epochs > 1:
        text += " train.learning_rate=3e-4"
    if preset == "cispo":  # its bound is 5, which eight steps do not come near
        text += " objective.surrogate.high=1.1"
    compare = ["{trl}", str(HERE / "learning_trl.py"), "replay", "{work}/run", "--out", "{out}"]
    about = f"{epochs} epoch" + "s" * (epochs > 1)
    ours = quickstart(*settings(text), steps=steps)
    return Arm(f"{preset}-{epochs}", [ours, compare], seeds=(1,), about=f"`{preset}`, {about}")


GRPO = one("grpo", about="`grpo`, the quickstart as it is")


def turns_arm(name: str, text: str, about: str, seeds: Sequence[int] = SEEDS) -> Arm:
    make = [sys.executable, str(HERE / "learning_turns.py"), "{models}/six-turns"]
    given = settings(
        f"{text} env.id={HERE}/learning_turns.py:SixTurns model.path={{models}}/six-turns "
        "env.config.seed={seed}"
    )
    return Arm(
        name,
        [make, run(*given, run_file=HERE / "learning_turns.toml", steps=TURNS_STEPS)],
        seeds,
        about,
    )


def packing_arm(name: str, prompts: str) -> Arm:
    script = str(HERE / "train_step.py")
    command = [sys.executable, script, "--vocab", "4096", "--prompts", prompts, "--repeat", "3"]
    return Arm(name, [[*command, "--trl", "{trl}", "--json", "{out}"]], seeds=(1,))


def staleness_arm(steps: int) -> Arm:
    given = settings(f"rollout.max_staleness={steps} env.config.seed={{seed}}")
    given += ["--inference.python", "{vllm}"]
    about = "in turn" if not steps else f"{steps} step{'s' * (steps > 1)} ahead at most"
    run_file = ROOT / "examples" / "vllm_cpu" / "run.toml"
    command = run(*given, run_file=run_file, steps=SHORTER)
    return Arm(f"staleness-{steps}", [command], seeds=(1,), about=about)


def real_arm(name: str, text: str, about: str, seeds: Sequence[int] = SEEDS) -> Arm:
    """Builds an arm on the pretrained model of examples/smollm2, which its first command makes."""
    task = "tools" if "tools" in name else "words"
    run_file = SMOLLM2 / ("tools.toml" if task == "tools" else "run.toml")
    steps = str(TOOLS_STEPS if task == "tools" else REAL_STEPS)
    prepare = [sys.executable, str(SMOLLM2 / "prepare.py"), "--only", task]
    given = [*settings(text), "--run.eval_every", steps, "--track.signals", "0"]
    if "trl" in name:
        command = ["{trl}", str(HERE / "learning_trl.py"), "words", str(run_file)]
        command += ["--out", "{out}", "--run.num_steps", steps, "--run.seed", "{seed}"]
        return Arm(name, [prepare, [*command, *given]], seeds, about)
    if "vllm" in name:
        given += ["--inference.python", "{vllm}"]
    return Arm(name, [prepare, run(*given, run_file=run_file, steps=int(steps))], seeds, about)


CRITIC = "objective.preset=ppo critic.learning_rate=1e-3"
REAL_LORA = "train.learning_rate=1e-4 model.lora.rank=16"
LORA = "train.learning_rate=1e-3 model.lora.rank="

ROWS: dict[str, Row] = {
    "trl": Row(
        "agentrl and TRL on the same tasks",
        [
            Arm("agentrl", [quickstart(*SAME)], about="agentrl"),
            trl_arm("trl", "bare", "TRL"),
            trl_arm("trl-adapter", "adapter", "TRL with agentrl's environment"),
        ],
    ),
    "replay": Row(
        "TRL on agentrl's trajectories",
        [replay_arm("grpo", 1, 60)]
        + [replay_arm(name, 2, 8) for name in ("grpo", "dr_grpo", "dapo", "gspo", "cispo")],
    ),
    "ppo": Row(
        "PPO and GRPO",
        [
            GRPO,
            one("ppo", CRITIC, "`ppo`, 8 tasks of 8"),
            one(
                "ppo-64x1",
                CRITIC + " rollout.groups_per_step=64 rollout.group_size=1",
                "`ppo`, 64 tasks of 1",
            ),
            one("ppo-lambda", CRITIC + " objective.credit.lam=0.95", "`ppo`, lambda 0.95"),
        ],
    ),
    "packing": Row(
        "Long multi-turn rows: packed and shared against padded",
        [
            packing_arm("packing", "0"),
            *(packing_arm(f"packing-{prompts}", prompts) for prompts in ("130", "600", "980u")),
        ],
    ),
    "reuse": Row(
        "Epochs and mini-batches",
        [
            GRPO,
            one("epochs-2", "train.num_epochs=2", "2 epochs"),
            one("epochs-4", "train.num_epochs=4", "4 epochs"),
            one("minibatches-2", "train.num_minibatches=2", "2 mini-batches"),
            one("minibatches-4", "train.num_minibatches=4", "4 mini-batches"),
        ],
    ),
    "lora": Row(
        "LoRA",
        [
            GRPO,
            *(one(f"lora-{rank}", f"{LORA}{rank}", f"rank {rank}") for rank in (2, 8, 32)),
        ],
    ),
    "turns": Row(
        "Six turns and one reward at the end",
        [
            turns_arm("turns-outcome", "", "outcome credit (`grpo`)"),
            turns_arm(
                "turns-slow", "train.learning_rate=1e-4", "outcome credit, learning rate 1e-4"
            ),
            turns_arm(
                "turns-gigpo", "objective.credit.kind=gigpo", "turn credit (`credit.kind = gigpo`)"
            ),
            turns_arm("turns-ppo", f"{CRITIC} objective.credit.lam=0.95", "`ppo`, lambda 0.95"),
            turns_arm(
                "turns-paid",
                "env.config.pays=turn objective.credit.kind=turn objective.baseline.key=group_turn",
                "a sixth paid for each right turn, turn credit",
                seeds=(1, 2),
            ),
        ],
    ),
    "real": Row(
        "A pretrained model",
        [
            real_arm("real", "", "all weights, float32", seeds=(*SEEDS, 4)),
            real_arm("real-bfloat16", "model.dtype=bfloat16", "all weights, bfloat16"),
            real_arm("real-lora", f"{REAL_LORA}", "adapter, float32"),
            real_arm(
                "real-lora-bfloat16", f"{REAL_LORA} model.dtype=bfloat16", "adapter, bfloat16"
            ),
            real_arm("real-vllm", "inference.backend=vllm", "all weights, float32, vLLM"),
            real_arm("real-trl", "train.warmup_steps=0 objective.scale.eps=1e-4", "TRL"),
        ],
        goal=0.35,  # it begins at about half of that
    ),
    "tools": Row(
        "A pretrained model with a tool",
        [real_arm("real-tools", "", "a calculator over several turns")],
        samples_per_step=32,
    ),
    "staleness": Row("Rollouts ahead of the trainer", [staleness_arm(n) for n in (0, 1, 2, 4)]),
}

APART = ("real", "tools")
"""Rows that run where they are named: hours on a quiet machine, and a download."""
