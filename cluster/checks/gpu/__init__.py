"""Checks of the GPUs themselves: there, free, without errors, at their clocks, and one version of everything."""
