"""Withheld runs: what the tests report, and what a patch's values are taken for."""

import asyncio
import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path

import attack_rows_guess
import pytest
from swe_rows import instance_of

from agentrl.errors import EnvError
from agentrl_swebench import grade as grading
from agentrl_swebench import withheld_run
from agentrl_swebench.diff import parse_patch
from agentrl_swebench.grade import grade
from agentrl_swebench.harness import Evidence
from agentrl_swebench.official_worker import marked_lines
from agentrl_swebench.testfiles import TestFiles as Files
from agentrl_swebench.testfiles import git_diff, script_with
from agentrl_swebench.withheld_run import locate, prepare

FIXTURES = Path(__file__).parents[3] / "benchmarks" / "swe_fixtures" / "spans"
TEST_FILE = "tests/test_spans.py"
TESTS = (FIXTURES / "tests" / TEST_FILE).read_text()


def instance_with(tests, fail_to_pass, pass_to_pass=()):
    patch = git_diff({}, {TEST_FILE: tests})
    return instance_of(
        patch="gold",
        test_patch=patch,
        fail_to_pass=tuple(f"{TEST_FILE}::test_{name}" for name in fail_to_pass),
        pass_to_pass=tuple(f"{TEST_FILE}::test_{name}" for name in pass_to_pass),
        eval_script=f"cd /testbed\ngit apply -v - <<'EOF_1'\n{patch}EOF_1\n"
        ": '>>>>> Start Test Output'\npytest -rA tests\n: '>>>>> End Test Output'\n",
    )


SPANS = instance_with(TESTS, ["inside", "touching"], ["apart", "overlap"])


def in_folder(tmp_path, scripts=None):
    """The harness without containers. The solution is the reference's, or the bug with code."""
    number = iter(range(1000))

    async def run(of, patch, mark="", **options):
        if scripts is not None:
            scripts.append(of.eval_script)
        folder = tmp_path / str(next(number))
        shutil.copytree(FIXTURES / "before" / "spans", folder / "spans")
        if patch == "gold":
            shutil.copytree(FIXTURES / "fix" / "spans", folder / "spans", dirs_exist_ok=True)
        else:
            with (folder / "spans" / "core.py").open("a") as file:
                file.write("\n\n" + patch)
        text = of.eval_script.split("<<'EOF_1'\n")[1].split("EOF_1")[0]
        subprocess.run(["git", "apply", "-"], cwd=folder, input=text, text=True, check=True)
        command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider"]
        command += ["-c", "/dev/null", "--rootdir", str(folder), TEST_FILE]
        environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder)}
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        found = re.findall(r"^(PASSED|FAILED|XFAIL|ERROR) (\S+)", ran.stdout, re.MULTILINE)
        statuses = {name: status for status, name in found}
        required = (*of.fail_to_pass, *of.pass_to_pass)
        resolved = all(statuses.get(test) in ("PASSED", "XFAIL") for test in required)
        reports = Path(f"/tmp/{mark}")
        lines = reports.read_text().splitlines() if mark and reports.exists() else []
        reports.unlink() if lines else None
        report = {"resolved": resolved, "tests_status": {}}
        return Evidence({of.instance_id: report}, statuses, True, lines, container_end="stopped")

    return run


