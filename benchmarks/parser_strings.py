"""Turns of other projects' tests: do our dialects read them as those projects' own parsers do?

    python benchmarks/parser_strings.py llama.cpp FOLDER
    python benchmarks/parser_strings.py vllm STRINGS

FOLDER is llama.cpp's source (`vendor/llama.cpp` in the source package of llama-cpp-python): the
turns of `tests/test-chat.cpp`, each read in the dialect that its chat template is found to speak.

STRINGS is what vLLM's own parsers made of the strings of vLLM's own tests. It is written by running
those tests (`tests` of vLLM's source package) in vLLM's environment with this file as a plugin:

    STRINGS=strings.jsonl PYTHONPATH=.:/path/to/agentrl/benchmarks \\
        VLLM_PYTHON -m pytest -p parser_strings -q tests/tool_parsers tests/parser \\
        tests/tool_use/test_kimi_k3_tool_parser.py \\
        --ignore tests/parser/engine/test_replay.py --ignore tests/parser/engine/test_plamo3.py \\
        -k "not streaming or nonstreaming or non_streaming"

The models' tokenizers are replaced by one that knows every mark of these files, and a test that
fails with it is not counted. Neither are turns to which no tool was allowed.

Both print, for each family, how many turns are read alike, and every other one with what each side
makes of it: `refused` calls nothing and says why, `text` calls nothing, `calls` calls.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

SPEAKS = {
    "Apertus": "apertus", "CohereCommand": "cohere", "DeepSeekV31": "deepseek_v31",
    "DeepSeekV32": "deepseek_v32", "DeepSeekV3Tool": "deepseek_v3", 
    "DeepSeekV4": "deepseek_v4", "Ernie45": "hermes", "FunctionGemma": "functiongemma",
    "Gemma4": "gemma4", "Glm47Moe": "glm4", "GraniteThinking": "qwen_xml", "Granite4": "hermes",
    "GraniteEngine": "granite3", "GraniteParser": "granite3", "Hermes": "hermes",
    "HunyuanA13B": "jamba", "Jamba": "jamba", "KimiK2": "kimi_k2", "KimiK3": "kimi_k3",
    "Lfm2": "lfm2", "Llama3Json": "llama_json", "Llama4Pythonic": "pythonic",
    "Longcat": "longcat", "MiMo": "qwen_xml", "MiniCPM5XML": "minicpm5",
    "MinimaxM2": "minimax_m2", "MinimaxM3": "minimax_m3", "Mistral": "mistral",
    "NemotronV3": "qwen_xml", "Olmo3": "olmo3", "Phi4Mini": "phi4", "Pythonic": "pythonic",
    "Qwen3": "qwen_xml", "SeedOss": "seed_oss", "Step3Tool": "step3", "Step3p5": "qwen_xml",
    "xLAM": "xlam",
}  # fmt: skip
"""Which dialect vLLM's parsers read, by the beginnings of their classes' names."""
NOT_READ = (
    *("DeepSeekV41", "Dots", "GigaChat3", "Granite20bFC", "HYV3", "Inkling", "Internlm2"),
    *("K2Horizon", "Ling3", "Plamo3", "PoolsideV1"),
)
"""Parsers of vLLM 0.32 that no dialect of ours stands for."""


class Turn(NamedTuple):
    where: str
    text: str
    tools: list[Any]
    calls: list[tuple[str, Any]]
    """What the other project reads: names, and arguments as objects."""
    prompt_end: str = ""


def arguments_of(text: Any) -> Any:
    try:
        return json.loads(text or "{}") if isinstance(text, str) else text
    except ValueError:
        return text


def compare(dialect: Any, turn: Turn) -> tuple[str, str]:
    """Returns `alike` or who does what, and what we make of the turn."""
    names = [name for name, _ in turn.calls] or ["x"]
    tools = turn.tools or [{"type": "function", "function": {"name": name}} for name in names]
    action, status = dialect.read_turn(turn.text, tools, turn_id=0, prompt_end=turn.prompt_end)
    ours = [(call.name, call.arguments) for call in action.tool_calls]
    if status != "malformed" and ours == turn.calls:
        return "alike", ""
    mine = "refused" if status == "malformed" else "calls" if ours else "text"
    theirs = "calls" if turn.calls else "text"
    if mine == theirs == "calls":
        return "calls otherwise", str(ours)
    return f"{mine} here, {theirs} there", str(action.parse_error or ours)


def report(families: dict[str, list[tuple[Any, Turn]]]) -> None:
    total: Counter[str] = Counter()
    lines = []
    for family, turns in sorted(families.items()):
        counted: Counter[str] = Counter()
        for dialect, turn in turns:
            verdict, ours = compare(dialect, turn)
            counted[verdict] += 1
            if verdict != "alike":
                lines += [f"\n{family} | {verdict} | {turn.where}", f"  {turn.text[:400]!r}"]
                lines += [f"  ours:   {ours[:300]}", f"  theirs: {str(turn.calls)[:300]}"]
        total += counted
        print(f"{family}: {', '.join(f'{count} {name}' for name, count in counted.most_common())}")
    print(f"{total.total()} turns: {', '.join(f'{n} {name}' for name, n in total.most_common())}")
    print("\n".join(lines))


# --- vLLM: the plugin for its tests, and what they left behind


@functools.cache
def _stand_in() -> Any:
    """Makes a tokenizer of bytes with every mark that vLLM's parsers or their tests spell."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    mark = re.compile(r"<[^<>\s=\"']{1,40}>|\[/?[A-Z_]{3,}\]")
    marks = set()
    installed = Path(str(import_module("vllm").__file__)).parent
    for folder in (installed, Path("tests")):
        for part in ("tool_parsers", "reasoning", "parser", "tool_use"):
            for file in (folder / part).rglob("*.py"):
                marks |= set(mark.findall(file.read_text()))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([AddedToken(each, normalized=False) for each in sorted(marks)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)


if "pytest" in sys.modules and "STRINGS" in os.environ:
    import pytest
    from transformers import AutoTokenizer

    for module in ("vllm.tokenizers", "vllm.tokenizers.registry"):
        setattr(import_module(module), "get_tokenizer", lambda *_, **__: _stand_in())  # noqa: B010
    AutoTokenizer.from_pretrained = lambda *_, **__: _stand_in()
    _found: list[dict[str, Any]] = []
    _depth = 0
    _wrapped: set[tuple[type, str]] = set()

    def _wrap(cls: type, name: str) -> None:
        original = cls.__dict__[name]

        @functools.wraps(original)
        def method(self: Any, text: str, *args: Any, **kwargs: Any) -> Any:
            global _depth
            _depth += 1
            try:
                result = original(self, text, *args, **kwargs)
            finally:
                _depth -= 1
            request = kwargs.get("request", args[0] if args else None)
            offered = getattr(request, "tools", None)  # without, a request's choice is "none"
            if _depth or (offered and getattr(request, "tool_choice", None) == "none"):
                return result
            own = getattr(self, "_tools", None) or getattr(self, "tools", None)
            tools = offered or own or []
            calls = (result[2] if name == "parse" else result.tool_calls) or []
            functions = [getattr(call, "function", call) for call in calls]
            config = getattr(self, "parser_engine_config", None)
            _found.append(
                {
                    "parser": type(self).__name__,
                    "config": getattr(config, "name", None),
                    "text": text,
                    "tools": [
                        each.model_dump(mode="json", exclude_none=True)
                        if hasattr(each, "model_dump")
                        else each
                        for each in (tools if isinstance(tools, list) else [])
                    ],
                    "calls": [(each.name, each.arguments) for each in functions],
                }
            )
            return result

        setattr(cls, name, method)

    def _below(cls: type) -> Iterator[type]:
        for each in cls.__subclasses__():
            yield each
            yield from _below(each)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(item: Any) -> Iterator[Any]:
        parser = import_module("vllm.parser.abstract_parser").Parser
        tool_parser = import_module("vllm.tool_parsers.abstract_tool_parser").ToolParser
        for base in (parser, tool_parser):
            for cls in {base, *_below(base)}:
                for name in {"extract_tool_calls", "parse"} & cls.__dict__.keys():
                    if (cls, name) not in _wrapped:
                        _wrapped.add((cls, name))
                        _wrap(cls, name)
        _found.clear()
        result = yield  # a test that fails raises here
        with Path(os.environ["STRINGS"]).open("a") as out:
            for each in _found:
                out.write(json.dumps(each | {"test": item.nodeid}, default=str) + "\n")
        return result


def vllm_turns(strings: Path) -> dict[str, list[tuple[Any, Turn]]]:
    from agentrl.model.text.table import DIALECTS

    families: dict[str, list[tuple[Any, Turn]]] = defaultdict(list)
    seen, unread = set(), Counter()
    for line in strings.read_text().splitlines():
        row = json.loads(line)
        name = row["parser"].removeprefix("_Delegating")
        if name == "ParserEngine":
            name = {"qwen3": "Qwen3", "hermes_test": "Hermes"}.get(row["config"], name)
        if name.startswith(NOT_READ):
            unread[name] += 1
            continue
        spoken = next((each for start, each in SPEAKS.items() if name.startswith(start)), None)
        calls = [(called, arguments_of(arguments)) for called, arguments in row["calls"]]
        key = (spoken, row["text"], json.dumps(calls))
        # A parser that was made for a test is none of a family; harmony's get ids, not texts.
        if spoken is None or key in seen or not row["text"]:
            continue
        seen.add(key)
        given = [each for each in row["tools"] if isinstance(each, dict)]
        tools = [t if "function" in t else {"type": "function", "function": t} for t in given]
        where = row["test"].rpartition("::")[2]
        families[spoken].append((DIALECTS[spoken], Turn(where, row["text"], tools, calls)))
    print(f"no dialect here: {', '.join(sorted(unread))}")
    return families


# --- llama.cpp: its test file, read as the few forms of C++ that it consists of

_LITERAL = re.compile(r'\s*(?:R"([^\s()"]*)\((.*?)\)\1"|"((?:[^"\\]|\\.)*)")', re.DOTALL)
_MESSAGES = {
    "simple_assist_msg": ("content", "reasoning", "name", "arguments"),
    "message_with_tool_calls": ("name", "arguments"),
    "message_with_tool_calls_and_reasoning": ("name", "arguments", "reasoning"),
    "message_with_content_and_tool_call": ("content", "name", "arguments"),
    "message_with_reasoning_and_tool_call": ("reasoning", "name", "arguments"),
}


def literal(source: str, at: int) -> tuple[str | None, int]:
    """Returns the text of the literals that stand side by side, and where they end."""
    texts = []
    while found := _LITERAL.match(source, at):
        plain = found[3]
        texts.append(found[2] if plain is None else json.loads(f'"{plain}"', strict=False))
        at = found.end()
    return "".join(texts) if texts else None, at


def literals(source: str) -> list[str]:
    """Returns every text in a piece of C++, side by side counting as one."""
    texts, at = [], 0
    while at < len(source):
        text, end = literal(source, at)
        if text is not None:
            texts.append(text)
        at = max(end, at + 1)
    return texts


def calls_expected(chain: str, known: dict[str, list[tuple[str, Any]]]) -> list[tuple[str, Any]]:
    """Raises:
    KeyError: it is said in another form.
    """
    if ".expect_tool_calls(" in chain:
        body = chain.partition(".expect_tool_calls(")[2].partition("\n            .")[0]
        items = re.split(r"\}\s*,\s*\{", re.sub(r"//[^\n]*", "", body))
        return [(texts[0], arguments_of(texts[1])) for texts in map(literals, items)]
    if not (found := re.search(r"\.expect\((\w+)(\(?)", chain)):
        return []
    if not found[2]:
        return known[found[1]]
    texts = literals(chain[found.end() : chain.find("\n            .", found.end())])
    values = dict(zip(_MESSAGES[found[1]], texts, strict=False))
    return [(values["name"], arguments_of(values["arguments"]))] if values.get("name") else []


def llama_cpp_turns(folder: Path) -> dict[str, list[tuple[Any, Turn]]]:
    sys.path.insert(0, str(Path(__file__).parent))
    from chat_templates import tokenizer_for
    from jinja2.exceptions import TemplateError

    from agentrl.errors import ConfigError
    from agentrl.model.text.renderer import Renderer

    source = (folder / "tests" / "test-chat.cpp").read_text()
    tools = {}
    for found in re.finditer(r"static common_chat_tool (\w+)\{(.*?)\n\};", source, re.DOTALL):
        name, description, parameters = literals(re.sub(r"/\*.*?\*/", "", found[2]))[:3]
        function = {"name": name, "description": description}
        function["parameters"] = arguments_of(parameters)
        tools[found[1]] = {"type": "function", "function": function}
    known: dict[str, list[tuple[str, Any]]] = {}
    for found in re.finditer(r"common_chat_msg (message_\w+)\s*=(.*?);\n", source, re.DOTALL):
        with_calls = f".expect({found[2].strip()}\n            ."
        with contextlib.suppress(KeyError):
            known[found[1]] = calls_expected(with_calls, known)
    families: dict[str, list[tuple[Any, Turn]]] = defaultdict(list)
    skipped: Counter[str] = Counter()
    parts = re.split(r"peg_tester\((\"[^\"]+\"|template_path)", source)
    for path, part in zip(parts[1::2], parts[2::2], strict=True):
        if path == "template_path":  # a function's argument: LFM2's
            path = '"models/templates/LFM2-8B-A1B.jinja"'
        template = (folder / path.strip('"')).read_text()
        renderers: dict[bool, Any] = {}
        for begin in [found.end() for found in re.finditer(r"tst2?\.test\(", part)]:
            chain = part[begin : part.find(".run()", begin)]
            text, end = literal(chain, 0)
            if text is None or chain[end:].lstrip()[:1] != ")":
                skipped["said in another form"] += 1
                continue
            if re.search(r"is_partial\(true|messages\(|json_schema\(", chain):
                skipped["partial, continued, or of a schema"] += 1
                continue
            thinks = "enable_thinking(true)" in chain
            try:
                if thinks not in renderers:
                    renderers[thinks] = Renderer(
                        tokenizer_for(template, part),
                        template_kwargs={"enable_thinking": thinks},
                    )
                expected = calls_expected(chain[end:], known)
            except ConfigError as error:
                skipped[f"template refused: {Path(path).stem}: {str(error)[:100]}"] += 1
                continue
            except (KeyError, IndexError):
                skipped["said in another form"] += 1
                continue
            renderer = renderers[thinks]
            offered = re.search(r"\.tools\(\{(.*?)\}\)", chain, re.DOTALL)
            names = re.findall(r"\w+", offered[1]) if offered else []
            given = [tools[each] for each in names if each in tools]
            try:
                ids = renderer.prompt([{"role": "user", "content": "x"}], given)
            except TemplateError:  # it is refused where tools are offered
                skipped[f"template fails with tools: {Path(path).stem}"] += 1
                continue
            prompt_end = renderer._prompt_end(ids, len(ids))
            turn = Turn(Path(path.strip('"')).stem, text, given, expected, prompt_end)
            families[Path(path.strip('"')).stem].append((renderer.dialect, turn))
    for reason, count in skipped.most_common():
        print(f"not counted: {count} {reason}")
    return families


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("project", choices=["llama.cpp", "vllm"])
    parser.add_argument("path", type=Path)
    args = parser.parse_args()
    report(llama_cpp_turns(args.path) if args.project == "llama.cpp" else vllm_turns(args.path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
