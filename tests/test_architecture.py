"""The arrows of the design: who may import whom, what is loaded when, and what is never used.

`pytest -s tests/test_architecture.py -k circle` prints the rooms with what each stands on.

Every import counts: at the top of a file, inside a function, and under `if TYPE_CHECKING`, for
whoever reads the one file has to read the other. A room is a package of `agentrl`, a module beside
the packages, or a package of environments or rewards.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What `sys.path` holds of the repository.
SOURCE_ROOTS = [ROOT, ROOT / "rewards", *sorted((ROOT / "environments").iterdir())]
SOURCES = {
    ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
    for root in SOURCE_ROOTS
    for package in (["agentrl"] if root == ROOT else [p.name for p in root.glob("agentrl_*")])
    for path in sorted((root / package).rglob("*.py"))
}
FOUNDATION = {"caller", "errors", "guard", "images", "runtime", "types", "user_modules"}
"""Rooms of agentrl that all others may import from."""
ALLOWED = {
    "env": set(),
    "algo": set(),
    "config": {"algo"},
    "model": {"config"},
    "inference": {"model"},
    "rollout": {"agentrl_rewards", "config", "env", "inference", "model"},
    "evaluate": {"config", "env", "rollout"},
    "view": {"config", "env", "evaluate", "rollout"},
    "train": {"algo", "config", "env", "evaluate", "inference", "model", "rollout", "view"},
}
"""Package of agentrl -> the rooms that it may import from besides."""
PLUGIN = "agentrl.inference.weights.vllm_plugin"
TORCH_MODULES = {"torch", "safetensors"}
TORCH_ALLOWED = (
    "agentrl.algo.",
    "agentrl.inference.embedded",
    "agentrl.inference.weights.",
    "agentrl.model.",
    "agentrl.train.",
)


def imported_names(tree: ast.Module, *, at_once: bool = False) -> Iterator[str]:
    """Dotted names that a file imports; of `from a import b` it is `a.b`.

    `at_once`: only those that are loaded with the file, neither in functions nor for types alone.
    """
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # Relative ones stand in the plugin that is copied into vLLM's environment, where it has
            # another name, and reach no further than its own package.
            origin = node.module if node.level == 0 else f"{PLUGIN}.{node.module}"
            yield from (f"{origin}.{alias.name}" for alias in node.names)


@functools.cache
def graph_of_files() -> dict[str, set[str]]:
    """Module -> the modules of this repository that it imports."""
    graph = {}
    for module, path in SOURCES.items():
        names = imported_names(ast.parse(path.read_text()))
        known = (name if name in SOURCES else name.rpartition(".")[0] for name in names)
        graph[module] = {name for name in known if name in SOURCES} - {module}
    return graph


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[0] if parts[0] != "agentrl" or len(parts) == 1 else parts[1]


def subpackage_of(module: str) -> str | None:
    """`agentrl.env.session` of `agentrl.env.session.record`; None of what lies in no subpackage."""
    parts = module.split(".")
    return ".".join(parts[:3]) if parts[0] == "agentrl" and len(parts) > 3 else None


def merged(graph: Mapping[str, set[str]], name_of) -> dict[str, set[str]]:
    """The graph of what `name_of` makes of each module."""
    result: dict[str, set[str]] = {}
    for module, imports in graph.items():
        if (name := name_of(module)) is not None:
            others = {name_of(each) for each in imports} - {name, None}
            result.setdefault(name, set()).update(others)
    return result


def in_order(graph: Mapping[str, set[str]]) -> list[str]:
    """Each after all that it imports; fails with the circle where there is one."""
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


@pytest.mark.parametrize("name_of", [room_of, subpackage_of])
def test_no_circle_of_rooms(name_of):
    graph = merged(graph_of_files(), name_of)
    order = in_order(graph)
    print(f"\n{len(order)} rooms, {sum(map(len, graph.values()))} arrows, no circles")
    for name in order:
        print(f"  {name:22} {', '.join(sorted(graph[name]))}")


def test_no_circle_of_files():
    graph = graph_of_files()
    order = in_order(graph)
    print(f"\n{len(order)} files, {sum(map(len, graph.values()))} arrows, no circles")


def test_a_circle_is_found():
    with pytest.raises(
        pytest.fail.Exception, match=r"circle of imports: (a <- b <- a|b <- a <- b)"
    ):
        in_order({"a": {"b"}, "b": {"a"}, "c": {"a"}})
    code = (
        "from typing import TYPE_CHECKING\n"
        "import a\n"
        "if TYPE_CHECKING:\n    import b\n"
        "def f():\n    from c import d\n"
    )
    tree = ast.parse(code)
    assert set(imported_names(tree)) == {"a", "b", "c.d", "typing.TYPE_CHECKING"}
    assert set(imported_names(tree, at_once=True)) == {"a", "typing.TYPE_CHECKING"}


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_know_only_what_they_stand_on(package):
    rooms = merged(graph_of_files(), room_of)
    assert rooms[package] <= ALLOWED[package] | FOUNDATION


@pytest.mark.parametrize("module", [m for m in SOURCES if room_of(m).startswith("agentrl_")])
def test_environments_and_rewards_stand_on_the_platform_alone(module):
    allowed = {"env", "agentrl_rewards", *FOUNDATION, room_of(module)}
    # `agentrl swebench eval` reads the episodes that `agentrl eval` kept.
    if module == "agentrl_swebench.dataset":
        allowed |= {"rollout", "evaluate"}
    if module == "agentrl_swebench.cli":  # `agentrl swebench run` plays
        allowed |= {"api", "config"}
    assert {room_of(name) for name in graph_of_files()[module]} <= allowed


@pytest.mark.parametrize("module", SOURCES)
def test_torch_stays_in_its_rooms(module):
    if not module.startswith(TORCH_ALLOWED):
        names = imported_names(ast.parse(SOURCES[module].read_text()), at_once=True)
        assert not {name.split(".")[0] for name in names} & TORCH_MODULES


SERVERS = {"fastapi", "aiohttp", "uvicorn", "starlette"}
SANDBOXED = ("agentrl_rewards.code_sandbox", "agentrl_rewards.code_calls")
"""Programs that run other people's code, behind the walls that the first one builds."""


