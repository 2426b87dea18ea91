"""`agentrl swebench doctor`: checks what SWE-bench needs on this machine."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Iterator, Sequence
from typing import Literal

from agentrl.env.container.engine import OWNER_LABEL, abandoned, connect
from agentrl.errors import AgentRLError
from agentrl_swebench import images
from agentrl_swebench.dataset import Instance
from agentrl_swebench.grade import HARNESS_VERSION

Status = Literal["ok", "note", "fix"]


def findings(instances: Sequence[Instance]) -> Iterator[tuple[Status, str, str]]:
    """Yields the status, the name and the finding of each check. Rows and images are those of
    `instances`."""
    try:
        version = importlib.metadata.version("swebench")
    except importlib.metadata.PackageNotFoundError:
        yield "fix", "harness", "not installed: pip install 'agentrl-gym[swebench]'"
    else:
        right = version == HARNESS_VERSION
        wanted = f"; {HARNESS_VERSION} is needed: pip install 'agentrl-gym[swebench]'"
        yield "ok" if right else "fix", "harness", f"swebench {version}{'' if right else wanted}"
    yield from _rows(instances)
    try:
        client = connect()
    except AgentRLError as error:
        yield "fix", "engine", str(error)
        return
    info = client.info()
    yield (
        "ok",
        "engine",
        f"{info.get('ServerVersion')}, storage {info.get('Driver')}, cgroup version "
        f"{info.get('CgroupVersion', '1')}, {info.get('NCPU')} processors, "
        f"{info.get('MemTotal', 0) / 2**30:.0f} GiB of memory",
    )
    for feature, key in (("memory limit", "MemoryLimit"), ("process limit", "PidsLimit")):
        if not info.get(key):
            yield "fix", "engine", f"has no {feature}: an agent could take the whole machine"
    free = images.free_bytes(client)
    if free is None:
        yield "note", "disk", f"{info.get('DockerRootDir')} is not on this machine"
    else:
        short = free < images.MIN_FREE_BYTES
        yield "fix" if short else "ok", "disk", f"{free / 2**30:.0f} GiB free for images"
    summaries = client.api.containers(all=True, filters={"label": OWNER_LABEL})
    now = time.time()
    left = sum(abandoned(summary["Labels"], now) is not None for summary in summaries)
    if left:
        yield "fix", "containers", f"{left} outlived their process: run `agentrl swebench reap`"
    else:
        yield "ok", "containers", f"{len(summaries)} in use, none left over"
    if instances:
        missing = {each.image for each in instances if not images.is_local(client, each.image)}
        if missing:
            yield (
                "note",
                "images",
                f"{len(missing)} of {len(instances)} are not local: run `agentrl swebench pull`",
            )
        else:
            yield "ok", "images", f"all {len(instances)} are local"


def _rows(instances: Sequence[Instance]) -> Iterator[tuple[Status, str, str]]:
    """Yields the findings about rows that cannot be graded."""
    without = [each.instance_id for each in instances if not each.fail_to_pass]
    if without:
        yield "fix", "rows", f"{_some(without)} name no test in FAIL_TO_PASS: leave them out"
    try:
        from swebench.harness.log_parsers import PARSER_REGISTRY
    except ImportError:
        return
    unknown = [each.instance_id for each in instances if each.log_parser not in PARSER_REGISTRY]
    if unknown:
        names = sorted({each.log_parser for each in instances} - set(PARSER_REGISTRY))
        yield (
            "fix",
            "rows",
            f"{_some(unknown)} need a log parser that the harness lacks: {', '.join(names[:5])}",
        )


def _some(ids: list[str]) -> str:
    more = f" and {len(ids) - 3} more" if len(ids) > 3 else ""
    return ", ".join(ids[:3]) + more
