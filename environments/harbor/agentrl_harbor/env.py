"""Environment of tasks in Harbor's format: an agent works in the task's container by `bash`, and
its work is verified in a fresh one.

An episode starts a container of the task's image, runs the agent's commands and ends with `submit`.
Then the agent's processes are ended, its changes are copied into a new container (`sandbox.py`),
and the tests are put there and run (`verify.py`); they write the reward. In a task of several
steps, each `submit` but the last leads to the next step's instruction.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import shlex
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from agentrl.env.base import EnvConfig, Environment, Observation
from agentrl.env.container.container import MAX_COMMAND_CHARS, Container, describe
from agentrl.env.container.engine import Engine, reap_abandoned
from agentrl.env.registry import register
from agentrl.env.tools import tool
from agentrl.env.values import to_observation
from agentrl.errors import ConfigError, DataError, EnvError, GraderError
from agentrl.types import JSON, Action, Task, ToolCall
from agentrl_harbor.images import build_or_find
from agentrl_harbor.provider import Provider, ProviderSandbox
from agentrl_harbor.sandbox import (
    SCRIPT_FAILED,
    TOO_LARGE,
    Image,
    as_root,
    carry,
    carry_folders,
    list_programs,
    start_container,
)
from agentrl_harbor.task import (
    EnvironmentTable,
    HarborTask,
    Network,
    Step,
    load_tasks,
    pack,
    resolve,
)
from agentrl_harbor.verify import Verified, verify, wait_healthy

Sandbox = Container | ProviderSandbox

logger = logging.getLogger("agentrl.env")

PROMPT = """\
{instruction}

You work in a Linux container, in {workdir}.
- `bash` runs a command there. Each command is a new shell: `cd` and variables do not last, \
changes to files do. There is no input{network}. A command is stopped after \
{command_timeout_s:g} seconds.
- `submit` ends your work{step}. Tests that you do not see decide what it is worth."""


class HarborConfig(EnvConfig):
    """Keys that select tasks, limit the agent and decide how its work is verified."""

    source: str | dict[str, str]
    """A folder with `task.toml`, or a folder of such folders, which becomes the split `test`; or a
    table that maps names of splits to such folders."""
    task_ids: list[str] | None = None
    """Use only the tasks with these ids; a task's id is its folder's name. By default all."""
    network: Literal["task", "none"] = "task"
    """`task`: a network unless the task says `no-network`. `none`: no network for any task or its
    verifier. Tasks with a list of allowed hosts are refused unless this is `none`."""
    policy: Literal["strict", "all"] = "strict"
    """Which of the agent's changes a verifier on the task's own image sees: `strict` leaves out
    files that decide how any test runs (programs of the image, files that shells, interpreters and
    pytest read on their own); `all` leaves out nothing, as Harbor does."""
    verifier: Literal["fresh", "shared"] = "fresh"
    """`fresh`: the tests run in a new container. `shared`: unless the task says otherwise, they run
    in the agent's own container, among the processes that it left, as Harbor does. Tasks whose work
    is a running server need that, but nothing then keeps an agent from paying itself."""
    reward_key: str = "reward"
    """Name of the reward to use if a verifier gives several."""
    host_variables: list[str] = Field(default_factory=list)
    """Names of this process's variables that a task may read by `${NAME}`; others are refused."""
    command_timeout_s: float = Field(default=120.0, gt=0, le=3600)
    """Seconds that one command may take."""
    max_output_chars: int = Field(default=10_000, ge=100)
    """Characters of a command's output that the agent sees; the middle of longer output is left
    out."""
    max_processes: int = Field(default=512, ge=16)
    """Processes and threads in a container."""
    sandbox: str = Field(default="docker", pattern=r"^(docker|harbor:\S+)$")
    """`docker`: containers of this machine's engine. `harbor:NAME`: sandboxes of the Harbor
    provider NAME (`modal`, `daytona`, `podman`, ..., or `module:Class`); this needs `verifier =
    "shared"` and `harbor_python`."""
    sandbox_options: dict[str, JSON] = Field(default_factory=dict)
    """Options of that provider, as `harbor run --environment-kwarg` takes them."""
    harbor_python: str = ""
    """Path of a Python 3.12 that has Harbor, whose providers it runs."""

    @model_validator(mode="after")
    def _check_sandbox(self) -> Self:
        if self.sandbox != "docker" and self.verifier != "shared":
            raise ValueError(
                f'sandbox = "{self.sandbox}": only of Docker\'s containers it is known what an '
                "agent changed, so the tests cannot run in a fresh sandbox: set "
                'verifier = "shared", with which they run in the agent\'s'
            )
        if self.sandbox != "docker" and not self.harbor_python:
            raise ValueError(
                f'sandbox = "{self.sandbox}" needs Harbor: `python3.12 -m venv DIR && DIR/bin/pip '
                'install harbor`, then set harbor_python = "DIR/bin/python"'
            )
        if self.sandbox == "docker" and self.sandbox_options:
            raise ValueError("sandbox_options need a sandbox harbor:NAME")
        return self


