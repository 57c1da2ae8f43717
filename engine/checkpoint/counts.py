"""What backward runs again to have the inputs of a group of layers, of which only the first one's was kept: counts.

Backward wants the inputs last layer first. `hold` runs the group once and holds every input. `bisect` runs from the
nearest input it has to the one that is wanted, and keeps on the way the input halfway, the one halfway from there, and
so on: the places are those of recursive bisection (Griewank, Optimization Methods and Software 1, 1992), so that the
inputs at once grow with the logarithm of the group's layers, and the layers run with layers times logarithm.
"""

from __future__ import annotations

from functools import cache

from engine.settings import Checkpoint


def stops(first: int, place: int) -> list[int]:
    """Places between `first` and `place` whose inputs are kept by a run from the one to the other under `bisect`."""
    kept: list[int] = []
    while (first := (first + place + 1) // 2) < place:
        kept.append(first)
    return kept


def layers_replayed(checkpoint: Checkpoint, layers: int) -> int:
    """Layers that one backward of a model of so many runs for their outputs, the next ones' inputs, alone. Each layer's
    run for its own activations is not among them. `every` is at least 1."""
    groups, rest = divmod(layers, checkpoint.every)
    return groups * _in_group(checkpoint, checkpoint.every) + _in_group(checkpoint, rest)


def inputs_at_once(checkpoint: Checkpoint, layers: int) -> int:
    """The most inputs of one group that exist together beside the first one's, the one handed out last among them."""
    beside = min(checkpoint.every, layers) - 1
    return beside.bit_length() if checkpoint.replay == "bisect" else beside


def stops_at_once(checkpoint: Checkpoint, layers: int) -> int:
    """The most of them that are kept for a later request, where `bisect` keeps: what was handed out is not."""
    return max(0, inputs_at_once(checkpoint, layers) - 1) if checkpoint.replay == "bisect" else 0


def starts(checkpoint: Checkpoint, layers: int) -> int:
    """Inputs that a forward keeps: those of the groups' first layers. `every` is at least 1."""
    return -(-layers // checkpoint.every)


def inputs_in_store(checkpoint: Checkpoint, layers: int) -> int:
    """The most inputs that one store keeps at once: those of the groups' first layers, and what a group adds."""
    return starts(checkpoint, layers) + stops_at_once(checkpoint, layers)


def _in_group(checkpoint: Checkpoint, layers: int) -> int:
    beside = max(0, layers - 1)
    return _bisected(beside) if checkpoint.replay == "bisect" else beside


@cache
def _bisected(places: int) -> int:
    """Layers run for so many places after a kept one: to the place halfway, for those after it, for those before it."""
    if places == 0:
        return 0
    half = (places + 1) // 2
    return half + _bisected(places - half) + _bisected(half - 1)
