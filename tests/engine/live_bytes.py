"""Device memory counted rather than measured: the bytes of all tensors that live at once, without any allocator."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts storages that operations make while it is on, until they die.

    Host buffers (`engine.memory.offload`) are mapped, not made by an operation, and so do not count: on a CPU as on
    a GPU, what is offloaded is gone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {_key(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            if _key(tensor) not in given | self._known:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, nbytes)

    def _remove(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


class SavesInputs(torch.autograd.Function):
    """An operation as one kernel of a GPU: it saves its inputs, gives a tensor like the first, and makes nothing else.
    Values do not matter here."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*inputs)
        return torch.zeros_like(inputs[0])

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(None if each is None else torch.zeros_like(each) for each in ctx.saved_tensors)


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
