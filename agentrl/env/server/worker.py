"""Runs one server, in a process that `agentrl.env.server.supervisor` starts.

python -m agentrl.env.server.worker SETTINGS
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from agentrl.env.protocol import TOKEN_VARIABLE
from agentrl.env.server.access import is_loopback, usable_token
from agentrl.env.server.app import make_app
from agentrl.env.server.serve import serve
from agentrl.errors import AgentRLError
from agentrl.runtime import die_with_parent


def main(settings: dict[str, Any]) -> int:
    supervisor = settings.pop("supervisor")
    if sys.platform == "linux":
        die_with_parent(supervisor)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    host, port, drain_s = (settings.pop(key) for key in ("host", "port", "drain_s"))
    token = usable_token(os.environ.get(TOKEN_VARIABLE))
    try:
        app = make_app(token=token, loopback_only=is_loopback(host), **settings)
        serve(app, host=host, port=port, token=token, drain_s=drain_s)
    except AgentRLError as error:
        print(f"agentrl: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
