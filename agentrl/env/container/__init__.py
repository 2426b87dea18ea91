"""Containers for episodes and images of environments, which need a Docker engine."""
