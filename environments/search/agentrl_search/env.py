"""Questions that the agent answers by searching a corpus, over several turns.

With `dialect = "tools"` the agent calls `search` and `open`, and finally `answer`. With `"tags"` it
writes plain text in Search-R1's dialect (see `dialect.py`). Both use the same passages, limits and
rewards. The agent sees text from the corpus only; just the reward reads the reference.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.env.base import EnvConfig, Environment
from agentrl.env.registry import register
from agentrl.env.tools import tool
from agentrl.env.values import to_observation
from agentrl.errors import ConfigError, DataError
from agentrl.images import join_contents
from agentrl.types import Action, Message, StepResult, Task, with_reasoning
from agentrl_rewards.qa import em, f1, substring
from agentrl_search.corpus import Passage, read_corpus
from agentrl_search.dialect import (
    as_information,
    cut_turn,
    is_well_formed,
    read_action,
    without_tags,
)
from agentrl_search.index import Retrieval, build_index, open_index
from agentrl_search.retrieval import Hit, RemoteRetriever, Retriever
from agentrl_search.tasks import NO_ANSWER, SAMPLE_DIR, QuestionSet, load_questions

TOOLS_INSTRUCTION = (
    "Search for what you need, then call `answer` with the answer alone: a name, a number or a few "
    "words, no sentence."
)
TAGS_INSTRUCTION = (
    "Think between <think> and </think> each time you have read something new. To look something "
    "up, write a query between <search> and </search>; what was found follows between "
    "<information> and </information>. You may search several times. When you know the answer, "
    "write it alone, without explanation, between <answer> and </answer>: <answer>Oslo</answer>."
)
UNANSWERABLE_INSTRUCTION = f"If the sources do not answer the question, answer `{NO_ANSWER}`."
INVALID = (
    "This turn held no action. Write a query between <search> and </search>, or the final answer "
    "between <answer> and </answer>."
)
CUT = " ... (cut)"


class Weights(EnvConfig):
    """Weights of the reward's components. All components are reported, even with weight 0."""

    em: float = 1.0
    """1 if the answer equals a reference after SQuAD's normalisation, else 0."""
    f1: float = 0.0
    """Token F1 with the best reference."""
    substring: float = 0.0
    """1 if the answer contains a reference, else 0."""
    format: float = 0.0
    """Fraction of turns that follow the dialect's format."""
    retrieval: float = 0.0
    """1 if the agent was shown a gold passage, else 0. If the task names no gold passages, any text
    that contains a reference counts."""


