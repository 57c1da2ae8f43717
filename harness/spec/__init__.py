"""Experiment files and settings, read strictly: experiments, models, methods by name, and the trials of a sweep.

Nothing here plans, measures or starts a trial; of the harness only `harness.base` is imported.
"""
