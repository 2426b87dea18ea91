"""Manages the sessions of one process, for callers in the process or over HTTP."""
