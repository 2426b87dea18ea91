"""Withheld runs: the harness runs a patch on tests that do not hold what they expect.

The code that a test judges shares its process, so it can forge statuses, logs and reports. In a
withheld run the tests report what they would compare (`agentrl_rewards.withheld`), and the values
are compared here with those of the reference solution. Right values have to be computed, and the
expected ones are nowhere in the container.

A required test is covered if the reference solution reports a value for it that cannot be guessed,
and reports it again in a second run. The other tests are judged by the official verdict alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from agentrl_rewards.withheld import (
    Comparison,
    Probe,
    Test,
    Values,
    compare,
    read_reports,
    stable,
    tells,
    withhold,
)
from agentrl_swebench.dataset import Instance
from agentrl_swebench.diff import PatchFormatError
from agentrl_swebench.harness import Evidence
from agentrl_swebench.testfiles import TestFiles, named_file, read_test_files, script_with

RunHarness = Callable[[Instance, str, str], Awaitable[Evidence]]
"""Runs the harness on an instance and a patch and returns the lines that begin with a mark, too.
Raises EnvError if the infrastructure failed."""
Where = tuple[str, Test]
"""File of a test, and its class and function."""

_END_MARK = ": '>>>>> End Test Output'"
_MAX_BYTES = 64 << 20
"""Limit on the reports of a run."""
_PASS = frozenset({"PASSED", "XFAIL"})
"""Statuses that the harness counts as passed."""


@dataclass(slots=True, frozen=True)
class Withheld:
    """An instance whose tests report values, with those of its reference solution."""

    instance: Instance
    mark: str
    """Word with which a report's line begins in the log."""
    probes: dict[int, Probe]
    reference: Values
    uncovered: tuple[str, ...]
    """Tests of FAIL_TO_PASS without a value that cannot be guessed."""
    passes: frozenset[str]
    """Required tests that pass with the reference solution."""
    suffices: bool
    """True if the run judges every required test, so that no official run is needed: each test to
    fix by a value, and each other one by a value or by its status."""

    @property
    def covers(self) -> bool:
        """Whether it covers a test to fix."""
        return len(self.uncovered) < len(self.instance.fail_to_pass)

    def judge(self, evidence: Evidence) -> tuple[Comparison, bool]:
        """Returns the comparison of a run's values, and whether they are right and the tests pass
        that have to."""
        compared = compare(self.probes, self.reference, read_reports(evidence.reports))
        return compared, not compared.wrong and self.passes <= _passed(evidence)


async def prepare(instance: Instance, run: RunHarness, run_id: str) -> Withheld:
    """Withholds an instance's expected values and runs its reference solution twice. The result is
    kept per process.

    Raises:
        EnvError: the engine failed while the tests were read or run.
    """
    async with _making[id(asyncio.get_running_loop()), instance.instance_id]:
        if instance not in _kept:
            _kept[instance] = await _prepared(instance, run, run_id)
        return _kept[instance]


_kept: dict[Instance, Withheld] = {}
_making: dict[tuple[int, str], asyncio.Lock] = defaultdict(asyncio.Lock)


async def _prepared(instance: Instance, run: RunHarness, run_id: str) -> Withheld:
    nothing = Withheld(instance, "", {}, {}, instance.fail_to_pass, frozenset(), suffices=False)
    try:
        files = await read_test_files(instance, run_id)
        changed, mark, probes = _without_values(instance, files)
    except PatchFormatError:
        return nothing
    if not mark:
        return nothing
    runs = []
    for _ in range(2):
        runs.append(await run(changed, instance.patch, mark))
    plain = {number: probe for number, (_, probe) in probes.items()}
    reference = stable(plain, *(read_reports(each.reports) for each in runs))
    places = {(path, probe.test) for path, probe in probes.values()}
    has_value = {
        (path, probe.test)
        for number, (path, probe) in probes.items()
        if probe.strong and any(tells(value) for _, value in reference.get(number, []))
    }
    required = (*instance.fail_to_pass, *instance.pass_to_pass)
    judged = {test for test in required if locate(test, places) in has_value}
    passes = frozenset(required) & _passed(runs[0]) & _passed(runs[1])
    uncovered = tuple(test for test in instance.fail_to_pass if test not in judged)
    return Withheld(
        changed,
        mark,
        plain,
        reference,
        uncovered,
        passes,
        suffices=not uncovered and all(each in judged | passes for each in instance.pass_to_pass),
    )


def _without_values(
    instance: Instance, files: TestFiles
) -> tuple[Instance, str, dict[int, tuple[str, Probe]]]:
    """Returns the instance with tests that report, the mark of their reports, and the probes with
    their files; an empty mark if there are none."""
    mark = f"@{secrets.token_hex(6)}"
    report_file = f"/tmp/{mark}"
    texts: dict[str, str] = {}
    probes: dict[int, tuple[str, Probe]] = {}
    for path, text in files.after.items():
        if not path.endswith(".py"):
            continue
        try:
            made = withhold(text, report_file=report_file, first=len(probes) + 1)
        except (SyntaxError, ValueError, RecursionError):
            continue  # another version's Python; its tests are uncovered
        if made.probes:
            texts[path] = made.text
            probes |= {number: (path, probe) for number, probe in made.probes.items()}
    script = script_with(instance, files, texts) if texts else None
    if script is None or _END_MARK not in script:
        return instance, "", {}
    # On the stream of the shell's own traces, so that none comes between.
    shown = f"head -c {_MAX_BYTES} {report_file} | sed 's/^/{mark} /' >&2\n{_END_MARK}"
    script = script.replace(_END_MARK, shown, 1)
    return dataclasses.replace(instance, eval_script=script), mark, probes


def _passed(evidence: Evidence) -> frozenset[str]:
    return frozenset(test for test, status in evidence.statuses.items() if status in _PASS)


def locate(test: str, places: Collection[Where]) -> Where | None:
    """Finds the file and function of a required test; None if they are not unique. Names look like
    `tests/test_a.py::Class::test_b[1]` (pytest), `test_b (package.tests.Class)` (unittest, Django)
    or `test_b` (SymPy)."""
    path, cls, name = named_file(test), None, ""
    if "::" in test:
        parts = test.split("[")[0].split("::")[1:]
        cls, name = parts[-2] if len(parts) > 1 else "", parts[-1]
    elif match := re.match(r"(\w+) \(([\w.]+)\)", test):
        owners = match.group(2).split(".")
        name = match.group(1)
        cls = owners[-2] if len(owners) > 1 and owners[-1] == name else owners[-1]
    elif re.fullmatch(r"\w+", test):
        name = test
    found = [
        where
        for where in places
        if where[1][1] == name and (not path or where[0] == path or where[0].endswith("/" + path))
    ]
    exact = [where for where in found if cls is None or where[1][0] == cls]
    # A method may be inherited from another class of the file.
    return exact[0] if len(exact) == 1 else found[0] if len(found) == 1 else None
