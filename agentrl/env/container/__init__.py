"""Runs containers for episodes and builds images of environments; both need a Docker engine."""
