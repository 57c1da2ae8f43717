"""Counts of the layers that backward recomputes in a group of layers of which only the first one's input is saved.

Backward needs the inputs last layer first. `hold` runs the group once and holds every input. `bisect` runs from the
nearest input it has to the one it needs, and saves the input halfway, the one halfway from there, and so on: the places
are those of recursive bisection (Griewank, Optimization Methods and Software 1, 1992), so that the inputs held at once
grow with the logarithm of the group's layers, and the recomputed layers with layers times logarithm.
"""

from __future__ import annotations

from functools import cache

from engine.settings import Checkpoint


def kept_places(first: int, place: int) -> list[int]:
    """Places between `first` and `place` whose inputs a run from one to the other saves under `bisect`."""
    kept: list[int] = []
    while (first := (first + place + 1) // 2) < place:
        kept.append(first)
    return kept


def layers_recomputed(checkpoint: Checkpoint, layers: int) -> int:
    """Layers that one backward of a model of `layers` runs only for their outputs, the next layers' inputs. Each
    layer's run for its own activations is not counted. `every` is at least 1."""
    groups, rest = divmod(layers, checkpoint.every)
    return groups * _in_group(checkpoint, checkpoint.every) + _in_group(checkpoint, rest)


def inputs_at_once(checkpoint: Checkpoint, layers: int) -> int:
    """The most inputs of one group held at once besides the first one's, the one in use included."""
    others = min(checkpoint.every, layers) - 1
    return others.bit_length() if checkpoint.replay == "bisect" else others


def kept_at_once(checkpoint: Checkpoint, layers: int) -> int:
    """The most of them that `bisect` saves for a later request; the one in use is not among them."""
    return max(0, inputs_at_once(checkpoint, layers) - 1) if checkpoint.replay == "bisect" else 0


def group_starts(checkpoint: Checkpoint, layers: int) -> int:
    """Inputs that a forward saves: those of the groups' first layers. `every` is at least 1."""
    return -(-layers // checkpoint.every)


def inputs_in_store(checkpoint: Checkpoint, layers: int) -> int:
    """The most inputs that one store holds at once: those of the groups' first layers, and those a group adds."""
    return group_starts(checkpoint, layers) + kept_at_once(checkpoint, layers)


def _in_group(checkpoint: Checkpoint, layers: int) -> int:
    others = max(0, layers - 1)
    return _bisected(others) if checkpoint.replay == "bisect" else others


@cache
def _bisected(places: int) -> int:
    """Layers run for `places` places after a saved one: to the place halfway, for those after it, for those before."""
    if places == 0:
        return 0
    half = (places + 1) // 2
    return half + _bisected(places - half) + _bisected(half - 1)