FORGE = "import _pytest.python as p; p.Function.runtest = lambda self: None"
CHEATS = {
    "equal to everything": "class A(list):\n    __eq__ = lambda s, o: True\n"
    "merge = lambda s: A()\n",
    "forges": FORGE,
    "forges where values are withheld": "import pathlib\n"
    f"if '_withheld' in pathlib.Path('{TEST_FILE}').read_text():\n    {FORGE}\n"
    "else:\n    import inspect\n    def merge(s):\n"
    "        line = inspect.stack()[1].code_context[0]\n"
    "        return eval(line.partition('==')[2])\n",
    "reads the expectation": "import inspect\ndef merge(s):\n"
    "    line = inspect.stack()[1].code_context[0]\n    return eval(line.partition('==')[2])\n",
    "reports by itself": f"{FORGE}\nimport glob\n"
    "for name in glob.glob('/tmp/@*'):\n    open(name, 'a').write('[1, 0]\\n')\n",
    "expects failure": "import pytest\ndef merge(s): pytest.xfail()",
    "changes the reporter": "import json\njson.dumps = lambda *a, **k: '[]'\n"
    "class A(list):\n    __eq__ = lambda s, o: True\nmerge = lambda s: A()\n",
}
RESOLVED = Evidence({"a__b-1": {"resolved": True}}, {}, True, container_end="stopped")
HONEST = {"gold": "gold", "differs where spans are empty": attack_rows_guess.BY_SETS}


@pytest.fixture
def files(monkeypatch):
    """The files of the hidden tests, which are read from an image otherwise."""

    def with_files(*, after=None):
        async def read(instance, run_id):
            return Files({}, after or {TEST_FILE: TESTS})

        monkeypatch.setattr(withheld_run, "read_test_files", read)
        monkeypatch.setattr(withheld_run, "_kept", {})
        monkeypatch.setattr(grading, "_check_installed", lambda: None)
        monkeypatch.setattr(grading, "_without_history", _without_history)

    with_files()
    return with_files


async def _without_history(instance):
    return instance, "sha256:source"


def graded(monkeypatch, instance, patch, run, **options):
    monkeypatch.setattr(grading, "run_harness", run)
    monkeypatch.setattr(grading, "make_submission", lambda i, p, policy: grading.Submission(p))
    options = {"policy": "strict", "run_id": "r", "timeout_s": 60, "withhold": True} | options
    return asyncio.run(grade(instance, patch, **options))


@pytest.mark.slow
@pytest.mark.parametrize("official_run", ["always", "uncovered"])
@pytest.mark.parametrize("name", [*HONEST, *CHEATS])
def test_right_values_are_paid_and_forged_results_are_not(
    tmp_path, monkeypatch, files, name, official_run
):
    code, run = (HONEST | CHEATS)[name], in_folder(tmp_path)
    verdict = graded(monkeypatch, SPANS, code, run, official_run=official_run)
    assert verdict.reward == float(name in HONEST), verdict
    assert ("wrong_values" in verdict.flags) is (name in CHEATS)
    assert verdict.withheld == ("6 of 6 values" if name in HONEST else verdict.withheld)
    assert ("no_official_run" in verdict.flags) is (official_run == "uncovered")
    assert bool(verdict.report) is (official_run == "always")
    if official_run == "always":  # the official verdict is the harness' own, forged or not
        official = graded(monkeypatch, SPANS, code, run, withhold=False)
        assert (verdict.resolved, verdict.report) == (official.resolved, official.report)


PARTLY = """from spans import merge, total


def test_inside():
    assert merge([(1, 9), (3, 5)]) == [(1, 9)]


def test_touching():
    assert len(merge([(1, 3), (3, 5)])) < 2
"""


