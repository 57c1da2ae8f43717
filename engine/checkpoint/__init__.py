"""What backward finds of a layer: everything, or so little that the layer is computed again from it.

Sequence-level selective checkpointing (BurstEngine, arXiv:2509.19836): a layer is computed again in backward, but
attention, whose cost grows with the square of the length, is replayed from its saved output and LSE for the tail of
the sequence. docs/checkpointing.md has the arithmetic.

    recompute.py      one layer's forward under torch's checkpoint, and where its input comes from afterwards
    group.py          k layers of which only the first one's input is kept
    hold.py           the others' computed again once, and held
    bisect.py         or as often as it takes to hold few of them
    attend_once.py    attention that is computed once and then replayed
    parameters.py     FSDP2's parameters of a layer that runs outside its turn
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.checkpoint.recompute import Recompute
from engine.model import Block, keep_all
from engine.settings import Checkpoint

__all__ = ["Recompute", "set_activations"]


def set_activations(settings: Checkpoint, blocks: Sequence[Block]) -> Recompute | None:
    """Make the blocks of one model keep what these settings ask for. Returns who keeps it, None for everything."""
    if settings.every == 0:
        for block in blocks:
            block.activations = keep_all
        return None
    recompute = Recompute(settings, layers=len(blocks))
    for index, block in enumerate(blocks):
        block.activations = recompute.of_layer(index, block)
    return recompute