class SearchConfig(EnvConfig):
    """Settings of the questions, the passages, the dialect and the reward."""

    source: str | dict[str, str] = "sample"
    """`sample` (twelve questions), a .jsonl or .parquet file of rows, a SQuAD .json file, a folder
    of such files (one split per file), or a table from split to file."""
    input_key: str | None = None
    """Column with the question. None: `prompt` if it contains chat messages, else `question`."""
    label_key: str | None = None
    """Column with the answers. None: `answers`, `golden_answers`, `answer` or `reward_model`."""
    metadata_key: str | None = None
    """Column with an object, or its JSON text, to merge into the task's metadata."""
    public_keys: tuple[str, ...] = ()
    """Columns that a function of `rollout.generate` or an agent finds in `task.metadata`; name none
    with an answer."""
    unanswerable: bool = False
    """Keep SQuAD 2.0's unanswerable questions, for which `unanswerable` is the right answer."""

    index: str | None = None
    """Directory made by `agentrl search index`."""
    corpus: str | None = None
    """File or folder of passages, which is indexed when the environment is loaded. Suited to small
    corpora."""
    retriever_url: str | None = None
    """Server with Search-R1's protocol, such as `agentrl search serve`: http://host:port/retrieve.
    If none of `index`, `corpus` and `retriever_url` is set, the corpus is that of `sample`, or the
    paragraphs of the SQuAD file."""
    retrieval: Retrieval | None = None
    """`bm25`, `dense` or `hybrid`; None uses everything the index supports."""
    allow_private: bool = False
    """Whether `retriever_url` and an index's embedding server may be on this machine or a private
    network. Anyone who can set the environment's config can set this."""
    retriever_timeout_s: float = Field(default=10.0, gt=0, le=15)
    """Seconds that the retriever has to answer a search, over all three attempts."""

    dialect: Literal["tools", "tags"] = "tools"
    """`tools` for tool calls, `tags` for plain text with Search-R1's tags."""
    require_think: bool = True
    """With `tags`, count a turn without `<think>` as badly formatted."""
    instruction: str | None = None
    """Text put below a question, after an empty line. None uses a default for the dialect, "" adds
    nothing. A prompt of chat messages gets an instruction only if this is set."""
    system_prompt: str | None = None

    top_k: int = Field(default=3, ge=1, le=10)
    """Passages per search, unless the agent asks for another number."""
    max_passage_chars: int = Field(default=2000, ge=50)
    """Maximum length of a passage in search results; longer ones are cut."""
    max_observation_chars: int = Field(default=8000, ge=200)
    """Maximum length of everything that one tool call returns."""
    weights: Weights = Weights()
    report_reference: bool = False
    """Put the right answers and the task's metadata into the `info` of the step that ends the
    episode, for the reward functions of a run file. The agent sees neither."""

    @model_validator(mode="after")
    def _check_retriever(self) -> SearchConfig:
        given = [
            name for name in ("index", "corpus", "retriever_url") if getattr(self, name) is not None
        ]
        if len(given) > 1:
            raise ValueError(f"set only one of {' and '.join(given)}")
        if self.retrieval is not None and self.index is None:
            raise ValueError("retrieval applies to an index only; set index, or leave it out")
        return self


@dataclass(slots=True, frozen=True)
class Shared:
    questions: QuestionSet
    retriever: Retriever