@pytest.mark.slow
def test_a_test_without_a_withheld_value_is_judged_by_the_official_verdict(
    tmp_path, monkeypatch, files
):
    files(after={TEST_FILE: PARTLY})
    instance = instance_with(PARTLY, ["inside", "touching"])
    verdict = graded(monkeypatch, instance, "gold", in_folder(tmp_path), official_run="uncovered")
    assert verdict.reward == 1.0 and "partly_covered" in verdict.flags
    assert "no_official_run" not in verdict.flags and verdict.report
    assert "test_touching" in verdict.notes[0] and "test_inside" not in verdict.notes[0]
    run = in_folder(tmp_path / "2")
    wrong = graded(monkeypatch, instance, FORGE, run, official_run="uncovered")
    assert (wrong.reward, wrong.report) == (0.0, {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        PARTLY.replace("== [(1, 9)]", ""),
        "from spans import merge\n\n\ndef test_inside():\n    wanted = bool('yes')\n"
        "    got = merge([(1, 9), (3, 5)]) == [(1, 9)]\n    assert got == wanted\n",
        "def test_inside(:\n",
        "test_inside = lambda: None\n",
    ],
    ids=["one bit", "a value that is one bit", "not Python", "no function"],
)
def test_what_nothing_confirms_is_masked_unless_it_is_to_be_paid(
    tmp_path, monkeypatch, files, source
):
    files(after={TEST_FILE: source})
    instance = instance_with(source, ["inside"])

    async def resolves(of, patch, mark="", **options):
        return RESOLVED

    run = in_folder(tmp_path) if "merge" in source else resolves
    masked = graded(monkeypatch, instance, "gold", run)
    assert (masked.resolved, masked.reward) == (True, None) and "uncovered" in masked.flags
    assert graded(monkeypatch, instance, "gold", run, pay_uncovered=True).reward == 1.0


def test_failures_of_the_infrastructure_confirm_nothing(monkeypatch, files):
    calls = []

    async def run(of, patch, mark="", **options):
        calls.append(mark)
        if mark:
            return Evidence(error_kind="other", error="gone")
        return RESOLVED

    monkeypatch.setattr(grading, "BACK_OFF_S", (0.0,))
    verdict = graded(monkeypatch, SPANS, "gold", run)
    assert (verdict.resolved, verdict.reward) == (True, None)
    assert "withheld_inconclusive" in verdict.flags and calls[-1] == ""
    assert withheld_run._kept == {}  # tried again for the next patch

    async def fails(instance, run_id):
        raise EnvError("no engine")

    monkeypatch.setattr(withheld_run, "read_test_files", fails)
    assert graded(monkeypatch, SPANS, "gold", run).reward is None


@pytest.mark.slow
def test_expected_values_are_nowhere_in_the_script_and_the_withheld_run_comes_first(
    tmp_path, monkeypatch, files
):
    scripts = []
    graded(monkeypatch, SPANS, "gold", in_folder(tmp_path, scripts))
    *withheld, official = scripts
    assert len(withheld) == 3 and official == SPANS.eval_script
    assert "== [(1, 10)]" in official
    assert not any("(1, 10)]" in each.split("test_inside")[1][:60] for each in withheld)
    scripts.clear()
    graded(monkeypatch, SPANS, "gold", in_folder(tmp_path / "2", scripts))
    assert len(scripts) == 2  # the reference's values are kept


@pytest.mark.slow
def test_tests_with_other_names_for_their_parameters_are_judged_by_their_values(
    tmp_path, monkeypatch, files
):
    source = (
        "import pytest\nfrom spans import merge\n\n\n@pytest.mark.parametrize('ends,width', "
        "[((1, 10), 9), ((3, 5), 2)])\ndef test_width(ends, width):\n"
        "    assert [b - a for a, b in merge([ends, ends])] == [width]\n"
    )
    files(after={TEST_FILE: source})
    instance = instance_with(source, ["width[ends0-9]", "width[ends1-2]"])
    verdict = graded(monkeypatch, instance, "gold", in_folder(tmp_path), official_run="uncovered")
    assert (verdict.reward, verdict.withheld) == (1.0, "2 of 2 values")
    assert "no_official_run" in verdict.flags


@pytest.mark.slow
def test_a_broken_test_that_must_keep_passing_is_not_paid(tmp_path, monkeypatch, files):
    source = TESTS + "\n\ndef test_kept():\n    assert not merge([])\n"
    files(after={TEST_FILE: source})
    instance = instance_with(source, ["inside"], ["kept"])
    broken = (FIXTURES / "fix/spans/core.py").read_text() + (
        "\n\ndef merge(spans, right=merge):\n    return right(spans) if spans else [(0, 0)]\n"
    )
    for official_run in ("always", "uncovered"):
        run = in_folder(tmp_path / official_run)
        verdict = graded(monkeypatch, instance, broken, run, official_run=official_run)
        assert (verdict.resolved, verdict.reward) == (False, 0.0), verdict


