"""Public data sets: a list of known ones, readers for their rows, and `agentrl data`."""
