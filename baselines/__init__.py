"""The systems BurstEngine is compared with, one package each.

Native form: the system's parallel attention on the engine's model and trainer, so that a comparison changes the method
alone.
"""
