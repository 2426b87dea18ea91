"""Rows of other datasets, in the shapes that their authors publish."""

import asyncio
import json
import subprocess

import pytest
from patches import file_diff
from rows_for_tests import write_rows
from swe_rows import ROW

from agentrl.cli.main import main
from agentrl.errors import DataError
from agentrl_swebench.adapters import MOVED_REPOSITORY, kind_of
from agentrl_swebench.dataset import NEW_COLUMNS, load_instances, parse_row, to_official
from agentrl_swebench.grade import grade

TESTS = file_diff("tests/test_new.py", None, "def test_a():\n    assert 1\n")
TESTS += file_diff("tests/test_old.py", "a\n", "b\n")
COMMON = {name: text for name, text in ROW.items() if name not in (*NEW_COLUMNS, "version")} | {
    "instance_id": "Own__Spans-1",
    "repo": "own/spans",
    "test_patch": TESTS,
    "FAIL_TO_PASS": ["tests/test_new.py::test_a"],
}
REBENCH = {
    "install": "pip install -e .[dev]",
    "log_parser": "parse_log_pytest",
    "pip_packages": ["pytest"],
    "python": "3.9",
    "test_cmd": "pytest --no-header -rA --tb=line --color=no",
    "env_vars": {"MODE": "a b"},
}


def in_shape(name, common):
    """A row as the dataset has them: with its columns and without SWE-bench 5's."""
    return {
        "swe_gym": common | {"repo": "dask/dask", "version": "2.30"},
        "swe_rebench": common
        | {"version": "1.0", "install_config": REBENCH, "environment": "", "requirements": ""}
        | {"FAIL_TO_FAIL": [], "PASS_TO_FAIL": [], "license_name": "MIT", "meta": {}},
        "swe_rebench_v2": common
        | {"language": "python", "image_name": f"{MOVED_REPOSITORY}:spans", "license": "MIT"}
        | {"install_config": json.dumps(REBENCH | {"test_cmd": ["pytest -rA tests"]})},
        "swe_synth": common | {"image_name": "own/spans:1", "test_cmd": "pytest -rA tests"},
        "swe_bench_live": common
        | {"test_cmds": ["pytest -rA tests"], "log_parser": "pytest", "pull_number": "1"},
    }[name]


@pytest.mark.parametrize(
    ("name", "image", "command"),
    [
        ("swe_gym", "xingyaoww/sweb.eval.x86_64.own_s_spans-1:latest", "tests/test_old.py"),
        ("swe_rebench", "swerebench/sweb.eval.x86_64.own_1776_spans-1:latest", "--tb=line"),
        ("swe_rebench_v2", f"{MOVED_REPOSITORY}:spans", "pytest -rA tests"),
        ("swe_synth", "own/spans:1", "pytest -rA tests"),
        (
            "swe_bench_live",
            "starryzhang/sweb.eval.x86_64.own_1776_spans-1:latest",
            "pytest -rA tests",
        ),
    ],
)
def test_rows_become_official_ones(tmp_path, name, image, command):
    row = in_shape(name, COMMON)
    assert kind_of(row) == name.replace("_", "-")
    (instance,) = load_instances(write_rows(tmp_path / "rows.jsonl", [row]))
    assert (instance.image, instance.log_parser) == (image, "parse_log_pytest")
    lines = instance.eval_script.split("\n")
    start, end = (
        next(k for k, line in enumerate(lines) if mark in line) for mark in ("Start T", "End T")
    )
    assert command in lines[end - 1] and end - start == 2
    assert TESTS.strip() in instance.eval_script
    assert lines.count(f"git checkout {'0' * 40} tests/test_old.py") == 2
    assert lines.count("rm -f tests/test_new.py") == 2
    assert ("export MODE='a b'" in lines) == ("rebench" in name)
    checked = subprocess.run(["bash", "-n"], input=instance.eval_script, text=True)
    assert checked.returncode == 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (COMMON | {"repo": "python/mypy"}, "names of cases.*--filter"),
        (COMMON | {"repo": "swesmith/own__spans.abcdef12"}, "pull --dataset swe-smith"),
        (
            COMMON | {"install_config": REBENCH, "image_name": "i", "language": "go"},
            "pull --dataset swe-rebench-v2",
        ),
        (COMMON | {"expected_output_json": "{}"}, "R2E-Gym name tests without their files"),
        ({"org": "o", "repo": "r", "number": 1, "fix_patch": ""}, "of Multi-SWE-bench"),
        (COMMON | {"dockerhub_tag": "t", "fail_to_pass": "[]"}, "of SWE-bench Pro"),
        ({**COMMON, "FAIL_TO_PASS": []}, "names no test in FAIL_TO_PASS"),
        (COMMON | {"install_config": {"install": "x"}}, "names no test_cmd"),
        (COMMON | {"install_config": "{"}, "is not JSON"),
        (COMMON | {"test_cmd": 3, "image_name": "i"}, "the wrong type"),
        (COMMON | {"repo": "dask/dask", "test_patch": "+x"}, "test_patch can't be read"),
    ],
)
def test_rows_that_can_not_be_used_say_why(row, message):
    with pytest.raises(DataError, match=message) as caught:
        to_official(row, "rows.jsonl, line 3")
    assert str(caught.value).startswith("rows.jsonl, line 3: ")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda row: {"prompt": [], "env_class": "null", "instance": row},
        lambda row: {"responses_create_params": {"metadata": {"instance_dict": json.dumps(row)}}},
        lambda row: row | {"responses_create_params": {"input": []}},
    ],
    ids=["skyrl", "nemo-gym", "nemo-gym, flat"],
)
def test_a_row_that_another_trainer_wrapped(tmp_path, wrap):
    path = write_rows(tmp_path / "rows.jsonl", [wrap(in_shape("swe_gym", COMMON))])
    (instance,) = load_instances(path, instance_ids=["Own__Spans-1"])
    assert instance.image.startswith("xingyaoww/")


