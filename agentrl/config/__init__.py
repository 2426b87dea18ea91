"""Every knob of a run: one TOML file, any key overridable as `--section.key value`.

Sections mirror the packages. Unknown keys are errors that name the file, the dotted key and the
closest valid key. This package imports no torch, so that `--help` and `--dry-run` are quick.
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
