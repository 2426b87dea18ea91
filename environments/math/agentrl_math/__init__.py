from agentrl_math.env import MathEnvironment

__all__ = ["MathEnvironment"]
