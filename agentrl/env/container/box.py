"""A box: a place where programs run, and whose processes and files are gone when it ends.

    start   a maker's: `Container.create`, `ProcessBox`, or `ProviderSandbox.start` for Harbor's
    run     an agent's command, a script of agentrl, or any program
    put     unpacks an archive
    get     reads a file
    end     removes the box; it also ends with the process that made it

What an agent changed (`Container.changes`) only a container's engine can tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

from agentrl.env.container.output import Clip

MAX_STREAM_BYTES = 64 << 20
"""A command that writes more than this is stopped."""
SCRIPT_BYTES = 4 << 20
ROOT = "0"

Sink = Callable[[int, bytes], None]
"""Takes output as it arrives: its kind (1: output, 2: errors) and its bytes."""

_SHELL = ("/bin/bash", "-p", "-c")
"""`-p`: only the shell that runs an agent's command reads the agent's BASH_ENV."""
# When memory runs out, the kernel should kill the agent's processes, not those that hold the box.
_COMMAND = '{ echo 1000 > /proc/self/oom_score_adj; } 2> /dev/null; exec /bin/bash -c "$1" 2>&1'


@dataclass(slots=True, frozen=True)
class CommandResult:
    """The result of an agent's command."""

    output: str
    """Standard output and errors, interleaved; the middle of a long output is left out."""
    exit_code: int | None
    """None if it was killed at its deadline or for writing too much."""
    num_dropped: int = 0
    """Characters left out of the middle."""
    timed_out: bool = False
    """True if it was killed at its deadline."""
    flooded: bool = False
    """True if it was killed for writing more than `MAX_STREAM_BYTES`."""
    out_of_memory: bool = False
    """True if one of its processes was killed because the container ran out of memory."""
    seconds: float = 0.0
    """Wall time."""


@dataclass(slots=True, frozen=True)
class ProgramResult:
    """The result of a program, or of one of agentrl's own scripts."""

    output: bytes
    """Standard output."""
    errors: str
    """Standard error."""
    exit_code: int | None
    """None if it was not waited for any longer."""
    timed_out: bool = False
    """True if it did not end within its time."""
    flooded: bool = False
    """True if it wrote more than `max_bytes`."""
    seconds: float = 0.0
    """Wall time."""


class Box(Protocol):
    """A running box. Its maker starts it, and whoever has it must end it.

    Every call raises EnvError if the box is gone, or if what runs it failed."""

    @property
    def workdir(self) -> str:
        """Folder in which programs start."""
        ...

    @property
    def variables(self) -> Mapping[str, str]:
        """Variables of an agent's commands."""
        ...

    async def execute(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        max_bytes: int = MAX_STREAM_BYTES,
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
        add: Sink | None = None,
    ) -> ProgramResult:
        """Runs a program without input; does not kill what is left of it.

        Args:
            timeout_s: seconds after which it is no longer waited for.
            max_bytes: after more output than this it is no longer waited for.
            environment: variables in addition to the box's own.
            user: None for the user of commands; `ROOT` for root.
            add: takes the output, which is not in the result then; called in any thread.
        """
        ...

    async def put(self, archive: bytes | IO[bytes], folder: str = "/") -> None:
        """Unpacks a tar archive in a folder, which must exist."""
        ...

    async def get(self, path: str, max_bytes: int) -> bytes | None:
        """Returns a regular file's content; None if there is none or it is too large."""
        ...

    async def sweep(self) -> None:
        """Kills all programs that were started, where it can be told which they are."""

    async def end(self) -> None:
        """Removes the box even if this call is cancelled. May be called more than once."""
        ...

    async def run(
        self, command: str, *, timeout_s: float, max_chars: int = 10_000
    ) -> CommandResult:
        """Runs an agent's shell command in the working folder, without input.

        Args:
            timeout_s: time limit, after which everything that was started is killed.
            max_chars: most characters of output to keep.
        """
        clip = Clip(max_chars)
        argv = (*_SHELL, _COMMAND, "bash", command)
        ran = await self._swept(argv, timeout_s=timeout_s, environment=self.variables, add=clip.add)
        text, num_dropped = clip.text()
        return CommandResult(
            text, ran.exit_code, num_dropped, ran.timed_out, ran.flooded, seconds=ran.seconds
        )

    async def script(
        self,
        script: str,
        *arguments: str,
        timeout_s: float,
        max_bytes: int = SCRIPT_BYTES,
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> ProgramResult:
        """Runs one of agentrl's own scripts, without the variables of the agent's commands.

        Args:
            arguments: the script's `$1`, `$2`, ...
            timeout_s: time limit, after which everything that was started is killed.
            max_bytes: it is killed for writing more than this.
            environment: variables of the script; None: only HOME, a folder that does not exist.
        """
        return await self._swept(
            (*_SHELL, script, "bash", *arguments),
            timeout_s=timeout_s,
            max_bytes=max_bytes,
            environment={"HOME": "/nonexistent"} if environment is None else environment,
            user=user,
        )

    async def _swept(self, argv: Sequence[str], **options: Any) -> ProgramResult:
        """Runs a program, and sweeps if it was stopped."""
        ended = await self.execute(argv, **options)
        if ended.exit_code is None:
            await self.sweep()
        return ended
