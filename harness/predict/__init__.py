"""Time and memory of a trial before it runs: the engine's own schedule, simulated at a GPU type's speeds."""
