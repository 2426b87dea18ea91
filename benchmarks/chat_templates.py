"""Chat templates as they are published: what the renderer makes of each.

    python benchmarks/chat_templates.py FOLDER...

FOLDER holds `.jinja` files, at any depth: llama.cpp's `models/templates`, vLLM's `examples`. Each
gets a tokenizer that has the special tokens which the template spells. A template is refused in
words, or

* no content (texts, reasoning, arguments, answers of tools, descriptions of tools) makes one of the
  template's own tokens, and
* three turns that grow by what was sampled are the template's own render of the whole dialogue, and
* the values of a call, of twelve kinds, are read back as the template writes them.

Anything else is WRONG, an error of Python's included.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tokenizers_for_tests import make_tokenizer

from agentrl.errors import ConfigError
from agentrl.model.text.renderer import Renderer
from agentrl.model.text.template import NAME
from agentrl.types import Message, ToolSpec

SPECIAL = re.compile(
    r"<\|[^|<>\s'\"]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|<\|[a-z_\"]+>|<[a-z_\"]+\|>|\[/?[A-Z_]{3,}\]|</?s>"
    r"|<[a-z]*(?:start|end)_of_[a-z]+>|</?(?:bos|eos|im_end|assistant|user|system)>|\]<\]minimax\[>\["
    r"|\[e~\[|\]~b\]|\]~!b\[|<(?:start|end)_function_[a-z]+>|<seed:[a-z]+>|<[a-z_]+:opensource>"
    r"|<SPECIAL_\d+>"
)


def tokenizer_for(source: str, also: str = "") -> Any:
    """Makes a tokenizer with every special token that a template, or another text, spells."""
    special = list(dict.fromkeys(["<eos>", "<bos>", *SPECIAL.findall(source + also)]))
    tokenizer = make_tokenizer(source, special=special)
    tokenizer.bos_token = "<bos>"
    return tokenizer


def look(description: str) -> ToolSpec:
    properties = {"word": {"type": "string", "description": description}}
    parameters = {"type": "object", "properties": properties, "required": ["word"]}
    function = {"name": "look", "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def turns(renderer: Renderer, text: str, with_calls: bool) -> list[Message]:
    """Makes a dialogue of three turns that think and call, or think and speak, about a text."""
    messages: list[Message] = [{"role": "user", "content": text}]
    for turn in range(3):
        said: Message = {"role": "assistant", "content": text, "reasoning": text}
        heard: Message = {"role": "user", "content": text}
        if with_calls:
            call_id = renderer.dialect.call_id.format(turn=turn, index=0, name="look")
            call = {"name": "look", "arguments": {"word": text}}
            calls: list[Any] = [{"id": call_id, "type": "function", "function": call}]
            said["content"], said["tool_calls"] = "", calls
            heard = {"role": "tool", "content": text, "tool_call_id": call_id, "name": "look"}
        messages += [said, heard]
    return messages


def frames(renderer: Renderer, ids: list[int]) -> list[int]:
    tokenizer: Any = renderer.tokenizer
    added = tokenizer.added_tokens_decoder
    guarded = renderer._guard.spellings
    return [each for each in ids if each in added and added[each].content in guarded]


def forges(renderer: Renderer, with_calls: bool) -> bool:
    """Returns whether contents that spell every token make more of them than harmless ones do."""
    guarded = sorted(renderer._guard.spellings)
    nested = "".join(f"{each[:3]}{each}{each[3:]}" for each in guarded)
    expected = frames(renderer, renderer.prompt(turns(renderer, "a b", with_calls), [look("a b")]))
    for text in ("a " + " ".join(guarded) + " b", f"a {nested} b"):
        ids = renderer.prompt(turns(renderer, text, with_calls), [look(text)])
        if frames(renderer, ids) != expected:
            return True
    return False


def grows_exactly(renderer: Renderer, with_calls: bool) -> bool:
    """Returns whether rows that grow turn by turn are the render of the whole dialogue.

    A template that edits the past is rendered whole for each turn; there the newest part is looked
    at, where the past stayed as it was.
    """
    messages = turns(renderer, "a word", with_calls)
    tools = [look("Look a word up.")] if with_calls else []
    row = renderer.prompt(messages[:1], tools)
    for end in range(3, len(messages) + 1, 2):
        behind = renderer.continuation(messages[:end], 1, tools, closed_by=None)
        whole = renderer.prompt(messages[:end], tools)
        if behind is not None and whole[-len(behind) :] != behind:
            return False
        if renderer.history == "append_only":
            said = renderer.assistant_turn(messages[end - 2])
            behind = renderer.continuation(messages[:end], 1, tools, closed_by=said[-1])
            if behind is None or row + said + behind != whole:
                return False
        row = whole
    return True


VALUES: dict[str, tuple[Any, Any]] = {
    "text": ("a b", "string"),
    "text of digits": ("417", "string"),
    "integer": (417, "integer"),
    "fraction": (2.5, "number"),
    "true": (True, "boolean"),
    "false": (False, "boolean"),
    "null": (None, ["string", "null"]),
    "list": ([1, "a", None], "array"),
    "empty list": ([], "array"),
    "object": ({"k": 1}, "object"),
    "empty object": ({}, "object"),
    "nested": ({"k": [{"x": None, "y": True}]}, "object"),
}
"""Kind -> a value, and the type that the tool's schema gives it."""


