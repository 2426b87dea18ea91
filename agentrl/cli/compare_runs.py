"""`agentrl compare RUN_A RUN_B`: finds where two training runs that should be equal first differ.

A run with the embedded engine is bit for bit repeatable, so the first value that differs leads to
the cause. Steps are compared in the order of what follows from what: checkpoint, tasks and seeds,
prompts, sampled tokens with their log-probabilities, rewards, what the trainer computed for each
token, and the step's metrics.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.config import load_config
from agentrl.errors import DataError
from agentrl.rollout.log import read_trajectories
from agentrl.rollout.signals import ARRAYS, read_signals
from agentrl.types import Trajectory
from agentrl.view.runs import flat
from agentrl.view.tracking import METRICS_FILE, read_metrics, read_software

OF_EACH_RUN = ("run.name", "run.dir", "run.resume", "run.save_every", "run.keep_checkpoints")
"""Keys in which equal runs may differ."""
OF_THE_CLOCK = ("time/", "sync/", "train/tokens_per_s", "rollout/tokens_per_s")
"""Beginnings of metrics that measure time, or depend on it."""


@dataclass(slots=True, frozen=True)
class Difference:
    """The first value that differs."""

    step: int
    where: str
    """The trajectory and the token, the file and the tensor, or "metrics"."""
    quantity: str
    first: Any
    second: Any
    means: str
    """What such a difference comes from."""

    def __str__(self) -> str:
        return (
            f"step {self.step}, {self.where}: {self.quantity} is {self.first} in A and "
            f"{self.second} in B\n{self.means}"
        )


def is_training_run(folder: Path) -> bool:
    """Returns whether this is a training run; False for an evaluation.

    Raises:
        DataError: it is neither.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    if not (folder / "config.toml").is_file():
        raise DataError(
            f"{folder} has no config.toml: name a run directory, or a folder of agentrl eval --out"
        )
    return (folder / METRICS_FILE).is_file()


def compare_runs(first: Path, second: Path, *, replay: bool, as_json: bool) -> int:
    """Runs `agentrl compare` for two training runs; returns 1 if they differ, else 0."""
    different = inputs_that_differ(first, second)
    last = min(_last_step(first), _last_step(second))
    found = first_difference(first, second, range(last + 1))
    again = {}
    if replay and found is not None:
        again = {name: played_again(run, found.step) for name, run in (("A", first), ("B", second))}
    if as_json:
        result = {"steps": last, "inputs": different, "difference": found and asdict(found)}
        print(json.dumps(result | ({"again": again} if again else {})))
        return found is not None
    print(f"A = {first}, B = {second}: {last} steps in both")
    print(f"first difference: {found}" if found else f"equal in all {last} steps that both have")
    for name, text in again.items():
        print(f"{name}, played again here, {text}")
    print(
        "what the runs were given:" if different else "both were given the same keys and packages"
    )
    for key, (one, other) in different.items():
        print(f"  {key}: {one} in A, {other} in B")
    return found is not None


def inputs_that_differ(first: Path, second: Path) -> dict[str, tuple[Any, Any]]:
    """Returns what differs in configuration, software, device and starting model, by name."""
    one, other = _keys(first), _keys(second)
    software = read_software(first), read_software(second)
    if all(software):
        one, other = one | software[0], other | software[1]
    elif any(software):
        one["packages"], other["packages"] = (
            "recorded" if each else "not recorded" for each in software
        )
    found = {
        key: (one.get(key, "absent"), other.get(key, "absent"))
        for key in sorted({*one, *other})
        if one.get(key) != other.get(key)
    }
    paths: tuple[Any, Any] = found.get("model.path", ('""', '""'))
    models = Path(json.loads(paths[0])), Path(json.loads(paths[1]))
    if "model.path" in found and all(model.is_dir() for model in models):
        weights = _weights(*models, 0)
        del found["model.path"]  # the same model may lie in two places
        if weights is not None:
            found[f"{weights.where}, {weights.quantity}"] = weights.first, weights.second
    return found


def _keys(run: Path) -> dict[str, Any]:
    """Returns a run's keys, of several environments by their names."""
    config: Any = load_config(run / "config.toml", []).to_json()
    if isinstance(config["env"], list):
        config["env"] = {each["name"]: each for each in config["env"]}
    return {key: value for key, value in flat(config).items() if key not in OF_EACH_RUN}


