"""Finds a chat template's dialect: the template writes a call, and a dialect that reads it wins."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError, first_line
from agentrl.model.text.prompt_tools import Render, with_prompted_tools
from agentrl.model.text.table import DIALECTS, Dialect
from agentrl.types import JSON, Message, ToolSpec

HIDDEN_TOOLS = (
    "the chat template shows the model no tools, so it would never learn that there are any; set "
    "rollout.tools = 'prompt', which describes them in the system message, or 'hidden' where the "
    "task's own text does"
)

NAME, SENTINEL = "lookup", "agentrl-dummy-argument"
TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Look a word up.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": "What to look up."},
                "count": {"type": "integer", "description": "How often."},
            },
            "required": ["word"],
        },
    },
}


RAW = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""`model.chat_template = "none"`: what is said, one text after the other."""

_KNOWN = f"rollout.dialect is one of auto, response_template, {', '.join(DIALECTS)}"


def named_dialect(name: str) -> Dialect:
    """Returns the dialect with this name; for `auto`, where no template is known, Hermes'.

    Raises:
        ConfigError: no dialect has that name.
    """
    if name == "auto":
        return DIALECTS["hermes"]
    if name not in DIALECTS:
        raise ConfigError(f"rollout.dialect = {name!r} is unknown here; {_KNOWN}")
    return DIALECTS[name]


_TRIED: tuple[dict[str, JSON], ...] = (
    {"word": SENTINEL, "count": 417},
    {"count": 417},
    {"word": SENTINEL},
)
"""Arguments of the example. Some templates write strings without their quotes, or numbers with."""


_VALUES: dict[str, JSON] = {
    "a truth value": True,
    "null": None,
    "a fraction": 2.5,
    "a list": ["a", None],
    "an object": {"k": [{"x": False}]},
}


