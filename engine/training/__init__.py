"""A real training run: the timed task's model, data and step, with a schedule, evaluation, metrics and checkpoints."""
