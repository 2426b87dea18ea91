"""`agentrl swebench`: grades predictions, checks instances and the engine.

Commands import what they need, so that `--help` stays quick.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from rich.progress import Progress

    from agentrl_swebench.dataset import Instance
    from agentrl_swebench.grade import GradingLimits

app = App("swebench", help="SWE-bench: grade predictions, check instances.")


@Parameter(name="*")
@dataclass(slots=True, frozen=True, kw_only=True)
class Rows:
    """The instances that a command is for."""

    dataset: str
    """A .jsonl, .json or .parquet file, an alias (full, lite, verified, multilingual, multimodal,
    swe-gym, ...), or a Hugging Face name."""
    split: str = "test"
    """Split of a Hugging Face dataset."""
    instance_ids: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None
    """Only these instances."""
    filter: str | None = None
    """Only instances whose id matches this regular expression (a search, as in Python)."""
    slice: str | None = None
    """Only this slice of what is left, FROM:TO, in the dataset's order, as in Python."""

    def load(self, *, derive: bool = False) -> list[Instance]:
        """Loads the instances.

        Args:
            derive: make the images of rows whose own images cannot be graded.

        Raises:
            ConfigError: an option is not valid, or no instance is left.
            DataError: a row cannot be read.
        """
        import re

        from agentrl_swebench.dataset import load_instances

        try:
            wanted = re.compile(self.filter or "")
        except re.error as error:
            raise ConfigError(f"--filter {self.filter!r}: {error}") from error
        place = slice(None)
        if self.slice is not None:
            if not re.fullmatch(r"-?\d*:-?\d*", self.slice):
                raise ConfigError(f"--slice {self.slice!r} is not FROM:TO, as in 0:50")
            ends = (int(each) if each.strip("-") else None for each in self.slice.split(":"))
            place = slice(*ends)
        instances = load_instances(
            self.dataset,
            split=self.split,
            instance_ids=self.instance_ids,
            wanted=wanted,
            convert=_derived if derive else None,
        )[place]
        if not instances:
            raise ConfigError("--filter and --slice leave no instance")
        return instances


@Parameter(name="*")
@dataclass(slots=True, frozen=True, kw_only=True)
class Limits:
    """The limits of gradings."""

    max_workers: int | None = None
    """Gradings at once; one per core by default."""
    timeout: float = 1800.0
    """Limit on an instance's tests in seconds."""
    memory_gb: float = 4.0
    """GiB of memory of a grading container."""
    network: bool = False
    """Give the tests a network, as the official harness does."""
    sys_admin: bool = False
    """Give the tests CAP_SYS_ADMIN, as the official harness does. Only tests that start a browser
    need it, and it is close to root on this machine."""

    def read(self) -> GradingLimits:
        """Returns the limits of a container.

        Raises:
            ConfigError: a limit is not valid.
        """
        from agentrl_swebench.grade import GradingLimits

        if self.max_workers is not None and self.max_workers < 1:
            raise ConfigError(f"--max-workers {self.max_workers} must be positive")
        if self.timeout <= 0:
            raise ConfigError(f"--timeout {self.timeout:g} must be positive")
        if self.memory_gb < 0.1:
            raise ConfigError(f"--memory-gb {self.memory_gb:g} is too little for a container")
        return GradingLimits(
            memory_bytes=int(self.memory_gb * (1 << 30)),
            network="bridge" if self.network else "none",
            sys_admin=self.sys_admin,
        )


