"""agentrl: a Gym for language-model agents and the trainer that learns from it.

Importing this package loads no torch. The trainer lives in `agentrl.train`, the objective in
`agentrl.algo`, environments in `agentrl.env`.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("agentrl-gym")
except PackageNotFoundError:  # a directory on PYTHONPATH
    __version__ = "unknown"
