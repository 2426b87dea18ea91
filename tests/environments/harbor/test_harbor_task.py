"""Harbor's task directories: what is read, and what is refused by name."""

import asyncio
import io
import os
import re
import tarfile
import tempfile
import time
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import harbor_tasks
import pytest
from docker.errors import ImageNotFound
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.errors import ConfigError, DataError
from agentrl.types import Task
from agentrl_harbor.env import HarborConfig, HarborEnvironment, _check_network
from agentrl_harbor.images import _built
from agentrl_harbor.provider import _choose
from agentrl_harbor.sandbox import Image, _reason
from agentrl_harbor.task import Artifact, StepTable, load_task, load_tasks, pack, resolve

PUBLIC = '[steps.agent]\nnetwork_mode = "public"\n'


@pytest.fixture
def folder(tmp_path):
    return harbor_tasks.write(tmp_path)


def test_all_shapes_load(folder):
    tasks = {task.id: task for task in load_tasks(folder)}
    assert list(tasks) == sorted(harbor_tasks.tasks())
    hello = tasks["hello"].steps[0]
    assert hello.instruction == "Write the word hello to /app/hello.txt."  # without its canary
    assert not hello.separate and hello.solution is not None
    first, second = tasks["steps"].steps
    assert (first.name, first.min_reward) == ("first", {"reward": 1.0})
    assert second.workdir is not None and first.workdir is None
    own = tasks["own-verifier"].steps[0]
    assert own.separate and own.bundled == folder / "own-verifier" / "tests"
    assert own.artifacts == ("/logs/artifacts", "/app/out.txt")
    assert tasks["mend"].table.environment.memory_mb == 512
    assert [task.id for task in load_tasks(folder / "hello")] == ["hello"]


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[[steps]]\nname = "../../victim"\n', "is not the name of a folder"),
        ('[[steps]]\nname = "/etc"\n', "is not the name of a folder"),
        ('[[steps]]\nname = ".."\n', "is not the name of a folder"),
        ('[[steps]]\nname = "a"\n[[steps]]\nname = "A"\n', "two steps have one name"),
        ('artifacts = ["/app/../../etc"]\n', "without '..'"),
        ('artifacts = ["relative"]\n', "absolute path"),
        ('artifacts = ["//"]\n', "whole system"),
        ('artifacts = ["/a\\u0000b"]\n', "absolute path"),
        (f'[[steps]]\nname = "{"ä" * 200}"\n', "is not the name of a folder"),
        ('[environment]\nworkdir = "app"\n', "absolute path"),
        ('[environment]\nallow_internet = "false"\n', "neither true nor false"),
        ('[environment]\ndocker_image = "--privileged"\n', "is not the name of an image"),
        ("[environment]\ngpus = 1\n", "graphics processors"),
        ('[environment]\nos = "windows"\n', "only Linux"),
        ('[environment]\nmemory = "a lot"\n', "is not a size"),
        ("[environment]\ncpus = -1\n", "greater than 0"),
        ("[agent\n", "can't be read"),
        ('[[verifier.collect]]\ncommand = "x"\n', "compose file"),
    ],
)
def test_wrong_tasks_are_refused_by_file_and_key(folder, toml, message):
    (folder / "hello" / "task.toml").write_text(toml)
    with pytest.raises(DataError, match=r"hello/task\.toml.*") as caught:
        load_task(folder / "hello")
    assert message in str(caught.value)


