"""Checks of the links between GPUs, and from them to the host."""
