"""Playing episodes: `driver` (one episode), `scheduler` (groups), `render`, `parse`, `log`."""

from agentrl.rollout.log import TrajectoryLog, read_trajectories

__all__ = ["TrajectoryLog", "read_trajectories"]
