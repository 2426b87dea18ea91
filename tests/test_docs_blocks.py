"""Every code block of the documentation is run, or checked against what there is.

Python runs page by page, in order and in one namespace, in a directory with `examples/` and a small
`runs/quickstart`. A block that cannot run stands below `<!-- not run: reason -->`. Run files and
their parts are loaded. Commands are parsed by the real parser, their keys by the real schema.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import typing
from pathlib import Path

import pytest
from cyclopts import App, CycloptsError
from docs_blocks import Block, blocks_of
from pydantic import BaseModel

from agentrl.algo.objective import deep_merge
from agentrl.api import load_config, train
from agentrl.cli.main import add_plugins, app, takes_keys
from agentrl.config import RunConfig
from agentrl.errors import AgentRLError

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "environments").glob("*/README.md")),
]
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SMALL = ["--run.num_steps", "12", "--rollout.groups_per_step", "2", "--rollout.group_size", "4"]
MAKE_TARGETS = set(re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def of_language(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages]


def pages_with_python() -> list[Path]:
    return [page for page in PAGES if any(b.language == "python" for b in blocks_of(page))]


def marked(page: Path):
    """Those whose Python trains take as long as a training run, which other fast tests do too."""
    name = str(page.relative_to(ROOT))
    trains = name in ("README.md", "docs/api.md")
    return pytest.param(page, id=name, marks=[pytest.mark.slow] if trains else [])


def test_no_file_installs_the_other_project_of_the_name_agentrl():
    """The package index has a project of that name that is not ours."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    texts = {".md", ".py", ".toml", ".sh", ".ipynb", ".yaml", ".sbatch", ""}
    install = re.compile(r"pip3? install [^\n`]*?(?<![\w/.-])agentrl(?![\w/.-])")
    found = [
        f"{file.relative_to(ROOT)}: {match[0]}"
        for file in files
        if file.suffix in texts and file != Path(__file__) and file.is_file()
        for match in install.finditer(file.read_text(errors="ignore"))
    ]
    assert not found
    assert not files or install.search("pip install 'agentrl[all]'")


def test_blocks_are_found():
    assert len(pages_with_python()) >= 6
    assert len(of_language("toml")) >= 8 and len(of_language("", "sh")) >= 20


@pytest.fixture(scope="module")
def quickstart_run(tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("docs") / "quickstart"
    run_file = ROOT / "examples" / "quickstart" / "run.toml"
    train(load_config(run_file, [*SMALL, "--run.dir", str(run_dir)]), quiet=True)
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("page", [marked(page) for page in pages_with_python()])
def test_the_python_of_a_page_runs(page, quickstart_run, tmp_path):
    blocks = [b for b in blocks_of(page) if b.language in ("python", "toml") and not b.not_run]
    if not any(block.language == "python" for block in blocks):
        pytest.skip("; ".join(sorted({b.not_run for b in blocks_of(page) if b.not_run})))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    shutil.copytree(quickstart_run, tmp_path / "runs" / "quickstart")
    for block in blocks:
        if block.file:
            (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.file).write_text(block.code)
    code = [(str(page), b.line, b.code) for b in blocks if b.language == "python"]
    ended = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "docs_blocks.py")],
        input=json.dumps(code),
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.fixture
def modules_of_the_page(request, tmp_path, monkeypatch):
    """The working directory, with the page's own Python files."""
    monkeypatch.chdir(tmp_path)
    for other in blocks_of(request.getfixturevalue("block").page):
        if other.file and other.language == "python":
            (tmp_path / other.file).write_text(other.code)


@pytest.mark.usefixtures("modules_of_the_page")
@pytest.mark.parametrize("block", of_language("toml"), ids=str)
def test_a_run_file_or_a_part_of_one_loads(block):
    data = tomllib.loads(block.code)
    if block.not_run or "project" in data or "benchmark" in data:  # a suite
        return
    # What a part leaves out.
    rest: dict = {"model": {"path": "m"}}
    load_config(deep_merge(rest, data))


def commands(code: str) -> list[list[str]]:
    """The words of every command line; pipes and redirections end one."""
    lines = re.sub(r"\\\n\s*", " ", code).splitlines()
    found = []
    for line in lines:
        lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        with contextlib.suppress(ValueError):  # a drawing with a lonely quotation mark
            words: list[str] = []
            for word in [*lexer, "&&"]:
                if set(word) <= set("|&;<>"):
                    found.append(words)
                    words = []
                else:
                    words.append(word)
    return [words for words in found if words]


