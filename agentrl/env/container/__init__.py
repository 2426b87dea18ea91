"""What needs a Docker engine: containers for episodes, images of environments."""
