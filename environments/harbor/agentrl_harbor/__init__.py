"""Environment of Harbor task directories: an agent works in the task's container, and the task's
tests run in a fresh one."""
