"""Runs `agentrl swebench` as `python -m agentrl_swebench eval|run|...`."""

from __future__ import annotations

import argparse
import sys

from agentrl.errors import AgentRLError
from agentrl_swebench.cli import add_subcommands


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m agentrl_swebench")
    add_subcommands(parser)
    arguments = parser.parse_args(argv)
    try:
        return arguments.handler(arguments)
    except AgentRLError as error:
        print(f"agentrl: error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