def first_difference(first: Path, second: Path, steps: Sequence[int]) -> Difference | None:
    """Returns the first difference in what two runs wrote in these steps."""
    one, other = ({row["step"]: row for row in read_metrics(run)} for run in (first, second))
    for step in steps:
        saved = f"checkpoints/step_{step:06d}"
        found = (
            _trajectories(first, second, step)
            or _signals(first, second, step)
            or _metrics(one.get(step, {}), other.get(step, {}), step)
            or _weights(first / saved, second / saved, step)
        )
        if found is not None:
            return found
    return None


def played_again(run: Path, step: int) -> str:
    """Plays and trains a step again, from the checkpoint before it, in a folder of its own, and
    says in words whether the result is what the run wrote."""
    from agentrl.api import train
    from agentrl.train.checkpoint import STEP_NAME

    saved = sorted(
        (int(match[1]), path)
        for path in (run / "checkpoints").glob("step_*")
        if (match := STEP_NAME.fullmatch(path.name)) and int(match[1]) < step
    )
    with tempfile.TemporaryDirectory(prefix="agentrl-compare-") as folder:
        begin, path = saved[-1] if saved else (0, None)
        keys = [f"--run.dir={folder}/run", f"--run.num_steps={max(step, 1)}", "--run.eval_every=0"]
        if path is not None:
            shutil.copytree(path, Path(folder, "run", "checkpoints", path.name))
            shutil.copy(run / METRICS_FILE, Path(folder, "run"))
            keys.append("--run.resume=true")
        with contextlib.redirect_stdout(sys.stderr):  # the report's own lines are on stdout
            again = train(load_config(run / "config.toml", keys), quiet=True).run_dir
        found = first_difference(run, again, range(begin + 1, step + 1))
    origin = f"from {path.name if path else 'its beginning'}"
    if found is None:
        return f"{origin}, is bit for bit what it wrote: its cause is among its inputs"
    return (
        f"{origin}, differs from what it wrote (A: then, B: now) in {found}\nIts machine, its "
        "packages or its data have changed since, or it does not repeat itself"
    )


# the parts of a step ------------------------------------------------------------------------------

_TRAINED = "equal episodes, trained on differently: [objective], [train], torch or the device"
_UPDATE = (
    "equal episodes and advantages: the update itself differs ([train], torch, the device, or the "
    "optimizer's state before it)"
)
_GRADING = "equal tokens, graded differently: the reference in the data, the grader or a package"
MEANS = {
    "whether it was played": "another number of groups or members, or another order of tasks",
    "task": "another order of tasks: run.seed, the sampler, or the size of the data",
    "seed": "another seed of the episode: run.seed, or the task's place in the order",
    "prompt token": "another text of the task: the data, unless a key or a package below says more",
    "token of the environment": "the environment answered the same actions differently: its data, "
    "its code or a package",
    "log-prob at sampling": "the weights or the arithmetic: the model's files, torch, the device, "
    "its threads",
    "sampled token": "another draw from the same distribution: run.seed or the sampling keys",
    "who wrote the token": "a turn ended elsewhere: a limit of tokens, or the stop tokens",
    "number of tokens": "a limit of tokens or turns",
    "error": _GRADING,
    "reward components": _GRADING,
    "reward": _GRADING,
    "stop reason": "a limit of the environment or of the run",
}
"""What a difference comes from, by quantity; of one turn's, causes stand before their effects."""


def _trajectories(first: Path, second: Path, step: int) -> Difference | None:
    """Returns the difference that the others of the step may follow from: of the earliest turn, as
    a round of sampling batches one turn of all trajectories."""
    one, other = (_played(run, step) for run in (first, second))
    found = []
    for name in sorted({*one, *other}):
        if name in one and name in other:
            different = _in_trajectory(one[name], other[name])
        else:
            different = -1, "", "whether it was played", name in one, name in other
        if different is not None:
            found.append((name, *different))
    if not found:
        return None
    order = [*MEANS]
    name, _, place, quantity, a, b = min(found, key=lambda e: (e[1], order.index(e[3]), e[0]))
    return Difference(step, f"trajectory {name}{place}", quantity, a, b, MEANS[quantity])


