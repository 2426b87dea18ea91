"""Pure reward functions, usable without an environment. Nothing here imports torch.

`agentrl_rewards.math` grades final answers; `agentrl_rewards.math_pool` holds the killable
processes behind its symbolic comparisons. Importing either loads no computer algebra system.
`agentrl_rewards.runner` finds and runs all of them by name.
"""
