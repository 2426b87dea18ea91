"""Every kind of box works alike. Harbor's sandboxes are tried in `test_harbor_providers.py`."""

import os

import pytest

from agentrl.env.container.box import ROOT
from agentrl.env.container.container import Container, ContainerSpec, packed
from agentrl.env.container.engine import Engine
from agentrl.env.container.process import ProcessBox
from agentrl.errors import EnvError


async def try_out(box):
    ran = await box.run("pwd; echo $COLOUR; echo bad >&2; cat; exit 3", timeout_s=30)
    assert (ran.output, ran.exit_code) == (f"{box.workdir}\ngreen\nbad\n", 3)
    slept = await box.run("echo a; sleep 600", timeout_s=2)
    assert (slept.output, slept.exit_code, slept.timed_out) == ("a\n", None, True)
    script = 'printf %s "$1$X$COLOUR"; echo no >&2'
    wrote = await box.script(script, "a b", timeout_s=30, environment={"X": "!", "COLOUR": ""})
    assert (wrote.output, wrote.errors, wrote.exit_code) == (b"a b!", "no", 0)
    pieces = []
    ran = await box.execute(["echo", "x"], timeout_s=30, add=lambda *piece: pieces.append(piece))
    assert b"".join(payload for kind, payload in pieces if kind == 1) == b"x\n"
    assert (ran.output, ran.exit_code) == (b"", 0)
    content = bytes(range(256)) * 300
    await box.put(packed({"deep/bytes": content}), box.workdir)
    assert await box.get("deep/bytes", len(content)) == content
    for path, limit in (("deep/bytes", len(content) - 1), ("deep", 9), ("none", 9)):
        assert await box.get(path, limit) is None, path
    await box.end()
    await box.end()
    with pytest.raises(EnvError):
        await box.run("true", timeout_s=30)


async def test_programs_of_this_machine():
    box = ProcessBox(os.environ | {"COLOUR": "green"})
    with pytest.raises(EnvError):
        await box.script("true", timeout_s=30, user=ROOT)
    with pytest.raises(EnvError):
        await box.put(packed({"name": b""}))
    with pytest.raises(EnvError):
        await box.get("../../name", 9)
    await try_out(box)
    assert not box.folder.exists()


@pytest.mark.docker
async def test_a_container(base_image):
    variables = {"COLOUR": "green"}
    spec = ContainerSpec(
        base_image, workdir="/srv", environment=variables, read_only=False, tmpfs=()
    )
    await try_out(await Container.create(Engine(), spec))
