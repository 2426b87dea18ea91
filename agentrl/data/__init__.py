"""Public data sets: which ones are known, how their rows are read, and `agentrl data`."""