def test_what_is_missing_is_named(folder):
    (folder / "hello" / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(DataError, match="no services of a compose file"):
        load_task(folder / "hello")
    (folder / "total" / "tests" / "test.sh").unlink()
    with pytest.raises(DataError, match=r"has no tests/test\.sh"):
        load_task(folder / "total")
    (folder / "mend" / "instruction.md").write_text("\n")
    with pytest.raises(DataError, match=r"instruction\.md is missing or empty"):
        load_task(folder / "mend")
    with pytest.raises(DataError, match=r"has no task\.toml"):
        load_tasks(folder / "mend" / "tests")


@pytest.mark.parametrize(
    ("task", "path"),
    [
        ("steps", "steps/first"),
        ("steps", "steps/second/workdir"),
        ("hello", "instruction.md"),
        ("hello", "task.toml"),
        ("hello", "tests"),
        ("hello", "solution"),
        ("hello", "environment"),
    ],
)
def test_a_part_that_is_a_link_out_of_its_task_is_refused(folder, tmp_path_factory, task, path):
    outside = tmp_path_factory.mktemp("outside") / "part"
    inside = folder / task / path
    inside.rename(outside)
    inside.symlink_to(outside)
    with pytest.raises(DataError, match="leads out of"):
        load_task(folder / task)


ODD = st.text(st.sampled_from("ab./\\~$ \n\x00ä\ud800-"), max_size=12) | st.text("aä", max_size=300)


@settings(max_examples=100, deadline=None)
@given(ODD)
def test_a_name_is_refused_or_stays_in_its_folder(name):
    try:
        step = StepTable(name=name).name
    except ValidationError:
        step = None
    if step is not None:
        base = Path("/tasks/task/steps")
        assert (base / step).parent == base and os.path.normpath(base / step) == str(base / step)
        assert len(os.fsencode(step)) <= 255
    try:
        source = Artifact(source=f"/{name}").source
    except ValidationError:
        return
    assert source == os.path.normpath(source) != "/" and not source.startswith("//")
    assert "\0" not in source


NAME = st.characters(blacklist_characters="/\x00", blacklist_categories=["Cs"])
FILE = st.just("\udcff") | st.text(NAME, min_size=1, max_size=60).filter(
    lambda name: name not in (".", "..") and len(name.encode()) < 200
)
"""Also a name that is not UTF-8."""


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(FILE, st.binary(max_size=20), min_size=1, max_size=4), FILE)
def test_members_of_an_archive_stay_in_their_folder(files, below):
    with tempfile.TemporaryDirectory() as made:
        root = Path(made) / below
        root.mkdir()
        for name, content in files.items():
            (root / name).write_bytes(content)
        with tarfile.open(fileobj=io.BytesIO(pack((Path(made),)))) as archive:
            found = {each.name: each for each in archive.getmembers()}
            assert set(found) == {below, *(f"{below}/{name}" for name in files)}
            for name, content in files.items():
                member = archive.extractfile(found[f"{below}/{name}"])
                assert member is not None and member.read() == content


def test_a_link_to_a_folder_of_its_own_keeps_what_is_in_it(tmp_path):
    (tmp_path / "cases" / "one").mkdir(parents=True)
    (tmp_path / "cases" / "now").symlink_to(tmp_path / "cases" / "one")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(DataError, match="neither a file nor a folder"):
        pack((tmp_path,))
    (tmp_path / "loop").unlink()
    with tarfile.open(fileobj=io.BytesIO(pack((tmp_path,)))) as archive:
        link = archive.getmember("cases/now")
        assert link.issym() and link.linkname == "one"


def test_keys_without_effect_are_said_once(folder, caplog, monkeypatch):
    for task in ("hello", "total"):
        path = folder / task / "task.toml"
        path.write_text(path.read_text() + 'storage = "2G"\nmemmory_mb = 1\n')
    monkeypatch.setattr("agentrl_harbor.env.reap_abandoned", Mock())
    config = HarborConfig(source=str(folder), task_ids=["hello", "total", "mend"])
    HarborEnvironment.load_shared(config)
    said = [each.getMessage() for each in caplog.records]
    assert len(said) == 2 and all("in 2 of 3 tasks" in each for each in said)
    assert "environment.memmory_mb, which has no effect here" in said[0]
    assert said[1].endswith(": the disk of a container has no limit")


def test_steps_of_one_container_have_one_network(folder):
    path = folder / "steps" / "task.toml"
    path.write_text(path.read_text().replace('name = "second"', 'name = "second"\n' + PUBLIC))
    task = load_task(folder / "steps")
    with pytest.raises(DataError, match="only some of the steps have a network"):
        _check_network(task, HarborConfig(source=str(folder)))
    _check_network(task, HarborConfig(source=str(folder), network="none"))


@pytest.mark.parametrize(
    ("timeout_s", "lines", "message"),
    [
        (600, [{"stream": "Step 1\n"}, {"error": "no such file"}], "no such file\nStep 1"),
        (0.001, [{"stream": "."}], "longer to build than build_timeout_sec = 0.001"),
    ],
)
def test_a_build_is_stopped_at_its_error_or_its_time(folder, timeout_s, lines, message):
    def build(**options):
        assert options["timeout"] == timeout_s
        for line in lines:
            time.sleep(0.002)
            yield line

    client = Mock()
    client.images.get.side_effect = ImageNotFound("none")
    client.api.build = build
    with pytest.raises(DataError, match=re.escape(message)):
        _built(client, folder / "hello" / "environment", timeout_s)


