"""Twelve small tasks in Harbor's format, each of another shape; `python harbor_tasks.py DIR` writes
them. Their images stand on the one that `tests/env/conftest.py` makes without a registry."""

import sys
from pathlib import Path
from textwrap import dedent

BASE = "agentrl/test-base:1"
FROM = f"FROM {BASE}\nRUN mkdir -p /app\nWORKDIR /app\n"
SH = "#!/bin/bash\n"
NONE = '[environment]\nnetwork_mode = "no-network"\n'


def check(condition: str) -> str:
    """A test script that pays 1 where a shell condition holds."""
    return SH + f"if {condition}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"


def tasks() -> dict[str, dict[str, str]]:
    """Files of each task."""
    python_test = SH + dedent("""\
        cd /app
        if python3 /tests/test_mean.py; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
    """)
    return {
        "hello": {
            "task.toml": NONE,
            "instruction.md": "<!-- canary 4711 -->\nWrite the word hello to /app/hello.txt.",
            "environment/Dockerfile": FROM,
            "tests/test.sh": check('[ "$(cat /app/hello.txt)" = hello ]'),
            "solution/solve.sh": SH + "echo hello > /app/hello.txt\n",
        },
        "total": {
            "task.toml": NONE,
            "instruction.md": "Write the sum of the numbers in /app/data.txt to /app/total.txt.",
            "environment/Dockerfile": FROM + "COPY data.txt /app/\n",
            "environment/data.txt": "12\n30\n-2\n",
            "tests/test.sh": check('[ "$(cat /app/total.txt)" = "$(cat /tests/wanted)" ]'),
            "tests/wanted": "40\n",
            "solution/solve.sh": SH + "echo $((12 + 30 - 2)) > total.txt\n",
        },
        "mend": {
            "task.toml": NONE + "cpus = 1\nmemory_mb = 512\n[agent]\ntimeout_sec = 300\n",
            "instruction.md": "mean() in /app/mean.py is wrong for two numbers and more. Mend it.",
            "environment/Dockerfile": FROM + "COPY mean.py /app/\n",
            "environment/mean.py": "def mean(numbers):\n    return sum(numbers) / 1\n",
            "tests/test.sh": python_test,
            "tests/test_mean.py": "import collections, email, json, logging, pathlib, re\n"
            "import subprocess, sys, unittest\nsys.path.insert(0, '/app')\nfrom mean import mean\n"
            "assert mean([2, 4]) == 3 and mean([5]) == 5\n",
            "solution/solve.sh": SH + "sed -i 's,/ 1,/ len(numbers),' /app/mean.py\n",
        },
        "two-rewards": {
            "task.toml": NONE,
            "instruction.md": "Write yes to /app/answer and keep it to one line.",
            "environment/Dockerfile": FROM,
            "tests/test.sh": SH + "right=$(grep -c yes /app/answer || true); "
            'echo "{\\"reward\\": ${right:-0}, \\"lines\\": $(cat /app/answer | wc -l)}" '
            "> /logs/verifier/reward.json\n",
            "solution/solve.sh": SH + "echo yes > /app/answer\n",
        },
        "in-part": {
            "task.toml": NONE,
            "instruction.md": "Make the files a, b, c and d in /app.",
            "environment/Dockerfile": FROM,
            "tests/test.sh": SH
            + "n=0; for f in a b c d; do [ -e /app/$f ] && n=$((n + 25)); done\n"
            "printf '0%s\\n' $(echo $n | sed 's/^100$/1/;s/^\\([257]\\)/.\\1/') "
            "> /logs/verifier/reward.txt\n",
            "solution/solve.sh": SH + "cd /app; touch a b c d\n",
        },
        "own-verifier": {
            "task.toml": 'artifacts = ["/app/out.txt"]\n'
            + NONE
            + '[verifier]\nenvironment_mode = "separate"\n'
            + '[verifier.environment]\nnetwork_mode = "no-network"\n',
            "instruction.md": "Write 7 to /app/out.txt.",
            "environment/Dockerfile": FROM,
            "tests/Dockerfile": f"FROM {BASE}\nCOPY test.sh /tests/test.sh\nRUN echo 7 > /wanted\n",
            "tests/test.sh": check("cmp -s /app/out.txt /wanted"),
            "solution/solve.sh": SH + "echo 7 > /app/out.txt\n",
        },
        "artifacts": {
            "task.toml": NONE + '[verifier]\nenvironment_mode = "separate"\n',
            "instruction.md": "Write the name of this system to /logs/artifacts/name.",
            "environment/Dockerfile": FROM,
            "tests/test.sh": check('[ "$(cat /logs/artifacts/name)" = Linux ]'),
            "solution/solve.sh": SH + "uname -s > /logs/artifacts/name\n",
        },
        "user": {
            "task.toml": NONE + '[agent]\nuser = "worker"\n[verifier]\nuser = "root"\n',
            "instruction.md": "Write your user's name to /app/me.",
            "environment/Dockerfile": FROM + "RUN useradd worker && chown worker /app\n",
            "tests/test.sh": check('[ "$(cat /app/me) $(stat -c %U /app/me)" = "worker worker" ]'),
            "solution/solve.sh": SH + "id -un > /app/me\n",
        },
        "steps": {
            "task.toml": 'multi_step_reward_strategy = "mean"\n'
            + NONE
            + '[[steps]]\nname = "first"\nmin_reward = 1.0\n[[steps]]\nname = "second"\n',
            "environment/Dockerfile": FROM,
            "steps/first/instruction.md": "Write 1 to /app/one.",
            "steps/first/tests/test.sh": check('[ "$(cat /app/one)" = 1 ]'),
            "steps/first/solution/solve.sh": SH + "echo 1 > /app/one\n",
            "steps/second/instruction.md": "Add the numbers in /app/one and /app/two, to /app/sum.",
            "steps/second/workdir/setup.sh": "echo 2 > /app/two\n",
            "steps/second/tests/test.sh": check('[ "$(cat /app/sum)" = 3 ]'),
            "steps/second/solution/solve.sh": SH + "echo $(($(cat one) + $(cat two))) > sum\n",
        },
        "image": {
            "task.toml": f'[environment]\ndocker_image = "{BASE}"\nnetwork_mode = "no-network"\n',
            "instruction.md": "Make the folder /srv/made.",
            "tests/test.sh": check("[ -d /srv/made ]"),
            "solution/solve.sh": SH + "mkdir /srv/made\n",
        },
        "variables": {
            "task.toml": NONE + 'workdir = "/work"\nenv = { COLOUR = "${UNSET_COLOUR:-green}" }\n'
            '[verifier]\nenv = { WANTED = "green 9" }\n[solution]\nenv = { NUMBER = "9" }\n',
            "instruction.md": "Write the colour in $COLOUR, a space, and 9 to colour.txt.",
            "environment/Dockerfile": FROM + "RUN mkdir /work\n",
            "tests/test.sh": check('[ "$(cat /work/colour.txt)" = "$WANTED" ]'),
            "solution/solve.sh": SH + 'echo "$COLOUR $NUMBER" > colour.txt\n',
        },
        "layout": {
            "task.toml": NONE + '[environment.healthcheck]\ncommand = "test -e /app/old"\n',
            "instruction.md": "In /app: remove old, make keep private to its owner, link latest to "
            "keep, and replace the folder set by one with only new in it.",
            "environment/Dockerfile": FROM
            + "RUN mkdir keep set && touch old keep/file set/a set/b\n",
            "tests/test.sh": check(
                '[ ! -e /app/old ] && [ "$(stat -c %a /app/keep)" = 700 ] && '
                '[ "$(readlink /app/latest)" = keep ] && [ "$(ls /app/set)" = new ] && '
                "[ -e /app/latest/file ]"
            ),
            "solution/solve.sh": SH
            + "cd /app; rm old; chmod 700 keep; ln -s keep latest; rm -r set; mkdir set; "
            "ln keep/file set/new\n",
        },
    }


def write(out: Path, only: tuple[str, ...] = ()) -> Path:
    """Write the tasks to a folder, or only these; returns it."""
    for name, files in tasks().items():
        if only and name not in only:
            continue
        for path, text in files.items():
            file = out / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            if path.endswith(".sh"):
                file.chmod(0o755)
    return out


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
