"""Checks of the GPUs: present, free, without errors, at their clocks, with equal versions."""
