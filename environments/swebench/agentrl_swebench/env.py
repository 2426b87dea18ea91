"""SWE-bench environment: an agent fixes a real bug by shell commands in the instance's container.

An episode starts a container of the instance's scrubbed image (`images.py`, `patch.py`), runs the
agent's commands and ends with `submit`. The environment then extracts the change, ends the
container, and has the official harness grade the change in a fresh one (`grade.py`). The verdict,
which wrong values in a withheld run lower, is the reward. A failure of the infrastructure is an
error and never reward 0.

The agent sees the problem statement, its commands' output and the rules. The tests and the
reference solution stay in this process.
"""

from __future__ import annotations

import asyncio
import shlex
import threading
import time
import uuid
import weakref
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from agentrl.env.base import EnvConfig, Environment, Observation
from agentrl.env.container.container import MAX_COMMAND_CHARS, describe
from agentrl.env.container.engine import connect, reap_abandoned
from agentrl.env.registry import register
from agentrl.env.tools import tool
from agentrl.env.values import to_observation
from agentrl.errors import DataError, EnvError, EnvUnavailable, GraderError
from agentrl.images import join_contents
from agentrl.types import JSON, Action, Message, Task
from agentrl_swebench import images
from agentrl_swebench.containers import WORKDIR, InstanceContainer
from agentrl_swebench.dataset import Instance, load_instances
from agentrl_swebench.grade import Verdict, grade
from agentrl_swebench.patch import Extracted, ScrubError, check_scrubbed, extract
from agentrl_swebench.policy import POLICY_TEXTS

MAX_CREATES = 4
"""Containers that are created at once. More at once would not be faster in total."""
MAX_EDIT_BYTES = 1 << 20
MIN_FREE_BYTES = 1 << 30
"""Free bytes on the engine's disk below which no container is started, since agents write to it."""

PROMPT = """\
A software repository lies in {workdir}. Somebody reported this problem:

<problem>
{problem}
</problem>

Change the repository's source so that the problem is solved. Hidden tests decide whether it is; \
they test the behaviour that the report asks for, and that nothing else broke.

How you work:
- `bash` runs a command in {workdir}. Each command is a new shell: `cd` and variables do not last, \
changes to files do. There is no input and no network. A command is stopped after \
{command_timeout_s:g} seconds.
{edit}- `submit` ends your work. {policy}
{turns}
Find the cause, change the source, check your change by running it, then submit."""


class SWEBenchConfig(EnvConfig):
    """Keys that select instances, limit the agent and decide how its change is graded."""

    source: str | dict[str, str] = "verified"
    """A .jsonl, .json or .parquet file, an alias (`full`, `lite`, `verified`, `multilingual`,
    `multimodal`) or a Hugging Face name, which becomes the split `test`; or a table that maps names
    of splits to such sources."""
    dataset_split: str = "test"
    """Split of a Hugging Face dataset."""
    instance_ids: list[str] | None = None
    """Use only the instances with these ids; by default all."""

    policy: Literal["official", "strict"] = "strict"
    """Which part of a change is graded: `official` takes all of it, as the leaderboard does;
    `strict` leaves out files that decide how tests are run. The agent is told."""
    grade: bool = True
    """If false, the episode ends without a verdict and with the change in its info, under
    `model_patch`, for predictions that are graded later."""
    withhold: bool = True
    """First run a change on tests without their expected values, and reward it only if it gives
    the right ones. A change that forges results gets reward 0. If no test to fix has a value that
    can be withheld, a resolved episode has no reward and is masked."""
    official_run: Literal["always", "uncovered"] = "always"
    """When the official run is made, if `withhold` is set. `uncovered`, for training, leaves it
    out where the withheld run judges every required test or finds a wrong value."""
    pay_uncovered: bool = False
    """Reward resolved episodes that no withheld value confirms by the official verdict alone. A
    policy is then paid for forged results as for a fix, and sooner or later it may learn to forge
    them."""
    grade_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds that an instance's tests may take."""
    grading_workers: int | None = Field(default=None, ge=1)
    """Gradings that run at once in a process; one per core by default."""

    edit_tool: bool = False
    """Also offer `str_replace`, which small models use better than sed."""
    command_timeout_s: float = Field(default=60.0, gt=0, le=600)
    """Seconds that one command may take."""
    max_output_chars: int = Field(default=10_000, ge=100)
    """Characters of a command's output that the agent sees; the middle of longer output is left
    out."""

    memory_mb: int = Field(default=4096, ge=64)
    """Memory of an agent's container in MiB, swap included."""
    cpus: float = Field(default=2.0, gt=0)
    """CPU cores of an agent's container, fractions allowed."""
    max_processes: int = Field(default=512, ge=16)
    """Processes and threads in an agent's container."""
    disk_mb: int | None = Field(default=None, ge=64)
    """MiB that an agent may write; by default unlimited. Works on engines that store on btrfs
    (where the image's size counts, too), on zfs, or with overlay2 on xfs mounted with pquota."""
    min_free_gb: float = Field(default=10.0, ge=0)
    """GiB that must be free on the engine's disk, after eviction, before an image is pulled."""


