# ruff: noqa: E501  (a row of the table is a line)
"""Honest work in odd trees: whatever else lies there, a fix that the official harness resolves has
the reward 1.

Each row plays an agent in a container: the reference solution and then something that agents leave
behind. What the environment takes from that tree is graded by the official verdict alone
(`official`) and as in training (`strict`, with the withheld run). Minutes: markers `docker`, `slow`.
"""

import asyncio
import dataclasses

import pytest

from agentrl_swebench import images
from agentrl_swebench.containers import InstanceContainer
from agentrl_swebench.grade import grade
from agentrl_swebench.patch import extract

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]
pytest.importorskip("swebench", reason="the official harness is missing: agentrl-gym[swebench]")

SPANS, GAUGE = "agentrl__spans-1", "agentrl__gauge-1"
LEDGER, TALLY = "agentrl__ledger-1", "agentrl__tally-1"
COMMIT = "git -c user.name=a -c user.email=a@b commit -q"


@dataclasses.dataclass(frozen=True)
class Work:
    name: str
    instance_id: str
    command: str
    """After the reference solution was applied."""
    official: bool = True
    """Whether the official harness resolves it."""


WORK = [
    # names and kinds of files
    Work("quoted names", GAUGE, "echo a > 'notes ü.txt'; echo b > 'a \"b\".txt'; : > \"t\tx.txt\""),
    Work("a line break in a name", GAUGE, "printf a > \"$(printf 'a\\nb.txt')\""),
    Work("a name with a dash in front", GAUGE, "echo a > ./-rf; echo b > './--help'"),
    Work("glob characters", GAUGE, "echo a > '[x].txt'; echo b > '*?.txt'"),
    Work("names that differ in case", SPANS, "cp README.md readme.MD; echo x >> readme.MD"),
    Work("a name in Latin-1", GAUGE, "printf a > \"$(printf 'caf\\351.txt')\""),
    Work("a deep folder", GAUGE, "d=$(seq -s/ 60); mkdir -p $d; echo a > $d/x.txt"),
    Work("links", SPANS, "ln -s core.py spans/alias.py; ln -s /nowhere gone; ln -s spans also"),
    Work("a pipe", GAUGE, "mkfifo pipe"),
    Work("a socket", SPANS, "python3 -c \"import socket as s; s.socket(s.AF_UNIX).bind('s')\""),
    Work("empty files and folders", SPANS, "mkdir -p a/b; touch c; mkdir p; touch p/__init__.py"),
    Work("unreadable", SPANS, "echo a > key; chmod 0 key; mkdir shut; echo a > shut/in; chmod 0 shut"),
    Work("modes", SPANS, "chmod 755 spans/core.py; chmod 600 README.md; chmod u+s setup.py"),
    Work("a file becomes a folder", SPANS, "rm README.md; mkdir README.md; echo a > README.md/x"),
    Work("removed", SPANS, "rm README.md .gitignore"),
    Work("a binary", GAUGE, "head -c 30000 /dev/urandom > picture.png"),
    # what a policy may take for something else
    Work("a folder named like a module", SPANS, "mkdir html; echo '<p>' > html/index.html"),
    Work("a module of another language", GAUGE, "mkdir -p lib/types src/queue; printf 'package types::Units;\n1;\n' > lib/types/Units.pm; echo 'pub mod a;' > src/queue/mod.rs"),
    Work("a new C source", TALLY, "printf 'int words(void) { return 0; }\n' > src/words.c; sed -i 's#: src/tally.c#& src/words.c#; s#[$]<#src/tally.c src/words.c#' Makefile"),
    Work("a new helper", SPANS, "echo 'LIMIT = 3' > spans/test_utils.py; echo 'from spans.test_utils import LIMIT' >> spans/core.py"),
    Work("a mark in a comment", LEDGER, "echo '# The log has >>>>> Start Test Output' >> ledger/book.py"),
    # text
    Work("Latin-1 source", SPANS, "printf '# caf\\351\\n' | cat - spans/core.py > x; mv x spans/core.py; sed -i '1i # -*- coding: latin-1 -*-' spans/core.py", official=False),  # it reads differences as UTF-8
    Work("CRLF source", SPANS, "sed -i 's/$/\\r/' spans/core.py"),
    Work("CRLF and attributes", SPANS, "printf '* text=auto\\n' > .gitattributes; printf 'a\\r\\n' > dos.txt"),
    Work("no attributes", SPANS, "printf '*.py -diff\\n*.txt binary\\n' > .gitattributes; echo a > b.txt"),
    Work("a byte order mark", SPANS, "sed -i '1s/^/\\xef\\xbb\\xbf/' spans/core.py"),
    Work("no last line break", SPANS, "printf %s \"$(cat spans/core.py)\" > x; mv x spans/core.py"),
    Work("form feeds", SPANS, "printf '\\n\\f\\n# more\\n' >> spans/core.py"),
    Work("a long line", GAUGE, "{ printf '# '; head -c 300000 /dev/zero | tr '\\0' x; echo; } >> lib/Gauge.pm; sed -i 's/^# x/\\n# x/' lib/Gauge.pm; sed -i '/^1;/d' lib/Gauge.pm; echo '1;' >> lib/Gauge.pm"),
    Work("text like a diff", SPANS, "printf 'diff --git a/x b/x\\n--- a/x\\n+++ b/x\\n@@ -1 +1 @@\\n-a\\n+b\\n' > notes.diff"),
    Work("merge leftovers", SPANS, "printf '<<<<<<< a\\n=======\\n>>>>>>> b\\n' > README.orig; touch core.py.rej"),
    # git
    Work("commits", SPANS, f"git checkout -q -b fix; git add -A; {COMMIT} -m one; echo a > b; git add b; {COMMIT} -m two"),
    Work("a detached head", GAUGE, f"git checkout -q --detach; {COMMIT} -am wip"),
    Work("a stash", SPANS, "git stash -q; git stash pop -q"),
    Work("a merge", LEDGER, f"git checkout -q -b a; {COMMIT} -am a; git checkout -q -b b HEAD~1; echo x > x; git add x; {COMMIT} -m b; git -c user.name=a -c user.email=a@b merge -q -m m a"),
    Work("a new repository", SPANS, f"rm -rf .git; git init -q; git add -A; {COMMIT} -m all"),
    Work("no repository", GAUGE, "rm -rf .git"),
    Work("a repository within", SPANS, "mkdir s; cd s; git init -q .; echo x > y"),
    Work("a clone within", GAUGE, "git clone -q . copy"),
    Work("a submodule", GAUGE, "git -c protocol.file.allow=always submodule add -q ./.git sub"),
    Work("a worktree", GAUGE, "git worktree add -q wt HEAD"),
    Work("ignored by mistake", SPANS, "echo 'spans/' >> .gitignore; echo '*.pm' >> .git/info/exclude"),
    # what work leaves behind
    Work("moved tests", SPANS, "git mv tests/test_spans.py tests/test_merge.py"),
    Work("tests of its own", SPANS, "printf 'def test_a():\\n    assert True\\n' > tests/test_more.py; echo 'import spans; print(spans.merge([]))' > try.py"),
    Work("the tests' caches", SPANS, "pytest -q tests > out.txt 2>&1; python3 -m compileall -q spans; touch .coverage"),
    Work("a virtual environment", GAUGE, "python3 -m venv --without-pip --system-site-packages .venv"),
    Work("vendored dependencies", SPANS, "mkdir -p vendor/lib; cp -r /usr/lib/python3/dist-packages/iniconfig vendor/lib/; printf '\\0\\1' > vendor/lib/x.so"),
    Work("generated files", TALLY, "make; python3 -c \"print('x = 1')\" > tally/generated.py; mkdir -p docs/_build; cp README* docs/_build 2>/dev/null; true"),
    Work("editors' files", LEDGER, "cp ledger/book.py ledger/book.py~; cp ledger/book.py ledger/.book.py.swp; mkdir .idea; echo '{}' > .idea/x.json"),
    Work("a log of 2 MB", GAUGE, "seq 300000 > app.log"),
    Work("a log of 30 MB", GAUGE, "seq 3900000 > huge.log"),
    Work("30,000 files", GAUGE, "mkdir out; cd out; seq 30000 | split -l 1 -a 4 - x --additional-suffix=.txt"),
    Work("processes", SPANS, "nohup sleep 600 > /dev/null 2>&1 & (while :; do date > clock; sleep 0.01; done) > /dev/null 2>&1 & true"),
]  # fmt: skip


