"""The command `agentrl`, a module per group of commands."""
