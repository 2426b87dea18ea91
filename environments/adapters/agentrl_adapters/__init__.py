"""Adapters that use other frameworks' environments as agentrl environments, and vice versa.

    gymnasium_env.py     a Gymnasium environment with a text or discrete interface
    reasoning_gym_env.py procedural tasks, graded by their own dataset
    mcp_env.py           the tools of an MCP server, with tasks from a file
    mcp_server.py        an agentrl environment served as an MCP server
    openenv_env.py       an OpenEnv server
    skyrl_env.py         an environment of SkyRL-gym
    trl_env.py           a class for TRL's GRPOTrainer(environment_factory=)
    verifiers_env.py     a taskset of verifiers whose tasks are answered by one text
    nemo_gym_env.py      a resources server of NeMo Gym
    tinker_env.py        a MessageEnv or ProblemEnv of tinker-cookbook
    games_env.py         a turn-taking game of PettingZoo, one seat of it
    textarena_env.py     a game of TextArena
    rows_env.py          what those share whose tasks are rows of a file
    openenv_server.py    an agentrl environment served to OpenEnv clients
    trl_factory.py       an agentrl environment for TRL's GRPOTrainer(environment_factory=)

Each adapter imports its framework only when it is used, and only translates calls.
"""