class Template:
    """A chat template and the form in which it expects messages: the key that holds reasoning, and
    whether a call's arguments are an object or JSON text.

    Attributes:
        dialect: the one that `rollout.dialect` names, or else the one that reads the template's
            calls.
        note: the reason for the choice, for people.
    """

    def __init__(
        self,
        render: Render,
        source: str,
        *,
        dialect: str,
        response: object,
        tools: str = "template",
        added_tokens: Collection[str] = (),
    ) -> None:
        """
        Args:
            source: the template's whole source text.
            tools: as `rollout.tools`.
            added_tokens: of the tokenizer, beside its vocabulary.
            dialect: a name, or `auto`.
            response: the tokenizer's response template, if it has one.

        Raises:
            ConfigError: no such dialect, it does not read what the template writes, or (`auto`)
                none does.
        """
        self._render = with_prompted_tools(render) if tools == "prompt" else render
        self._source, self._added_tokens = source, frozenset(added_tokens)
        self._arguments_as_text = self._reasoning_or_text = False
        self.dialect, self.note = self._choose(dialect, response)
        self._reasoning_key = self._find_reasoning_key()

    def text(self, messages: list[Message], tools: list[ToolSpec], generation_prompt: bool) -> str:
        written = [
            self._for_template(message) if message["role"] == "assistant" else message
            for message in messages
        ]
        return self._render(written, tools, generation_prompt)

    @functools.cached_property
    def hides_tools(self) -> bool:
        """Tells whether the template leaves offered tools out of the prompt."""
        from jinja2.exceptions import TemplateError

        asked: Message = {"role": "user", "content": "x"}
        system: Message = {"role": "system", "content": "y"}
        for messages in ([asked], [system, asked]):
            try:
                if NAME in self._render([*messages], [TOOL], True):
                    return False
            except TemplateError:
                continue
        return True

    def _for_template(self, message: Message) -> dict[str, Any]:
        wanted: dict[str, Any] = {**message}
        if (reasoning := wanted.pop("reasoning", "")) and self._reasoning_key:
            wanted[self._reasoning_key] = reasoning
            if self._reasoning_or_text and "tool_calls" in wanted:
                wanted["content"] = ""
        elif reasoning:
            tags = self.dialect.think or ("<think>", "</think>")
            space = "\n" if tags[0] == "<think>" else ""
            wanted["content"] = (
                f"{tags[0]}{space}{reasoning}{space}{tags[1]}{space * 2}{wanted['content']}"
            )
        if self._arguments_as_text and "tool_calls" in wanted:
            wanted["tool_calls"] = [_arguments_as_text(call) for call in wanted["tool_calls"]]
        return wanted

    def _choose(self, wanted: str, response: object) -> tuple[Dialect, str]:
        if wanted == "response_template" and not isinstance(response, dict):
            raise ConfigError(
                "rollout.dialect = 'response_template', and the tokenizer has no response_template "
                f"in its tokenizer_config.json; {_KNOWN}"
            )
        if wanted not in ("auto", "response_template"):
            named_dialect(wanted)
        readers = {name: each for name, each in DIALECTS.items() if name != "text"}
        if isinstance(response, dict):
            from agentrl.model.text.shipped import from_response_template

            readers["response_template"] = from_response_template(response)
        if wanted == "text":
            self._written_call(DIALECTS["text"], {"count": 417})
            return DIALECTS["text"], "set in rollout.dialect"
        example = ""
        for arguments in _TRIED:
            for name, dialect in readers.items():
                written = self._written_call(dialect, arguments)
                example = example or written
                if wanted in ("auto", name) and _reads(dialect, written, arguments):
                    how = "found" if wanted == "auto" else "set in rollout.dialect and found"
                    how += " to read the calls that the chat template writes"
                    if kinds := self._changed_values(dialect):
                        how += f", but in other words where an argument is {' or '.join(kinds)}"
                    return dialect, how
        if SENTINEL in example:
            raise ConfigError(
                f"rollout.dialect = {wanted!r}: "
                + ("no dialect reads" if wanted == "auto" else "it does not read")
                + f" the calls that the chat template writes ({example.strip()[:200]!r}); set "
                + ("it to 'text' where no tools are called" if wanted == "auto" else "it to 'auto'")
                + f"; {_KNOWN}"
            )
        if wanted != "auto":
            return readers[wanted], "set in rollout.dialect; the chat template writes no calls"
        shared = DIALECTS["hermes"].call
        for place, text in (("chat template", self._source), ("tokenizer", self._added_tokens)):
            for dialect in readers.values():
                # One of two delimiters is another family's, whose calls end in another way.
                marks = [mark for mark in dialect.call or () if mark]
                spelled = all(mark in text or repr(mark)[1:-1] in text for mark in marks)
                if marks and dialect.call != shared and spelled:
                    said = f"its delimiters stand in the {place}"
                    return dialect, f"{said}, and the chat template writes no calls"
        return DIALECTS["hermes"], "the default, because the chat template writes no calls"

    def _changed_values(self, dialect: Dialect) -> list[str]:
        """Returns the kinds of values that are not read back as the template writes them."""
        return [
            kind
            for kind, value in _VALUES.items()
            if not _reads(dialect, self._written_call(dialect, {"value": value}), {"value": value})
        ]

    def _written_call(self, dialect: Dialect, arguments: dict[str, JSON]) -> str:
        """Returns what the template writes for a turn with one call; empty if it refuses one."""
        from jinja2.exceptions import TemplateError, TemplateSyntaxError

        asked: list[Message] = [{"role": "user", "content": "x"}]
        said: list[Message] = [*asked, {"role": "assistant", "content": SENTINEL}]
        try:
            end = self._render(said, [TOOL], False).rpartition(SENTINEL)[2]
        except TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not valid Jinja (line {error.lineno}: {error.message}); "
                "correct the model's chat_template.jinja or rollout.template"
            ) from error
        except TemplateError:
            return ""
        call = example_call(dialect, arguments)
        for as_text in (False, True):
            turn: Any = {"role": "assistant", "content": "", "tool_calls": [call]}
            if as_text:
                turn["tool_calls"] = [_arguments_as_text(call)]
            try:
                before = self._render(asked, [TOOL], True)
                whole = self._render([*asked, turn], [TOOL], False)
                if not whole.startswith(before):
                    before = self._render(asked, [TOOL], False)
            except TemplateError:  # `'"arguments": ' + a mapping`
                continue
            self._arguments_as_text = as_text
            return whole[len(before) :].removesuffix(end) if whole.startswith(before) else ""
        return ""

    def _find_reasoning_key(self) -> str | None:
        """Returns the key under which the template looks for reasoning; None if reasoning belongs
        in the content."""
        from jinja2.exceptions import TemplateError

        call = example_call(self.dialect, {"count": 417})
        if self._arguments_as_text:
            call = _arguments_as_text(call)

        def shows(key: str, content: str, **more: Any) -> bool:
            turn = {"role": "assistant", "content": content, key: SENTINEL, **more}
            try:
                text = self._render([{"role": "user", "content": "x"}, turn], [TOOL], False)
            except TemplateError:
                return False
            return SENTINEL in text

        for key in ("reasoning_content", "reasoning", "thinking"):
            if key not in self._source:
                continue
            with_call = shows(key, "", tool_calls=[call])
            # gpt-oss's template refuses a text beside the reasoning of a call.
            self._reasoning_or_text = with_call and not shows(key, "x", tool_calls=[call])
            if with_call or shows(key, "x"):
                return key
        return None


