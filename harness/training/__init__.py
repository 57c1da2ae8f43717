"""`burst train` around the engine's training loop: its configuration file, one start, progress and status.

Steps, checkpoints and metrics of training are in `engine.training`.
"""
