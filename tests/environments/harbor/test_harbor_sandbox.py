"""Files are carried into a verifier's container, on a fake engine: names, links and content."""

import asyncio
import io
import tarfile
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.env.container.container import Container, ContainerSpec
from agentrl.errors import DataError
from agentrl_harbor import sandbox
from agentrl_harbor.sandbox import (
    _choose,
    _leads_astray,
    _pack,
    _reason,
    carry,
    carry_folders,
    is_hidden,
)
from agentrl_harbor.verify import _read

PROGRAMS = frozenset({"/usr/bin/python3", "/usr/bin/grep", "/usr/local/bin/other"})


class PretendedEngine:
    """Answers for a container whose files are: path -> content, a link `("->", target)`, a hard
    link `("=", path)`, or None for a folder."""

    def __init__(self, files: dict[str, Any], image: dict[str, Any] | None = None):
        self.files = files
        self.image = image or {}
        self.api = self

    async def call(self, function):
        return function(self)

    def diff(self, container_id):
        return [
            {"Path": path, "Kind": 0 if path in self.image else 1}
            for path in self.files
            if self.files[path] != self.image.get(path, 0)
        ]

    def get_archive(self, container_id, path):
        base = PurePosixPath(path).parent
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for each, content in sorted(self.of(container_id).items()):
                if each != path and not each.startswith(f"{path}/"):
                    continue
                member = tarfile.TarInfo(str(PurePosixPath(each).relative_to(base)))
                data = io.BytesIO(content if isinstance(content, bytes) else b"")
                if content is None:
                    member.type = tarfile.DIRTYPE
                elif isinstance(content, tuple):
                    member.type = tarfile.SYMTYPE if content[0] == "->" else tarfile.LNKTYPE
                    member.linkname = content[1]
                    if content[0] == "=":
                        member.linkname = str(PurePosixPath(content[1]).relative_to(base))
                else:
                    member.size = len(content)
                archive.addfile(member, data)
        return (chunk for chunk in [packed.getvalue()]), {}

    def of(self, container_id):
        return self.image if container_id == "fresh" else self.files


def carried(files, kinds=None, refuse=_leads_astray):
    """The archive's members by path, and what was left out."""
    kinds = kinds or dict.fromkeys(files, 1)
    kept, left_out = _choose(kinds, PROGRAMS, False)
    engine: Any = PretendedEngine(files)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        _pack(engine, "id", kept, kinds, archive, left_out, refuse)
    packed.seek(0)
    with tarfile.open(fileobj=packed) as archive:
        found = {}
        for member in archive.getmembers():
            content = archive.extractfile(member) if member.isreg() else None
            found["/" + member.name] = content.read() if content else member.linkname or None
    return found, {each.partition(": ")[0] for each in left_out}


NAME = st.text(
    st.characters(blacklist_characters="/\x00", blacklist_categories=["Cs"]),
    min_size=1,
    max_size=80,
).filter(lambda name: name not in (".", ".."))
"""Also long ones, odd ones and such as need another header in an archive."""


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(NAME, min_size=1, max_size=4), min_size=1, max_size=4), st.binary())
def test_every_file_comes_where_it_was(paths, content):
    files = {"/work": None}
    for parts in paths:
        for length in range(1, len(parts)):
            files["/work/" + "/".join(parts[:length])] = None
        files.setdefault("/work/" + "/".join(parts), content)
    # What stands below a file is none.
    files = {
        path: each
        for path, each in files.items()
        if all(files.get(str(above), 0) is None for above in PurePosixPath(path).parents[:-1])
    }
    found, left_out = carried(files)
    assert set(found) | left_out >= set(files) and set(found) <= set(files)
    assert all(found[path] == (files[path] if files[path] is not None else None) for path in found)


def test_a_name_that_needs_a_longer_header_stays_in_its_folder():
    files = {"/opt/etc": None, "/opt/etc/profile.d": None, "/opt/etc/profile.d/ü.sh": b"echo 1"}
    assert carried(files) == (files, set())


@pytest.mark.parametrize(
    ("path", "target", "kept"),
    [
        ("/app/out", "/app/in", True),
        ("/app/out", "../lib/in", True),
        ("/app/log", "/dev/stdout", True),
        ("/logs/artifacts/model", "/app/model", True),
        ("/app/out", "/tests/wanted", False),
        ("/app/out", "../tests/wanted", False),
        ("/app/out", "//tests/./wanted", False),
        ("/app/out", "/proc/self/root/tests/wanted", False),
        ("/app/out", "/logs/verifier/reward.txt", False),
        ("/app/root", "/", False),
        ("/app/root", "..", False),
        ("/app/logs", "/logs", False),
        ("/app/out", "/opt/link/../tests/wanted", False),
        ("/app/up", "/opt/link/..", False),
        ("/usr/lib/python3/dist-packages/sitecustomize", "/opt/p", False),
        ("/app/_pytest", "/opt/p", False),
        ("/usr/lib/python3/dist-packages/zz.pth", "/opt/zz", False),
        ("/usr/lib/python3/dist-packages/a.dist-info/entry_points.txt", "/opt/e", False),
    ],
)
def test_which_links_a_verifier_sees(path, target, kept):
    found, left_out = carried({path: ("->", target)})
    assert (path in found) == kept and (path in left_out) != kept


