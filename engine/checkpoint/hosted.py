"""Layers kept whole in host memory: what backward needs of them is copied there, and back one layer ahead of backward.

Nothing of such a layer is computed again, so its cost is that of copies, and computation hides these where it takes
longer than they do. In forward a layer's tensors leave until the next such layer is computed. In backward they begin to
come back when the next layer's backward reaches attention, which takes longest and, with the MLP's products gone,
leaves room. The idea is vDNN's (arXiv:1602.08124), with the time of transformers' attention in mind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from engine.attention.algorithms.saved import Attend
from engine.linear.shard import Mixer
from engine.memory.offload import HostStore, SavedTensors, local_shard
from engine.models.decoder import Block, LayerFn, MixCall, Rotary
from engine.ops.copies import copy_of


@dataclass(frozen=True, slots=True)
class _Place:
    """What autograd holds of a tensor that is in host memory."""

    layer: HostedLayer
    place: int  # among the layer's tensors
    shape: torch.Size


class HostedLayer:
    """What one layer saves in one forward. Lives as long as that forward's graph, so backward may run repeatedly.

    Args:
        store: the host memory.
        staying: addresses of the memory that stays on the device, such as that of parameters.
        device: of what leaves it.
    """

    def __init__(self, store: HostStore, staying: frozenset[int], device: torch.device) -> None:
        self._store, self._staying, self._device = store, staying, device
        self._leaving: list[Tensor] = []  # until the layer has been computed
        self._versions: list[int] = []  # of them, when they were saved
        self._places: dict[tuple[Any, ...], int] = {}  # by what they are
        self._uses: list[int] = []  # how often autograd saved each
        self._saved: SavedTensors | None = None
        self._back: list[Tensor | None] = []  # on the device again, until their last use
        self._left: list[int] = []  # uses until then

    def run(self, layer: LayerFn, x_BLE: Tensor, rotary: Rotary, over_ranks: Attend | MixCall) -> Tensor:
        """The layer, whose saved tensors go to the host. Raises RuntimeError where it changed one of them since."""
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._packed, self._unpacked):
                out_BLE = layer(x_BLE, rotary, over_ranks)
            # Autograd itself compares only what it holds.
            if any(tensor._version != version for tensor, version in zip(self._leaving, self._versions, strict=True)):
                raise RuntimeError(
                    "a tensor that backward needs was changed in place after its layer had saved it; change a copy"
                )
            if self._leaving:
                self._saved = self._store.put(tuple(self._leaving))
        finally:
            self._leaving, self._versions, self._places = [], [], {}
        return out_BLE

    def prefetch(self) -> None:
        """Start copying all of it to the device: backward will soon reach this layer."""
        if self._saved is not None and not self._back:
            self._saved.prefetch()

    def _packed(self, tensor: Tensor) -> Tensor | _Place:
        # Detached, since autograd would hold the node of an output by itself.
        tensor = tensor.detach()
        stays = tensor.untyped_storage().data_ptr() in self._staying or tensor.device != self._device
        if stays or tensor.numel() < 2 or not tensor.is_floating_point():
            return tensor
        flat = tensor.is_contiguous()  # the same tensor in another shape needs no other copy
        key = tensor.data_ptr(), tensor.dtype, tensor.numel(), None if flat else (tensor.shape, tensor.stride())
        place = self._places.setdefault(key, len(self._leaving))
        if place == len(self._leaving):
            self._leaving.append(tensor)
            self._versions.append(tensor._version)
            self._uses.append(0)
        self._uses[place] += 1
        return _Place(self, place, tensor.shape)

    def _unpacked(self, saved: Tensor | _Place) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved.layer._taken(saved.place).view(saved.shape)

    def _taken(self, place: int) -> Tensor:
        if not self._back or self._back[place] is None:  # not yet, or a backward before took some of them
            assert self._saved is not None, "a layer's backward follows its forward"
            self._back, self._left = list(self._saved.fetch()), list(self._uses)
        tensor = self._back[place]
        assert tensor is not None
        self._left[place] -= 1
        if not self._left[place]:
            self._back[place] = None
        if not any(self._left):
            self._back = []  # another backward copies them again
        return tensor


class HostedLayers:
    """The layers of one model that are kept whole in host memory."""

    def __init__(self) -> None:
        self.store = HostStore()
        self.places: Sequence[int] = ()
        self._before: HostedLayer | None = None  # the layer before, in the running forward, where it is one of them

    def set_activations(self, blocks: Sequence[Block], hosted: Sequence[int], settled: int) -> None:
        """Make the `hosted` of a model's blocks, each followed by another block, save their tensors in host memory.
        Their copies have to be there after the block `settled`."""
        self.places = hosted
        after = {each + 1 for each in hosted} | {settled}
        for place in after.difference(hosted):
            blocks[place].activations = partial(self._run_after, blocks[place], place == settled)
        for place in hosted:
            blocks[place].activations = partial(self._run, blocks[place], place - 1 in hosted)

    def forget(self) -> None:
        """Let go of the layer that ran last, where no other one followed it."""
        self._before = None

    def _run(
        self, block: Block, follows: bool, layer: LayerFn, x_BLE: Tensor, rotary: Rotary, over_ranks: Attend | MixCall
    ) -> Tensor:
        """One of them; whether it `follows` another one."""
        if not torch.is_grad_enabled():
            return layer(x_BLE, rotary, over_ranks)
        before = self._before if follows else None
        self._before = HostedLayer(self.store, _staying(block, rotary), x_BLE.device)
        return self._before.run(layer, x_BLE, rotary, _announced(block, over_ranks, before))

    def _run_after(
        self, block: Block, settles: bool, layer: LayerFn, x_BLE: Tensor, rotary: Rotary, over_ranks: Attend | MixCall
    ) -> Tensor:
        """A layer that saves on the device: one that follows one of them, or after which all copies have to end."""
        before, self._before = self._before, None
        out_BLE = layer(x_BLE, rotary, _announced(block, over_ranks, before))
        if settles:
            self.store.settle()
        return out_BLE


def _staying(block: Block, rotary: Rotary) -> frozenset[int]:
    """Addresses of the memory that a layer uses and that all its steps share: parameters, their copies, and tables."""
    parameters = list(block.parameters())
    copies = (copy_of(parameter) for parameter in parameters)
    shared: Iterable[Tensor] = (*parameters, *rotary, *(copy for copy in copies if copy is not None))
    local = map(local_shard, shared)
    return frozenset(each.untyped_storage().data_ptr() for each in local)


def _announced(block: Block, over_ranks: Attend | MixCall, before: HostedLayer | None) -> Attend | MixCall:
    """The same, which starts copying the layer `before` whenever backward is about to pass it."""
    if before is None:
        return over_ranks
    begins = partial(_prefetch, weakref.ref(before))  # its tensors go with the part of the graph that saved them
    if block.linear:
        return _AnnouncedMix(cast(MixCall, over_ranks), begins)
    attend = cast(Attend, over_ranks)

    def attend_announced(*qkv: Tensor, **given: Tensor) -> tuple[Tensor, Tensor]:
        out_BLND, lse_BNL = attend(*qkv, **given)
        _call_in_backward(out_BLND, begins)
        return out_BLND, lse_BNL

    return cast(Attend, attend_announced)


class _AnnouncedMix:
    """A linear layer's mixer, likewise."""

    def __init__(self, mix: MixCall, begins: Callable[[], None]) -> None:
        self._mix, self._begins = mix, begins
        self.enter, self.leave = mix.enter, mix.leave

    def __call__(self, mixer: Mixer, x_BLE: Tensor) -> Tensor:
        branch_BLE = self._mix(mixer, x_BLE)
        _call_in_backward(branch_BLE, self._begins)
        return branch_BLE


def _prefetch(layer: weakref.ref[HostedLayer]) -> None:
    if (found := layer()) is not None:
        found.prefetch()


def _call_in_backward(tensor: Tensor, called: Callable[[], None]) -> None:
    if tensor.requires_grad:
        tensor.register_hook(lambda gradient: called())
