"""Scrubbed histories and extracted patches, on a real engine."""

import os
import subprocess
from contextlib import asynccontextmanager

import pytest

from agentrl.errors import EnvError
from agentrl_swebench import images
from agentrl_swebench import patch as patch_module
from agentrl_swebench.containers import InstanceContainer
from agentrl_swebench.diff import parse_patch
from agentrl_swebench.patch import ScrubError, check_scrubbed, extract

pytestmark = pytest.mark.docker

IMAGE = "agentrl/swebench-fixture:agentrl-spans-1"
FIX = "sed -i 's/start </start <=/' spans/core.py"
LISTING = "rm -rf .git; find . -type f | sort | xargs -d '\\n' sha1sum"


@pytest.fixture(autouse=True)
def _state(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTRL_STATE_DIR", str(tmp_path))


@asynccontextmanager
async def scrubbed(image=IMAGE):
    """A container of a scrubbed image, and the state that an agent starts from."""
    made = await images.scrubbed(await images.resolve(image))
    container = await InstanceContainer.start(made.image_id, run_id="test")
    try:
        yield container, made.base
    finally:
        await container.remove()


async def sh(container, command):
    return (await container.run(command, timeout_s=30, max_chars=100_000)).output


async def test_nothing_of_the_future_is_left(fixture_dir, engine, fixture_instances):
    find = "git log --all --format=%H; git rev-parse v-next origin/main 2>/dev/null; true"
    before = engine.containers.run(
        IMAGE, ["bash", "-c", f"{find}; git reflog --format=%H"], remove=True, network_mode="none"
    )
    base_commit = fixture_instances["agentrl__spans-1"].base_commit

    async with scrubbed() as (container, base):
        await check_scrubbed(container, base)
        past = (await sh(container, "git log --format=%H")).split()
        assert past[0] == base.commit == base_commit and len(past) == 2
        future = set(before.decode().split()) - set(past) - {"v-next", "origin/main"}
        assert len(future) >= 2
        for commit in future:
            assert "rror" in await sh(container, f"git cat-file -t {commit} 2>&1 || echo error")
        shown = await sh(
            container,
            "git log --all --oneline; git reflog; git stash list; git tag; git branch -a; "
            "git remote -v; git fsck --unreachable --no-reflogs; cat .git/*MSG .git/*HEAD",
        )
        assert "Fix the bug" not in shown and "Notes" not in shown and "next" not in shown
        # Not in a loose or packed object either, under whatever name.
        every = (
            "git cat-file --batch-check --batch-all-objects | cut -d' ' -f1 | git cat-file --batch"
        )
        assert "test_touching" not in await sh(container, f"{every} | tr -d '\\0'")
        assert (await sh(container, "git status --short")) == ""


@pytest.mark.parametrize(
    "spoil",
    [
        "git branch sneaky HEAD~1",
        "git remote add origin /nowhere",
        "mkdir -p .git/logs && touch .git/logs/HEAD",
        "git -c user.name=a -c user.email=a@b commit -q --allow-empty -m more; "
        "git branch x; git reset -q --hard HEAD~1",
        "git -c user.name=a -c user.email=a@b commit -q --allow-empty -m more",
        "rm -rf .git",
    ],
)
async def test_the_check_fails_closed(fixture_dir, spoil):
    async with scrubbed() as (container, base):
        await sh(container, spoil)
        with pytest.raises(ScrubError):
            await check_scrubbed(container, base)


@pytest.mark.parametrize("mark", ["keep", "promisor"])
async def test_packs_that_git_would_keep_are_scrubbed_too(fixture_dir, engine, mark):
    """A partial clone's packs are marked `promisor`; git never drops an object of those."""
    pack = f"git repack -a -d -q && touch $(ls .git/objects/pack/*.pack | sed s/pack$/{mark}/)"
    made = engine.containers.run(
        IMAGE, ["bash", "-c", f"cd /testbed && {pack}"], detach=True, network_mode="none"
    )
    try:
        assert made.wait()["StatusCode"] == 0
        source = made.commit("agentrl/packed", mark)
    finally:
        made.remove()

    try:
        async with scrubbed(source.id) as (container, base):
            await check_scrubbed(container, base)
            assert "Fix the bug" not in await sh(container, "git log --all --reflog --oneline")
            every = "git cat-file --batch-check --batch-all-objects | cut -d' ' -f1"
            every += " | git cat-file --batch | tr -d '\\0'"
            assert "test_touching" not in await sh(container, every)
    finally:
        for tag in (images.scrubbed_tag(source.id), source.id):
            engine.images.remove(tag)


async def test_an_image_without_a_repository_is_refused(fixture_dir):
    source = await images.resolve("agentrl/swebench-fixture-base:1")
    with pytest.raises(EnvError, match="can't be scrubbed"):
        await images.scrubbed(source)


async def test_an_extracted_patch_is_the_change_and_applies(fixture_dir, tmp_path):
    changes = (
        "sed -i 's/start </start <=/' spans/core.py; printf 'a\\0b' > blob.bin; "
        "echo new > 'name with space.txt'; rm README.md; mkdir d; echo ü > d/ü.txt; "
        "chmod +x setup.py"
    )

    async with scrubbed() as (container, base):
        assert (await extract(container, base)).patch == ""
        await sh(container, changes)
        extracted = await extract(container, base)
        assert extracted.problem == ""
        await sh(container, "git add -A; git -c user.name=a -c user.email=a@b commit -qm wip")
        assert (await extract(container, base)).patch == extracted.patch
        tree = await sh(container, LISTING)
    patch = extracted.patch
    assert "b/spans/core.py" in patch and "GIT binary patch" in patch
    async with scrubbed() as (container, base):
        apply = f"git apply - <<'END'\n{patch}END\n"
        applied = await container.run(apply, timeout_s=30, max_chars=1000)
        assert applied.exit_code == 0, applied.output
        assert await sh(container, LISTING) == tree


@pytest.mark.parametrize(
    "hostile",
    [
        "git config diff.external /bin/false; git config core.pager 'rm -rf /'",
        "git config core.hooksPath /tmp; printf '#!/bin/sh\\nexit 1\\n' > .git/hooks/pre-commit",
        "git config filter.x.clean 'echo pwned'; echo '*.py filter=x' > .git/info/attributes",
        "echo 'spans/' >> .git/info/exclude; git update-index --assume-unchanged spans/core.py",
        "git config --global core.excludesFile /tmp/ex; echo '*.py' > /tmp/ex; "
        "git config --global diff.external false",
        "export GIT_DIR=/nowhere; echo 'export GIT_DIR=/nowhere' > /root/.bashrc",
        "git update-index --skip-worktree spans/core.py; git config core.fsmonitor /bin/true",
        "printf '[diff]\\n\\texternal = false\\n' > /var/lib/agentrl/base.git/config",
    ],
)
async def test_what_the_agent_did_to_git_has_no_say(fixture_dir, hostile):
    async with scrubbed() as (container, base):
        await sh(container, hostile)
        await sh(container, FIX)
        extracted = await extract(container, base)
        assert extracted.problem == ""
        assert "+        if merged and start <= merged[-1][1]:" in extracted.patch
        assert extracted.patch.count("diff --git") == 1


async def test_only_what_the_agent_did_for_certain_is_its_problem(fixture_dir):
    async with scrubbed() as (container, base):
        await sh(container, f"{FIX}; rm -rf .git; git init -q .")
        kept = await extract(container, base)
        assert kept.problem == "" and kept.patch.count("diff --git") == 1
        await sh(container, "printf '#!/bin/sh\\nexit 1\\n' > $(command -v git)")
        assert (await extract(container, base)).problem
        await sh(container, "rm $(command -v git)")
        assert "removed the programs" in (await extract(container, base)).problem
    async with scrubbed() as (container, base):
        await sh(container, "rm -rf /var/lib/agentrl")
        assert "first state" in (await extract(container, base)).problem


async def test_a_change_that_can_not_be_taken_is_nobodys_problem(fixture_dir, monkeypatch):
    async with scrubbed() as (container, base):
        full = "echo 'No space left on device' >&2; exit 128"
        monkeypatch.setattr(patch_module, "_EXTRACT", full)
        with pytest.raises(EnvError, match="No space left"):
            await extract(container, base)


ODD_TREES = {
    "quoted name": "echo a > 'notes ü.txt'; echo b > 'a \"b\".txt'; printf c > \"tab\there.txt\"",
    "Latin-1": "printf '# caf\\351\\n' | cat - spans/core.py > x && mv x spans/core.py;"
    " sed -i '1i # -*- coding: latin-1 -*-' spans/core.py; printf 'caf\\351\\n' > 'n*[1] ü.txt'",
    "repository within": "mkdir scratch && cd scratch && git init -q . && echo x > y",
    "repository within, with a commit": "git clone -q . copy",
    "unreadable": "echo a > secret; chmod 000 secret; mkdir shut; echo a > shut/in; chmod 000 shut",
    "pipe": "mkfifo pipe; ln -s /nowhere link; ln -s spans also",
    "merge leftovers": "printf '<<<<<<< a\\n=======\\n>>>>>>> b\\n' > README.orig",
    "new repository": "rm -rf .git; git init -q; git add -A; git -c user.name=a -c "
    "user.email=a@b commit -qm all",
    "vendored": "mkdir -p vendor/lib; cp -r spans vendor/lib/; printf '\\0\\1' > vendor/lib/x.so",
    "submodule": "git -c protocol.file.allow=always submodule add -q ./.git sub",
    "CRLF": "printf '* text=auto\\n' > .gitattributes; printf 'a\\r\\nb\\r\\n' > dos.txt",
    "no attributes": "printf '*.py -diff\\n*.txt binary\\n' > .gitattributes; echo a > b.txt",
}


@pytest.mark.parametrize("tree", ODD_TREES)
async def test_whatever_the_tree_is_the_fix_is_submitted(fixture_dir, tree):
    async with scrubbed() as (container, base):
        made = await container.run(f"{FIX}; {ODD_TREES[tree]}", timeout_s=30, max_chars=1000)
        assert made.exit_code == 0, made.output
        extracted = await extract(container, base)
        assert extracted.problem == "" and extracted.left_out == ()
        patch, fixed = extracted.patch, await sh(container, "sha1sum spans/core.py")
    async with scrubbed() as (container, base):
        await container.write("/tmp/patch.diff", patch.encode())
        applied = await container.run("git apply -v /tmp/patch.diff", timeout_s=30, max_chars=2000)
        assert applied.exit_code == 0, applied.output
        assert await sh(container, "sha1sum spans/core.py") == fixed
    assert "spans/core.py" in [path for each in parse_patch(patch) for path in each.paths]


@pytest.mark.parametrize(
    "junk,left_out",
    [
        ("seq 400000 > app.log; seq 500000 > more.log; rm -f x", "./*.log"),
        ("seq 3000000 > huge.log", "huge.log"),
        (
            "mkdir out; cd out; seq 30000 | split -l 1 -a 4 - x --additional-suffix=.txt",
            "out/*.txt",
        ),
        ("head -c 90000000 /dev/zero > /dev/shm/full; seq 900000 > app.txt", "app.txt"),
    ],
)
async def test_of_a_large_change_junk_is_left_out_and_not_the_fix(fixture_dir, junk, left_out):
    async with scrubbed() as (container, base):
        await sh(container, f"{FIX}; echo 'def helper(): pass' > spans/helper.py; {junk}")
        extracted = await extract(container, base)
        assert extracted.problem == "" and list(extracted.left_out) == [left_out]
        names = {path for each in parse_patch(extracted.patch) for path in each.paths}
        assert names == {"spans/core.py", "spans/helper.py"}


def test_eviction_spares_what_is_in_use_or_not_ours(fixture_dir, engine, tmp_path):
    def make(name):
        engine.api.tag(IMAGE, f"agentrl/evict-{name}", "1")
        container = engine.containers.create(IMAGE, ["true"], labels={"evict": name})
        image = container.commit(f"agentrl/evict-{name}", "1", message=os.urandom(4).hex())
        container.remove()
        return image.id

    ids = {name: make(name) for name in ("old", "new", "named", "busy", "foreign")}
    busy = engine.containers.create("agentrl/evict-busy:1", ["true"])
    try:
        for name in ("old", "new", "named", "busy"):
            images.touch([ids[name]], managed=True)
        images.touch([ids["foreign"]])
        images.touch([ids["old"]])  # used last, so it goes last
        gone = images.evict(engine, min_free_bytes=1 << 60, in_use=["agentrl/evict-named:1"])
        assert gone == [ids["new"], ids["old"]]
        left = {tag for image in engine.images.list() for tag in image.tags}
        assert {f"agentrl/evict-{name}:1" for name in ("named", "busy", "foreign")} <= left
        assert images.evict(engine, min_free_bytes=0) == []
    finally:
        busy.remove()
        for name in ids:
            subprocess.run(
                ["docker", "rmi", "-f", f"agentrl/evict-{name}:1"], capture_output=True, check=False
            )


def test_pulling_names_what_is_missing(fixture_dir, engine):
    seen = []
    with pytest.raises(images.ImageMissing, match="agentrl/no-such-image"):
        images.pull(
            engine,
            [IMAGE, "agentrl/no-such-image:0"],
            min_free_bytes=0,
            progress=lambda name, state: seen.append((name, state.split(":")[0])),
        )
    assert set(seen) == {(IMAGE, "local"), ("agentrl/no-such-image:0", "missing")}
    with pytest.raises(EnvError, match=r"disk has .* free"):
        images.pull(engine, ["agentrl/no-such-image:0"], min_free_bytes=1 << 60)


async def test_an_image_that_was_removed_is_noticed(fixture_dir, engine):
    container = engine.containers.create(IMAGE, ["true"])
    source = container.commit("agentrl/removed", "1", message=os.urandom(4).hex())
    container.remove()
    made = await images.scrubbed(source.id)
    assert await images.present(made)
    engine.images.remove(made.image_id, force=True)
    engine.images.remove(source.id, force=True)
    assert not await images.present(made)


async def test_a_short_disk_refuses_containers(engine):
    await images.check_disk(1)
    with pytest.raises(EnvError, match="too little for another"):
        await images.check_disk(1 << 60)
