"""`agentrl swebench`: grades predictions, checks instances and the engine. Handlers import what
they need."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

    from agentrl_swebench.dataset import Instance
    from agentrl_swebench.grade import GradingLimits


def add_swebench_commands(commands: argparse._SubParsersAction) -> None:
    """Adds `swebench` and its subcommands. Each sets `handler`, which returns an exit status."""
    swebench = commands.add_parser(
        "swebench",
        help="SWE-bench: grade predictions, check instances",
        description="Run SWE-bench on its official harness, in containers of the Docker engine.",
    )
    add_subcommands(swebench)


def add_subcommands(parser: argparse.ArgumentParser) -> None:
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    evaluate = subcommands.add_parser(
        "eval",
        help="grade predictions with the official harness",
        description="Grade predictions with the official harness. Write its report unchanged to "
        "MODEL.RUN.json and our own report to MODEL.RUN.agentrl.json. To continue an interrupted "
        "call, repeat it with the same run id. The exit status is 1 if a failure of the "
        "infrastructure left an instance without a verdict.",
    )
    _add_dataset(evaluate)
    evaluate.add_argument(
        "--predictions",
        required=True,
        metavar="FILE|DIR|gold",
        help="predictions in an official format, .jsonl or .json; a folder of `agentrl eval "
        "--out`; or `gold`, the reference solutions",
    )
    evaluate.add_argument(
        "--out",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder for reports and logs (default: .)",
    )
    evaluate.add_argument(
        "--run-id", default="run", metavar="ID", help="name of the run (default: %(default)s)"
    )
    evaluate.add_argument(
        "--policy",
        choices=["official", "strict"],
        default="official",
        help="grade all of a patch, or only its source (default: %(default)s)",
    )
    evaluate.add_argument(
        "--audit",
        action="store_true",
        help="check every resolved instance by control runs, which show forged results; the "
        "official report does not change",
    )
    _add_limits(evaluate)
    evaluate.set_defaults(handler=_evaluate)

    validate = subcommands.add_parser(
        "validate",
        help="check that instances can be graded here",
        description="Grade each instance's reference solution three times and no patch once. An "
        "instance is valid if its solution always resolves it and no patch does not. The exit "
        "status is 1 if an instance is not valid.",
    )
    _add_dataset(validate)
    validate.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="gradings of the reference solution (default: %(default)s)",
    )
    validate.add_argument(
        "--audit",
        action="store_true",
        help="also make control runs; an instance on which forged results would go unnoticed is "
        "not valid",
    )
    validate.add_argument(
        "--keep-unaudited",
        action="store_true",
        help="with --audit, also keep instances that no control run can confirm; training on them "
        "rewards forged results (environment key pay_unaudited)",
    )
    validate.add_argument(
        "--out", type=Path, metavar="FILE.jsonl", help="write the valid rows to this file"
    )
    _add_limits(validate)
    validate.set_defaults(handler=_validate)

    doctor = subcommands.add_parser(
        "doctor",
        help="check the engine, its disk, images and leftovers",
        description="Check what SWE-bench needs on this machine. The exit status is 1 if something "
        "must be fixed.",
    )
    _add_dataset(doctor, required=False)
    doctor.set_defaults(handler=_doctor)

    pull = subcommands.add_parser(
        "pull",
        help="pull the images of a dataset",
        description="Pull the images of a dataset's instances, several at once. If the engine's "
        "disk is short, evict images that agentrl pulled or made, the least recently used first, "
        "but none that has a container or is to be pulled.",
    )
    _add_dataset(pull)
    pull.add_argument(
        "--concurrency", type=int, default=4, help="pulls at once (default: %(default)s)"
    )
    pull.add_argument(
        "--min-free-gb",
        type=float,
        default=10.0,
        help="GiB that must be free before each pull (default: %(default)g)",
    )
    pull.add_argument(
        "--scrub",
        action="store_true",
        help="also make the images that agents get, whose history is scrubbed",
    )
    pull.set_defaults(handler=_pull)

    reap = subcommands.add_parser(
        "reap",
        help="remove containers whose process is gone",
        description="Remove agentrl's containers whose process is gone, as every start of an "
        "environment or grading does.",
    )
    reap.add_argument(
        "--all", action="store_true", help="also remove containers that other processes use"
    )
    reap.set_defaults(handler=_reap)

    export = subcommands.add_parser(
        "export",
        help="write instances as Harbor task folders",
        description="Write each instance as a task in Harbor's format: the row's image, the "
        "official evaluation script and grading as its tests, the reference solution as its "
        "solution. The verdict is the official one; there is no control run.",
    )
    _add_dataset(export)
    export.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder for the tasks"
    )
    export.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="limit on an instance's tests (default: %(default)g)",
    )
    export.set_defaults(handler=_export)

    from agentrl_swebench.data import add_data_commands

    add_data_commands(subcommands)


def _add_dataset(command: argparse.ArgumentParser, *, required: bool = True) -> None:
    command.add_argument(
        "--dataset",
        required=required,
        metavar="FILE|NAME",
        help="a .jsonl, .json or .parquet file, full, lite, verified, multilingual, multimodal, or "
        "a Hugging Face name",
    )
    command.add_argument(
        "--split", default="test", help="split of a Hugging Face dataset (default: %(default)s)"
    )
    command.add_argument("--instance-ids", nargs="+", metavar="ID", help="only these instances")
    command.add_argument(
        "--filter", metavar="REGEX", help="only instances whose id matches (a search, as in Python)"
    )
    command.add_argument(
        "--slice",
        metavar="FROM:TO",
        help="only this slice of what is left, in the dataset's order, as in Python",
    )


def _add_limits(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--max-workers", type=int, metavar="N", help="gradings at once (default: one per core)"
    )
    command.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="limit on an instance's tests (default: %(default)g)",
    )
    command.add_argument(
        "--memory-gb",
        type=float,
        default=4.0,
        help="GiB of memory of a grading container (default: %(default)g)",
    )
    command.add_argument(
        "--network",
        action="store_true",
        help="give the tests a network, as the official harness does",
    )
    command.add_argument(
        "--sys-admin",
        action="store_true",
        help="give the tests CAP_SYS_ADMIN, as the official harness does; only tests that start a "
        "browser need it, and it is close to root on this machine",
    )


def _limits(arguments: argparse.Namespace) -> GradingLimits:
    from agentrl.errors import ConfigError
    from agentrl_swebench.grade import GradingLimits

    if arguments.max_workers is not None:
        if arguments.max_workers < 1:
            raise ConfigError(f"--max-workers {arguments.max_workers} must be positive")
        os.environ["AGENTRL_GRADING_WORKERS"] = str(arguments.max_workers)
    if arguments.timeout <= 0:
        raise ConfigError(f"--timeout {arguments.timeout:g} must be positive")
    if arguments.memory_gb < 0.1:
        raise ConfigError(f"--memory-gb {arguments.memory_gb:g} is too little for a container")
    return GradingLimits(
        memory_bytes=int(arguments.memory_gb * (1 << 30)),
        network="bridge" if arguments.network else "none",
        sys_admin=arguments.sys_admin,
    )


def _load(arguments: argparse.Namespace) -> list[Instance]:
    import re

    from agentrl.errors import ConfigError
    from agentrl_swebench.dataset import load_instances

    instances = load_instances(
        arguments.dataset, split=arguments.split, instance_ids=arguments.instance_ids
    )
    if arguments.filter is not None:
        try:
            wanted = re.compile(arguments.filter)
        except re.error as error:
            raise ConfigError(f"--filter {arguments.filter!r}: {error}") from error
        instances = [each for each in instances if wanted.search(each.instance_id)]
    if arguments.slice is not None:
        if not re.fullmatch(r"-?\d*:-?\d*", arguments.slice):
            raise ConfigError(f"--slice {arguments.slice!r} is not FROM:TO, as in 0:50")
        start, end = (int(each) if each.strip("-") else None for each in arguments.slice.split(":"))
        instances = instances[start:end]
    if not instances:
        raise ConfigError("--filter and --slice leave no instance")
    return instances


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


def _evaluate(arguments: argparse.Namespace) -> int:
    from collections import Counter

    from agentrl.env.container.engine import reap_abandoned
    from agentrl_swebench.dataset import load_predictions
    from agentrl_swebench.evaluate import evaluate
    from agentrl_swebench.grade import TAMPERED, UNAUDITED, Verdict

    limits = _limits(arguments)
    instances = _load(arguments)
    reap_abandoned(10)
    predictions = load_predictions(arguments.predictions, instances)
    arguments.out.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()
    with _progress() as progress:
        task = progress.add_task("grading", total=len(predictions), state="")

        def show(verdict: Verdict) -> None:
            counts[verdict.outcome] += 1
            state = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
            progress.update(task, advance=1, state=state)

        result = asyncio.run(
            evaluate(
                instances,
                predictions,
                run_id=arguments.run_id,
                out=arguments.out,
                dataset=arguments.dataset,
                split=arguments.split,
                policy=arguments.policy,
                audit=arguments.audit,
                timeout_s=arguments.timeout,
                limits=limits,
                progress=show,
            )
        )
    void = [each for each in result.verdicts if each.outcome == "infrastructure"]
    tampered = [each.instance_id for each in result.verdicts if TAMPERED in each.flags]
    num_resolved = sum(bool(each.resolved) for each in result.verdicts)
    print(f"resolved {num_resolved} of {len(instances)} instances, policy {arguments.policy}")
    if result.num_reused:
        print(f"{result.num_reused} verdicts come from an earlier call with this run id")
    if arguments.audit:
        shown = f": {', '.join(tampered)}" if tampered else ""
        print(f"audit: {len(tampered)} of the {num_resolved} resolved forge their results{shown}")
        for flag in sorted(UNAUDITED):
            ids = [each.instance_id for each in result.verdicts if flag in each.flags]
            if ids:
                print(f"audit: {len(ids)} without a result, {flag}: {', '.join(ids)}")
    print(f"official report  {result.report}")
    print(f"our report       {result.audit_report}")
    for each in void:
        print(f"{each.instance_id}: no verdict: {each.reason}", file=sys.stderr)
    return 1 if void else 0


def _export(arguments: argparse.Namespace) -> int:
    from agentrl_swebench.export import export

    instances = _load(arguments)
    export(instances, arguments.out, timeout_s=arguments.timeout)
    print(f"{arguments.out}: {len(instances)} tasks")
    return 0


def _validate(arguments: argparse.Namespace) -> int:
    from agentrl.env.container.engine import reap_abandoned
    from agentrl.errors import ConfigError
    from agentrl_swebench.dataset import write_rows
    from agentrl_swebench.evaluate import Validation, validate
    from agentrl_swebench.grade import UNAUDITED

    if arguments.repeats < 1:
        raise ConfigError(f"--repeats {arguments.repeats} must be positive")
    limits = _limits(arguments)
    instances = _load(arguments)
    reap_abandoned(10)
    with _progress() as progress:
        task = progress.add_task("validating", total=len(instances), state="")

        def show(validation: Validation) -> None:
            verdict = validation.reason or f"valid, {validation.slowest_s:.0f} s"
            progress.console.print(f"{validation.instance_id}: {verdict}", highlight=False)
            progress.update(task, advance=1)

        validations = asyncio.run(
            validate(
                instances,
                run_id="validate",
                repeats=arguments.repeats,
                audit=arguments.audit,
                keep_unaudited=arguments.keep_unaudited,
                timeout_s=arguments.timeout,
                limits=limits,
                progress=show,
            )
        )
    valid = {each.instance_id for each in validations if not each.reason}
    if arguments.out:
        rows = [each.row() for each in instances if each.instance_id in valid]
        write_rows(arguments.out, rows)
        print(f"{arguments.out}: {len(rows)} rows")
    if arguments.audit:
        unaudited = [
            each.instance_id
            for each in validations
            if any(UNAUDITED & {*v.flags} for v in each.gold)
        ]
        shown = f": {', '.join(unaudited)}" if unaudited else ""
        print(f"{len(unaudited)} of {len(instances)} instances could not be audited{shown}")
    slowest = max((each.slowest_s for each in validations if not each.reason), default=0.0)
    print(f"{len(valid)} of {len(instances)} instances are valid; the slowest took {slowest:.0f} s")
    return 0 if len(valid) == len(instances) else 1


def _doctor(arguments: argparse.Namespace) -> int:
    from agentrl_swebench.doctor import findings

    worst = 0
    for status, what, detail in findings(_load(arguments) if arguments.dataset else []):
        print(f"{status:4} {what}: {detail}")
        worst |= status == "fix"
    return worst


def _pull(arguments: argparse.Namespace) -> int:
    from agentrl.env.container.engine import connect
    from agentrl.errors import ConfigError
    from agentrl_swebench import images

    if arguments.concurrency < 1:
        raise ConfigError(f"--concurrency {arguments.concurrency} must be positive")
    names = list(dict.fromkeys(instance.image for instance in _load(arguments)))
    client = connect(timeout_s=3600)
    ids = images.pull(
        client,
        names,
        concurrency=arguments.concurrency,
        min_free_bytes=int(arguments.min_free_gb * 2**30),
        progress=lambda name, state: print(f"{name}: {state}", flush=True),
    )
    if arguments.scrub:
        asyncio.run(_scrub(ids, arguments.concurrency))
    return 0


async def _scrub(ids: dict[str, str], concurrency: int) -> None:
    from agentrl.env.container.engine import Engine
    from agentrl_swebench import images

    engine = Engine()
    capacity = asyncio.Semaphore(concurrency)

    async def scrub_one(name: str, image_id: str) -> None:
        async with capacity:
            made = await images.scrubbed(engine, image_id)
        print(f"{name}: scrubbed at {made.base.commit[:12]}", flush=True)

    async with asyncio.TaskGroup() as tasks:
        for name, image_id in ids.items():
            tasks.create_task(scrub_one(name, image_id))


def _reap(arguments: argparse.Namespace) -> int:
    from agentrl.env.container.engine import connect, reap

    removed = reap(connect(), everything=arguments.all)
    for line in removed:
        print(line)
    print(f"{len(removed)} containers removed")
    return 0