@app.command(name="eval")
def evaluate(
    *,
    rows: Rows,
    predictions: str,
    out: Path = Path(),
    run_id: str = "run",
    policy: Literal["official", "strict"] = "official",
    withhold: bool = False,
    limits: Limits = Limits(),
) -> int:
    """Grade predictions with the official harness.

    Writes its report unchanged to MODEL.RUN.json and our own report to MODEL.RUN.agentrl.json. To
    continue an interrupted call, repeat it with the same run id. The exit status is 1 if a failure
    of the infrastructure left an instance without a verdict.

    Args:
        predictions: Predictions in an official format, .jsonl or .json; a folder of
            `agentrl eval --out`; or gold, the reference solutions.
        out: Folder for reports and logs.
        run_id: Name of the run.
        policy: Grade all of a patch, or only its source.
        withhold: First run every patch on tests without their expected values, which shows forged
            results. The official report does not change.
    """
    import asyncio
    from collections import Counter

    from agentrl.env.container.engine import reap_abandoned
    from agentrl_swebench.dataset import load_predictions
    from agentrl_swebench.evaluate import evaluate as grade_all
    from agentrl_swebench.grade import UNCONFIRMED, WRONG_VALUES, Verdict

    checked = limits.read()
    instances = rows.load()
    reap_abandoned(10)
    is_selection = bool(rows.instance_ids or rows.filter or rows.slice)
    loaded = load_predictions(predictions, instances, is_selection=is_selection)
    out.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    with _progress() as progress:
        task = progress.add_task("grading", total=len(loaded), state="")

        def show(verdict: Verdict) -> None:
            counts[verdict.outcome] += 1
            state = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
            progress.update(task, advance=1, state=state)

        result = asyncio.run(
            grade_all(
                instances,
                loaded,
                run_id=run_id,
                out=out,
                dataset=rows.dataset,
                split=rows.split,
                policy=policy,
                withhold=withhold,
                timeout_s=limits.timeout,
                limits=checked,
                workers=limits.max_workers,
                progress=show,
            )
        )
    void = [each for each in result.verdicts if each.outcome == "infrastructure"]
    num_resolved = sum(bool(each.resolved) for each in result.verdicts)
    print(f"resolved {num_resolved} of {len(instances)} instances, policy {policy}")
    if result.num_reused:
        print(f"{result.num_reused} verdicts come from an earlier call with this run id")
    if withhold:
        wrong = [e.instance_id for e in result.verdicts if e.resolved and WRONG_VALUES in e.flags]
        shown = f": {', '.join(wrong)}" if wrong else ""
        print(f"withheld: {len(wrong)} of the {num_resolved} resolved give wrong values{shown}")
        for flag in sorted(UNCONFIRMED):
            ids = [each.instance_id for each in result.verdicts if flag in each.flags]
            if ids:
                print(f"withheld: {len(ids)} not confirmed, {flag}: {', '.join(ids)}")
    print(f"official report  {result.report}")
    print(f"our report       {result.our_report}")
    for each in void:
        print(f"{each.instance_id}: no verdict: {each.reason}", file=sys.stderr)
    return 1 if void else 0


@app.command
def run(
    *,
    rows: Rows,
    url: str,
    model: str,
    out: Path = Path("results"),
    workers: int = 4,
    max_turns: int = 50,
    max_total_tokens: int | None = None,
    policy: Literal["official", "strict"] = "official",
    withhold: bool = False,
    limits: Limits = Limits(),
) -> int:
    """Let a served model solve instances, then grade its patches with the official harness.

    Plays each instance in a container with a shell, through the server's chat endpoint, and writes
    what `agentrl swebench eval` writes. To continue an interrupted call, repeat it: what is played
    and graded already is kept. A token for the server is read from OPENAI_API_KEY.

    Args:
        url: Server of the OpenAI protocol, which has to read tool calls itself.
        model: Name of the model at the server.
        out: Folder for episodes, reports and logs.
        workers: Containers in which the model works at once.
        max_turns: Turns of an episode.
        max_total_tokens: Limit of cost: once so many tokens were sampled, no instance is begun.
        policy: Grade all of a patch, or only its source.
        withhold: First run every patch on tests without their expected values.
    """
    from agentrl import api
    from agentrl.config import load_config

    limits.read()
    name = model.replace("/", "__")
    if name in ("", ".", "..") or "\0" in name:
        raise ConfigError(f"--model {model!r} cannot be the name of a folder")
    instances = rows.load()
    episodes = out / name
    config = load_config(
        {
            "run": {"name": "swebench"},
            "model": {"path": model},
            "env": {
                "id": "swebench",
                "config": {
                    "source": rows.dataset,
                    "dataset_split": rows.split,
                    "instance_ids": [each.instance_id for each in instances],
                    "policy": policy,
                    "grade": False,
                },
            },
            "inference": {"backend": "openai", "urls": [url], "model": model},
            "rollout": {
                "max_turns": max_turns,
                "max_turn_tokens": 4096,
                "max_concurrent": workers,
                "turn_timeout_s": 600,
                "step_timeout_s": 3600,
                "episode_timeout_s": 86400,
            },
            "eval": {"num_tasks": len(instances), "max_total_tokens": max_total_tokens},
        }
    )
    with _progress() as progress:
        task = progress.add_task("playing", total=len(instances), state="")
        played = api.evaluate(
            config,
            on_progress=lambda done, total: progress.update(task, completed=done),
            out=episodes,
            resume=(episodes / "config.toml").exists(),
        )
    failed = [each for each in played.trajectories if each.error is not None]
    for each in failed:
        print(f"{each.task_id}: no patch: {each.error}", file=sys.stderr)
    graded = evaluate(
        rows=rows,
        predictions=str(episodes),
        out=out,
        policy=policy,
        withhold=withhold,
        limits=limits,
    )
    return 1 if failed else graded