def test_there_are_forty():
    assert len({each.name for each in WORK}) == len(WORK)
    assert sum(each.official for each in WORK) >= 40


async def submitted(instance, command):
    """The change that the environment takes from the tree."""
    made = await images.scrubbed(await images.resolve(instance.image))
    container = await InstanceContainer.start(made.image_id, run_id="honest")
    try:
        await container.write("/tmp/fix.diff", instance.patch.encode())
        ran = await container.run(
            f"git apply /tmp/fix.diff && {{ {command}\n}}", timeout_s=60, max_chars=2000
        )
        assert ran.exit_code == 0, ran.output
        await container.sweep()
        return await extract(container, made.base)
    finally:
        await container.remove()


@pytest.mark.parametrize("work", WORK, ids=lambda each: each.name)
def test_whatever_lies_around_a_fix_is_paid(fixture_instances, work):
    instance = fixture_instances[work.instance_id]
    extracted = asyncio.run(submitted(instance, work.command))
    assert extracted.problem == ""

    async def both():
        options = {"run_id": "honest", "timeout_s": 120.0}
        # Tests in Perl have no values to withhold.
        withheld = {"withhold": True, "pay_uncovered": work.instance_id == GAUGE}
        return await asyncio.gather(
            grade(instance, extracted.patch, policy="official", **options),
            grade(instance, extracted.patch, policy="strict", **withheld, **options),
        )

    official, strict = asyncio.run(both())
    print(
        f"{work.name:28} {work.instance_id[9:-2]:7} official {official.outcome}, "
        f"strict {strict.outcome}, reward {strict.reward}, {len(extracted.patch):,} characters"
    )
    assert official.resolved is work.official, official.reason
    assert strict.reward == float(work.official), (strict.reason, strict.flags, strict.notes)
