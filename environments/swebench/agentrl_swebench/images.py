"""Pulls images with bounded concurrency, pins, scrubs and evicts them.

A row names an image by tag. `resolve` turns the tag into the image's id, a digest of its content,
which everything after it uses, so that a tag that moves changes nothing within a run.

`scrubbed` derives the image that agents get: the row's image with its repository scrubbed and
recorded (`patch.py`), once per image and version of the scripts. A file in the state folder records
when each image was last used. `evict` removes the least recently used images, but only those that
were pulled or derived here, are not named as in use and have no container.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from agentrl.env.container.engine import (
    EngineError,
    ImageMissing,
    connect,
    engine_errors,
    is_podman,
)
from agentrl.errors import EnvError, EnvUnavailable
from agentrl_swebench.containers import WORKDIR, InstanceContainer, current_engine
from agentrl_swebench.patch import SCRUB_VERSION, Base, ScrubError, scrub

if TYPE_CHECKING:
    import docker

SCRUBBED = "agentrl/swebench-scrubbed"
COMMIT_LABEL = "agentrl.base_commit"
TREE_LABEL = "agentrl.base_tree"

MIN_FREE_BYTES = 10 << 30
"""Default for the free space in bytes below which the engine's disk counts as short."""


@dataclass(slots=True, frozen=True)
class Scrubbed:
    """An image that an agent may see: its history is scrubbed."""

    image_id: str
    source_id: str
    """Id of the row's own image."""
    base: Base


