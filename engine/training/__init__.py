"""A real training run: the timed task's model, data and step, with a schedule, evaluation, metrics and checkpoints.

`loop` is one rank, `state` its checkpoints; `config`, `files`, `manifest` and `preflight` import no torch, since the
harness reads them. Nothing here starts processes or prints.
"""
