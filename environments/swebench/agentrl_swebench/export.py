"""Exports instances as Harbor task folders, which any agent and sandbox of Harbor can play.

The tests are the official evaluation script and the official grading of its output. The harness'
modules lie beside them, so an image needs Python 3.10 or newer and no network.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import ConfigError, DataError
from agentrl_swebench.containers import WORKDIR
from agentrl_swebench.dataset import Instance

_MODULES = ("types.py", "harness/constants", "harness/log_parsers", "harness/grading.py")
_MODULES += ("harness/infra_failure.py",)
"""The harness' modules that read a log and need no package."""
_GRADED_BY = ("instance_id", "repo", "version", "FAIL_TO_PASS", "PASS_TO_PASS")
_GRADED_BY += ("log_parser", "eval_type")

TASK = """\
version = "1.0"

[metadata]
repo = {repo}
version = {version}
base_commit = {base_commit}

[environment]
docker_image = {image}
workdir = "{workdir}"
cpus = 2
memory_mb = 4096

[agent]
timeout_sec = 3600.0

[verifier]
timeout_sec = {timeout_s}
"""
TEST = """\
#!/bin/bash
here=$(cd "$(dirname "$0")" && pwd)
log=/logs/verifier
/bin/bash "$here/eval.sh" > "$log/eval.log" 2>&1
for python in /opt/miniconda3/bin/python3 python3 python; do
  if "$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null; then
    exec "$python" -I "$here/grade.py" "$log/eval.log" "$log/reward.txt"
  fi
done
echo "the image has no Python of 3.10 or newer, which the official grading needs"
exit 1
"""
GRADE = """\
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from swebench.harness.grading import get_eval_report
from swebench.types import TestSpec

row = json.loads((HERE / "instance.json").read_text())
spec = TestSpec(image="", eval_script_list=[], **row)
prediction = {"instance_id": spec.instance_id, "model_name_or_path": "", "model_patch": "its tree"}
report = get_eval_report(spec, prediction, sys.argv[1], True)[spec.instance_id]
print(json.dumps(report, indent=2))
Path(sys.argv[2]).write_text(str(int(report["resolved"])))
"""
SOLVE = """\
#!/bin/bash
cd {workdir} || exit 1
patch=$(dirname "$0")/patch.diff
git apply --verbose "$patch" || patch --batch --fuzz=5 -p1 -i "$patch"
"""


def export(instances: Sequence[Instance], out: Path, *, timeout_s: float) -> None:
    """Writes a task folder for each instance below `out`.

    Args:
        timeout_s: limit on an instance's tests, in seconds.

    Raises:
        ConfigError: `out` exists and is not an empty folder.
        DataError: an instance's tests need files that the harness downloads, or their log parser is
            missing.
    """
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise ConfigError(f"{out} already exists; remove it, or choose another --out")
    if assets := [each.instance_id for each in instances if each.image_assets]:
        raise DataError(
            f"{len(assets)} instances have files that the harness downloads before the tests "
            f"(image_assets), such as {assets[0]}: leave them out with --instance-ids or --filter"
        )
    from swebench.harness.log_parsers import PARSER_REGISTRY

    if unknown := [each for each in instances if each.log_parser not in PARSER_REGISTRY]:
        raise DataError(
            f"{unknown[0].instance_id}: the harness has no log parser {unknown[0].log_parser}"
        )
    for instance in instances:
        _write(instance, out / instance.instance_id, timeout_s)


def _write(instance: Instance, folder: Path, timeout_s: float) -> None:
    import swebench
    from swebench.harness.utils import make_test_spec
    from swebench.utils import ansi_escape

    row = instance.row()
    texts = {name: json.dumps(row[name]) for name in ("repo", "version", "base_commit", "image")}
    harness, copied = Path(swebench.__file__).parent, folder / "tests" / "swebench"
    for name in _MODULES:
        source, target = harness / name, copied / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target)
    files = {
        "task.toml": TASK.format(**texts, workdir=WORKDIR, timeout_s=float(timeout_s)),
        "instruction.md": instance.problem_statement,
        "tests/test.sh": TEST,
        "tests/eval.sh": make_test_spec(row).eval_script,
        "tests/grade.py": GRADE,
        "tests/instance.json": json.dumps({name: row[name] for name in _GRADED_BY}),
        # The package's `__init__` imports the whole harness, and its `utils` packages that few
        # images have.
        "tests/swebench/__init__.py": "",
        "tests/swebench/harness/__init__.py": "",
        "tests/swebench/utils.py": "import re\n\n\n" + inspect.getsource(ansi_escape),
        "solution/solve.sh": SOLVE.format(workdir=WORKDIR),
        "solution/patch.diff": instance.patch,
    }
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, newline="")
        if path.suffix == ".sh":
            path.chmod(0o755)
    (folder / "environment").mkdir()
