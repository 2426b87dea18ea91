"""agentrl: a Gym for language-model agents and the trainer that learns from it.

Importing this package loads no torch. The trainer lives in `agentrl.train`, the objective in
`agentrl.algo`, environments in `agentrl.env`.
"""

__version__ = "0.1.0"
