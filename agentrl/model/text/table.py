"""The dialects as data, and the code that splits a turn by them.

A turn is reasoning, text and tool calls in any order. It is split first: what stands inside a
thought is reasoning whatever it looks like, and is never read as a call. Then each region of calls
goes to its reader (`calls.py`). One unreadable call spoils the turn: nothing of it is executed,
because a half-executed turn is harder for a policy to learn from than a clear refusal.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from agentrl.model.text.calls import (
    Call,
    Unreadable,
    element_calls,
    framed_calls,
    gemma_calls,
    json_calls,
    json_sequence,
    keyed_calls,
    pythonic_calls,
    xml_calls,
)
from agentrl.types import Action, ParseStatus, ToolCall, ToolSpec

Reader = Callable[[str, list[ToolSpec]], list[Call]]


@dataclass(slots=True)
class Split:
    """A turn in parts, before its calls are read."""

    reasoning: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    problem: str | None = None
    """Why it cannot be read."""


@dataclass(slots=True, frozen=True)
class Dialect:
    name: str
    families: str
    """Who speaks it, in words."""
    read: Reader = json_calls
    call: tuple[str, str | None] | None = None
    """What opens and closes a region of calls; closed by None, it reaches to the next that opens,
    or to the end of the turn."""
    also_opens: str | None = None
    """What opens a region of calls in other versions of the family."""
    inside: tuple[str, ...] = ()
    """Marks that stand in a region of calls only, beside the one that closes it. In a text they
    are the rest of a call that was never opened."""
    bare: re.Pattern[str] | None = None
    """Calls without delimiters: a turn that begins like this is nothing but calls. Read so only
    where tools are offered, because an answer may look the same."""
    think: tuple[str, str] | None = ("<think>", "</think>")
    thought: re.Pattern[str] | None = None
    """What opens a thought, where `think` is not the only text that does."""
    answer: tuple[str, ...] = ()
    """Marks around the text of a turn, which are not part of it."""
    ends: tuple[str, ...] = ()
    """Tokens that end a turn where the template does not show it: the first ends a turn of text,
    the last one with calls. Empty: the template's own close token."""
    call_id: str = "t{turn:04d}c{index:03d}"
    """Ids of calls that carry none, a function of the turn, so that they repeat with the seed.
    Nine letters and digits, which is what Mistral's templates ask for."""
    split: Callable[[str, str], Split] | None = None
    """(turn, end of its prompt) -> parts, for a dialect that no delimiters describe. Its turns
    come with the token that ended them."""

    @property
    def marks(self) -> list[str]:
        """All delimiters of reasoning and calls."""
        opened = *(self.think or ()), *(self.call or ()), self.also_opens
        return [mark for mark in (*opened, *self.inside, *self.answer) if mark]

    def read_turn(
        self, text: str, tools: list[ToolSpec], *, turn_id: int, prompt_end: str = ""
    ) -> tuple[Action, ParseStatus]:
        """Reads what a turn does: its calls, its text and its reasoning.

        Args:
            text: the decoded turn, special tokens included, without the token that ended it.
            tools: those that the policy was offered; their schemas give untyped arguments a type.
            prompt_end: the text that the template wrote before the turn. It may have opened a
                thought.
        """
        split = self.split or partial(self._split, tools)
        parts = split(text, prompt_end)
        reasoning = "\n\n".join(each.strip() for each in parts.reasoning if each.strip())
        written = "".join(parts.text)
        for mark in self.answer:
            written = written.replace(mark, "")
        whole = (written + "".join(parts.calls)).strip()
        if parts.problem is not None:
            return Action(whole, (), parts.problem, reasoning), "malformed"
        calls: list[ToolCall] = []
        for body in parts.calls:
            try:
                for call in self.read(body, tools):
                    given = self.call_id.format(turn=turn_id, index=len(calls), name=call.name)
                    calls.append(ToolCall(call.id or given, call.name, call.arguments))
                    if any(calls[-1].id == each.id for each in calls[:-1]):
                        raise Unreadable(f"two calls have the id {calls[-1].id!r}")
            except Unreadable as error:
                problem = f"tool call {len(calls) + 1}: {error}"
                return Action(whole, (), problem, reasoning), "malformed"
        if calls:
            return Action(written.strip(), tuple(calls), None, reasoning), "tool_calls"
        return Action(written.strip() if parts.reasoning else written, (), None, reasoning), "text"

    def _split(self, tools: list[ToolSpec], text: str, prompt_end: str) -> Split:
        parts = Split()
        opened, closed = self.think or (None, None)
        call_opens, call_closes = self.call or (None, None)
        thought = self.thought or re.compile(re.escape(opened) if opened else r"(?!)")
        openers = [mark for mark in (call_opens, self.also_opens) if mark]
        others = [re.escape(mark) for mark in (closed, *openers) if mark]
        marks = re.compile("|".join([thought.pattern, *others]))
        position = _end_of_open_thought(thought, closed, prompt_end, text)
        thinking, position = position is not None, position or 0
        while True:
            if thinking and closed:
                end = text.find(closed, position)
                parts.reasoning.append(text[position:] if end < 0 else text[position:end])
                if end < 0:
                    if any(each in parts.reasoning[-1] for each in (*openers, *self.inside)):
                        parts.problem = (
                            f"the call stands in reasoning that was never closed by {closed}"
                        )
                    return parts
                thinking, position = False, end + len(closed)
            if self._is_nothing_but_calls("".join(parts.text) + text[position:], tools):
                # Read at once: a mark inside an argument is a part of the argument.
                parts.text, parts.calls = [], ["".join(parts.text) + text[position:]]
                break
            mark = marks.search(text, position)
            parts.text.append(text[position : mark.start() if mark else None])
            if mark is None:
                break
            position = mark.end()
            if mark[0] == closed:
                # The thought was opened in the prompt, or not at all: all of it was reasoning.
                before = text[: mark.start()]
                begins = thought.match(before)
                parts = Split(reasoning=[before[begins.end() :] if begins else before])
            elif mark[0] in openers:
                if call_closes:
                    end = text.find(call_closes, position)
                else:
                    end = _next_mark_outside_strings(marks, text, position)
                if end < 0:
                    parts.text.append(text[mark.start() :])
                    parts.problem = f"a {mark[0]} was never closed by {call_closes}"
                    return parts
                parts.calls.append(text[position:end])
                position = end + len(call_closes or "")
            else:
                thinking = True
        written = "".join(parts.text)
        if self.bare and tools and self.bare.match(written):
            parts.text, parts.calls = [], [written]
        elif tools:
            left = [mark for mark in (call_closes, *self.inside) if mark and mark in written]
            if left:
                begins = f"; a call begins with {call_opens}" if call_opens else ""
                parts.problem = f"{left[0]} stands outside of a call{begins}"
        return parts

    def _is_nothing_but_calls(self, text: str, tools: list[ToolSpec]) -> bool:
        if not (self.bare and tools and self.bare.match(text)):
            return False
        try:
            self.read(text, tools)
        except Unreadable:
            return False
        return True