@app.command
def validate(
    *,
    rows: Rows,
    repeats: int = 3,
    withhold: bool = False,
    keep_uncovered: bool = False,
    out: Path | None = None,
    limits: Limits = Limits(),
) -> int:
    """Check that instances can be graded here.

    Grades each instance's reference solution three times and no patch once. An instance is valid if
    its solution always resolves it and no patch does not. The exit status is 1 if an instance is
    not valid.

    Args:
        repeats: Gradings of the reference solution.
        withhold: Also make a withheld run; an instance on which forged results would go unnoticed
            is not valid.
        keep_uncovered: With --withhold, also keep instances that no withheld value can confirm.
            Training on them rewards forged results (environment key pay_uncovered).
        out: Write the valid rows to this file, such as valid.jsonl.
    """
    import asyncio

    from agentrl.env.container.engine import reap_abandoned
    from agentrl_swebench.dataset import write_rows
    from agentrl_swebench.evaluate import Validation
    from agentrl_swebench.evaluate import validate as validate_all
    from agentrl_swebench.grade import UNCONFIRMED

    if repeats < 1:
        raise ConfigError(f"--repeats {repeats} must be positive")
    checked = limits.read()
    instances = rows.load()
    reap_abandoned(10)
    with _progress() as progress:
        task = progress.add_task("validating", total=len(instances), state="")

        def show(validation: Validation) -> None:
            verdict = validation.reason or f"valid, {validation.slowest_s:.0f} s"
            progress.console.print(f"{validation.instance_id}: {verdict}", highlight=False)
            progress.update(task, advance=1)

        validations = asyncio.run(
            validate_all(
                instances,
                run_id="validate",
                repeats=repeats,
                withhold=withhold,
                keep_uncovered=keep_uncovered,
                timeout_s=limits.timeout,
                limits=checked,
                workers=limits.max_workers,
                progress=show,
            )
        )
    valid = {each.instance_id for each in validations if not each.reason}
    if out:
        valid_rows = [each.row() for each in instances if each.instance_id in valid]
        write_rows(out, valid_rows)
        print(f"{out}: {len(valid_rows)} rows")
    if withhold:
        uncovered = [
            each.instance_id
            for each in validations
            if any(UNCONFIRMED & {*v.flags} for v in each.gold)
        ]
        shown = f": {', '.join(uncovered)}" if uncovered else ""
        print(f"{len(uncovered)} of {len(instances)} instances have no withheld value{shown}")
    slowest = max((each.slowest_s for each in validations if not each.reason), default=0.0)
    print(f"{len(valid)} of {len(instances)} instances are valid; the slowest took {slowest:.0f} s")
    return 0 if len(valid) == len(instances) else 1


