"""Messages to tokens, append-only: what the model sampled is never tokenised again.

The first prompt comes from the tokenizer's own chat template. Every later observation becomes a
token *suffix*: the conversation is rendered with a dummy assistant turn in place of the sampled
one, and everything from that dummy's close token on is cut out and tokenised. The sampled ids in
front of it stay as they were, so the prompt of turn k is bit for bit the row that will be trained.

That is exact only if the template itself is append-only. Some templates edit the past (a thinking
template that drops earlier reasoning). `Renderer` tests its template once, at start-up: it builds
dialogues of turns that think, call and speak, both ways and compares the ids. A template
that fails is rendered whole for every turn instead, and a changed past forks a new branch
(see `rollout.driver`). Edits that begin only later, in a longer dialogue or with other contents,
are found by an audit: one turn in a hundred, and each that is longer than all before it, is
compared with the whole render.
"""

from __future__ import annotations

import contextlib
import functools
import html
import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from agentrl.errors import ConfigError, HistoryError, first_line
from agentrl.model.text.guard import Guard
from agentrl.model.text.processor import Processor, with_markers
from agentrl.model.text.template import NAME, SENTINEL, TOOL, Template, example_call, rendered
from agentrl.types import JSON, Action, Message, ParseStatus, ShownImage, ToolSpec

logger = logging.getLogger("agentrl.rollout")

HistoryMode = Literal["append_only", "fork"]

# Never produced by a tokenizer's merges across its borders and never meaningful to a template.
_SENTINEL = "agentrl-dummy-turn"
_ASKED: Message = {"role": "user", "content": "x"}
_CONTENT = "agentrl-dummy-content"

PROMPT_END_TOKENS = 512
"""Tokens before a turn that may say whether the prompt opened a thought."""
LONG_TEST = 8
"""Turns of the self-test's long dialogues."""
AUDIT_EVERY = 100
"""Turns of which one has its whole dialogue audited."""
MAX_FRAMES = 4096
MAX_PROMPTS = 256

_AWKWARD = (
    "",
    " \n leading and trailing space \n ",
    "\n\n<information>x</information>\n\n",
    "<think>\nx\n</think>\n\n<tool_response>\ny\n</tool_response><tool_call>",
    '{"json": ["{{ x }}", "{% if y %}", null]}',
    "ÜnïCode \u4f60\u597d & <b>&amp;</b> 'quotes' \"double\" \\ back",
    "a long text " * 999,
)
"""Contents that templates are known to treat specially: trimmed, split, looked into, escaped, or
cut."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that rollouts use."""

    @property
    def chat_template(self) -> object: ...

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any: ...

    def encode(self, text: Any, **kwargs: Any) -> Any: ...

    def decode(self, token_ids: Any, **kwargs: Any) -> Any: ...


def _added_tokens(tokenizer: Tokenizer) -> dict[int, Any]:
    return getattr(tokenizer, "added_tokens_decoder", {})


