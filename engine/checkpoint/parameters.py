"""FSDP2's parameters of a layer that runs outside its turn: in the middle of another layer's backward.

FSDP2 gathers a module's parameters when the module is called and again when its backward begins. A call in between
would enter the order of calls from which FSDP2 predicts what to gather next, so the layer's mathematics are run
directly, between an explicit gathering and release. A module that is not sharded needs neither.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def start_gathering(module: nn.Module) -> None:
    """Have the parameters on their way while something else is computed. Collective."""
    if isinstance(module, FSDPModule):
        module.unshard(async_op=True)


def gather(module: nn.Module) -> None:
    """Have the parameters whole for what is launched next. Collective, unless they are on their way or there."""
    if isinstance(module, FSDPModule):
        module.unshard()


def release(module: nn.Module) -> None:
    """Keep this rank's shard alone."""
    if isinstance(module, FSDPModule):
        module.reshard()
