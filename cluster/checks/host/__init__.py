"""Checks of the host: cores, memory, processes, and the software that runs need there."""
