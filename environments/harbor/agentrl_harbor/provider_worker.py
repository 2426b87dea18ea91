"""Program for Harbor's Python that runs sandboxes of Harbor's providers:

    python provider_worker.py PROVIDER OPTIONS

PROVIDER is a name that `harbor run --env` knows, or `module:Class` of a `BaseEnvironment`; OPTIONS
are its options as JSON. Each line of the input is a request in JSON; the answer is a line with the
request's `number`. Answers come in any order. When the input ends, because the asking process
closed it or ended, all sandboxes are stopped.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from harbor.environments.factory import EnvironmentFactory  # pyright: ignore[reportMissingImports]
from harbor.models.task.config import (  # pyright: ignore[reportMissingImports]
    EnvironmentConfig,
    NetworkPolicy,
)
from harbor.models.trial.config import (  # pyright: ignore[reportMissingImports]
    EnvironmentConfig as Choice,
)
from harbor.models.trial.paths import TrialPaths  # pyright: ignore[reportMissingImports]

GRACE_S = 60.0
"""Seconds that a command may take beyond its own limit, for the way to the sandbox and back."""

_provider, _options = sys.argv[1], json.loads(sys.argv[2])
_choice = Choice(**{"import_path" if ":" in _provider else "type": _provider, "kwargs": _options})
_folder = tempfile.TemporaryDirectory(prefix="agentrl-harbor-")
"""Folder that Harbor requires for collected files; nothing is collected here."""
_sandboxes: dict[str, "asyncio.Task[Any]"] = {}
"""Task that starts each sandbox, by the id that the asking process chose."""


async def _begin(
    id: str, folder: str, name: str, config: dict, network: str, environment: dict, upload: bool
) -> Any:
    paths = TrialPaths(trial_dir=Path(_folder.name) / id)
    paths.mkdir()
    sandbox = EnvironmentFactory.create_environment_from_config(
        config=_choice,
        environment_dir=Path(folder),
        environment_name=name,
        session_id=id,
        trial_paths=paths,
        task_env_config=EnvironmentConfig(**config),
        network_policy=NetworkPolicy(network_mode=network),
        persistent_env=environment,
        enable_environment_dir_upload=upload,
    )
    try:
        await sandbox.start(force_build=False)
    except BaseException:
        with contextlib.suppress(Exception):  # the error of the start says more
            await sandbox.stop(delete=True)
        raise
    return sandbox


async def start(**request: Any) -> dict:
    _sandboxes[request["id"]] = asyncio.create_task(_begin(**request))
    sandbox = await _sandboxes[request["id"]]
    workdir = request["config"].get("workdir") or (await sandbox.exec("pwd")).stdout.strip()
    return {"workdir": workdir}


async def execute(id: str, command: str, seconds: int, **options: Any) -> dict:
    sandbox = await _sandboxes[id]
    ran = await asyncio.wait_for(
        sandbox.exec(command, timeout_sec=seconds + int(GRACE_S), **options), seconds + 2 * GRACE_S
    )
    return {"output": ran.stdout or "", "errors": ran.stderr or "", "exit_code": ran.return_code}


async def upload(id: str, source: str, target: str) -> dict:
    await (await _sandboxes[id]).upload_file(source, target)
    return {}


async def download(id: str, source: str, target: str) -> dict:
    await (await _sandboxes[id]).download_file(source, target)
    return {}


async def stop(id: str) -> dict:
    starting = _sandboxes.get(id)
    if starting is not None:
        starting.cancel()  # no effect if it has started; else `_begin` removes what it made
        (sandbox,) = await asyncio.gather(starting, return_exceptions=True)
        if not isinstance(sandbox, BaseException):
            await sandbox.stop(delete=True)
        _sandboxes.pop(id, None)  # not reached if stopping failed, so the end tries again
    return {}


_OPERATIONS = {each.__name__: each for each in (start, execute, upload, download, stop)}


async def _answer(request: dict, answers: Any) -> None:
    number, operation = request.pop("number"), _OPERATIONS[request.pop("operation")]
    try:
        answer = await operation(**request)
    except Exception as error:  # the asking process judges the provider's errors
        answer = {"error": f"{type(error).__name__}: {error}"}
    answers.write(json.dumps({"number": number, **answer}) + "\n")
    answers.flush()


async def _serve(answers: Any) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 30)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tasks: set[asyncio.Task] = set()
    while line := await reader.readline():
        task = asyncio.create_task(_answer(json.loads(line), answers))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*(stop(each) for each in list(_sandboxes)), return_exceptions=True)


def main() -> None:
    # A provider's prints must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        EnvironmentFactory.run_preflight(_choice.type, _choice.import_path, _options)
    except (Exception, SystemExit) as error:
        print(json.dumps({"number": 0, "error": str(error)}), file=answers, flush=True)
        return
    print(json.dumps({"number": 0}), file=answers, flush=True)
    with _folder:
        asyncio.run(_serve(answers))


if __name__ == "__main__":
    main()