@app.command
def doctor(*, rows: Rows | None = None) -> int:
    """Check the engine, its disk, images and leftovers, and the rows of a dataset.

    The exit status is 1 if something must be fixed.
    """
    from agentrl_swebench.doctor import findings

    worst = 0
    for status, what, detail in findings(rows.load() if rows else []):
        print(f"{status:4} {what}: {detail}")
        worst |= status == "fix"
    return worst


@app.command
def pull(
    *,
    rows: Rows,
    concurrency: int = 4,
    min_free_gb: float = 10.0,
    scrub: bool = False,
    out: Path | None = None,
) -> int:
    """Pull the images of a dataset.

    Pulls several at once. If the engine's disk is short, removes images that agentrl pulled or
    made, the least recently used first, but none that has a container or is to be pulled.

    Args:
        concurrency: Pulls at once.
        min_free_gb: GiB that must be free before each pull.
        scrub: Also make the images that agents get, whose history is scrubbed.
        out: Make the images of SWE-smith and SWE-rebench-V2, whose own images cannot be graded, and
            write the rows that name them to this file.
    """
    from agentrl.env.container.engine import connect
    from agentrl_swebench import images
    from agentrl_swebench.dataset import write_rows

    if concurrency < 1:
        raise ConfigError(f"--concurrency {concurrency} must be positive")
    instances = rows.load(derive=out is not None)
    if out is not None:
        write_rows(out, [instance.row() for instance in instances])
    names = list(dict.fromkeys(instance.image for instance in instances))
    client = connect(timeout_s=3600)
    ids = images.pull(
        client,
        names,
        concurrency=concurrency,
        min_free_bytes=int(min_free_gb * 2**30),
        progress=lambda name, state: print(f"{name}: {state}", flush=True),
    )
    if scrub:
        import asyncio

        asyncio.run(_scrub(ids, concurrency))
    return 0


def _derived(row: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns the row with the image that is made for it, if its own cannot be graded."""
    from agentrl_swebench.adapters import kind_of
    from agentrl_swebench.derived import make_moved_row, make_smith_row

    make = {"swe-smith": make_smith_row, "swe-rebench-v2": make_moved_row}.get(kind_of(row))
    return row if make is None else make(row, place)


async def _scrub(ids: dict[str, str], concurrency: int) -> None:
    import asyncio

    from agentrl_swebench import images

    capacity = asyncio.Semaphore(concurrency)

    async def scrub_one(name: str, image_id: str) -> None:
        async with capacity:
            made = await images.scrubbed(image_id)
        print(f"{name}: scrubbed at {made.base.commit[:12]}", flush=True)

    async with asyncio.TaskGroup() as tasks:
        for name, image_id in ids.items():
            tasks.create_task(scrub_one(name, image_id))


@app.command
def reap(*, all: bool = False) -> int:
    """Remove containers whose process is gone.

    Every start of an environment or grading does so, too.

    Args:
        all: Also remove containers that other processes use.
    """
    from agentrl.env.container.engine import connect
    from agentrl.env.container.engine import reap as reap_containers

    removed = reap_containers(connect(), everything=all)
    for line in removed:
        print(line)
    print(f"{len(removed)} containers removed")
    return 0


@app.command
def export(*, rows: Rows, out: Path, timeout: float = 1800.0) -> int:
    """Write instances as Harbor task folders.

    Each task has the row's image, the official evaluation script and grading as its tests, and the
    reference solution as its solution. The verdict is the official one; there is no withheld run.

    Args:
        out: Folder for the tasks.
        timeout: Limit on an instance's tests in seconds.
    """
    from agentrl_swebench.export import export as export_tasks

    instances = rows.load()
    export_tasks(instances, out, timeout_s=timeout)
    print(f"{out}: {len(instances)} tasks")
    return 0


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        *Progress.get_default_columns(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}"),
        console=Console(stderr=True),
    )