def test_a_packed_folder_holds_only_its_own_files(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    tests = tmp_path / "tests"
    (tests / "inner").mkdir(parents=True)
    (tests / "test.sh").write_text("echo 1\n")
    (tests / "inner" / "same").hardlink_to(tests / "test.sh")
    with tarfile.open(fileobj=io.BytesIO(pack((tests,)))) as archive:
        members = {each.name: each for each in archive.getmembers()}
        assert set(members) == {"test.sh", "inner", "inner/same"}
        assert members["test.sh"].mode & 0o555 == 0o555 and members["test.sh"].uid == 0
        inner = archive.extractfile(members["inner/same"])
        assert inner is not None and inner.read() == b"echo 1\n"
    before = pack((tests,))
    (tests / "test.sh").touch()
    assert pack((tests,)) == before  # the time of a file changes nothing
    (tests / "link").symlink_to(secret)
    with pytest.raises(DataError, match="leads out of"):
        pack((tests,))


def test_a_task_reads_no_variable_of_this_machine_unasked(monkeypatch):
    monkeypatch.setenv("TOKEN", "secret")
    assert resolve({"A": "${NAME:-there}"}, [], "task") == {"A": "there"}
    assert resolve({"A": "x${TOKEN:-none}"}, [], "task") == {"A": "xnone"}
    with pytest.raises(DataError, match="host_variables"):
        resolve({"A": "${TOKEN}"}, [], "task")
    assert resolve({"A": "x${TOKEN}"}, ["TOKEN"], "task") == {"A": "xsecret"}


def test_a_list_of_hosts_is_refused_unless_there_is_no_network(folder):
    path = folder / "hello" / "task.toml"
    path.write_text('[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["pypi.org"]\n')
    task = load_task(folder / "hello")
    with pytest.raises(DataError, match='set network = "none"'):
        _check_network(task, HarborConfig(source=str(folder)))
    _check_network(task, HarborConfig(source=str(folder), network="none"))


INNER = ("", "/bin", "/lib")


@pytest.mark.parametrize(
    ("path", "kind", "kept"),
    [
        ("/app/answer", 1, True),
        ("/app/mean.py", 0, True),
        ("/usr/local/bin/mytool", 1, True),
        ("/usr/lib/python3/dist-packages/numpy/core.py", 1, True),
        ("/app/venv/bin/python3", 1, True),  # of a new virtual environment
        ("/app/conftest.py", 1, True),
        ("/usr/bin/python3", 0, False),
        ("/usr/bin/grep", 2, False),
        ("/usr/local/bin/grep", 1, False),
        ("/root/.bashrc", 0, False),
        ("/etc/ld.so.preload", 1, False),
        ("/conftest.py", 1, False),
        ("/app/python/json/__init__.py", 1, True),
        ("/usr/lib/python3.11/os.py", 0, False),
        ("/usr/lib/python3.11/json/__init__.py", 0, False),
        ("/usr/lib/python3.11/email/mime/text.py", 2, False),
        ("/usr/lib/python3.11/lib-dynload/_json.so", 0, False),
        ("/usr/lib/python3.11/json.py", 1, False),
        ("/usr/lib/python311.zip", 1, False),
        ("/usr/pyvenv.cfg", 1, False),
        ("/usr/bin/pybuilddir.txt", 1, False),
        ("/app/other/pyvenv.cfg", 1, True),
        ("/app/venv/lib/python3.11/site-packages/pluggy/__init__.py", 1, True),
        ("/opt/tools/bin/python3", 1, False),  # a folder of PATH that was empty
        ("/usr/lib/python3/dist-packages/packaging/__init__.py", 0, False),
        ("/usr/lib/python3/dist-packages/packaging/__init__.py", 1, True),
        ("/usr/lib/python3/dist-packages/numpy/core.py", 0, True),  # may be the agent's work
        ("/usr/lib/python3/dist-packages/sitecustomize.py", 1, False),
        ("/app/_pytest/runner.py", 1, False),
    ],
)
def test_which_changes_a_verifier_sees(path, kind, kept):
    programs = {"/usr/bin/python3", "/usr/bin/grep", "/usr/local/bin/other", "/opt/tools/bin/"}
    made = (f"{folder}{inner}" for folder in ("/app/venv", "/opt/tools") for inner in INNER)
    changes = {path: kind} | dict.fromkeys(made, 1)
    assert (_reason(path, kind, changes, frozenset(programs)) is None) == kept


class Stop(Exception):
    pass


def in_episode(folder, task_id, monkeypatch, images):
    """An environment in an episode of a task, of which `images` says what its images are."""

    async def image(self, where, table):
        return images(where, table)

    monkeypatch.setattr(HarborEnvironment, "_image", image)
    environment = HarborEnvironment(HarborConfig(source=str(folder)), shared=Mock())
    environment._task = load_task(folder / task_id)
    environment.shared.tasks = {task_id: environment._task}
    return environment


def test_an_image_with_a_volume_is_refused(folder, monkeypatch):
    image = Image("sha256:1", "0", "/app", frozenset(), ("/var/lib/data",))
    environment = in_episode(folder, "hello", monkeypatch, lambda where, table: image)
    with pytest.raises(DataError, match="has the volumes /var/lib/data, whose content"):
        asyncio.run(environment.reset(Task("hello", "x"), seed=0))


def test_a_separate_verifier_with_a_dockerfile_is_not_the_agents_image(folder, monkeypatch):
    path = folder / "own-verifier" / "task.toml"
    path.write_text(
        '[environment]\ndocker_image = "agents"\n[verifier]\nenvironment_mode = "separate"\n'
    )
    asked = []

    def images(where, table):
        asked.append((where.name, table.docker_image))
        raise Stop

    environment = in_episode(folder, "own-verifier", monkeypatch, images)
    environment._number, environment._image_in_use = 0, Mock()
    environment._container = Mock(sweep=AsyncMock())
    with pytest.raises(Stop):
        asyncio.run(environment._verify_apart())
    assert asked == [("tests", None)]


def test_other_sandboxes_have_no_fresh_verifier_and_say_what_they_need(folder):
    with pytest.raises(ValidationError, match='set verifier = "shared"'):
        HarborConfig(source=str(folder), sandbox="harbor:modal")
    with pytest.raises(ValidationError, match="sandbox_options need a sandbox"):
        HarborConfig(source=str(folder), sandbox_options={"a": 1})
    modal = {"source": str(folder), "sandbox": "harbor:modal", "verifier": "shared"}
    with pytest.raises(ValidationError, match="set harbor_python"):
        HarborConfig(**modal)
    for python, said in (("/no/python", "can't be run"), ("/bin/false", "does not work here")):
        with pytest.raises(ConfigError, match=said):
            HarborEnvironment.load_shared(HarborConfig(**modal, harbor_python=python))


def test_a_compose_file_is_left_to_harbor(folder, caplog):
    (folder / "hello" / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(DataError, match='sandbox = "harbor:docker"'):
        load_tasks(folder, task_ids=["hello"])
    # One task that cannot be played does not cost the folder.
    assert len(load_tasks(folder)) == len(harbor_tasks.tasks()) - 1
    assert "1 of 12 tasks are left out" in caplog.text and "harbor:docker" in caplog.text
    assert len(load_tasks(folder, compose=True)) == len(harbor_tasks.tasks())
    # Harbor does not read a file of another name, so it is one of the task's own files.
    (folder / "hello" / "environment" / "docker-compose.yaml").rename(
        folder / "hello" / "environment" / "docker-compose.yml"
    )
    assert len(load_tasks(folder)) == len(harbor_tasks.tasks())


def test_of_an_agents_archive_only_its_artifacts_come_on(tmp_path):
    def member(name, kind=tarfile.REGTYPE, link=""):
        found = tarfile.TarInfo(name)
        found.type, found.linkname = kind, link
        return found

    with tarfile.open(tmp_path / "given", "w") as archive:
        for each in (
            member("./app/out", tarfile.DIRTYPE),
            member("./app/out/" + "n" * 120),
            member("./app/out/../../tests/test.sh"),
            member("app/outside"),
            member("app/out/to", tarfile.SYMTYPE, "/usr/bin"),
            member("app/out/to/python3"),
            member("app/out/wanted", tarfile.SYMTYPE, "/tests/wanted"),
            member("app/out/hard", tarfile.LNKTYPE, "tests/wanted"),
        ):
            archive.addfile(each)
    left_out: list[str] = []
    _choose(tmp_path / "given", tmp_path / "kept", ["/app/out"], left_out)
    with tarfile.open(tmp_path / "kept") as archive:
        assert archive.getnames() == ["app/out", "app/out/" + "n" * 120, "app/out/to"]
    assert len(left_out) == 5