@register("search", max_sessions=1024)
class SearchEnvironment(Environment):
    Config = SearchConfig
    # Leaves a remote retriever enough time for its three attempts.
    step_timeout_s = 120.0

    @classmethod
    def load_shared(cls, config: SearchConfig) -> Shared:
        """Loads the questions and opens the retriever.

        Raises:
            ConfigError: the config names no usable source or retriever, or a package is missing.
            DataError: a file cannot be read.
        """
        questions = load_questions(
            config.source,
            input_key=config.input_key,
            label_key=config.label_key,
            metadata_key=config.metadata_key,
            public_keys=config.public_keys,
            unanswerable=config.unanswerable,
        )
        return Shared(questions, _open_retriever(config))

    @classmethod
    def close_shared(cls, shared: Shared) -> None:
        shared.retriever.close()

    def splits(self) -> dict[str, int | None]:
        return self.shared.questions.splits()

    def get(self, split: str, index: int) -> Task:
        return self.shared.questions.get(split, index)

    def offered_tools(self) -> list[str]:
        if self.config.dialect == "tags":
            return []
        # The protocol of remote retrievers has no request for a single passage.
        return ["search", "answer"] if self.config.retriever_url else ["search", "open", "answer"]

    async def reset(self, task: Task, *, seed: int) -> list[Message]:
        self._golds = _golds(task)
        self._answer: str | None = None
        self._found_gold = False
        self._num_turns = self._num_well_formed = 0
        self.metrics.update(searches=0.0, empty_searches=0.0)
        self.system_prompt = self.config.system_prompt
        if isinstance(task.prompt, str):
            instruction = self._default_instruction()
            messages: list[Message] = [{"role": "user", "content": task.prompt}]
        else:
            instruction = ""
            messages = [message.copy() for message in task.prompt]
        if self.config.instruction is not None:
            instruction = self.config.instruction
        if instruction:
            messages[-1]["content"] = join_contents([messages[-1]["content"], instruction], "\n\n")
        return messages

    @tool
    def search(
        self,
        query: Annotated[str, Field(max_length=2000, description="what to look for, in words")],
        k: Annotated[int | None, Field(ge=1, le=10, description="how many passages")] = None,
    ) -> str:
        """Find the passages that match a query best. Long ones are cut."""
        hits = self._search(query, k or self.config.top_k)
        texts = [
            f"id: {hit.passage.id}\ntitle: {hit.passage.title}\n"
            f"{_cut(hit.passage.text, self.config.max_passage_chars)}\n\n"
            for hit in hits
        ]
        return self._show(hits, texts).rstrip() or "Nothing was found."

    @tool
    def open(
        self, doc_id: Annotated[str, Field(max_length=500, description="id of a passage")]
    ) -> str:
        """Show a whole passage that a search found."""
        passage = self.shared.retriever.find(doc_id)
        if passage is None:
            return f"There is no passage with the id {doc_id!r}; take one from a search's results."
        text = f"title: {passage.title}\n{passage.text}"
        observation = _cut(text, self.config.max_observation_chars)
        self._note_gold(passage, observation)
        return observation

    @tool(terminal=True)
    async def answer(
        self, text: Annotated[str, Field(description="the final answer, in a few words")]
    ) -> None:
        """Give the final answer. This ends the episode."""
        self._answer = text

    async def step(self, action: Action) -> StepResult:
        self._num_turns += 1
        if self.config.dialect == "tags":
            observation = await self._step_tags(action.text, action.reasoning)
        else:
            observation = await self._step_tools(action)
        answered = self._answer is not None
        result = StepResult(observation, terminated=answered)
        if not (answered or self.episode.last_turn):
            return result
        result.truncated = not answered  # no answer counts as a wrong one
        result.reward_components = self._components()
        weights: Weights = self.config.weights
        result.reward = sum(
            getattr(weights, name) * value for name, value in result.reward_components.items()
        )
        result.info = {"answer": self._answer, "gold_passage_seen": self._found_gold}
        if self.config.report_reference:
            result.info |= {"reference": self.task.reference, "metadata": self.task.metadata}
        return result

    async def _step_tools(self, action: Action) -> list[Message]:
        invalid = self.metrics.get("invalid_calls", 0.0)
        observation = to_observation(await self.run_tools(action), "run_tools()")
        was_valid = self.metrics.get("invalid_calls", 0.0) == invalid
        self._num_well_formed += bool(action.tool_calls) and was_valid
        return observation

    async def _step_tags(self, text: str, reasoning: str) -> list[Message]:
        self._num_well_formed += is_well_formed(
            with_reasoning(text, reasoning), require_think=self.config.require_think
        )
        if text[len(cut_turn(text)) :].strip():
            self.metrics["overrun_turns"] = self.metrics.get("overrun_turns", 0.0) + 1
        action = read_action(text)
        if action is None:
            self._count_invalid()
            return [{"role": "user", "content": INVALID}]
        if action.kind == "answer":
            self._answer = action.text
            return []
        if not action.text:
            self._count_invalid()
            return [_information_message("The query was empty.")]
        found = await self.call(self._find_for_tags, action.text[:2000])
        return [_information_message(found)]

    def _find_for_tags(self, query: str) -> str:
        """Returns the search results in Search-R1's format."""
        hits = self._search(query, self.config.top_k)
        texts = [
            f'Doc {number}(Title: "{without_tags(hit.passage.title)}") '
            f"{_cut(without_tags(hit.passage.text), self.config.max_passage_chars)}\n"
            for number, hit in enumerate(hits, start=1)
        ]
        return self._show(hits, texts) or "Nothing was found."

    def _search(self, query: str, k: int) -> list[Hit]:
        hits = self.shared.retriever.search([query], k)[0]
        self.metrics["searches"] += 1
        self.metrics["empty_searches"] += not hits
        return hits

    def _show(self, hits: list[Hit], texts: list[str]) -> str:
        """Joins the hits' texts up to the length limit, and records a gold passage among them."""
        shown, room = "", self.config.max_observation_chars
        for hit, text in zip(hits, texts, strict=True):
            text = _cut(text, room - len(shown))
            self._note_gold(hit.passage, text)
            shown += text
            if len(shown) >= room:
                break
        return shown

    def _note_gold(self, passage: Passage, shown: str) -> None:
        metadata = self.task.metadata
        if ids := metadata.get("gold_ids"):
            found = isinstance(ids, list) and passage.id in ids
        elif titles := metadata.get("gold_titles"):
            found = isinstance(titles, list) and passage.title in titles
        else:
            found = not self._is_unanswerable() and substring(shown, self._golds) > 0
        self._found_gold = self._found_gold or found

    def _components(self) -> dict[str, float]:
        text = self._answer or ""
        if self._is_unanswerable() and em(text, NO_ANSWER):
            text = ""  # SQuAD's evaluation expects an empty answer
        scores = {
            "em": em(text, self._golds),
            "f1": f1(text, self._golds),
            "substring": substring(text, self._golds),
        }
        if self._answer is None:  # a truncated episode did not claim that there is no answer
            scores = dict.fromkeys(scores, 0.0)
        return scores | {
            "format": self._num_well_formed / self._num_turns,
            "retrieval": float(self._found_gold),
        }

    def _is_unanswerable(self) -> bool:
        return bool(self.task.metadata.get("unanswerable"))

    def _default_instruction(self) -> str:
        instruction = TAGS_INSTRUCTION if self.config.dialect == "tags" else TOOLS_INSTRUCTION
        return (
            f"{instruction} {UNANSWERABLE_INSTRUCTION}" if self.config.unanswerable else instruction
        )

    def _count_invalid(self) -> None:
        self.metrics["invalid_calls"] = self.metrics.get("invalid_calls", 0.0) + 1


