"""Harbor task directories as an environment: an agent works in the task's container, its verifier
pays in a fresh one."""