@dataclass(slots=True)
class Shared:
    tasks: dict[str, HarborTask]
    splits: dict[str, list[str]]
    engine: Engine = field(default_factory=Engine)
    images: dict[str, Image] = field(default_factory=dict)
    """Images by the folder that they were built from, or by name."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while an image is built or pulled, so that none is built twice."""
    renamed: set[str] = field(default_factory=set)
    """Tasks of which it was said that a reward of another name counts."""
    provider: Provider | None = None
    """Provider of all sandboxes; None if they are containers of the engine."""


@register("harbor", max_sessions=64)
class HarborEnvironment(Environment):
    """Plays tasks in Harbor's format and verifies them in a container that no agent used."""

    Config = HarborConfig
    # A reset may have to build an image first.
    reset_timeout_s = 1800.0
    step_timeout_s = 7200.0

    @classmethod
    def load_shared(cls, config: HarborConfig) -> Shared:
        """Loads the tasks; starts the provider, or checks that the engine answers and removes
        containers that earlier runs left on it.

        Raises:
            ConfigError: a package is missing, the engine's address is wrong, or the provider does
                not work here.
            EnvUnavailable: no engine answers.
            DataError: the tasks cannot be read, or need a feature that agentrl lacks.
        """
        sources = config.source if isinstance(config.source, dict) else {"test": config.source}
        tasks: dict[str, HarborTask] = {}
        splits: dict[str, list[str]] = {}
        for split, source in sources.items():
            compose = config.sandbox != "docker"
            loaded = load_tasks(
                Path(source).expanduser(), compose=compose, task_ids=config.task_ids
            )
            found = {task.id: task for task in loaded}
            for task in found.values():
                if tasks.setdefault(task.id, task).folder.resolve() != task.folder.resolve():
                    raise DataError(f"two splits of source have different tasks named {task.id}")
            splits[split] = list(found)
        if config.task_ids is not None:
            if missing := set(config.task_ids) - set(tasks):
                raise DataError(f"source {config.source} has no task {', '.join(sorted(missing))}")
            tasks = {task_id: tasks[task_id] for task_id in config.task_ids}
            splits = {
                split: [each for each in config.task_ids if each in ids]
                for split, ids in splits.items()
            }
        for task in tasks.values():
            _check_network(task, config)
        ignored = Counter(key for task in tasks.values() for key in task.ignored)
        for key, count in sorted(ignored.items()):
            logger.warning(
                "source %s: task.toml has %s, which has no effect here, in %d of %d tasks%s",
                config.source,
                key,
                count,
                len(tasks),
                ": the disk of a container has no limit" if "storage" in key else "",
            )
        if config.sandbox != "docker":
            name = config.sandbox.partition(":")[2]
            provider = Provider(name, config.sandbox_options, config.harbor_python)
            return Shared(tasks, splits, provider=provider)
        reap_abandoned()
        return Shared(tasks, splits)

    @classmethod
    def close_shared(cls, shared: Shared) -> None:
        """Has the provider stop the sandboxes that are left."""
        if shared.provider is not None:
            shared.provider.close()

    def splits(self) -> dict[str, int | None]:
        return {split: len(ids) for split, ids in self.shared.splits.items()}

    def get(self, split: str, index: int) -> Task:
        task = self.shared.tasks[self.shared.splits[split][index]]
        return Task(task.id, task.steps[0].instruction, metadata=dict(task.table.metadata))

    async def reset(self, task: Task, *, seed: int) -> str:
        self._container: Sandbox | None = None
        self._number = 0
        self._results: list[dict[str, float]] = []
        self._reports: list[JSON] = []
        self._num_left_out = 0
        found = self.shared.tasks.get(task.id)
        if found is None:
            raise DataError(f"task {task.id!r} is not in source {self.config.source}")
        self._task: HarborTask = found
        self._run_id = f"{task.id}.{uuid.uuid4().hex[:12]}"
        self._left_s = self._allowance()
        image = await self._image(found.folder / "environment", found.table.environment)
        self._image_in_use = image
        separate = all(step.separate for step in found.steps)
        if image.volumes and self.config.verifier == "fresh" and not separate:
            raise DataError(
                f"the image of {found.folder} has the volumes {', '.join(image.volumes)}, whose "
                'content cannot be carried into a fresh container: set verifier = "shared", or '
                "leave the task out with `task_ids`"
            )
        self._container = await self._start(image, found.table.environment, self._step.agent)
        await self._put_files(self._container, found.folder / "environment", image)
        await self._prepare(found.table.environment.healthcheck)
        self.metrics.update(commands=0.0, command_s=0.0, timeouts=0.0)
        return self._prompt()

    @tool
    async def bash(
        self,
        command: Annotated[
            str, Field(max_length=MAX_COMMAND_CHARS, description="a command for bash -c")
        ],
    ) -> str:
        """Run a command in a new shell in the working folder."""
        if self._left_s <= 0:
            return "The time for commands is over: call submit."
        container = self._living()
        timeout_s = min(self.config.command_timeout_s, self._left_s)
        ran = await container.run(
            command, timeout_s=timeout_s, max_chars=self.config.max_output_chars
        )
        self._left_s -= ran.seconds
        self.metrics["commands"] += 1
        self.metrics["command_s"] += ran.seconds
        self.metrics["timeouts"] += ran.timed_out
        return describe(ran, container.spec, timeout_s)

    @tool
    async def submit(self) -> str:
        """End your work; tests decide what it is worth."""
        verified = await self._verify()
        if self._after(verified):
            self._end(truncated=False)
            return ""
        self._number += 1
        self._left_s = self._allowance()
        # The next step's agent may be another user. Processes that the last one left were ended if
        # the tests ran in a fresh container; they go on if the tests ran in the agent's container
        # or if a provider gave the sandbox.
        container = self._living()
        container.spec = replace(container.spec, user=self._user(self._step.agent.user))
        await self._prepare(None)
        return self._prompt()

    async def on_text(self, text: str) -> str:
        return "Call one of the tools: bash, submit."

    async def step(self, action: Action) -> Observation:
        observation = to_observation(await self.run_tools(action), "run_tools()")
        if self._finish is None and self.episode.last_turn:
            self._after(await self._verify())
            self._end(truncated=True)
        return observation

    async def close(self) -> None:
        container, self._container = getattr(self, "_container", None), None
        if container is not None:
            await container.end()

    def oracle(self) -> Iterator[Action] | None:
        """Returns the task's solution as an agent's actions; None if a step has no solution."""
        if any(step.solution is None for step in self._task.steps):
            return None
        return self._solve()

    def _solve(self) -> Iterator[Action]:
        variables = resolve(
            self._task.solution_env, self.config.host_variables, f"{self._task.folder} [solution]"
        )
        exports = "".join(
            f"export {name}={shlex.quote(text)}; " for name, text in variables.items()
        )
        for step in self._task.steps:
            assert step.solution is not None
            encoded = base64.b64encode(pack((step.solution,))).decode()
            size = MAX_COMMAND_CHARS - 200
            # Harbor puts it in /solution as root; a user who may not write there uses /tmp.
            yield bash(
                "folder=/solution; rm -rf $folder; mkdir -p $folder || folder=/tmp/solution; "
                "mkdir -p $folder; echo $folder > /tmp/solution.at; : > /tmp/solution.b64"
            )
            for start in range(0, len(encoded), size):
                yield bash(f"printf %s {encoded[start : start + size]} >> /tmp/solution.b64")
            yield bash(
                "folder=$(cat /tmp/solution.at); base64 -d /tmp/solution.b64 | tar -x -C $folder; "
                "rm /tmp/solution.b64 /tmp/solution.at; export DEBIAN_FRONTEND=noninteractive; "
                f"{exports}$folder/solve.sh; code=$?; rm -rf $folder; exit $code"
            )
            yield submit()

    # --- the start of a step ---------------------------------------------------------------------

    @property
    def _step(self) -> Step:
        return self._task.steps[self._number]

    def _allowance(self) -> float:
        """Returns the seconds that all commands of a step may take; the model's time is free."""
        return self._step.agent.timeout_sec or 3600.0

    def _user(self, given: str | int | None) -> str:
        return str(given) if given is not None else self._image_in_use.user

    def _prompt(self) -> str:
        step, number, total = self._step, self._number + 1, len(self._task.steps)
        of = f" on step {number} of {total}" if total > 1 else ""
        network = self._network(self._task.table.environment, step.agent)
        return PROMPT.format(
            instruction=step.instruction,
            workdir=self._living().spec.workdir,
            network="" if network != "none" else " and no network",
            command_timeout_s=self.config.command_timeout_s,
            step=of,
        )

    async def _prepare(self, check) -> None:
        step, container = self._step, self._living()
        if step.workdir is not None:
            workdir = container.spec.workdir
            await container.put(pack((step.workdir,)), workdir)
            if (step.workdir / "setup.sh").is_file():
                ran = await container.run(
                    f"bash {shlex.quote(f'{workdir}/setup.sh')}", timeout_s=600, max_chars=1000
                )
                if ran.exit_code != 0:
                    raise EnvError(
                        f"setup.sh of step {step.name} of {self._task.folder} failed: {ran.output}",
                        code="setup_failed",
                    )
        await wait_healthy(container, check)
        await wait_healthy(container, step.healthcheck)

    async def _image(self, folder: Path, table: EnvironmentTable) -> Image:
        """Returns a task's image, built or pulled at its first use. A provider builds or pulls
        its images itself and gets the folder."""
        if self.shared.provider is not None:
            return Image(str(folder), "", table.workdir or "/", frozenset())
        return await asyncio.to_thread(
            build_or_find, self.shared.images, self.shared.lock, folder, table
        )

    async def _start(
        self, image: Image, table: EnvironmentTable, phase: Network, *, verifier: bool = False
    ) -> Sandbox:
        user = self._step.verifier.user if verifier else self._step.agent.user
        variables = resolve(
            table.env, self.config.host_variables, f"{self._task.folder} [environment]"
        )
        network = self._network(table, phase)
        if self.shared.provider is not None:
            container = await ProviderSandbox.start(
                self.shared.provider,
                Path(image.id),
                table,
                name=self._task.id,
                network=network,
                user=user,
                environment=variables,
                upload=Path(image.id).name == "environment",
            )
        else:
            container = await start_container(
                self.shared.engine,
                image,
                table,
                run_id=self._run_id,
                role="grade" if verifier else "agent",
                network=network,
                user=user,
                environment=variables,
                max_processes=self.config.max_processes,
            )
        try:
            # In Harbor, these folders exist from the start.
            await as_root(
                container,
                "mkdir -p -- /logs/agent /logs/artifacts /logs/verifier "
                f"{'' if container.spec.workdir == '/' else shlex.quote(container.spec.workdir)} "
                "&& chmod 777 /logs/agent /logs/artifacts /logs/verifier",
            )
        except BaseException:
            await container.end()
            raise
        return container

    async def _put_files(self, container: Sandbox, folder: Path, image: Image) -> None:
        """Puts a folder's files into the working folder if the image was not built from the folder,
        as Harbor does. A provider has done so itself."""
        if self.shared.provider is None and image.is_named and folder.is_dir():
            await container.put(pack((folder,)), container.spec.workdir)

    def _network(self, table: EnvironmentTable, phase: Network) -> str:
        mode = phase.network_mode or table.network_mode or "public"
        return "none" if self.config.network == "none" or mode == "no-network" else "bridge"

    def _living(self) -> Sandbox:
        if self._container is None:
            raise EnvError("the episode has no container any more")
        return self._container

    # --- the end of a step -----------------------------------------------------------------------

    async def _verify(self) -> Verified:
        """Runs the tests of the step on the work as it is; without a verdict there is no reward."""
        try:
            if self.config.verifier == "shared" and not self._step.separate:
                container = self._living()
                user = self._user(self._step.verifier.user)
                container.spec = replace(container.spec, user=user)
                return await self._run_tests(container)
            return await self._verify_apart()
        except EnvError as error:
            if error.code in (SCRIPT_FAILED, TOO_LARGE):  # caused by the agent's changes
                return Verified(problem=str(error))
            raise GraderError(f"{self._task.id}: no reward: {error}") from error

    async def _verify_apart(self) -> Verified:
        """Copies the work into a new container and runs the tests there."""
        step, container, task = self._step, self._living(), self._task
        await container.sweep()
        last = self._number + 1 == len(task.steps)
        table, image = task.table.environment, self._image_in_use
        if step.separate:
            table = step.verifier.environment or table
            folder = step.bundled or task.folder / "environment"
            if step.bundled is not None and step.verifier.environment is None:
                table = table.model_copy(update={"docker_image": None})  # that image is the agent's
            elif step.bundled is None and table.docker_image is None:
                table = table.model_copy(
                    update={"docker_image": task.table.environment.docker_image}
                )
            image = await self._image(folder, table)
        fresh = await self._start(image, table, step.verifier, verifier=True)
        try:
            if step.separate:
                if step.bundled is None:
                    await self._put_files(fresh, task.folder / "environment", image)
                if isinstance(container, Container):
                    left_out = await carry_folders(container, fresh, step.artifacts)
                else:
                    left_out = await container.carry_folders(fresh, step.artifacts)
            else:
                assert isinstance(container, Container) and isinstance(fresh, Container)
                if not image.programs:
                    image = replace(image, programs=await list_programs(fresh))
                    self._image_in_use = image
                    for key, known in self.shared.images.items():
                        if known.id == image.id:
                            self.shared.images[key] = image
                left_out = await carry(
                    container, fresh, image.programs, everything=self.config.policy == "all"
                )
            if last:
                await self.close()  # frees the container's memory for the tests
            verified = await self._run_tests(fresh)
        finally:
            await fresh.end()
        verified.left_out = left_out
        return verified

    async def _run_tests(self, container: Sandbox) -> Verified:
        verifier = self._step.verifier
        variables = resolve(
            verifier.env, self.config.host_variables, f"{self._task.folder} [verifier]"
        )
        return await verify(
            container,
            self._step,
            {**container.spec.environment, **variables},
            timeout_s=verifier.timeout_sec or 600.0,
        )

    def _after(self, verified: Verified) -> bool:
        """Records a step's result; returns True if it was the episode's last step."""
        self._results.append(verified.rewards)
        self._num_left_out += len(verified.left_out)
        self._reports.append(
            {
                "step": self._step.name,
                "rewards": dict(verified.rewards),
                "problem": verified.problem,
                "output": verified.output,
                "left_out": list(verified.left_out),
            }
        )
        missed = any(
            verified.rewards.get(key, float("-inf")) < least
            for key, least in self._step.min_reward.items()
        )
        return missed or self._number + 1 == len(self._task.steps)

    def _end(self, *, truncated: bool) -> None:
        rewards = self._results
        if self._task.table.multi_step_reward_strategy == "final":
            rewards = rewards[-1:]
        else:
            # As in Harbor, steps without a verdict are left out, unless all steps are.
            rewards = [each for each in rewards if each] or [{}]
        names = sorted({name for each in rewards for name in each})
        means = {
            name: sum(each.get(name, 0.0) for each in rewards) / len(rewards) for name in names
        }
        key = self.config.reward_key
        if key not in means and len(means) == 1:
            key = names[0]
            if self._task.id not in self.shared.renamed:
                self.shared.renamed.add(self._task.id)
                logger.warning(
                    "the verifier of %s gives no reward %r; its only one, %r, counts instead",
                    *(self._task.id, self.config.reward_key, key),
                )
        if means and key not in means:
            raise ConfigError(
                f"the verifier of {self._task.id} gives the rewards {', '.join(names)}: choose one "
                "of them with `reward_key`"
            )
        self.metrics["no_reward"] = float(any(not each for each in self._results))
        self.metrics["left_out"] = float(self._num_left_out)
        self.finish(
            means.get(key, 0.0),
            {"rewards": dict(means), "steps": self._reports},
            truncated=truncated,
        )


def _check_network(task: HarborTask, config: HarborConfig) -> None:
    if config.network == "none":
        return
    table = task.table
    phases = [
        table.environment,
        *(
            each
            for step in task.steps
            for each in (step.agent, step.verifier, step.verifier.environment)
            if each is not None
        ),
    ]
    if any(each.network_mode == "allowlist" for each in phases):
        raise DataError(
            f"{task.folder / 'task.toml'}: network_mode = 'allowlist': agentrl's containers have "
            'the whole network or none: set network = "none", or leave the task out with '
            "`task_ids`"
        )

    modes = {step.agent.network_mode or table.environment.network_mode for step in task.steps}
    if len({mode == "no-network" for mode in modes}) > 1:
        raise DataError(
            f"{task.folder / 'task.toml'}: only some of the steps have a network, but all are "
            'played in one container: set network = "none", or leave the task out with `task_ids`'
        )


def bash(command: str) -> Action:
    """Returns the action of an agent that runs a command."""
    return Action(tool_calls=(ToolCall("call", "bash", {"command": command}),))


def submit() -> Action:
    """Returns the action of an agent that submits."""
    return Action(tool_calls=(ToolCall("call", "submit", {}),))