@pytest.mark.parametrize(
    ("name", "content", "kept"),
    [
        ("a.pth", b"/opt/more\n", True),
        ("a.pth", b"import os", False),
        ("a.pth", b"\xef\xbb\xbfimport os", False),  # Python drops the mark
        ("a.pth", b"/opt\rimport\tos", False),  # which ends a line for Python
        ("a-1.dist-info/entry_points.txt", b"[console_scripts]\na = a:main\n", True),
        ("a-1.dist-info/entry_points.txt", b"[pytest11]\na = a\n", False),
    ],
)
def test_files_that_run_code_at_a_start_are_left_out(name, content, kept):
    path = f"/usr/lib/python3/dist-packages/{name}"
    found, left_out = carried({path: content})
    assert (path in found) == kept and (path in left_out) != kept


def test_a_hard_link_brings_nothing_that_was_left_out():
    files = {
        "/root/site": None,
        "/root/site/a.txt": b"import os",
        "/root/site/b.pth": ("=", "/root/site/a.txt"),
        "/root/site/c.txt": ("=", "/root/site/a.txt"),
        "/root/site/sitecustomize.py": b"print()",
        "/root/site/z.txt": ("=", "/root/site/sitecustomize.py"),
    }
    found, left_out = carried(files)
    assert set(found) == {"/root/site", "/root/site/a.txt", "/root/site/c.txt"}
    assert found["/root/site/c.txt"] == "root/site/a.txt"
    assert left_out == set(files) - set(found)


@pytest.mark.parametrize(
    ("path", "kind", "kept"),
    [
        ("/etc/alternatives/awk", 0, False),
        ("/etc/alternatives/mine", 1, True),
        ("/usr/local/bin", 2, False),  # with the programs in it
        ("/usr/local/bin", 0, True),  # a folder stays one, see `carry`
        ("/usr/local/lib", 2, True),
        ("/etc/apt/apt.conf.d/99run", 1, False),
        ("/root/.config/uv/uv.toml", 1, False),
        ("/root/.config/mine/uv.toml", 1, True),
        ("/etc/nsswitch.conf", 0, False),
    ],
)
def test_which_other_changes_a_verifier_sees(path, kind, kept):
    assert (_reason(path, kind, {path: kind}, PROGRAMS) is None) == kept


def test_many_files_count_as_large(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_CARRIED_BYTES", 10_000)
    with pytest.raises(sandbox.EnvError, match="changed more than") as caught:
        carried({f"/app/{number}": b"" for number in range(20)})
    assert caught.value.code == sandbox.TOO_LARGE


def test_artifacts_may_be_links_but_not_to_tests():
    files = {"/app/a": ("->", "/tests/wanted"), "/app/b": ("->", "/app/c")}
    found, left_out = carried(files, refuse=is_hidden)
    assert (set(found), left_out) == ({"/app/b"}, {"/app/a"})


@pytest.mark.parametrize(
    "written",
    [b'{"reward": 1' + b"0" * 400 + b"}", b"[" * 60_000, b'{"reward": "1"}', b"NaN", b"{", b"null"],
)
def test_a_reward_that_is_no_number_is_a_verdict_and_no_failure(written):
    container = Container(
        PretendedEngine({"/logs/verifier/reward.json": written}),  # type: ignore[arg-type]
        "id",
        None,
        ContainerSpec("image"),
    )
    with pytest.raises(DataError):
        asyncio.run(_read(container))


class Fresh:
    """The container that the work is carried into."""

    id = "fresh"
    names: list[str]

    async def put(self, packed):
        with tarfile.open(fileobj=packed) as archive:
            self.names = ["/" + name for name in archive.getnames()]

    async def script(self, script, *arguments, **options):
        raise AssertionError("nothing was deleted")


@pytest.mark.parametrize("everything", [False, True])
def test_a_folder_of_the_image_is_not_exchanged_for_a_link(everything):
    image = {"/usr/local/bin": None, "/app": None, "/app/now": ("->", "one")}
    files = image | {"/usr/local/bin": ("->", "/opt/bin"), "/app/now": ("->", "two")}
    files |= {"/opt/bin": None, "/opt/bin/cat": b"liar"}
    container = Container(PretendedEngine(files, image), "agent", None, ContainerSpec("image"))  # type: ignore[arg-type]
    fresh = Fresh()
    left_out = asyncio.run(carry(container, fresh, PROGRAMS, everything=everything))  # type: ignore[arg-type]
    exchanged = "/usr/local/bin: takes the place of a folder of the image"
    assert left_out == ([] if everything else [exchanged])
    assert ("/usr/local/bin" in fresh.names) == everything
    assert {"/app/now", "/opt/bin", "/opt/bin/cat"} <= set(fresh.names)


def test_an_artifact_in_an_artifact_is_written_once():
    files: dict = {"/app/a/bin": None, "/app/a/bin/grep": b"liar"}
    container = Container(PretendedEngine(files), "agent", None, ContainerSpec("image"))  # type: ignore[arg-type]
    fresh = Fresh()
    asyncio.run(carry_folders(container, fresh, ["/app/a/bin", "/logs/artifacts"]))  # type: ignore[arg-type]
    assert fresh.names == ["/app/a/bin", "/app/a/bin/grep"]
    files["/app"] = None
    asyncio.run(carry_folders(container, fresh, ["/app", "/app/a/bin"]))  # type: ignore[arg-type]
    assert fresh.names == ["/app", "/app/a/bin", "/app/a/bin/grep"]