def changed_values(renderer: Renderer) -> list[str]:
    """Returns the kinds of values that are read back as others than the template writes."""
    template, changed = renderer.template, []
    if not template._written_call(template.dialect, {"count": 417}):
        return []
    for kind, (value, of_type) in VALUES.items():
        parameters = {"type": "object", "properties": {"value": {"type": of_type}}}
        function = {"name": NAME, "parameters": parameters}
        written = template._written_call(template.dialect, {"value": value})
        tools: list[ToolSpec] = [{"type": "function", "function": function}]
        action, _ = template.dialect.read_turn(written, tools, turn_id=0)
        if [repr(call.arguments) for call in action.tool_calls] != [repr({"value": value})]:
            changed.append(kind)
    return changed


def judge(path: Path) -> str:
    """Returns what came of a template: `refused (...)`, `exact, ...` or `WRONG, ...`."""
    try:
        renderer = Renderer(tokenizer_for(path.read_text()))
        hidden = renderer.template.hides_tools
        if hidden:
            renderer = Renderer(tokenizer_for(path.read_text()), tools="prompt")
    except ConfigError as error:
        return f"refused ({str(error)[:160]})"
    except Exception as error:
        return f"WRONG, {type(error).__name__}: {error}"
    found = []
    for with_calls in (False, True):
        try:
            if forges(renderer, with_calls):
                found.append("a content forges a token")
            if not grows_exactly(renderer, with_calls):
                found.append("a row is not the whole render")
        except TemplateError as error:
            if not with_calls:
                found.append(f"does not render ({error})")
            else:
                found.append("takes no calls")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    if changed := changed_values(renderer):
        found.append(f"values read back as others: {', '.join(changed)}")
    wrong = [each for each in found if each != "takes no calls"]
    shown = ["tools described in the system message"] if hidden else []
    kind = "WRONG" if wrong else "exact"
    return ", ".join([kind, renderer.dialect.name, renderer.history, *shown, *found])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    logging.disable(logging.ERROR)
    paths = [path for each in parser.parse_args().folders for path in sorted(each.rglob("*.jinja"))]
    counts: Counter[str] = Counter()
    for path in paths:
        result = judge(path)
        counts[re.split(r"[ ,]", result)[0]] += 1
        print(f"{path.name} | {result}", flush=True)
    print(f"{len(paths)} templates: {dict(counts)}")
    sys.exit(bool(counts["WRONG"]))


if __name__ == "__main__":
    main()