def test_a_wrapped_row_without_an_instance_says_so(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": [], "env_class": "gsm8k"}])
    with pytest.raises(DataError, match="line 1: a row of SkyRL has no instance"):
        load_instances(path)


def derive(source, out):
    """Makes the images and rows by `agentrl swebench pull --out`."""
    return main(["swebench", "pull", "--dataset", str(source), "--out", str(out)])


# --- graded, with the fixture's image under the names of the datasets -----------------------------


def of_fixture(row, spans):
    """A row with what the fixture's instance has."""
    columns = ("base_commit", "patch", "test_patch")
    tests = {"FAIL_TO_PASS": list(spans.fail_to_pass), "PASS_TO_PASS": list(spans.pass_to_pass)}
    return row | {each: getattr(spans, each) for each in columns} | tests


def require_paid(instance):
    settings = {"policy": "strict", "run_id": "t", "timeout_s": 120}
    gold = asyncio.run(grade(instance, instance.patch, **settings, withhold=True))
    assert (gold.reward, gold.flags) == (1.0, ()), gold


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", ["swe_gym", "swe_rebench", "swe_rebench_v2", "swe_synth", "swe_bench_live"]
)
def test_converted_rows_are_graded_and_confirmed(engine, fixture_instances, name):
    spans = fixture_instances["agentrl__spans-1"]
    row = in_shape(name, of_fixture(COMMON, spans))
    instance = parse_row(to_official(row, "row"), "row")
    image = engine.images.get(spans.image)
    image.tag(*instance.image.rsplit(":", 1))
    try:
        require_paid(instance)
        settings = {"policy": "official", "run_id": "t", "timeout_s": 120}
        assert asyncio.run(grade(instance, "", **settings, skip_patch=True)).reward == 0.0
    finally:
        engine.images.remove(instance.image)


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_row_of_smith_gets_an_image_with_the_bug(engine, fixture_instances, tmp_path):
    """From the fixture's repaired repository, and the way from there to the bug as its patch."""
    spans = fixture_instances["agentrl__spans-1"]
    script = (
        "cd /testbed && git apply /tmp/p && rm /tmp/p && git config user.email a@b && "
        "git config user.name a && git commit -qam fixed && git diff HEAD HEAD~1 -- spans"
    )
    from agentrl.env.container.container import packed
    from agentrl_swebench.containers import InstanceContainer
    from agentrl_swebench.derived import SMITH_REPOSITORY
    from agentrl_swebench.images import commit

    async def fixed():
        made = await InstanceContainer.start(spans.image, run_id="t", role="build")
        try:
            await made.put(packed({"p": (spans.patch + spans.test_patch).encode()}), "/tmp")
            ran = await made.script(script, timeout_s=60, environment={"HOME": "/root"})
            assert ran.exit_code == 0, ran
            await commit(made, "agentrl/test-smith:1")
            return ran.output.decode()
        finally:
            await made.end()

    bug = asyncio.run(fixed())
    row = {
        "instance_id": "own__spans.abcdef12.func_basic__x1",
        "repo": "swesmith/own__spans.abcdef12",
        "image_name": "agentrl/test-smith:1",
        "patch": bug,
        "problem_statement": "p",
        "FAIL_TO_PASS": list(spans.fail_to_pass),
        "PASS_TO_PASS": list(spans.pass_to_pass),
        "created_at": "",
    }
    source, out = write_rows(tmp_path / "smith.jsonl", [row]), tmp_path / "rows.jsonl"
    try:
        assert derive(source, out) == 0
        (instance,) = load_instances(out)
        assert (
            instance.image.startswith(SMITH_REPOSITORY) and "test_spans.py" in instance.test_patch
        )
        shown = engine.containers.run(
            instance.image,
            ["bash", "-c", "git log --oneline | wc -l; ls tests; git status --short; ls /tmp"],
            network_mode="none",
            remove=True,
        )
        assert shown.decode().split() == ["1"]
        require_paid(instance)
    finally:
        for each in {"agentrl/test-smith:1", *(i.image for i in load_instances(out))}:
            engine.images.remove(each, force=True)


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_repository_elsewhere_in_the_image_is_moved(engine, fixture_instances, tmp_path):
    """A row of SWE-rebench-V2, whose image has the repository at /NAME, installed from there."""
    spans = fixture_instances["agentrl__spans-1"]
    script = (
        "mv /testbed /spans && cd /spans && "
        "python -m pip install --no-index --no-deps --no-build-isolation -q -e ."
    )
    made = engine.containers.create(
        spans.image, ["bash", "-c", script], network_mode="none", working_dir="/"
    )
    try:
        made.start()
        assert made.wait()["StatusCode"] == 0, made.logs()
        made.commit("agentrl/test-v2", "1")
    finally:
        made.remove(force=True)
    row = in_shape("swe_rebench_v2", of_fixture(COMMON, spans))
    row |= {"image_name": "agentrl/test-v2:1"}
    source, out = write_rows(tmp_path / "v2.jsonl", [row]), tmp_path / "rows.jsonl"
    try:
        assert derive(source, out) == 0
        (instance,) = load_instances(out)
        require_paid(instance)
    finally:
        for each in {"agentrl/test-v2:1", *(i.image for i in load_instances(out))}:
            engine.images.remove(each, force=True)