def complaint(words: list[str]) -> str | None:
    """Returns what is wrong with a command of this project; None for other commands."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if "-m" in words and words[words.index("-m") + 1 : words.index("-m") + 2] == ["agentrl"]:
        words = ["agentrl", *words[words.index("-m") + 2 :]]
    if not words:
        return None
    name, arguments = words[0].rpartition("/")[2], words[1:]
    if name == "agentrl":
        return agentrl_complaint(arguments)
    if name == "make":
        wrong = {word for word in arguments if "=" not in word} - MAKE_TARGETS
        return f"no target {', '.join(wrong)}" if wrong else None
    if name == "pip":
        named = " ".join(arguments)
        if re.search(r"(?<![\w/.-])agentrl(?:-gym)?(?![\w/.-])", named):
            return "it is not on the package index: install a clone, a wheel or a git address"
        asked = re.findall(r"(?:agentrl|whl\)|\.)\[([\w,-]+)\]", named)
        wrong = {extra for group in asked for extra in group.split(",")} - set(EXTRAS)
        return f"no extra {', '.join(wrong)}" if wrong else None
    return None


def agentrl_complaint(arguments: list[str]) -> str | None:
    add_plugins(app)
    if {"--help", "--help-all", "--version"} & {*arguments} or not arguments:
        return None
    try:
        command, bound, _ = app.parse_args(arguments)
    except CycloptsError as error:
        return str(error)
    if not takes_keys(command):
        return None
    rest, run_file = [*bound.arguments.get("keys", ())], bound.arguments.get("run_file")
    if run_file is None:
        rest = [word for word in rest if not word.endswith(".toml")]
    source: typing.Any = {"model": {"path": "m"}}
    if arguments[0] == "doctor" and run_file is None:  # it asks servers what they are
        source["inference"] = {"backend": "vllm"}
    if run_file is not None and "/" in str(run_file) and (ROOT / run_file).exists():
        source = ROOT / run_file
    try:
        load_config(source, [word.replace("...", "1") for word in rest])
    except AgentRLError as error:
        return str(error)
    return None


@pytest.mark.usefixtures("modules_of_the_page")
@pytest.mark.parametrize("block", of_language("", "sh", "bash", "console"), ids=str)
def test_commands_exist_with_their_options_and_keys(block):
    if block.not_run:
        return
    for words in commands(block.code):
        assert (wrong := complaint(words)) is None, f"{shlex.join(words)}: {wrong}"


def test_commands_in_running_text_exist():
    add_plugins(app)
    names = {*all_commands(app)}
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # it names commands that are gone
            continue
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for line in re.findall(r"`agentrl ([a-z][^`]*)`", text):
            words = re.split(r"[\s\[|]", line.replace("\\|", "|"))
            known = any(words[: len(name)] == list(name) for name in names)
            assert known or (words[0],) in {name[:1] for name in names if len(words) == 1}, (
                f"{page.name}: agentrl {line}"
            )


def all_commands(group: App, before: tuple[str, ...] = ()) -> typing.Iterator[tuple[str, ...]]:
    """The words of every command and group."""
    for name in group:
        if not name.startswith("-"):
            yield (*before, name)
            yield from all_commands(group[name], (*before, name))


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("agentrl train run.toml --rollout.group_sise 4", "did you mean rollout.group_size"),
        ("agentrl trian run.toml", 'Did you mean "train"'),
        ("torchrun --nproc-per-node 8 -m agentrl train RUN.toml --run.sed 1", "unknown key"),
        (".venv/bin/agentrl env serve math --prot 1", "Did you mean --port"),
        ("make nonsense", "no target"),
        ("pip install -e '.[everything]'", "no extra"),
        ("pip install 'agentrl[all]'", "not on the package index"),
        ("pip install agentrl-gym", "not on the package index"),
        ("pip install openai-agents", None),
        ("A=1 agentrl eval RUN.toml --json | tail -1", None),
        ("make quickstart DEVICE=cuda", None),
    ],
)
def test_what_is_wrong_is_found(line, wrong):
    (words, *_) = commands(line)
    found = complaint(words)
    assert found is None if wrong is None else wrong in (found or "")


def models_of(annotation: object) -> list[type[BaseModel]]:
    """The sections that an annotation allows: itself, or the members of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in models_of(part)]


def key_exists(name: str) -> bool:
    models: list[type[BaseModel]] = [RunConfig]
    for part in name.split("."):
        found = [
            model.model_fields[part].annotation for model in models if part in model.model_fields
        ]
        if not found:
            return False
        if any(typing.get_origin(annotation) is dict for annotation in found):
            return True  # below a table of another's keys, such as env.config
        models = [model for annotation in found for model in models_of(annotation)]
    return True


def value_is_wrong(key: str, value: str) -> bool:
    """Returns whether the schema refuses the value itself, whatever other sections require."""
    try:
        load_config({"model": {"path": "m"}}, [f"--{key}={value}"])
    except AgentRLError as error:
        return any(line.startswith(f"--{key}: Input should") for line in str(error).splitlines())
    return False


def test_every_key_of_the_right_hand_column_of_the_migration_page_exists():
    pages = [ROOT / "docs" / "migration.md", *sorted((ROOT / "docs").glob("from_*.md"))]
    rows = [
        row for page in pages for row in re.findall(r"^\|(.+)\|(.+)\|$", page.read_text(), re.M)
    ]
    spans = [span for _, ours in rows for span in re.findall(r"`([^`]+)`", ours)]
    named = [s for s in spans if s.split(".")[0] in RunConfig.model_fields and "." in s]
    assert len(named) > 120
    for span in named:
        key, _, value = span.partition(" = ")
        assert key_exists(key), span
        assert not value or not value_is_wrong(key, value), span


def test_wrong_keys_and_values_are_found():
    assert key_exists("objective.credit.lam") and key_exists("env.config.anything")
    assert not key_exists("rollout.group_sise") and not key_exists("objective.credit.lamb")
    assert value_is_wrong("inference.transfer", '"ncll"')
    assert not value_is_wrong("rollout.max_staleness", "1"), "other sections ask for more"