def example_call(
    dialect: Dialect, arguments: JSON, *, turn: int = 0, index: int = 0, name: str = NAME
) -> dict[str, Any]:
    """Returns a call of the example tool, or of another name, with an id as the dialect gives."""
    return {
        "id": dialect.call_id.format(turn=turn, index=index, name=name),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def rendered(render: Callable[[list[Any] | None], str], tools: list[ToolSpec]) -> str:
    """Returns the text that a template renders with these tools, or without tools.

    Some templates are written for dialogues with tools only and fail without a list of them. They
    get an empty one.

    Raises:
        TemplateError: the template refuses the dialogue, or fails on it with an error of Python's.
    """
    from jinja2.exceptions import TemplateError, TemplateRuntimeError

    try:
        try:
            return render([*tools] or None)
        except (TypeError, AttributeError):
            if tools:
                raise
            return render([])
    except TemplateError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        raise TemplateRuntimeError(f"{type(error).__name__}: {error}") from error


def template_source(chat_template: str) -> str:
    """Returns the template that `model.chat_template` names.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    if chat_template == "none":
        return RAW
    try:
        source = Path(chat_template).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"model.chat_template: {chat_template} cannot be read ({first_line(error)}); name a "
            "Jinja file, or none for prompts without a template"
        ) from None
    if not source.strip():
        raise ConfigError(f"model.chat_template: {chat_template} is empty")
    return source


def read_template(
    model_path: str,
    render_kwargs: dict[str, JSON],
    dialect: str,
    tools: str = "template",
    chat_template: str | None = None,
) -> Template | None:
    """Reads the chat template in a model's directory without loading the tokenizer, which needs
    torch.

    Args:
        chat_template: as `model.chat_template`, in place of the directory's.

    Returns:
        None where the directory has no template: the path may be a name on the hub, or an error
        that is found later.

    Raises:
        ConfigError: as `Template`.
    """
    directory = Path(model_path)
    config: dict[str, Any] = {}
    if (path := directory / "tokenizer_config.json").is_file():
        config = json.loads(path.read_text())
    source = config.get("chat_template")
    if (path := directory / "chat_template.jinja").is_file():
        source = path.read_text()
    if chat_template is not None:
        source = template_source(chat_template)
    if not isinstance(source, str):
        return None
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError:
        return None
    kwargs: dict[str, Any] = {"chat_template": source, "bos_token": "", "eos_token": ""}
    for key in ("bos_token", "eos_token"):
        token = config.get(key) or ""
        kwargs[key] = token["content"] if isinstance(token, dict) else token
    kwargs |= render_kwargs

    def render(messages: list[Any], tools: list[ToolSpec], generation_prompt: bool) -> str:
        def of_tools(offered: list[Any] | None) -> str:
            texts, _ = render_jinja_template(
                conversations=[messages],
                tools=offered,
                add_generation_prompt=generation_prompt,
                **kwargs,
            )
            return texts[0]

        return rendered(of_tools, tools)

    response = config.get("response_template")
    source = str(kwargs["chat_template"])
    added = [str(each["content"]) for each in config.get("added_tokens_decoder", {}).values()]
    if (path := directory / "tokenizer.json").is_file():
        added += [each["content"] for each in json.loads(path.read_text()).get("added_tokens", ())]
    return Template(
        render, source, dialect=dialect, response=response, tools=tools, added_tokens=added
    )


def _reads(dialect: Dialect, written: str, arguments: dict[str, JSON]) -> bool:
    action, _ = dialect.read_turn(written, [TOOL], turn_id=0)
    return [(call.name, call.arguments) for call in action.tool_calls] == [(NAME, arguments)]


def _arguments_as_text(call: Any) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