@pytest.mark.parametrize("module", sorted(SOURCES.keys() - set(SANDBOXED)))
def test_nothing_is_unpickled_or_evaluated(module):
    for node in ast.walk(ast.parse(SOURCES[module].read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
            if names == ["dumps", "pickle"]:  # written, never read
                continue
            assert not {"pickle", "cloudpickle", "dill", "shelve", "marshal"} & set(names)
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "torch.load", "yaml.load", "os.system"}
            for keyword in node.keywords:
                assert keyword.arg != "shell" or ast.unparse(keyword.value) == "False"


@pytest.mark.parametrize(
    ("imports", "heavy"),
    [
        ("agentrl; agentrl.Environment, agentrl.tool, agentrl.make, agentrl.train", SERVERS),
        ("agentrl; [getattr(agentrl, name) for name in agentrl.__all__]", set()),
        ("agentrl, agentrl.env; agentrl.env.Environment, agentrl.env.make", SERVERS),
        ("agentrl.env.pytest_plugin", SERVERS | {"agentrl.env.check", "agentrl.env.base"}),
        ("agentrl.algo.presets; agentrl.algo.PRESETS['dapo']", SERVERS),
        ("agentrl.config, agentrl.evaluate.statistics", set()),
        ("agentrl.cli.main", set()),
        ("agentrl_math, agentrl_rewards.math", {"sympy", "math_verify"}),
    ],
)
def test_light_imports_load_nothing_heavy(imports, heavy):
    heavy = heavy | {"torch", "transformers"}
    code = f"import sys, {imports}; sys.exit(str({heavy} & set(sys.modules) or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == ""
