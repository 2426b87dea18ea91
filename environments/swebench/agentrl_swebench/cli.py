"""`agentrl swebench ...`: grade predictions and check instances. Handlers import what they need."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

    from agentrl_swebench.dataset import Instance
    from agentrl_swebench.grade import GradingLimits


def add_swebench_commands(commands: argparse._SubParsersAction) -> None:
    """Add `swebench` and its subcommands. Each sets `handler`, which returns an exit status."""
    swebench = commands.add_parser(
        "swebench",
        help="SWE-bench: grade predictions, check instances, run models",
        description="SWE-bench on its official harness, in containers of the local Docker engine.",
    )
    add_subcommands(swebench)


def add_subcommands(parser: argparse.ArgumentParser) -> None:
    subcommands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    evaluate = subcommands.add_parser(
        "eval",
        help="grade predictions with the official harness",
        description="Grade predictions with the official harness and write its report unchanged, "
        "MODEL.RUN.json, and a report of our own beside it, MODEL.RUN.agentrl.json. Repeat an "
        "interrupted call with the same run id to go on. Exit status 1 when the infrastructure "
        "left an instance without a verdict.",
    )
    _add_dataset(evaluate)
    evaluate.add_argument(
        "--predictions",
        required=True,
        metavar="FILE|gold",
        help="predictions in an official format, .jsonl or .json; `gold`: the reference solutions",
    )
    evaluate.add_argument(
        "--run-id", default="run", metavar="ID", help="name of the run (default: %(default)s)"
    )
    evaluate.add_argument(
        "--out", type=Path, default=Path(), metavar="DIR", help="for reports and logs (default: .)"
    )
    evaluate.add_argument(
        "--policy",
        choices=["official", "strict"],
        default="official",
        help="what of a patch is graded: all of it, or its source alone (default: %(default)s)",
    )
    evaluate.add_argument(
        "--audit",
        action="store_true",
        help="follow every resolved instance by a control run that shows forged results; the "
        "official report does not change",
    )
    _add_grading(evaluate)
    evaluate.set_defaults(handler=_evaluate)

    validate = subcommands.add_parser(
        "validate",
        help="check that instances can be graded here",
        description="Grade each instance's reference solution three times and no patch once. An "
        "instance is valid if the first always resolves it and the second does not. Exit status 1 "
        "when one is not.",
    )
    _add_dataset(validate)
    validate.add_argument(
        "--repeats", type=int, default=3, help="of the reference solution (default: %(default)s)"
    )
    validate.add_argument(
        "--audit", action="store_true", help="also check that the control run suits the instance"
    )
    validate.add_argument(
        "--out", type=Path, metavar="FILE.jsonl", help="write the rows that are valid to this file"
    )
    _add_grading(validate)
    validate.set_defaults(handler=_validate)

    from agentrl_swebench.manage import add_commands

    add_commands(subcommands)


def _add_dataset(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dataset",
        required=True,
        metavar="FILE|NAME",
        help="a .jsonl, .json or .parquet file, full, lite, verified, multilingual, multimodal, or "
        "a Hugging Face name",
    )
    command.add_argument("--split", default="test", help="(default: %(default)s)")
    command.add_argument("--instance-ids", nargs="+", metavar="ID", help="only these instances")


def _add_grading(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--max-workers", type=int, metavar="N", help="gradings at once (default: one per core)"
    )
    command.add_argument(
        "--timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="of an instance's tests (default: %(default)g)",
    )
    command.add_argument(
        "--memory-gb", type=float, default=4.0, help="of a container (default: %(default)g)"
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


def _grading(arguments: argparse.Namespace) -> GradingLimits:
    from agentrl.errors import ConfigError
    from agentrl_swebench.grade import GradingLimits, set_max_workers

    if arguments.max_workers is not None:
        set_max_workers(arguments.max_workers)
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
    from agentrl_swebench.dataset import load_instances
    from agentrl_swebench.engine import connect

    instances = load_instances(
        arguments.dataset, split=arguments.split, instance_ids=arguments.instance_ids
    )
    # Without an engine every instance would be tried in vain, twice.
    connect(10)
    return instances


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[state]}"),
        console=Console(stderr=True),
    )


def _evaluate(arguments: argparse.Namespace) -> int:
    import asyncio
    from collections import Counter

    from agentrl_swebench.dataset import load_predictions
    from agentrl_swebench.evaluate import evaluate
    from agentrl_swebench.grade import TAMPERED, Verdict

    limits = _grading(arguments)
    instances = _load(arguments)
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
        print(f"{result.num_reused} verdicts are of an earlier call with this run id")
    if arguments.audit:
        shown = f": {', '.join(tampered)}" if tampered else ""
        print(f"audit: {len(tampered)} of the resolved forge their results{shown}")
    print(f"official report  {result.report}")
    print(f"our report       {result.audit_report}")
    for each in void:
        print(f"{each.instance_id}: no verdict: {each.reason}", file=sys.stderr)
    return 1 if void else 0


def _validate(arguments: argparse.Namespace) -> int:
    import asyncio
    import json

    from agentrl.errors import ConfigError
    from agentrl_swebench.evaluate import Validation, validate

    if arguments.repeats < 1:
        raise ConfigError(f"--repeats {arguments.repeats} must be positive")
    limits = _grading(arguments)
    instances = _load(arguments)
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
                timeout_s=arguments.timeout,
                limits=limits,
                progress=show,
            )
        )
    valid = {each.instance_id for each in validations if not each.reason}
    if arguments.out:
        rows = [each.row() for each in instances if each.instance_id in valid]
        part = arguments.out.with_name(arguments.out.name + ".part")
        part.write_text("".join(json.dumps(row) + "\n" for row in rows))
        part.replace(arguments.out)
        print(f"{arguments.out}: {len(rows)} rows")
    slowest = max((each.slowest_s for each in validations if not each.reason), default=0.0)
    print(f"{len(valid)} of {len(instances)} instances are valid; the slowest took {slowest:.0f} s")
    return 0 if len(valid) == len(instances) else 1