@dataclass(slots=True)
class Shared:
    instances: dict[str, list[Instance]]
    """Instances by split."""
    by_id: dict[str, Instance]
    image_ids: dict[str, str] = field(default_factory=dict)
    """Image id by name as first resolved, so that a moved tag changes nothing within a run."""
    scrubbed: dict[str, images.Scrubbed] = field(default_factory=dict)
    """Scrubbed image by the id of its source."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while an image is resolved or pulled, so that no image is pulled twice."""
    creates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    """Limits the containers that are created at once, by event loop."""

    def creating(self) -> asyncio.Semaphore:
        return self.creates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MAX_CREATES))


@register("swebench", max_sessions=64)
class SWEBenchEnvironment(Environment):
    """SWE-bench instances, graded by the official harness."""

    Config = SWEBenchConfig
    # A reset may have to pull and scrub an image first.
    reset_timeout_s = 1800.0
    # A grading may wait for a free worker, take two attempts and withheld runs.
    step_timeout_s = 7200.0

    @classmethod
    def load_shared(cls, config: SWEBenchConfig) -> Shared:
        """Loads the instances, checks that the engine answers and removes containers that earlier
        runs left on it.

        Raises:
            ConfigError: a package is missing, or the engine's address is wrong.
            EnvUnavailable: no engine answers.
            DataError: the instances cannot be read, or differ between splits.
        """
        sources = config.source if isinstance(config.source, dict) else {"test": config.source}
        instances = {
            split: load_instances(
                source, split=config.dataset_split, instance_ids=config.instance_ids
            )
            for split, source in sources.items()
        }
        by_id: dict[str, Instance] = {}
        for rows in instances.values():
            for instance in rows:
                if by_id.setdefault(instance.instance_id, instance) != instance:
                    raise DataError(
                        f"instance {instance.instance_id} differs between the splits of source"
                    )
        reap_abandoned()
        return Shared(instances, by_id)

    def splits(self) -> dict[str, int | None]:
        return {split: len(rows) for split, rows in self.shared.instances.items()}

    def get(self, split: str, index: int) -> Task:
        instance = self.shared.instances[split][index]
        return Task(instance.instance_id, instance.problem_statement)

    def offered_tools(self) -> list[str]:
        return ["bash", "str_replace", "submit"] if self.config.edit_tool else ["bash", "submit"]

    async def reset(self, task: Task, *, seed: int) -> str:
        instance = self.shared.by_id.get(task.id)
        if instance is None:
            raise DataError(f"task {task.id!r} is not an instance of source {self.config.source}")
        self._instance = instance
        self._run_id = f"{instance.instance_id}.{uuid.uuid4().hex[:12]}"
        self._container: InstanceContainer | None = None
        started = time.monotonic()
        self._image = await self._find_image(instance.image)
        await self._start()
        self.metrics.update(
            container_s=time.monotonic() - started, commands=0.0, command_s=0.0, timeouts=0.0
        )
        return self._prompt()

    @tool
    async def bash(
        self,
        command: Annotated[
            str, Field(max_length=MAX_COMMAND_CHARS, description="a command for bash -c")
        ],
    ) -> str:
        """Run a command in a new shell in the repository."""
        container, timeout_s = self._living(), self.config.command_timeout_s
        ran = await container.run(
            command, timeout_s=timeout_s, max_chars=self.config.max_output_chars
        )
        self.metrics["commands"] += 1
        self.metrics["command_s"] += ran.seconds
        self.metrics["timeouts"] += ran.timed_out
        return describe(ran, container.spec, timeout_s)

    @tool
    async def str_replace(
        self,
        path: Annotated[str, Field(max_length=4096, description="a file of the repository")],
        old: Annotated[
            str, Field(max_length=200_000, description="exact text that stands there once")
        ],
        new: Annotated[str, Field(max_length=200_000, description="what to put in its place")],
    ) -> str:
        """Replace text in a file. With an empty `old` a new file is written."""
        container = self._living()
        path = path if path.startswith("/") else f"{WORKDIR}/{path}"
        file = await container.read_file(path, MAX_EDIT_BYTES)
        if file is None:
            folder = path.rpartition("/")[0] or "/"
            if old:
                return f"There is no file {path} of at most {MAX_EDIT_BYTES:,} bytes."
            made = await container.run(
                f"test ! -e {shlex.quote(path)} && mkdir -p {shlex.quote(folder)}",
                timeout_s=10,
                max_chars=500,
            )
            if made.exit_code != 0:
                return f"{path} can't be written. {made.output}"
            await container.write(path, new.encode())
            return f"Wrote the new file {path}."
        found = file.content.count(old.encode()) if old else 0
        if found != 1:
            what = f"`old` stands {found} times" if old else "`old` is empty, but there is a file"
            return f"Nothing was changed: {what} in {path}; it must stand there exactly once."
        content = file.content.replace(old.encode(), new.encode())
        await container.write(file.path, content, mode=file.mode)
        return f"Replaced it in {path}."

    @tool(terminal=True)
    async def submit(self) -> None:
        """End your work; what you changed is graded."""
        await self._submit(truncated=False)

    async def step(self, action: Action) -> Observation:
        observation = to_observation(await self.run_tools(action), "run_tools()")
        if self._finish is not None:
            return observation
        left = self.episode.turns_left
        if left == 0:
            await self._submit(truncated=True)
        elif left is not None and observation:
            turns = "This is your last turn." if left == 1 else f"{left} turns left."
            last: Message = observation[-1].copy()
            last["content"] = join_contents([last["content"], f"[{turns}]"], "\n")
            observation[-1] = last
        return observation

    async def close(self) -> None:
        await self._remove()

    # --- the start of an episode -----------------------------------------------------------------

    async def _find_image(self, name: str) -> images.Scrubbed:
        shared: Shared = self.shared
        source_id = shared.image_ids.get(name) or await asyncio.to_thread(self._pin, name)
        if source_id not in shared.scrubbed:
            shared.scrubbed[source_id] = await images.scrubbed(source_id)
        found = shared.scrubbed[source_id]
        if not await images.present(found):
            # Another program removed the image; a repeated call pulls the row's image again.
            shared.scrubbed.pop(source_id, None)
            shared.image_ids.pop(name, None)
            raise EnvUnavailable(
                f"image {name} was removed during the run; the next call pulls it again"
            )
        await asyncio.to_thread(images.touch, [found.source_id, found.image_id])
        return found

    def _pin(self, name: str) -> str:
        """Returns the id of a row's image, which is pulled if it is not local."""
        shared: Shared = self.shared
        with shared.lock:
            if name not in shared.image_ids:
                client = connect(timeout_s=1800)
                try:
                    shared.image_ids |= images.pull(
                        client,
                        [name],
                        min_free_bytes=int(self.config.min_free_gb * 2**30),
                        in_use=list(shared.image_ids.values()),
                    )
                finally:
                    client.close()
            return shared.image_ids[name]

    async def _start(self) -> None:
        keys = {"memory_mb", "cpus", "max_processes", "disk_mb"}
        limits = self.config.model_dump(include=keys)
        async with self.shared.creating():
            await images.check_disk(MIN_FREE_BYTES)
            self._container = await InstanceContainer.start(
                self._image.image_id, run_id=self._run_id, **limits
            )
            try:
                await check_scrubbed(self._container, self._image.base)
            except ScrubError as error:
                raise EnvError(
                    f"the container of {self._instance.instance_id} shows more of the history than "
                    f"an agent may see ({error})",
                    code="scrub_failed",
                ) from error

    def _prompt(self) -> str:
        config: SWEBenchConfig = self.config
        edit = "- `str_replace` changes a piece of a file, or writes a new file.\n"
        turns = (
            f"- You have {self.episode.max_turns} turns. After the last one your work is submitted "
            "as it stands.\n"
            if self.episode.max_turns
            else ""
        )
        return PROMPT.format(
            workdir=WORKDIR,
            problem=self._instance.problem_statement.strip(),
            command_timeout_s=config.command_timeout_s,
            edit=edit if config.edit_tool else "",
            policy=POLICY_TEXTS[config.policy],
            turns=turns,
        )

    def _living(self) -> InstanceContainer:
        if self._container is None:
            raise EnvError("the episode has no container any more")
        return self._container

    # --- the end of an episode -------------------------------------------------------------------

    async def _submit(self, *, truncated: bool) -> None:
        """Grades the work as it is and ends the episode; without a verdict there is no reward."""
        extracted = await self._extract()
        info: dict[str, JSON] = {
            "instance_id": self._instance.instance_id,
            "run_id": self._run_id,
            "image_id": self._image.source_id,
            "model_patch": extracted.patch,
            "patch_problem": extracted.problem,
            "left_out": list(extracted.left_out),
        }
        reward: float | None = None
        if extracted.problem:
            reward = 0.0
            info |= {"outcome": "invalid_patch", "reason": extracted.problem, "resolved": False}
        elif self.config.grade:
            verdict = await self._grade(extracted.patch)
            reward = verdict.reward
            if reward is None:
                why = "; ".join((verdict.reason, *verdict.flags, *verdict.notes))
                raise GraderError(f"{verdict.instance_id}: no reward: {why}")
            info |= _verdict_info(verdict, extracted)
            self.metrics["grade_s"] = verdict.seconds
        self.metrics["resolved"] = float(bool(info.get("resolved")))
        self.finish(0.0 if reward is None else reward, info, truncated=truncated)

    async def _extract(self) -> Extracted:
        container = self._living()
        await container.sweep()
        extracted = await extract(container, self._image.base)
        await self._remove()  # frees the container's memory for the grading
        return extracted

    async def _grade(self, patch: str) -> Verdict:
        config: SWEBenchConfig = self.config
        verdict = await grade(
            self._instance,
            patch,
            policy=config.policy,
            run_id=self._run_id,
            timeout_s=config.grade_timeout_s,
            withhold=config.withhold,
            official_run=config.official_run,
            pay_uncovered=config.pay_uncovered,
            workers=config.grading_workers,
        )
        if verdict.image_id and verdict.image_id != self._image.source_id:
            raise GraderError(
                f"image {self._instance.image} is now {verdict.image_id}, and was "
                f"{self._image.source_id} when the agent got it: a tag moved during the run"
            )
        return verdict

    async def _remove(self) -> None:
        container, self._container = getattr(self, "_container", None), None
        if container is not None:
            await container.end()


def _verdict_info(verdict: Verdict, extracted: Extracted) -> dict[str, JSON]:
    info: dict[str, JSON] = {
        "outcome": verdict.outcome,
        "reason": verdict.reason,
        "resolved": verdict.resolved,
        "policy": verdict.policy,
        "verdict_flags": list(verdict.flags),
        "withheld": verdict.withheld,
        "dropped": [list(pair) for pair in verdict.dropped],
        "notes": list(verdict.notes),
        "attempts": verdict.attempts,
    }
    if verdict.graded_patch != extracted.patch:
        info["graded_patch"] = verdict.graded_patch
    return info
