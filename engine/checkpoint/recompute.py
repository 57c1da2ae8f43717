"""Layers that backward computes again, and the sources of their inputs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from engine.checkpoint.attend_once import AttendOnce
from engine.checkpoint.counts import inputs_in_store
from engine.checkpoint.group import BisectingGroup, Group, HoldingGroup, Step
from engine.memory.offload import DeviceStore, HostStore, Store
from engine.models.decoder import Activations, Attend, AttendCall, Block, LayerFn, Rotary, keep_all
from engine.ops.ranges import RECOMPUTE
from engine.settings import Checkpoint


def set_activations(settings: Checkpoint, blocks: Sequence[Block]) -> Recompute | None:
    """Make the blocks of one model save the tensors of these settings.

    Returns the stores of the saved tensors, or None when nothing is recomputed.
    """
    again = settings.layers_again(len(blocks))
    for block in blocks[again:]:
        block.activations = keep_all
    if not again:
        return None
    recompute = Recompute(settings, layers=again)
    for index, block in enumerate(blocks[:again]):
        block.activations = recompute.of_layer(index, block)
    return recompute


class Recompute:
    """The first layers of one model, each computed again in backward. Evaluation saves nothing.

    torch's checkpoint saves its arguments, so its only tensor arguments are RoPE's tables, which all layers share. A
    layer's input comes from a source, which returns the forward's tensor once and afterwards the group's.
    """

    def __init__(self, settings: Checkpoint, layers: int) -> None:
        self._host = host = HostStore()
        self.inputs: Store = host if settings.offload in ("inputs", "all") else DeviceStore()
        self.attention: Store = host if settings.offload == "all" else DeviceStore()
        self._settings, self._layers = settings, layers
        self._group: Group | None = None  # to which the running forward adds layers

    def reserve(self, input_bytes: int, attention_bytes: Iterable[int], device: torch.device) -> None:
        """Lock host memory for what a step saves at once, where it is offloaded.

        That is the layer inputs, `input_bytes` each, of a whole forward and those a group adds in backward; and of
        each layer the tensors that are saved of its attention, of `attention_bytes`. Otherwise the first forward of a
        length locks it, at one or two gigabytes per second, within its own time.
        """
        counts: Counter[int] = Counter()
        if isinstance(self.inputs, HostStore):
            # At most `kept_at_once` too many, where the last group is a shorter one.
            counts[input_bytes] += inputs_in_store(self._settings, self._layers)
        if isinstance(self.attention, HostStore):
            for nbytes in attention_bytes:
                counts[nbytes] += self._layers
        if counts:
            self._host.reserve(counts, device)

    def of_layer(self, index: int, block: nn.Module) -> Activations:
        """The activations of layer `index`, whose parameters are those of `block`."""
        return partial(self._run, index, block)

    def _run(
        self, index: int, block: nn.Module, layer: LayerFn, x_BLE: Tensor, rotary: Rotary, attend: Attend
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return layer(x_BLE, rotary, attend)
        if index % self._settings.every == 0:
            kind = BisectingGroup if self._settings.replay == "bisect" else HoldingGroup
            self._group = kind(x_BLE, self.inputs, previous=self._group if index else None)
        assert self._group is not None, "layers run in order"
        passed = partial(_passed, weakref.ref(self._group), index % self._settings.every)
        once = AttendOnce(attend, self._settings.tail, self.attention, passed)
        place = self._group.add(Step(block=block, layer=layer, rotary=rotary, attend=once))
        source = _Source(x_BLE, self._group, place)
        if index + 1 == self._layers:
            self._group = None  # from here on only the graph holds the saved tensors
        # No dropout anywhere, so no random state to restore.
        return checkpoint(_layer_from, source, layer, rotary, once, use_reentrant=False, preserve_rng_state=False)


class _Source:
    """Input of a layer: once the forward's own tensor, afterwards the one its group computes."""

    def __init__(self, given_BLE: Tensor, group: Group, place: int) -> None:
        self._given: Tensor | None = given_BLE
        self._requires_grad = given_BLE.requires_grad
        self._group, self._place = group, place

    @property
    def again(self) -> bool:
        """Whether the forward has taken its tensor: a later call recomputes the layer."""
        return self._given is None

    def __call__(self) -> Tensor:
        if self._given is not None:
            given_BLE, self._given = self._given, None
            return given_BLE
        # Autograd saves the same tensors again only if the input requires a gradient as before; none flows to it.
        return self._group.input(self._place).detach().requires_grad_(self._requires_grad)


def _passed(group: weakref.ref[Group], place: int) -> None:
    """`Group.passed`, by a weak reference: the group holds the layers whose hooks call this."""
    if (found := group()) is not None:
        found.passed(place)


def _layer_from(source: _Source, layer: LayerFn, rotary: Rotary, attend: AttendCall) -> Tensor:
    with record_function(RECOMPUTE) if source.again else nullcontext():
        return layer(source(), rotary, attend)