def _end_of_open_thought(
    opens: re.Pattern[str], closed: str | None, prompt_end: str, text: str
) -> int | None:
    """Returns where the mark that opens a thought ends in the turn, if the prompt left a thought
    open; else None."""
    starts = [mark.start() for mark in opens.finditer(prompt_end)]
    if not starts or closed is None or prompt_end.rfind(closed) > starts[-1]:
        return None
    begun = len(prompt_end) - starts[-1]
    whole = opens.match(prompt_end[starts[-1] :] + text)  # the turn may go on with its name
    return max(0, whole.end() - begun) if whole else 0


def _next_mark_outside_strings(marks: re.Pattern[str], text: str, position: int) -> int:
    """Returns where the next mark outside JSON strings begins, or the end of the text."""
    for found in re.finditer(rf'"(?:[^"\\]|\\.)*"|({marks.pattern})', text[position:], re.DOTALL):
        if found[1]:
            return position + found.start()
    return len(text)


def _split_harmony(text: str, prompt_end: str) -> Split:
    """Splits gpt-oss' messages: `<|channel|>analysis<|message|>...<|end|>` is reasoning, a `to=` in
    the header marks a call, everything else is text (openai-harmony's format)."""
    parts = Split()
    last = prompt_end[prompt_end.rfind("<|start|>") + 1 :]
    if "<|channel|>" in last:  # the prompt began the turn's first message
        header = last[last.rindex("<|channel|>") :]
        text = header.partition("<|message|>")[0] + "<|message|>" * ("<|message|>" in header) + text
    for number, message in enumerate(text.split("<|start|>")):
        header, found, body = message.partition("<|message|>")
        body = re.split(r"<\|(?:end|call|return)\|>", body, maxsplit=1)[0]
        channel = re.search(r"<\|channel\|>(\w+)", header)
        recipient = re.search(r"\bto=([^\s<]+)", header)
        if not found:
            if number or channel or "to=functions." in header:
                parts.problem = "a message has no <|message|> behind its header"
            parts.text.append(message)
        elif channel and channel[1] == "analysis":
            parts.reasoning.append(body)
            if recipient:
                parts.problem = f"the call to {recipient[1]} stands in the analysis channel"
        elif recipient:
            parts.calls.append(f"{recipient[1]}<|message|>{body}")
        else:
            parts.text.append(body)
    return parts


