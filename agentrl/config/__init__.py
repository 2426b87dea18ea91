"""The configuration of a run: one TOML file whose keys `--section.key value` can override.

Sections mirror the packages. An unknown key is an error that names the file, the dotted key and the
closest valid key. This package does not import torch, so that `--help` and `--dry-run` are fast.
"""

from agentrl.config.load import (
    CHANGEABLE,
    apply_overrides,
    load_config,
    load_tables,
    valid_keys,
    with_change,
)
from agentrl.config.run import RunConfig, weight_at
from agentrl.config.sections import (
    AgentRole,
    AgentSection,
    CriticSection,
    EnvSection,
    EvalSection,
    InferenceSection,
    LoraSection,
    MixedEnvSection,
    ModelSection,
    ParallelSection,
    RewardSection,
    RolloutSection,
    RunSection,
    TeacherSection,
    TrackSection,
    TrainSection,
)

__all__ = [
    "CHANGEABLE",
    "AgentRole",
    "AgentSection",
    "CriticSection",
    "EnvSection",
    "EvalSection",
    "InferenceSection",
    "LoraSection",
    "MixedEnvSection",
    "ModelSection",
    "ParallelSection",
    "RewardSection",
    "RolloutSection",
    "RunConfig",
    "RunSection",
    "TeacherSection",
    "TrackSection",
    "TrainSection",
    "apply_overrides",
    "load_config",
    "load_tables",
    "valid_keys",
    "weight_at",
    "with_change",
]
