"""Question answering with retrieval. `agentrl_search.env` is the environment."""
