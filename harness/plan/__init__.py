"""From an experiment to its trials, with the reason for each that cannot run, and predictions of time and memory.

All of it is pure: the same input gives the same plan, no process is started, and torch is never imported.
"""
