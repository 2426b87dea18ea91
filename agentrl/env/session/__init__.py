"""The life of episodes in one process: who may open one, where it runs, how it ends."""