def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


_XML = partial(
    xml_calls,
    pattern=_compile(r"<function=(?P<name>[^>\n]+)>(?P<parameters>.*?)</function>"),
    parameter=_compile(r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>"),
    openers=("<tool_call>", "<seed:tool_call>", "<function=", "<parameter="),
    trim_newlines=True,
)
_INVOKE = partial(
    xml_calls,
    pattern=_compile(r'<invoke name="(?P<name>[^"\n]+)">(?P<parameters>.*?)</invoke>'),
    parameter=_compile(r'<parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</parameter>'),
    openers=("<minimax:tool_call>", "<invoke name=", "<parameter name="),
)
_DSML = partial(
    xml_calls,
    pattern=_compile(
        r'<｜DSML｜invoke name="(?P<name>[^"\n]+)">(?P<parameters>.*?)</｜DSML｜invoke>'
    ),
    parameter=_compile(
        r'<｜DSML｜parameter name="(?P<key>[^"\n]+)" string="(?P<string>true|false)">'
        r"(?P<value>.*?)</｜DSML｜parameter>"
    ),
    openers=("<｜DSML｜",),
)
_ARG_KEYS = partial(
    xml_calls,
    pattern=_compile(r"\A\s*(?P<name>[^\s<]+)(?P<parameters>.*)\Z"),
    parameter=_compile(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
    openers=("<tool_call>", "<arg_key>", "<arg_value>"),
)
_STEP = partial(
    xml_calls,
    pattern=_compile(
        r"(?:<｜tool_sep｜>\s*)?<｜tool_call_begin｜>\s*(?:function<｜tool_sep｜>[^<]*)?"
        r'<steptml:invoke name="(?P<name>[^"\n]+)">(?P<parameters>.*?)</steptml:invoke>'
        r"\s*<｜tool_call_end｜>"
    ),
    parameter=_compile(
        r'<steptml:parameter name="(?P<key>[^"\n]+)">(?P<value>.*?)</steptml:parameter>'
    ),
    openers=("<｜tool_call", "<steptml:"),
)
_FUNCTION_NAME = partial(
    xml_calls,
    pattern=_compile(r'\A"(?P<name>[^"\n]+)">(?P<parameters>.*)\Z'),
    parameter=_compile(
        r'<param name="(?P<key>[^"\n]+)">(?P<cdata><!\[CDATA\[)?'
        r"(?P<value>.*?)(?(cdata)\]\]>)</param>"
    ),
    openers=("<function name=", "<param name=", "<![CDATA["),
)
_MISTRAL = partial(
    framed_calls,
    pattern=_compile(
        r"\A\s*(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?(?P<arguments>\s*\{.*)\Z"
    ),
)


_MINIMAX = "]<]minimax[>["
_XTML = partial(
    xml_calls,
    pattern=_compile(
        r'<\|open\|>call tool="(?P<name>[^"\n]+)"(?: index="\d+")?<\|sep\|>'
        r"(?P<parameters>.*?)<\|close\|>call<\|sep\|>"
    ),
    parameter=_compile(
        r'<\|open\|>argument key="(?P<key>[^"\n]+)" type="(?P<string>\w+)"<\|sep\|>'
        r"(?P<value>.*?)<\|close\|>argument<\|sep\|>"
    ),
    openers=("<|open|>tools", "<|open|>call", "<|open|>argument"),
    escaped=True,
)


def _phi_calls(text: str, tools: list[ToolSpec]) -> list[Call]:
    return json_calls(text.strip().removeprefix("functools"), tools)


def _command_r_calls(text: str, tools: list[ToolSpec]) -> list[Call]:
    """Reads a list up to the fence that ends the turn. The fence is not the dialect's closing
    delimiter, because a text may hold code, and an argument too."""
    if not (text := text.rstrip()).endswith("```"):
        raise Unreadable("the list of calls does not end the turn with ```")
    return json_calls(text.removesuffix("```"), tools)


def _mistral_calls(text: str, tools: list[ToolSpec]) -> list[Call]:
    """Reads a JSON list (up to version 7 of the format) or `name[ARGS]{...}` (from version 11)."""
    return json_calls(text, tools) if text.lstrip()[:1] in ("[", "{") else _MISTRAL(text, tools)


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            "harmony",
            "gpt-oss",
            partial(
                framed_calls,
                pattern=_compile(r"\Afunctions\.(?P<name>[^<]+)<\|message\|>(?P<arguments>.*)\Z"),
            ),
            think=("<|channel|>analysis<|message|>", "<|end|>"),
            ends=("<|return|>", "<|call|>"),
            split=_split_harmony,
        ),
        Dialect(
            "gemma4",
            "Gemma 4",
            gemma_calls,
            call=("<|tool_call>", "<tool_call|>"),
            think=("<|channel>thought\n", "<channel|>"),
            thought=_compile(r"<\|channel>(?:\w*\n)?"),
            ends=("<turn|>", "<|tool_response>"),
        ),
        Dialect(
            "mistral",
            "Mistral, Devstral, Ministral, Magistral",
            _mistral_calls,
            call=("[TOOL_CALLS]", None),
            inside=("[CALL_ID]", "[ARGS]"),
            think=("[THINK]", "[/THINK]"),
        ),
        Dialect(
            "kimi_k2",
            "Kimi K2",
            partial(
                framed_calls,
                pattern=_compile(
                    r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^:<\s]+)(?::\d+)?)\s*"
                    r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)<\|tool_call_end\|>"
                ),
            ),
            call=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            inside=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
            call_id="functions.{name}:{index}",
        ),
        Dialect(
            "kimi_k3",
            "Kimi K3",
            _XTML,
            call=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
            inside=("<|open|>call", "<|open|>argument", "<|close|>call", "<|close|>argument"),
            think=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
            answer=(
                "<|open|>response<|sep|>",
                "<|close|>response<|sep|>",
                "<|close|>message<|sep|>",
            ),
            ends=("<|end_of_msg|>",),
        ),
        Dialect(
            "minimax_m3",
            "MiniMax M3",
            partial(
                element_calls,
                pattern=_compile(
                    re.escape(_MINIMAX)
                    + r'<invoke name="(?P<name>[^"\n]+)">(?P<parameters>.*?)'
                    + re.escape(_MINIMAX)
                    + "</invoke>"
                ),
                mark=_MINIMAX,
            ),
            call=(f"{_MINIMAX}<tool_call>", f"{_MINIMAX}</tool_call>"),
            inside=(_MINIMAX,),
            think=("<mm:think>", "</mm:think>"),
        ),
        Dialect(
            "deepseek_v32",
            "DeepSeek V3.2",
            _DSML,
            call=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
            inside=("<｜DSML｜", "</｜DSML｜"),
        ),
        Dialect(
            "deepseek_v4",
            "DeepSeek V4",
            _DSML,
            call=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
            inside=("<｜DSML｜", "</｜DSML｜"),
        ),
        Dialect(
            "deepseek_v3",
            "DeepSeek V3, R1",
            partial(
                framed_calls,
                pattern=_compile(
                    r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n<]+)\n"
                    r"```json\n(?P<arguments>.*?)\s*```<｜tool▁call▁end｜>"
                ),
            ),
            call=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            inside=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        ),
        Dialect(
            "deepseek_v31",
            "DeepSeek V3.1",
            partial(
                framed_calls,
                pattern=_compile(
                    r"<｜tool▁call▁begin｜>(?P<name>[^\n<]+)<｜tool▁sep｜>"
                    r"(?P<arguments>.*?)<｜tool▁call▁end｜>"
                ),
            ),
            call=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            inside=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        ),
        Dialect(
            "minimax_m2",
            "MiniMax M2",
            _INVOKE,
            call=("<minimax:tool_call>", "</minimax:tool_call>"),
            inside=("<invoke name=", "<parameter name=", "</invoke>"),
        ),
        Dialect(
            "glm4",
            "GLM 4.5 to 4.7, GLM 5",
            _ARG_KEYS,
            call=("<tool_call>", "</tool_call>"),
            inside=("<arg_key>", "<arg_value>"),
            ends=("<|user|>", "<|observation|>"),
        ),
        Dialect(
            "qwen_xml",
            "Qwen3-Coder, Qwen3.5, Nemotron 3",
            _XML,
            call=("<tool_call>", "</tool_call>"),
            inside=("<function=", "<parameter=", "</function>"),
        ),
        Dialect("olmo3", "OLMo 3", pythonic_calls, call=("<function_calls>", "</function_calls>")),
        Dialect(
            "lfm2",
            "LFM2, LFM2.5",
            pythonic_calls,
            call=("<|tool_call_start|>", "<|tool_call_end|>"),
        ),
        Dialect(
            "seed_oss",
            "Seed-OSS",
            _XML,
            call=("<seed:tool_call>", "</seed:tool_call>"),
            inside=("<function=", "<parameter=", "</function>"),
            think=("<seed:think>", "</seed:think>"),
        ),
        Dialect(
            "functiongemma",
            "FunctionGemma",
            partial(gemma_calls, quote="<escape>"),
            call=("<start_function_call>", "<end_function_call>"),
            inside=("<escape>",),
            ends=("<end_of_turn>", "<start_function_response>"),
        ),
        Dialect(
            "cohere",
            "Command R7B, Command A",
            call=("<|START_ACTION|>", "<|END_ACTION|>"),
            think=("<|START_THINKING|>", "<|END_THINKING|>"),
            answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
            ends=("<|END_OF_TURN_TOKEN|>",),
        ),
        Dialect(
            "command_r",
            "Command R, Command R+",
            _command_r_calls,
            call=("Action:\n```json", None),
            also_opens="Action: ```json",
            think=None,
        ),
        Dialect(
            "step3",
            "Step 3",
            _STEP,
            call=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
            inside=("<｜tool_call_begin｜>", "<steptml:", "<｜tool_call_end｜>"),
        ),
        Dialect(
            "longcat",
            "LongCat-Flash",
            call=("<longcat_tool_call>", "</longcat_tool_call>"),
            think=("<longcat_think>", "</longcat_think>"),
        ),
        Dialect(
            "apertus",
            "Apertus",
            keyed_calls,
            call=("<|tools_prefix|>", "<|tools_suffix|>"),
            think=("<|inner_prefix|>", "<|inner_suffix|>"),
        ),
        Dialect(
            "nemotron_v2",
            "Nemotron Nano v2",
            call=("<TOOLCALL>", "</TOOLCALL>"),
            ends=("<SPECIAL_12>",),
        ),
        Dialect(
            "jamba",
            "Jamba, Hunyuan A13B",
            call=("<tool_calls>", "</tool_calls>"),
            answer=("<answer>", "</answer>"),
        ),
        Dialect(
            "minicpm5",
            "MiniCPM 5",
            _FUNCTION_NAME,
            call=("<function name=", "</function>"),
            inside=("<param name=", "</param>"),
        ),
        Dialect(
            "phi4",
            "Phi-4-mini",
            _phi_calls,
            call=("<|tool_call|>", "<|/tool_call|>"),
            bare=_compile(r"\s*functools\s*\["),
        ),
        Dialect("granite3", "Granite 3", call=("<|tool_call|>", None), also_opens="<tool_call>"),
        Dialect(
            "hermes",
            "Qwen2.5, Qwen3, Granite 4, SmolLM3, Ernie 4.5, Hermes",
            call=("<tool_call>", "</tool_call>"),
        ),
        Dialect(
            "llama_json",
            "Llama 3.1 to 3.3",
            json_sequence,
            inside=("<|python_tag|>",),
            bare=_compile(r'\s*(?:<\|python_tag\|>|\{\s*"(?:name|parameters|arguments|type)"\s*:)'),
            ends=("<|eot_id|>", "<|eom_id|>"),
        ),
        Dialect(
            "pythonic",
            "Llama 3.2 and 4 (pythonic), Gemma 3 with a pythonic template",
            pythonic_calls,
            inside=("<|python_start|>",),
            bare=_compile(r"\s*(?:<\|python_start\|>|\[\s*[A-Za-z_][\w.]*\()"),
        ),
        Dialect("xlam", "xLAM 2", bare=_compile(r'\s*\[\s*\{\s*"(?:name|arguments)"\s*:')),
        Dialect("text", "any: every turn is one text", think=None),
    )
}
