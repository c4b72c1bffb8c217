"""GPUs and other devices of a node."""
