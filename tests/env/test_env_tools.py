"""Specifications from signatures and docstrings."""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field
from sample_envs import Workshop

from agentrl.env import Environment, reward, tool
from agentrl.env.tools import tools_of
from agentrl.errors import ConfigError


class Filter(BaseModel):
    field: str
    title: str = "x"


class Search(Environment):
    @tool(timeout_s=3)
    async def search(
        self,
        query: str,
        k: Annotated[int, Field(ge=1, le=10, description="from the Field")] = 3,
        *,
        mode: Literal["exact", "fuzzy"] = "exact",
        filters: list[Filter] | None = None,
        schema: str = "",
    ) -> str:
        """Search the corpus.

        It never fails.

        Args:
            query: what to look for,
                in plain words
            k (int): from the docstring
            mode: how to match

        Returns:
            hits
        """
        return f"{query} {k} {mode} {filters} {schema}"


def test_the_specification_follows_signature_and_docstring():
    spec = tools_of(Search)["search"].spec
    assert spec["type"] == "function"
    function = spec["function"]
    assert function["name"] == "search"
    assert function["description"] == "Search the corpus.\n\nIt never fails."
    parameters = function["parameters"]
    assert parameters["required"] == ["query"]
    assert parameters["additionalProperties"] is False
    assert parameters["properties"]["query"] == {
        "type": "string",
        "description": "what to look for, in plain words",
    }
    assert parameters["properties"]["k"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 10,
        "default": 3,
        "description": "from the Field",
    }
    assert parameters["properties"]["mode"]["enum"] == ["exact", "fuzzy"]
    # a property may be called title; only the generated titles are dropped
    assert parameters["$defs"]["Filter"]["properties"]["title"] == {
        "type": "string",
        "default": "x",
    }


def test_validated_arguments_are_what_the_method_gets():
    search = tools_of(Search)["search"]
    assert search.validate({"query": "a"}) == {"query": "a"}
    assert search.validate({"query": "a", "filters": [{"field": "f"}]}) == {
        "query": "a",
        "filters": [Filter(field="f")],
    }
    assert search.validate({"query": "a", "mode": "no"}).startswith("mode: ")
    assert search.validate({"query": "a", "filters": [{}]}).startswith("filters.0.field: this")


def test_a_tool_without_arguments_has_a_schema():
    parameters = tools_of(Workshop)["greet"].spec["function"]["parameters"]
    assert parameters == {"type": "object", "properties": {}, "additionalProperties": False}


def untyped(self, x): ...
def splat(self, *args: int): ...
def unknown(self, x: "Nowhere"): ...  # noqa: F821
def field_default(self, x: int = Field(3)): ...


class Opaque:
    pass


def opaque(self, x: Opaque): ...
def nothing() -> str: ...
def forgotten(x: int) -> str: ...


@pytest.mark.parametrize("mark", [tool, reward])
@pytest.mark.parametrize("wrong", ["add", 0.5, staticmethod(untyped)])
def test_a_mark_on_something_else_than_a_method_is_refused(mark, wrong):
    with pytest.raises(ConfigError, match=rf"write @{mark.__name__} or .* directly above a `def`"):
        mark(wrong)


def test_a_static_tool_is_refused():
    environment = type("Broken", (Environment,), {"add": staticmethod(tool(splat))})
    with pytest.raises(ConfigError, match="remove @staticmethod"):
        tools_of(environment)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (untyped, "parameter 'x' needs a type annotation"),
        (splat, "cannot be passed by name"),
        (unknown, "Nowhere"),
        (field_default, "the default outside the Field"),
        (opaque, "Opaque"),
        (nothing, "its first parameter must be self"),
        (forgotten, "its first parameter must be self"),
    ],
)
def test_a_signature_without_a_specification_is_refused(method, says):
    environment = type("Broken", (Environment,), {method.__name__: tool(method)})
    with pytest.raises(ConfigError, match=rf"tool Broken\.{method.__name__}: .*{says}"):
        tools_of(environment)