class Renderer:
    """Renders the dialogues of one model.

    Attributes:
        dialect: how the model writes reasoning and tool calls.
        close_token_id: the token that ends an assistant turn of text in the template. Sampling
            stops there; it stays in the row, with mask 1, because the policy sampled it.
        stop_token_ids: tokens that end a turn: the close token, the dialect's and the tokenizer's
            end token.
        history: `append_only` or `fork`, as the self-test or a later audit found.
        num_audited: turns that an audit compared with the whole render.
        processor: of a vision-language model; None for one that takes no images.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        history: Literal["auto", "append_only", "fork"] = "auto",
        template_kwargs: dict[str, JSON] | None = None,
        dialect: str = "auto",
        tools: str = "template",
        stop_token_ids: Sequence[int] = (),
        processor: Processor | None = None,
    ) -> None:
        """
        Args:
            processor: of a vision-language model; None for one that takes no images.
            dialect: a name in `agentrl.model.text.table`, or `auto`.
            history: `auto` follows the self-test; the others force a mode. Forcing `append_only`
                keeps what the template would have dropped in the model's context.
            tools: how the model is told of its tools, as in `rollout.tools`.
            stop_token_ids: additional tokens that end a turn, as in `rollout.stop_token_ids`.
            template_kwargs: extra variables for the template, such as `enable_thinking`.

        Raises:
            ConfigError: the tokenizer has no chat template, its turns have no close token, or the
                dialect does not read what it writes.
        """
        if not tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template; add `chat_template` to its "
                "tokenizer_config.json (or a chat_template.jinja beside it), or choose an "
                "instruction-tuned model"
            )
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs or {}
        # The Rust tokenizer behind a Hugging Face one costs a third per call, and less again as a
        # batch of one: `encode` works out each token's place in the text, which nobody asks for.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._encode: Callable[[str], list[int]] = (
            (lambda text: backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
            if backend is not None
            else (lambda text: tokenizer.encode(text, add_special_tokens=False))
        )
        self._decode = (tokenizer if backend is None else backend).decode
        self.processor = processor
        self._as_parts = processor is not None and self._takes_parts_only()
        source = str(self.template_kwargs.get("chat_template", tokenizer.chat_template))
        self.template = Template(
            self._render,
            source,
            dialect=dialect,
            response=getattr(tokenizer, "response_template", None),
            tools=tools,
            added_tokens=[str(each) for each in _added_tokens(tokenizer).values()],
        )
        self.dialect = self.template.dialect
        self._text = self.template.text
        marks = "".join(self.dialect.marks)
        self._guard = Guard(tokenizer, self._encode, source + marks)
        # A demonstration may hold calls and thoughts as the model is to write them.
        self._taught = frozenset(each for each in self._guard.spellings if each in marks)
        # One text to us, it is still the template that looks for thoughts in it.
        self._spared = frozenset(() if self.dialect.think else ("<think>", "</think>"))
        self._prompts: dict[bytes | None, list[int]] = {}
        # A template that writes today's date has to be asked every day.
        self._keeps_prompts = "strftime_now" not in source
        self._frame_of = functools.lru_cache(MAX_FRAMES)(self._frame)
        ends = [self._one_special_token(end) for end in self.dialect.ends] or [None]
        self.close_token_id = self._find_close_token() if ends[0] is None else ends[0]
        self._call_close_id = self.close_token_id if ends[-1] is None else ends[-1]
        eos = getattr(tokenizer, "eos_token_id", None)
        self.stop_token_ids = tuple(
            sorted({self.close_token_id, *(each for each in (eos, *ends) if each is not None)})
        )
        self._end_texts = [
            self._decode([each], skip_special_tokens=False) for each in self.stop_token_ids
        ]
        marks = "".join(self.dialect.think or ())
        self._frame_ids = self._guard.special_ids - frozenset(self._encode(marks))
        self._require_own_tokens()
        self.history: HistoryMode = history if history != "auto" else self._self_test()
        # Who forces append_only wants what the template would not write.
        self._audits = history == "auto"
        self.stop_token_ids = tuple(
            sorted({*self.stop_token_ids, *self._known_tokens(stop_token_ids)})
        )
        self.num_audited = 0
        self._num_continued = 0
        # Most messages and longest content that an audit saw, without tools and with.
        self._seen = [(0, 0), (0, 0)]

    def prompt(self, messages: list[Message], tools: list[ToolSpec]) -> list[int]:
        """Returns the whole dialogue as token ids, up to where the assistant begins.

        The members of a group begin with the same prompt, by far the longest text, so it is
        rendered and tokenised once and cached."""
        messages = self._marked(messages)
        key = self._prompt_key(messages, tools)
        ids = self._prompts.pop(key, None)
        if ids is None:
            guarded, offered, mark = self._guard.guard(messages, tools, spared=self._spared)
            ids = self._guard.encode(self._text(guarded, offered, True), mark)
        if key is not None:
            self._prompts[key] = ids  # as the newest; the oldest goes first
            if len(self._prompts) > MAX_PROMPTS:
                self._prompts.pop(next(iter(self._prompts)))
        return list(ids)

    def suffix(self, observation: list[Message], *, closed_by: int | None) -> list[int]:
        """Returns the tokens between a sampled assistant turn and the next one, whatever came
        before.

        Args:
            closed_by: the stop token that the sampled turn ended with; None: it was cut by length.
                Unless it is the one that the template writes, the template's comes first.
        """
        observation = self._marked(observation)
        observation, _, mark = self._guard.guard(observation, [], spared=self._spared)
        return self._behind(closed_by, self._tail(observation), mark)

    def continuation(
        self,
        messages: list[Message],
        num_observed: int,
        tools: list[ToolSpec],
        *,
        closed_by: int | None,
    ) -> list[int] | None:
        """Returns the tokens between the newest sampled turn and the next one; None if the template
        no longer renders everything before the newest observation as it did.

        Compares renderings with renderings, never with sampled text: a tool call that the template
        would space differently is not an edit of the past.

        Args:
            messages: the dialogue, ending with an assistant turn and `num_observed` messages.
            closed_by: as in `suffix`.

        Raises:
            HistoryError: an audit found that the template edits the past. It is rendered whole
                from then on.
        """
        messages = self._marked(messages)
        turn = len(messages) - num_observed - 1
        observation = messages[turn + 1 :]
        # The self-test has seen no turns that the policy did not take.
        foreign = any(message["role"] == "assistant" for message in observation)
        if self.history == "append_only" and not foreign:
            if self._audits:
                self._audit(messages, turn, tools)
            return self.suffix(observation, closed_by=closed_by)
        messages, tools, mark = self._guard.guard(messages, tools, spared=self._spared)
        tail = self._tail_in(messages, turn, tools, self._text(messages[:turn], tools, True))
        return None if tail is None else self._behind(closed_by, tail, mark)

    def show(
        self, ids: list[int], messages: list[Message], start: int = 0
    ) -> tuple[list[int], list[ShownImage]]:
        """Returns the ids of a prompt or suffix with the images' tokens in place of the markers,
        and the images.

        Args:
            ids: rendered from these messages, with one marker for each image.
            start: position of the first id in its row.
        """
        if self.processor is None:
            return ids, []
        return self.processor.show(ids, messages, start)

    def _marked(self, messages: list[Message]) -> list[Message]:
        return with_markers(messages, takes_images=self.processor is not None)

    def _takes_parts_only(self) -> bool:
        """Tells whether the template accepts contents only as lists of parts."""
        from jinja2.exceptions import TemplateError

        asked: list[Message] = [{"role": "user", "content": _CONTENT}]
        self._as_parts = False
        try:
            return _CONTENT not in self._render(asked, [], True)
        except TemplateError:
            return True

    def _tail_in(
        self, messages: list[Message], turn: int, tools: list[ToolSpec], asked: str
    ) -> str | None:
        """Returns the text that the template writes after a turn; None if that text changes what
        comes before it.

        Args:
            asked: the dialogue before the turn, as rendered.
        """
        with_turn = self._text(messages[: turn + 1], tools, False)
        whole = self._text(messages, tools, True)
        # Perhaps all of it: the message behind the turn ends it.
        end = self._without_ends(with_turn)
        if not (with_turn.startswith(asked) and whole.startswith(with_turn[:end])):
            return None
        return whole[end:]

    def _without_ends(self, text: str) -> int:
        """Returns the position at which the tokens that end the rendered text begin."""
        end = len(text)
        while ends := [each for each in self._end_texts if text[:end].rstrip().endswith(each)]:
            end = len(text[:end].rstrip()) - len(ends[0])
        return end

    def _audit(self, messages: list[Message], newest: int, tools: list[ToolSpec]) -> None:
        """Compares the ids that the policy read with the template's whole render, for the turns
        that are due for an audit."""
        self._num_continued += 1
        longest = max(len(message["content"]) for message in messages)
        most_seen, longest_seen = self._seen[bool(tools)]
        if self._num_continued % AUDIT_EVERY == 0:
            first = 0
        elif len(messages) > most_seen or longest > 2 * longest_seen:
            self._seen[bool(tools)] = max(len(messages), most_seen), max(longest, longest_seen)
            first = newest  # the longest dialogue so far
        else:
            return
        self.num_audited += 1
        if (end := self._first_edit(messages, tools, first)) is not None:
            self.history = "fork"
            reason = (
                f"the chat template writes the past of a dialogue of {end} messages otherwise than "
                "the policy read it, which its self-test did not show; set rollout.history = "
                '"fork"'
            )
            logger.warning("%s. Every turn is rendered whole from now on", reason)
            raise HistoryError(reason)
        if self.num_audited in (1, 10, 100, 1000, 10_000):
            # No metric of a step: a run that was resumed begins to count anew.
            logger.info(
                "%d prompts that continue a row were compared with the whole render: all alike",
                self.num_audited,
            )

    def _first_edit(self, messages: list[Message], tools: list[ToolSpec], first: int) -> int | None:
        """Returns the number of messages at which the template first edits the past; None if it
        never does.

        Compares texts: each whole render with the previous one and the suffix.

        Args:
            first: turns before this message are skipped.
        """
        messages, tools, _ = self._guard.guard(messages, tools, spared=self._spared)
        turns = [at for at, each in enumerate(messages) if each["role"] == "assistant"]
        for turn, end in zip(turns, [*turns[1:], len(messages)], strict=True):
            if turn < first or end == turn + 1:
                continue
            shown, asked = (self._text(messages[:at], tools, False) for at in (end, turn))
            tail = self._tail_in(messages[:end], turn, tools, asked[: self._without_ends(asked)])
            if tail != self._tail(messages[turn + 1 : end]) or not self._text(
                messages[:end], tools, True
            ).startswith(shown[: self._without_ends(shown)]):
                return end
        return None

    def _behind(self, closed_by: int | None, tail: str, mark: str) -> list[int]:
        ids = self._guard.encode(tail, mark)
        # A template may leave the turn open, for messages that belong inside it.
        return ids[1:] if closed_by is not None and ids[:1] == [closed_by] else ids

    def assistant_turn(self, message: Message) -> list[int]:
        """Returns the ids that a policy would have sampled for this assistant message, close token
        included.

        The dialect's marks become its tokens here, wherever the message spells them.

        Raises:
            ValueError: the template renders nothing between the two ends of the turn.
        """
        before = self._text([_ASKED], [], True)
        (message,), _, mark = self._guard.guard([message], [], spared=self._taught)
        whole = self._text([_ASKED, message], [], False)
        if not whole.startswith(before):
            raise ValueError(
                "the chat template does not put an assistant turn behind its generation prompt"
            )
        ids = self._guard.encode(whole[len(before) :], mark)
        end = next((at for at, each in enumerate(ids) if each in self.stop_token_ids), None)
        if end is None:  # the template leaves the end of a turn to the message behind it
            return [*ids, self._call_close_id if message.get("tool_calls") else self.close_token_id]
        return ids[: end + 1]

    def read_turn(
        self, token_ids: list[int], start: int, tools: list[ToolSpec], *, turn_id: int
    ) -> tuple[Action, ParseStatus]:
        """Reads the action of the turn that was sampled at `token_ids[start:]`.

        Args:
            tools: those that the policy was offered.
        """
        ids = token_ids[start:]
        whole = self._decode(ids, skip_special_tokens=False) if self.dialect.split else None
        return self.dialect.read_turn(
            self.decode(ids) if whole is None else whole,
            tools,
            turn_id=turn_id,
            prompt_end=self._prompt_end(token_ids, start),
        )

    def _prompt_end(self, token_ids: list[int], start: int) -> str:
        """Returns the text that the template wrote before a turn, without the messages before it,
        which may mention thoughts without opening one.

        The text begins after the last special token, because no content contains one; tokens that
        open or close a thought do not count."""
        first = max(0, start - PROMPT_END_TOKENS)
        last = next(
            (at for at in range(start - 1, first - 1, -1) if token_ids[at] in self._frame_ids),
            start - 32,
        )
        if self.dialect.split:  # it knows its own beginnings
            last = min(last, start - 32)
        return self._decode(token_ids[max(last, 0) : start], skip_special_tokens=False)

    def decode(self, token_ids: list[int]) -> str:
        """Returns sampled ids as text, special tokens included (tool-call tags may be special),
        without the stop tokens at the end."""
        end = len(token_ids)
        while end and token_ids[end - 1] in self.stop_token_ids:
            end -= 1
        return self._decode(token_ids[:end], skip_special_tokens=False)

    def _prompt_key(self, messages: list[Message], tools: list[ToolSpec]) -> bytes | None:
        """Returns a cache key that is equal only for equal dialogues; None for a dialogue that is
        not cached."""
        if not self._keeps_prompts:
            return None
        try:
            return msgspec.msgpack.encode((messages, tools))
        except (TypeError, ValueError, OverflowError):  # no JSON, or half of a surrogate pair
            return None

    def _render(self, messages: list[Any], tools: list[ToolSpec], generation_prompt: bool) -> str:
        if self._as_parts:
            messages = [
                {**each, "content": [{"type": "text", "text": each["content"]}]}
                if isinstance(each["content"], str)
                else each
                for each in messages
            ]

        def render(offered: list[Any] | None) -> str:
            return self.tokenizer.apply_chat_template(
                messages,
                tools=offered,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self.template_kwargs,
            )

        return rendered(render, tools)

    def _tail(self, observation: list[Message]) -> str:
        """Returns the text after the dummy turn.

        A template takes ten times as long as inserting contents between texts that it rendered
        before, so contents are inserted wherever `_frame` found that this gives the same text."""
        contents = [message["content"] for message in observation]
        frame = None
        if all(type(content) is str for content in contents):
            with contextlib.suppress(TypeError):  # a message with a value that is not a scalar
                frame = self._frame_of(
                    *((*{**message, "content": ""}.items(),) for message in observation)
                )
        if frame is None:
            return self._render_tail(observation)
        text = frame[0]
        for content, after in zip(contents, frame[1:], strict=True):
            text += str(content) + after
        return text

    def _frame(self, *items: tuple[tuple[str, Any], ...]) -> list[str] | None:
        """Returns the texts that the template puts around the contents of such messages.

        Returns None where inserting differs from rendering: a template may trim, escape or inspect
        a content. This is tested with contents that such templates change.

        Args:
            items: the messages, each as pairs of key and value; their contents do not matter.
        """
        observation: list[Any] = [dict(message) for message in items]
        marked: list[Any] = [
            {**message, "content": f"{_CONTENT}-{position}-"}
            for position, message in enumerate(observation)
        ]
        rest, frame = self._render_tail(marked), []
        for message in marked:
            before, found, rest = rest.partition(str(message["content"]))
            if not found:
                return None
            frame.append(before)
        frame.append(rest)
        for awkward in _AWKWARD:
            tried: list[Any] = [{**message, "content": awkward} for message in observation]
            spliced = frame[0] + "".join(awkward + after for after in frame[1:])
            if spliced != self._render_tail(tried):
                return None
        return frame

    def _render_tail(self, observation: list[Message]) -> str:
        answers = [message for message in observation if message["role"] == "tool"]
        if answers:  # some templates name the call that is answered, or refuse an answer to none
            turn: Message = {"role": "assistant", "content": ""}
            word = SENTINEL
            while any(word in str(message["content"]) for message in observation):
                word += "-"  # or the answer would be cut where it says the word
            turn["tool_calls"] = [self._dummy_call(*each, word) for each in enumerate(answers)]
            text = self._text([_ASKED, turn, *observation], [TOOL], True)
            _, found, rest = text.rpartition(word)
            ends = [at for end in self._end_texts if (at := rest.find(end)) >= 0]
            if found and ends:
                return rest[min(ends) :]
        text = self._text(
            [_ASKED, {"role": "assistant", "content": _SENTINEL}, *observation], [], True
        )
        _, found, rest = text.rpartition(_SENTINEL)
        if not found:
            raise ConfigError(
                "the chat template does not write what an assistant said in earlier turns (it is "
                "one of an embedding or ranking model, or takes contents as lists of parts); name "
                "another with model.chat_template"
            )
        for mark in self.dialect.answer:
            rest = rest.removeprefix(mark)  # the policy wrote it
        return rest

    def _dummy_call(self, index: int, answer: Message, word: str) -> JSON:
        name = answer.get("name") or NAME
        call = example_call(self.dialect, {"word": word}, index=index, name=name)
        return {**call, "id": answer.get("tool_call_id") or call["id"]}

    def _one_special_token(self, text: str) -> int | None:
        """Returns the id of the text's token if it is a single special token, else None."""
        ids = self._encode(text)
        if len(ids) != 1 or self.tokenizer.decode(ids, skip_special_tokens=True):
            return None
        return ids[0]

    def _known_tokens(self, token_ids: Sequence[int]) -> Sequence[int]:
        for each in token_ids:
            try:
                known = bool(self._decode([each], skip_special_tokens=False))
            except (IndexError, OverflowError, ValueError):
                known = False
            if not known:
                raise ConfigError(
                    f"rollout.stop_token_ids: the tokenizer has no token {each}; give ids of it"
                )
        return token_ids

    def _find_close_token(self) -> int:
        from jinja2.exceptions import TemplateError

        try:
            ids = self._encode(self._render_tail([_ASKED]))
        except TemplateError as error:
            raise ConfigError(
                f"the chat template does not render a dialogue of texts ({first_line(error)}); set "
                "what it lacks in rollout.template, or name another with model.chat_template"
            ) from error
        # The closing tag must be one token, or "the turn is over" could be sampled in pieces.
        text = self.tokenizer.decode(ids[:1], skip_special_tokens=False)
        with_special = self.tokenizer.decode(ids[:1], skip_special_tokens=True)
        if not text or text == with_special:
            raise ConfigError(
                "the chat template does not close an assistant turn with one special token "
                f"(it continues with {text!r}); use a template that does, such as ChatML's "
                "<|im_end|>"
            )
        return ids[0]

    def _require_own_tokens(self) -> None:
        """Checks that the template does not make one of its own tokens from a text that only nearly
        spells it."""
        from jinja2.exceptions import TemplateError

        token = self._end_texts[self.stop_token_ids.index(self.close_token_id)]
        removed = ("<b>", "</think>", "\n", " ", "\\", *self._guard.removed)
        cut = [f"{token[:3]}{inside}{token[3:]}" for inside in removed]
        edited = [token.swapcase(), token.upper(), html.escape(token), *cut]
        hostile = " ".join([token, *edited])
        harmless = "".join("x" if each in token else each for each in hostile)

        def num_tokens(role: str, said: str) -> int:
            call = example_call(self.dialect, {"word": said})
            turn: Any = {"role": "assistant", "content": said, "reasoning": said}
            if role == "tool":
                turn = {**turn, "content": "", "tool_calls": [call]}
            answer: Any = {"role": role, "content": said}
            if role == "tool":
                answer |= {"tool_call_id": call["id"], "name": NAME}
            messages, tools, _ = self._guard.guard([_ASKED, turn, answer], [TOOL])
            return len(self._guard.find(self._text(messages, tools, True)))

        for role in ("user", "tool"):
            try:
                makes = num_tokens(role, hostile) > num_tokens(role, harmless)
            except TemplateError:
                continue  # some take no answers of tools
            if makes:
                raise ConfigError(
                    f"the chat template makes its own token {token!r} of a message that only "
                    "nearly spells it: it changes letters or takes something out of contents, so "
                    "a text could end a turn; use a template that writes contents as they are"
                )

    def _self_test(self) -> HistoryMode:
        from jinja2.exceptions import TemplateError

        short = (False, False, False), (True, True, True), (True, False, True)
        for calls in (*short, (False,) * LONG_TEST, (True, False) * (LONG_TEST // 2)):
            try:
                appends = self._append_only(calls)
            except TemplateError:
                if not any(calls):
                    raise
                continue  # some take no answers of tools, and serve without them
            if not appends:
                return "fork"
        return "append_only"

    def _append_only(self, calls: tuple[bool, ...]) -> bool:
        """Tells whether incremental and whole rendering agree on a dialogue of calls and texts."""
        tools = [TOOL] if any(calls) else []
        messages: list[Message] = [{"role": "user", "content": "Where is it?"}]
        row = self.prompt(messages, tools)
        for turn, with_call in enumerate(calls):
            assistant, observation = self._example_turn(turn, with_call)
            if len(calls) == LONG_TEST:  # texts are enough, and ids take their time
                messages += [assistant, observation]
                continue
            ids = self._encode(self._text([*messages, assistant], tools, False))
            if ids[: len(row)] != row:
                return False
            ends = (at for at in range(len(row), len(ids)) if ids[at] in self.stop_token_ids)
            end = next(ends, None)
            closed_by = None if end is None else ids[end]
            row = ids if end is None else ids[: end + 1]
            row = row + self.suffix([observation], closed_by=closed_by)
            messages += [assistant, observation]
            if row != self.prompt(messages, tools):
                return False
        return len(calls) < LONG_TEST or self._first_edit(messages, tools, 0) is None

    def _example_turn(self, turn: int, with_call: bool) -> tuple[Message, Message]:
        """Returns an assistant turn that thinks, and the tool's answer or user's message after it.
        Later turns are long."""
        more = " and more" * min(4**turn, 400) if turn > 2 else ""
        said: Message = {
            "role": "assistant",
            "content": f"Part {turn}{more}.",
            "reasoning": f"step {turn}",
        }
        if not with_call:
            return said, {"role": "user", "content": f"And then {turn}{more}?"}
        call = example_call(self.dialect, {"word": f"w{turn}"}, turn=turn)
        said["tool_calls"] = [call]
        return said, {
            "role": "tool",
            "content": f"found {turn}{more}",
            "tool_call_id": call["id"],
            "name": NAME,
        }
