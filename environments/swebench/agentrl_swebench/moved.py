"""SWE-rebench-V2: derives images that have the repository at /testbed.

The authors' images have the repository of `owner/name` at `/name`, but the official harness applies
patches at `/testbed`. The derived image has the repository there and a link to it at `/name`.
"""

from __future__ import annotations

import hashlib
from typing import Any

from agentrl.env.container.engine import connect, engine_errors, labels, remove
from agentrl.errors import DataError
from agentrl_swebench.adapters import MOVED_REPOSITORY

_WAIT_S = 600

_MOVE = """
set -eu
[ -d "/$1/.git" ] || { echo "there is no repository at /$1"; exit 1; }
mv "/$1" /testbed
ln -s /testbed "/$1"
"""


def make_moved_row(row: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns the row with the derived image, which is made if it is not local.

    Args:
        place: names the row in errors.

    Raises:
        DataError: the image has no repository at `/name`.
        EnvError: there is no engine, or the source image is missing.
    """
    source, name = row["image_name"], row["repo"].partition("/")[2]
    tag = hashlib.sha256(source.encode()).hexdigest()[:24]
    with engine_errors():
        client = connect(timeout_s=_WAIT_S)
        try:
            if not client.images.list(f"{MOVED_REPOSITORY}:{tag}"):
                container = client.containers.create(
                    source,
                    ["-c", _MOVE, "bash", name],
                    entrypoint="/bin/bash",
                    user="root",
                    working_dir="/",
                    network_mode="none",
                    labels=labels("moved", "build"),
                )
                try:
                    container.start()
                    if container.wait(timeout=_WAIT_S)["StatusCode"] != 0:
                        said = container.logs(tail=3).decode(errors="replace").strip()
                        raise DataError(f"{place}: image {source}: {said}")
                    # `changes` of the engine's commit cannot remove an entry point.
                    settings = {"Cmd": ["/bin/bash"], "Entrypoint": [], "WorkingDir": "/testbed"}
                    container.commit(MOVED_REPOSITORY, tag, conf=settings)
                finally:
                    remove(client, str(container.id))
        finally:
            client.close()
    return row | {"image_name": f"{MOVED_REPOSITORY}:{tag}"}