def _in_trajectory(a: Trajectory, b: Trajectory) -> tuple[int, str, str, Any, Any] | None:
    """Returns turn, place, quantity and both values of the first difference."""
    for quantity, one, other in (("task", a.task_id, b.task_id), ("seed", a.seed, b.seed)):
        if one != other:
            return -1, "", quantity, one, other
    for number, (left, right) in enumerate(zip(a.branches, b.branches, strict=False)):
        both = min(len(left), len(right))
        rows = [
            np.array([row.loss_mask[:both], row.token_ids[:both], row.rollout_logprobs[:both]])
            for row in (left, right)
        ]
        unequal = (rows[0] != rows[1]).any(axis=0)
        if unequal.any():
            token = int(unequal.argmax())
            place, turn = f", row {number}, token {token}", left.turn_ids[token]
            (mask, id_a, logprob_a), (mask_b, id_b, logprob_b) = (each[:, token] for each in rows)
            if mask != mask_b:
                author = {1: "the policy", 0: "the environment"}
                return turn, place, "who wrote the token", author[mask], author[mask_b]
            if id_a == id_b:
                return turn, place, "log-prob at sampling", float(logprob_a), float(logprob_b)
            read = "token of the environment" if turn else "prompt token"
            return turn, place, "sampled token" if mask else read, int(id_a), int(id_b)
        if len(left) != len(right):
            turn = (left if len(left) > both else right).turn_ids[both]
            return turn, f", row {number}", "number of tokens", len(left), len(right)
    for quantity, one, other in (
        ("error", a.error and a.error.code, b.error and b.error.code),
        ("reward components", a.reward_components, b.reward_components),
        ("reward", a.reward, b.reward),
        ("stop reason", str(a.stop_reason), str(b.stop_reason)),
    ):
        if one != other:
            return len(a.turns), "", quantity, one, other
    return None


def _played(run: Path, step: int) -> dict[str, Trajectory]:
    if not step or not (run / "trajectories").is_dir():
        return {}
    played = read_trajectories(run, steps=range(step, step + 1))
    return {trajectory.trajectory_id: trajectory for _, trajectory in played}


def _signals(first: Path, second: Path, step: int) -> Difference | None:
    try:
        one, other = read_signals(first, step), read_signals(second, step)
    except DataError:  # a run keeps a share of them, or none
        return None
    for name in sorted(one.keys() & other.keys()):
        for a, b in zip(one[name], other[name], strict=False):
            # The live log-probs are those after an update; what leads to it comes first.
            for quantity in ("old_logprobs", "advantages", "weights", *ARRAYS):
                left, right = getattr(a, quantity), getattr(b, quantity)
                if left is None or right is None or np.array_equal(left, right, equal_nan=True):
                    continue
                token = int(((left != right) & ~(np.isnan(left) & np.isnan(right))).argmax())
                where = f"trajectory {name}, row {a.row}, token {token}"
                values = float(left[token]), float(right[token])
                return Difference(step, where, f"the trainer's {quantity}", *values, _TRAINED)
    return None


def _metrics(one: Mapping[str, Any], other: Mapping[str, Any], step: int) -> Difference | None:
    for key in one:
        if key in other and one[key] != other[key] and not key.startswith(OF_THE_CLOCK):
            return Difference(step, "metrics", key, one[key], other[key], _UPDATE)
    return None


def _weights(first: Path, second: Path, step: int) -> Difference | None:
    """Compares the tensors of two checkpoints or models; None if one does not exist."""
    for file in sorted(first.glob("**/*.safetensors")) if second.is_dir() else ():
        name = file.relative_to(first)
        if not (second / name).is_file():  # written by another number of ranks
            continue
        a, b = np.memmap(file, np.uint8, "r"), np.memmap(second / name, np.uint8, "r")
        if len(a) == len(b) and np.array_equal(a, b):
            continue
        length = min(len(a), len(b))
        place = int((a[:length] != b[:length]).argmax())
        tensor, element = _tensor_at(a, place)
        bits = f"{a[place] ^ b[place]:08b}".count("1")
        where = f"{first.parent.name}/{first.name}/{name}"
        means = (
            f"{bits} of its bits differ, in a file that follows from equal values: it was damaged "
            "or changed on the disk, or the update differs"
        )
        what = f"byte {place}, in {tensor}{element}"
        return Difference(step, where, what, int(a[place]), int(b[place]), means)
    return None


def _tensor_at(content: np.ndarray, place: int) -> tuple[str, str]:
    """Returns the tensor that holds a byte of a safetensors file, and the element of it."""
    (length,) = struct.unpack("<Q", content[:8].tobytes())
    if place < 8 + length:
        return "its header", ""
    header = json.loads(content[8 : 8 + length].tobytes())
    for name, each in header.items():
        begin, end = each.get("data_offsets", (0, 0))
        if begin <= place - 8 - length < end:
            count = max(1, int(np.prod(each["shape"])))
            return name, f"[{(place - 8 - length - begin) * count // (end - begin)}]"
    return "no tensor", ""


def _last_step(run: Path) -> int:
    return max((row["step"] for row in read_metrics(run)), default=0)