class _TemporaryIndex:
    """An index of a small corpus in a temporary directory, which `close` deletes."""

    def __init__(self, corpus: Path) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="agentrl-search-")
        place = Path(self._directory.name) / "index"
        try:
            build_index(read_corpus(corpus), place)
            self._retriever = open_index(place)
        except BaseException:
            self._directory.cleanup()
            raise

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        return self._retriever.search(queries, k)

    def find(self, passage_id: str) -> Passage | None:
        return self._retriever.find(passage_id)

    def close(self) -> None:
        self._retriever.close()
        self._directory.cleanup()


def _open_retriever(config: SearchConfig) -> Retriever:
    if config.retriever_url is not None:
        return RemoteRetriever(
            config.retriever_url,
            allow_private=config.allow_private,
            timeout_s=config.retriever_timeout_s,
        )
    if config.index is not None:
        directory = Path(config.index).expanduser()
        return open_index(directory, config.retrieval, allow_private=config.allow_private)
    if config.corpus is not None:
        corpus = Path(config.corpus).expanduser()
        if not corpus.exists():
            raise ConfigError(
                f"corpus {corpus} does not exist; relative paths start at {Path.cwd()}"
            )
        return _TemporaryIndex(corpus)
    if config.source == "sample":
        return _TemporaryIndex(SAMPLE_DIR / "passages.jsonl")
    if isinstance(config.source, str) and config.source.endswith(".json"):
        return _TemporaryIndex(Path(config.source).expanduser())
    raise ConfigError(
        "there is no corpus to search: set index (a directory made by `agentrl search index`), "
        "corpus (a small file or folder) or retriever_url"
    )


def _information_message(text: str) -> Message:
    # It has a name, so that a chat template can continue the assistant's turn with it.
    return {"role": "user", "name": "information", "content": as_information(text)}


def _golds(task: Task) -> list[str]:
    reference = task.reference if isinstance(task.reference, list) else [task.reference]
    golds = [gold for gold in reference if isinstance(gold, str) and gold.strip()]
    if len(golds) < len(reference) or not (golds or task.metadata.get("unanswerable")):
        raise DataError(
            f"task {task.id}: the reference has to be a right answer or a non-empty list of them"
        )
    return golds


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: max(limit - len(CUT), 0)] + CUT[:limit]