def test_a_report_is_found_within_a_line_of_another_stream():
    text = "+ CODE=0@mark [1, 2]\n@mark [2, 3]\n\n+ sed 's/^/@mark /' /tmp/@mark\n[4, 5]\n"
    assert marked_lines(text, "@mark")[:2] == ["[1, 2]", "[2, 3]"]
    assert len(marked_lines(text, "@mark")) == 3 and marked_lines(text, "") == []


def test_names_of_other_runners_are_found():
    where, plain = ("app/tests.py", ("T", "test_a")), ("app/tests.py", ("", "test_plain"))
    for name, found in (
        ("test_a (app.tests.T)", where),
        ("test_a (app.tests.T.test_a)", where),
        ("test_plain", plain),
        ("app/tests.py::T::test_a[x::y]", where),
        ("app/tests.py::Derived::test_a", where),
        ("test_b (app.tests.T)", None),
        ("other/tests.py::T::test_a", None),
    ):
        assert locate(name, [where, plain]) == found, name


def test_where_there_is_no_patch_the_script_brings_the_tests():
    script = "cd /testbed\ncp -r /tests .\n: '>>>>> Start Test Output'\npytest\n"
    instance = dataclasses.replace(SPANS, test_patch="", eval_script=script)
    lines = script_with(instance, Files({}, {"t.py": "a\n"}), {"t.py": "b\n"}).split("\n")
    assert lines[1] == "cp -r /tests ." and lines[2].startswith("git apply")
    assert lines[-3:] == [": '>>>>> Start Test Output'", "pytest", ""]
    # Where the patch is not in the script, the original tests would stay in the container.
    instance = dataclasses.replace(SPANS, eval_script=script)
    assert script_with(instance, Files({}, {TEST_FILE: TESTS}), {TEST_FILE: "b\n"}) is None


def test_other_files_of_the_hidden_tests_stay_as_they_are_written():
    other = "diff --git a/z.txt b/z.txt\n--- a/z.txt\n+++ b/z.txt\n@@ -1 +1 @@ odd\n-1\n+2\n"
    instance = dataclasses.replace(
        SPANS,
        test_patch=other + SPANS.test_patch,
        eval_script=SPANS.eval_script.replace(SPANS.test_patch, other + SPANS.test_patch),
    )
    files = Files({"z.txt": "1\n"}, {TEST_FILE: TESTS, "z.txt": "2\n"})
    script = script_with(instance, files, {TEST_FILE: "new text\n"})
    text = script.split("<<'EOF_1'\n")[1].split("EOF_1")[0]
    assert text.startswith(other) and "+new text" in text and "def test_" not in text
    assert [each.paths[-1] for each in parse_patch(text)] == ["z.txt", TEST_FILE]


def test_a_renamed_test_file_is_brought_under_its_new_name():
    patch = "diff --git a/old.py b/new.py\nrename from old.py\nrename to new.py\n"
    instance = dataclasses.replace(SPANS, test_patch=patch, eval_script=f"<<E\n{patch}E\n")
    script = script_with(instance, Files({"old.py": "a\n"}, {"new.py": "a\n"}), {"new.py": "b\n"})
    names = {path for each in parse_patch(script.split("<<E\n")[1][:-2]) for path in each.paths}
    assert names == {"old.py", "new.py"} and "+b" in script


async def test_the_reference_is_run_once_for_many_patches(tmp_path, files):
    run = in_folder(tmp_path)
    one, two = await asyncio.gather(*(prepare(SPANS, run, "r") for _ in range(2)))
    assert one is two and not one.uncovered and one.suffices