def state_dir() -> Path:
    """Returns the folder for the times of last use, in AGENTRL_STATE_DIR or the user's cache."""
    given = os.environ.get("AGENTRL_STATE_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) / "swebench" if given else cache / "agentrl" / "swebench"


def free_bytes(client: docker.DockerClient) -> int | None:
    """Returns the free bytes on the engine's disk; None if the disk is not on this machine."""
    root = client.info().get("DockerRootDir") or ""
    try:
        return shutil.disk_usage(root).free
    except OSError:
        return None


def is_local(client: docker.DockerClient, name: str) -> bool:
    """Returns True if the engine has an image of this name; engines read names differently."""
    from docker.errors import ImageNotFound

    try:
        client.images.get(name)
    except ImageNotFound:
        return False
    return True


def pull(
    client: docker.DockerClient,
    names: Iterable[str],
    *,
    concurrency: int = 4,
    min_free_bytes: int = MIN_FREE_BYTES,
    in_use: Iterable[str] = (),
    progress: Callable[[str, str], None] | None = None,
) -> dict[str, str]:
    """Pulls the images that are not local and returns the id of each name.

    Checks the disk before each pull. If it is short, `evict` frees space, but removes none of
    `names` and `in_use`.

    Args:
        concurrency: pulls at once.
        progress: called with each name and its result, from several threads.

    Raises:
        ImageMissing: an image is not local and cannot be pulled.
        EnvError: the disk is short and nothing more may be evicted.
    """
    from docker.errors import APIError, ImageNotFound

    wanted = list(dict.fromkeys(names))
    keep = {*wanted, *in_use}
    freeing = threading.Lock()
    missing: dict[str, str] = {}

    def one(name: str) -> tuple[str, str] | None:
        try:
            found = (name, str(client.images.get(name).id))
            done = "local"
        except ImageNotFound:
            with freeing:
                _free_disk(client, min_free_bytes, keep, name)
            try:
                found = (name, str(client.images.pull(name).id))
            except (APIError, ImageNotFound) as error:
                missing[name] = " ".join(str(error.explanation or error).split())[:200]
                if progress:
                    progress(name, f"missing: {missing[name]}")
                return None
            done = "pulled"
            touch([found[1]], managed=True)
        if progress:
            progress(name, done)
        return found

    with ThreadPoolExecutor(max_workers=concurrency) as threads:
        found = dict(filter(None, threads.map(one, wanted)))
    if missing:
        name, reason = next(iter(missing.items()))
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ImageMissing(
            f"image {name}{more} is not local and can't be pulled: {reason}; see "
            "`agentrl swebench pull`"
        )
    return found


def _free_disk(client: docker.DockerClient, min_free_bytes: int, keep: set[str], name: str) -> None:
    free = free_bytes(client)
    if free is None or free >= min_free_bytes:
        return
    evict(client, min_free_bytes=min_free_bytes, in_use=keep)
    free = free_bytes(client) or 0
    if free < min_free_bytes:
        raise EnvError(
            f"no room for {name}: the Docker engine's disk has {free / 2**30:.1f} GiB free, and "
            f"{min_free_bytes / 2**30:.1f} GiB are needed; nothing more may be evicted: free space "
            "there, or pull fewer instances at once",
            code="disk_full",
        )


def evict(
    client: docker.DockerClient, *, min_free_bytes: int, in_use: Iterable[str] = ()
) -> list[str]:
    """Removes the least recently used images until `min_free_bytes` are free; returns their ids.

    Keeps images that are in use (by name or id), have a container, running or not, or were neither
    pulled nor derived by agentrl. If the engine's disk is not on this machine, keeps all.
    """
    from docker.errors import APIError, ImageNotFound

    keep = set()
    for name in in_use:
        with contextlib.suppress(ImageNotFound):
            keep.add(client.images.get(name).id)
    keep |= {summary["ImageID"] for summary in client.api.containers(all=True)}
    # An image that was derived from one in use is in use, too.
    scrubbed_of = {scrubbed_tag(image_id) for image_id in keep if image_id}
    removed = []
    with _state() as state:
        for image_id in sorted(state, key=lambda key: state[key]["used"]):
            free = free_bytes(client)
            if free is None or free >= min_free_bytes:
                break
            if image_id in keep or not state[image_id]["managed"]:
                continue
            try:
                image = client.images.get(image_id)
                if scrubbed_of & set(image.tags):
                    continue
                for tag in image.tags or [image_id]:
                    client.images.remove(tag)  # without force, the engine keeps images in use
            except ImageNotFound:
                pass
            except APIError as error:
                if error.status_code != 409:
                    raise
                continue
            del state[image_id]
            removed.append(image_id)
    return removed


def touch(image_ids: Iterable[str], *, managed: bool = False) -> None:
    """Records that images are used now. With `managed`, they may be evicted later."""
    with _state() as state:
        for image_id in image_ids:
            before = state.get(image_id, {"managed": False})
            state[image_id] = {"used": time.time(), "managed": managed or before["managed"]}


async def check_disk(min_free_bytes: int) -> None:
    """Checks that the engine's disk has enough space, without which containers fail in odd ways.

    Raises:
        EnvUnavailable: fewer than `min_free_bytes` are free.
    """
    free = await current_engine().call(free_bytes)
    if free is not None and free < min_free_bytes:
        raise EnvUnavailable(
            f"the Docker engine's disk has {free / 2**20:,.0f} MiB free, too little for another "
            "container: free space there",
            retry_after_s=30.0,
        )


async def resolve(name: str) -> str:
    """Returns the id of a local image.

    Raises:
        ImageMissing: the image is not local.
    """
    return (await _inspect(name))["Id"]


async def scrubbed(source_id: str) -> Scrubbed:
    """Returns the scrubbed image of an image; makes it if there is none.

    Raises:
        EnvError: the history cannot be scrubbed, or the engine failed.
    """
    async with _making[id(asyncio.get_running_loop()), source_id]:
        with contextlib.suppress(ImageMissing):
            if found := _scrubbed_from(await _inspect(scrubbed_tag(source_id)), source_id):
                return found
        return await _scrub(source_id)


_making: dict[tuple[int, str], asyncio.Lock] = defaultdict(asyncio.Lock)


async def _scrub(source_id: str) -> Scrubbed:
    tag = scrubbed_tag(source_id)
    container = await InstanceContainer.start(source_id, run_id="scrub", role="build")
    try:
        base = await scrub(container)
        await commit(container, tag, {COMMIT_LABEL: base.commit, TREE_LABEL: base.tree})
    except ScrubError as error:
        raise EnvError(
            f"the history in image {source_id} can't be scrubbed ({error}); no agent may see it",
            code="scrub_failed",
        ) from error
    finally:
        await container.remove()
    found = _scrubbed_from(await _inspect(tag), source_id)
    if found is None:
        raise EnvError(f"image {tag} was made without its labels", code="scrub_failed")
    touch([found.image_id], managed=True)
    return found


async def scrubbed_of(name: str) -> Scrubbed:
    """Returns the scrubbed image of a row's image, which is pulled if it is not local.

    Raises:
        ImageMissing: the row's image is not local and cannot be pulled.
        EnvError: the history cannot be scrubbed, or the engine failed.
    """
    try:
        source_id = await resolve(name)
    except ImageMissing:
        source_id = (await asyncio.to_thread(lambda: pull(connect(timeout_s=3600), [name])))[name]
    return await scrubbed(source_id)


async def commit(
    container: InstanceContainer, name: str, its_labels: Mapping[str, str] | None = None
) -> None:
    """Makes an image of a container: the settings are those of its own image, without an entry
    point, and commands start in WORKDIR.

    Raises:
        EnvError: the engine failed.
    """

    def make() -> None:
        with engine_errors(), contextlib.closing(connect(timeout_s=600)) as client:
            source = container.spec.image
            user = client.api.inspect_image(source)["Config"].get("User") or "0:0"
            found = dict(its_labels or {})
            # Otherwise the entry point and user of this container would become the image's.
            config = {"Labels": found, "User": user, "Entrypoint": [], "Cmd": ["/bin/bash"]}
            changes = None
            if is_podman(client):  # it ignores the configuration; Docker ignores ENTRYPOINT []
                changes = [f"LABEL {name}={value}" for name, value in found.items()]
                changes += [f"USER {user}", "ENTRYPOINT []", 'CMD ["/bin/bash"]']
                changes += [f"WORKDIR {WORKDIR}"]
            repository, _, tag = name.rpartition(":")
            client.api.commit(
                container.id,
                repository=repository,
                tag=tag,
                message=f"made from {source}",
                conf=config | {"WorkingDir": WORKDIR},
                changes=changes,
            )

    await asyncio.to_thread(make)


async def present(made: Scrubbed) -> bool:
    """Tells whether an image and its source are still local."""
    try:
        await _inspect(made.image_id)
        await _inspect(made.source_id)
    except ImageMissing:
        return False
    return True


def scrubbed_tag(source_id: str) -> str:
    return f"{SCRUBBED}:{source_id.removeprefix('sha256:')[:24]}-v{SCRUB_VERSION}"


def _scrubbed_from(description: dict, source_id: str) -> Scrubbed | None:
    its_labels = description["Config"].get("Labels") or {}
    if COMMIT_LABEL not in its_labels or TREE_LABEL not in its_labels:
        return None
    base = Base(its_labels[COMMIT_LABEL], its_labels[TREE_LABEL])
    return Scrubbed(description["Id"], source_id, base)


async def _inspect(name: str) -> dict[str, Any]:
    try:
        return await current_engine().call(lambda client: client.api.inspect_image(name))
    except EngineError as error:
        if error.engine_status != 404:
            raise
        raise ImageMissing(
            f"image {name} is not on the Docker engine: pull it with `agentrl swebench pull`"
        ) from error


@contextlib.contextmanager
def _state() -> Iterator[dict[str, dict]]:
    """Locks and yields the times of last use; writes changes back."""
    folder = state_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "images.lock", "w")  # noqa: SIM115
    except OSError as error:
        raise EnvUnavailable(
            f"{folder} can't be written ({error}): set AGENTRL_STATE_DIR"
        ) from error
    path = folder / "images.json"
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            state = orjson.loads(path.read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            state = {}
        before = orjson.dumps(state)
        yield state
        after = orjson.dumps(state)
        if after != before:
            aside = path.with_name("images.json.new")
            aside.write_bytes(after)
            aside.replace(path)
