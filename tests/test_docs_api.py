"""Every public name has an entry on docs/api.md, and what the page shows says what it is.

The page takes its text from docstrings (`::: module` and the list of its members). Sources are
read, not imported, so that attributes have their docstrings too.
"""

import ast
import functools
import re
from pathlib import Path

import pytest

from agentrl_rewards.runner import REWARDS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
EXPORTING = [
    ".".join(path.parent.relative_to(ROOT).parts)
    for path in sorted((ROOT / "agentrl").rglob("__init__.py"))
    if "__all__" in path.read_text()
]
PUBLIC = ["agentrl.api", "agentrl.types", "agentrl.errors", *EXPORTING]

Name = tuple[str, str]
"""Module that defines it, and what it is called there."""


@functools.cache
def source(module: str) -> ast.Module | None:
    for root in (ROOT, ROOT / "rewards"):
        path = root.joinpath(*module.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.exists():
                return ast.parse(file.read_text())
    return None


def members(body: list[ast.stmt]) -> dict[str, tuple[ast.stmt, str | None]]:
    """Name -> what defines it, and its docstring."""
    found = {}
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = (node, ast.get_docstring(node))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            said = following.value if isinstance(following, ast.Expr) else None
            text = said.value if isinstance(said, ast.Constant) else None
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {t.id: (node, text) for t in targets if isinstance(t, ast.Name)}
    return found


def exported(module: str) -> list[str]:
    defined = members(source(module).body)
    if "__all__" in defined:
        return ast.literal_eval(defined["__all__"][0].value)
    return [name for name in defined if not name.startswith("_")]


def definition(module: str, name: str) -> Name:
    """Finds the definition of a name, through however many imports."""
    if name in members(source(module).body):
        return module, name
    for node in ast.walk(source(module)):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return definition(node.module, alias.name)
    raise LookupError(f"{module} has no {name}")


def entries(page: str) -> set[Name]:
    found = set()
    for what, options in re.findall(r"^::: (\S+)\n((?: +.*\n)*)", page, re.MULTILINE):
        listed = re.search(r"members: \[(.*?)\]", options, re.DOTALL)
        if source(what):
            names = re.split(r",\s*", listed[1]) if listed else exported(what)
            found |= {definition(what, name) for name in names}
        else:
            found.add(definition(*what.rsplit(".", 1)))
    return found


def without_entry(page: str) -> set[str]:
    public = {f"{module}.{name}": (module, name) for module in PUBLIC for name in exported(module)}
    public |= {place: tuple(place.split(":")) for place in REWARDS.values()}
    known = entries(page)
    # Sections have a page of their own, which tests/test_docs.py compares with the code.
    return {
        called
        for called, place in public.items()
        if (origin := definition(*place)) not in known and origin[0] != "agentrl.config.sections"
    }


def test_every_public_name_has_an_entry():
    assert len(EXPORTING) >= 5
    assert not without_entry(PAGE.read_text())


@pytest.mark.parametrize(
    ("entry", "missing"),
    [
        ("::: agentrl.errors\n", "agentrl.errors.GraderError"),
        ("Observation, ", "agentrl.env.Observation"),
        ("::: agentrl_rewards.ifbench.ifbench\n", "agentrl_rewards.ifbench:ifbench"),
    ],
)
def test_a_name_that_is_taken_off_the_page_is_missed(entry, missing):
    page = PAGE.read_text()
    assert page.count(entry) == 1
    assert missing in without_entry(page.replace(entry, ""))


def undescribed(module: str, name: str) -> list[str]:
    """The name, and of a class its public methods and attributes, that have no docstring."""
    known = members(source(module).body)
    node, text = known[name]
    found = [] if text else [name]
    if isinstance(node, ast.ClassDef):
        inherited = set()
        for base in node.bases:
            if isinstance(base, ast.Name) and isinstance(
                known.get(base.id, [None])[0], ast.ClassDef
            ):
                inherited |= members(known[base.id][0].body).keys()
        found += [
            f"{name}.{each}"
            for each, (_, said) in members(node.body).items()
            if not (said or each.startswith("_") or each in inherited or each == "model_config")
        ]
    return [f"{module}: {each}" for each in found]


def test_every_entry_says_what_it_is():
    found = entries(PAGE.read_text())
    assert len(found) > 100
    assert not [each for entry in sorted(found) for each in undescribed(*entry)]
