"""Layers that backward computes again: from the saved inputs of groups of layers, and the saved part of attention.

Of the consecutive layers of a group only the first one's input is saved; backward computes the inputs of the others
from it. A layer then runs in the middle of another layer's backward. FSDP2 gathers a module's parameters when the
module is called and again when its backward begins. A call in between would enter the order of calls from which FSDP2
predicts what to gather next, so the layer's mathematics run directly, between an explicit gathering and release. A
module that is not sharded needs neither.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

from engine.attention.algorithms.saved import Attend, FromSaved, SavedOutput
from engine.checkpoint.counts import inputs_in_store, kept_places
from engine.checkpoint.hosted import HostedLayers
from engine.linear.shard import Mixer
from engine.memory.offload import DeviceStore, HostStore, SavedTensors, Store, local_shard
from engine.models.decoder import Activations, Block, LayerFn, MixCall, Rotary, keep_all
from engine.ops import RECOMPUTE
from engine.settings import Checkpoint


class AttendOnce:
    """The attention of one layer in one forward.

    It lives as long as that forward's graph, so several forwards may be open at once (gradient accumulation) and
    backward may run repeatedly.

    Args:
        attend: the method's attention.
        tail: fraction of the sequence, from its end, whose result is saved.
        store: where it is saved.
        passed: called whenever backward has passed this attention.
        begins: called whenever backward is about to.
    """

    def __init__(
        self, attend: Attend, tail: float, store: Store, passed: Callable[[], None], begins: Callable[[], None]
    ) -> None:
        self.attend, self.passed, self._begins = attend, passed, begins
        # What is kept on the device stays there for another backward; from the host, and joined, comes a copy.
        self.copies = tail < 1 or isinstance(store, HostStore)
        self._tail, self._store = tail, store
        self._called = False
        self._cut = 0
        self._saved: SavedTensors | None = None
        self._ahead: SavedOutput | None = None

    def __call__(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, **sinks: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse): computed and saved by the first call, recomputed from the saved part by the others."""
        first = not self._called and q_BLND.requires_grad
        found = self.once(lambda saved: self.attend(q_BLND, k_BLKD, v_BLKD, saved=saved, **sinks))
        if first:
            passed, begins = self.passed, self._begins  # the graph holds the hooks, and this object: no cycle
            q_BLND.register_hook(lambda dq_BLND: passed())
            found[0].register_hook(lambda dout_BLND: begins())
        return found

    def once(self, compute: FromSaved) -> tuple[Tensor, Tensor]:
        """The same of any way to attend with what is saved."""
        if not self._called:
            self._called = True
            out_BLND, lse_BNL = compute(None)
            self._save(self.attend.keep(out_BLND, lse_BNL, self._tail))
            return out_BLND, lse_BNL
        saved, self._ahead = self._ahead or self._fetched(), None
        return compute(saved)

    def ahead(self, q_BLND: Tensor, k_BLKD: Tensor, v_BLKD: Tensor, **sinks: Tensor) -> tuple[Tensor, Tensor]:
        """A recomputation whose whole result is held for the next call, so that two in a row compute attention once."""
        out_BLND, lse_BNL = self.attend(q_BLND, k_BLKD, v_BLKD, saved=self._fetched(), **sinks)
        self._ahead = SavedOutput(out_BLND.detach(), lse_BNL.detach())
        return out_BLND, lse_BNL

    def prefetch(self) -> None:
        """Start copying the saved result to the device."""
        if self._saved is not None and self._ahead is None:
            self._saved.prefetch()

    def _save(self, saved: SavedOutput | None) -> None:
        if saved is not None:
            self._cut, self._saved = saved.cut, self._store.put((saved.out_BLND, saved.lse_BNL))

    def _fetched(self) -> SavedOutput | None:
        if self._saved is None:
            return None
        out_BLND, lse_BNL = self._saved.fetch()
        return SavedOutput(out_BLND, lse_BNL, self._cut)


class MixOnce:
    """The same of a linear layer: nothing of its mixer is saved, so a recomputation runs all of it."""

    def __init__(self, mix: MixCall, passed: Callable[[], None]) -> None:
        self._mix, self._passed = mix, passed
        self._called = False

    def __call__(self, mixer: Mixer, x_BLE: Tensor) -> Tensor:
        if not self._called:
            self._called = True
            if x_BLE.requires_grad:
                passed = self._passed
                x_BLE.register_hook(lambda dx_BLE: passed())
        return self._mix(mixer, x_BLE)

    def enter(self, x_BLE: Tensor) -> Tensor:
        return self._mix.enter(x_BLE)

    def leave(self, x_BLE: Tensor) -> Tensor:
        return self._mix.leave(x_BLE)

    @property
    def ahead(self) -> MixOnce:
        """Nothing is held for the next call."""
        return self

    def prefetch(self) -> None:
        """Nothing is on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """One layer of one forward, with all that running it again needs."""

    block: nn.Module  # whose parameters the layer uses
    layer: LayerFn
    rotary: Rotary
    over_ranks: Attend | MixCall  # the method's, which holds nothing of this forward
    # With what is saved. The graph's: it goes with the layer's own backward, while the group lives until that of its
    # first layer.
    of_graph: weakref.ref[AttendOnce | MixOnce]

    def run(self, x_BLE: Tensor, *, ahead: bool) -> Tensor:
        """The layer once more, with what its attention saved; with nothing of it where a backward from inside the
        model has passed the layer before. `ahead` holds attention's result for the layer's own recomputation."""
        found = self.of_graph()
        over_ranks = self.over_ranks if found is None else found.ahead if ahead else found
        return self.layer(x_BLE, self.rotary, over_ranks)

    def prefetch(self) -> None:
        """Start copying what its attention saved to the device."""
        if (found := self.of_graph()) is not None:
            found.prefetch()


class LayerGroup(ABC):
    """The layers of one group in one forward. Backward needs their inputs last layer first.

    Args:
        start_BLE: input of the group's first layer.
        store: where it is saved.
        previous: the group before, whose inputs backward needs next.
    """

    def __init__(self, start_BLE: Tensor, store: Store, previous: LayerGroup | None) -> None:
        self._start: SavedTensors = store.put((start_BLE.detach(),))
        self._store, self._previous = store, previous
        self._calls: list[LayerCall] = []

    def add(self, call: LayerCall) -> int:
        """The next layer; returns its place in the group."""
        self._calls.append(call)
        return len(self._calls) - 1

    def input(self, place: int) -> Tensor:
        """Input x_BLE of the layer at `place`, outside any graph. Collective where parameters are sharded."""
        with torch.no_grad():
            return self._input(place)

    def passed(self, place: int) -> None:
        """Backward has passed the attention of the layer at `place`: prefetch what it needs next.

        Not earlier, when a layer's backward holds most memory; not later, since the projections before attention hide
        the copies.
        """
        if place == 0 and self._previous is not None:
            self._previous.prefetch()

    def begins(self, place: int) -> None:
        """Backward is about to pass the attention of the layer at `place`: prefetch the input that it needs next.

        Its copy then has the time of attention, and only those of attention's results that of the projections before
        it, which hide no more than half of both. To be called where one more input makes no moment the fullest.
        """
        if place == 0 and self._previous is not None:
            self._previous._start.prefetch()

    def prefetch(self) -> None:
        """Backward is about to reach this group."""
        self._start.prefetch()
        self._calls[0].prefetch()

    @abstractmethod
    def _input(self, place: int) -> Tensor:
        """The result of `input`; also prefetches the saved attention of the layer at `place`."""

    def _inputs(self, first: int, start: SavedTensors, place: int, *, ahead: bool) -> Iterator[tuple[int, Tensor]]:
        """Places from `first`, whose input is `start`, to `place`, each with its input: the layers between are run.
        `ahead` holds attention's results for the layers' own recomputations."""
        [x_BLE] = start.fetch()
        yield first, x_BLE
        for index in range(first, place):
            call, following, last = self._calls[index], self._calls[index + 1], index + 1 == place
            gather(call.block)
            if not last:
                start_gathering(following.block)
            following.prefetch()
            x_BLE = call.run(x_BLE, ahead=ahead)
            if not last:
                release(call.block)  # the last one's stay, since backward needs them next
            yield index + 1, x_BLE


class HoldingGroup(LayerGroup):
    """`checkpoint.replay: hold`.

    The first request computes all inputs from the saved one, up to the requested layer, and each is dropped when it is
    returned; so is attention's result, which the layer's own recomputation uses.
    """

    def __init__(self, start_BLE: Tensor, store: Store, previous: LayerGroup | None) -> None:
        super().__init__(start_BLE, store, previous)
        self._held: dict[int, Tensor] = {}  # by place, from the group's run until their layer's

    def _input(self, place: int) -> Tensor:
        if place not in self._held:
            self._held.update(self._inputs(0, self._start, place, ahead=True))
        self._calls[place].prefetch()  # after the group's run, which needs the memory; projections hide it
        return self._held.pop(place)


class BisectingGroup(LayerGroup):
    """`checkpoint.replay: bisect`.

    A request runs layers from the nearest saved input and saves a few more, in the store of the first one, each until
    no later request can need it. Attention's results are not held: every run recomputes them from the saved part.
    """

    def __init__(self, start_BLE: Tensor, store: Store, previous: LayerGroup | None) -> None:
        super().__init__(start_BLE, store, previous)
        self._between: list[tuple[int, SavedTensors]] = []  # by place, ascending; the first input is not among them

    def _input(self, place: int) -> Tensor:
        first, start = self._nearest(place)
        self._calls[first].prefetch()
        to_save = kept_places(first, place)
        for reached, x_BLE in self._inputs(first, start, place, ahead=False):
            self._store.settle()  # copies of earlier puts have had the time of a layer
            if reached in to_save:
                self._between.append((reached, self._store.put((x_BLE,))))
        return x_BLE

    def passed(self, place: int) -> None:
        if place == 0:
            super().passed(place)
            return
        following, start = self._nearest(place - 1)
        start.prefetch()
        self._calls[following].prefetch()

    def _nearest(self, place: int) -> tuple[int, SavedTensors]:
        """The last place up to `place` whose input is saved. Those after it are dropped: backward has passed them."""
        while self._between and self._between[-1][0] > place:
            self._between.pop()
        return self._between[-1] if self._between else (0, self._start)


def start_gathering(module: nn.Module) -> None:
    """Start gathering the parameters while other work is computed. Collective."""
    if isinstance(module, FSDPModule):
        module.unshard(async_op=True)


def gather(module: nn.Module) -> None:
    """Make the parameters whole for later work. Collective, unless they are whole or being gathered."""
    if isinstance(module, FSDPModule):
        module.unshard()


def release(module: nn.Module) -> None:
    """Keep only this rank's shard."""
    if isinstance(module, FSDPModule):
        module.reshard()


def set_activations(settings: Checkpoint, blocks: Sequence[Block]) -> Recompute | None:
    """Make the blocks of one model save the tensors of these settings.

    Returns the stores of the saved tensors, or None when nothing is recomputed and nothing is on the host.
    """
    again, hosted = settings.layers_again(len(blocks)), settings.hosted(len(blocks))
    for block in blocks[again:]:
        block.activations = keep_all
    if not again and not hosted:
        return None
    recompute = Recompute(settings, layers=again, with_attention=sum(not block.linear for block in blocks[:again]))
    for index, block in enumerate(blocks[:again]):
        block.activations = recompute.of_layer(index, block)
    if hosted:
        recompute.hosted.set_activations(blocks, hosted, settled=settings.settled(len(blocks)))
    if 0 < again < len(blocks):
        blocks[again].activations = partial(recompute.after, blocks[again].activations)
    return recompute


class Recompute:
    """The first layers of one model, each computed again in backward. Evaluation saves nothing.

    torch's checkpoint saves its arguments, so its only tensor arguments are RoPE's tables, which all layers share. A
    layer's input comes from a source, which returns the forward's tensor once and afterwards the group's.
    """

    def __init__(self, settings: Checkpoint, layers: int, with_attention: int) -> None:
        """`with_attention`: of the layers, those that are not linear."""
        self._host = host = HostStore()
        self.inputs: Store = host if settings.offload in ("inputs", "all") else DeviceStore()
        self.attention: Store = host if settings.offload == "all" else DeviceStore()
        self.hosted = HostedLayers()
        self._settings, self._layers, self._with_attention = settings, layers, with_attention
        self._group: LayerGroup | None = None  # to which the running forward adds layers
        self._of_attention = 0  # puts of attention's result in the layer that ran last

    def reserve(self, input_bytes: int, attention_bytes: Iterable[int], device: torch.device) -> None:
        """Lock host memory for what a step saves at once, where it is offloaded.

        That is the layer inputs, `input_bytes` each, of a whole forward and those a group adds in backward; and of
        each layer with attention the tensors that are saved of it, of `attention_bytes`. Otherwise the first forward of
        a length locks it, at one or two gigabytes per second, within its own time.
        """
        counts: Counter[int] = Counter()
        if self._layers and isinstance(self.inputs, HostStore):
            # At most `kept_at_once` too many, where the last group is a shorter one.
            counts[input_bytes] += inputs_in_store(self._settings, self._layers)
        if isinstance(self.attention, HostStore):
            for nbytes in attention_bytes:
                counts[nbytes] += self._with_attention
        if counts:
            self._host.reserve(counts, device)

    def after(
        self, own: Activations, layer: LayerFn, x_BLE: Tensor, rotary: Rotary, over_ranks: Attend | MixCall
    ) -> Tensor:
        """The activations of the layer that follows them and is kept whole, beside its `own`: copies to the host had
        its time."""
        out_BLE = own(layer, x_BLE, rotary, over_ranks)
        self._host.settle()
        return out_BLE

    def of_layer(self, index: int, block: Block) -> Activations:
        """The activations of layer `index`, whose parameters are those of `block`."""
        return partial(self._run, index, block)

    def _run(
        self, index: int, block: Block, layer: LayerFn, x_BLE: Tensor, rotary: Rotary, over_ranks: Attend | MixCall
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return layer(x_BLE, rotary, over_ranks)
        starts = index % self._settings.every == 0
        # What a layer puts is free one layer later, so that a copy has the time of a layer and memory does not depend
        # on its end: its input when the next layer begins, attention's result when the next one's is there.
        self._host.settle(self._of_attention)
        self._of_attention = int(self.attention is self._host and self._settings.tail > 0 and not block.linear)
        # At least one: the puts of a backward, each of which has the time of a layer too.
        self._host.leaving_puts = max(1, self._of_attention + (starts and self.inputs is self._host))
        if starts:
            kind = BisectingGroup if self._settings.replay == "bisect" else HoldingGroup
            self._group = kind(x_BLE, self.inputs, previous=self._group if index else None)
        assert self._group is not None, "layers run in order"
        place, of_group = index % self._settings.every, weakref.ref(self._group)
        passed = partial(_told, of_group, LayerGroup.passed, place)
        once: AttendOnce | MixOnce
        if block.linear:
            once = MixOnce(cast(MixCall, over_ranks), passed)
        else:
            begins = partial(_told, of_group, LayerGroup.begins, place) if _has_room(block, x_BLE) else _nothing
            once = AttendOnce(cast(Attend, over_ranks), self._settings.tail, self.attention, passed, begins)
        call = LayerCall(block=block, layer=layer, rotary=rotary, over_ranks=over_ranks, of_graph=weakref.ref(once))
        place = self._group.add(call)
        source = _LayerInput(x_BLE, self._group, place)
        if index + 1 == self._layers:
            self._group = None  # from here on only the graph holds the saved tensors
        # No dropout anywhere, so no random state to restore.
        return checkpoint(_layer_from, source, layer, rotary, once, use_reentrant=False, preserve_rng_state=False)


class _LayerInput:
    """Input of a layer: once the forward's own tensor, afterwards the one its group computes."""

    def __init__(self, given_BLE: Tensor, group: LayerGroup, place: int) -> None:
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


def _told(group: weakref.ref[LayerGroup], what: Callable[[LayerGroup, int], None], place: int) -> None:
    """`LayerGroup.passed` or `begins`, by a weak reference: the group holds the layers whose hooks call this."""
    if (found := group()) is not None:
        what(found, place)


def _nothing() -> None:
    pass


def _has_room(block: Block, x_BLE: Tensor) -> bool:
    """Whether one more input of a layer fits beside the backward of `block` where no later moment is to be fuller.

    The first layer's backward comes last: it needs no further input, and holds the gradients of one layer more.
    """
    trained = (each for each in block.parameters() if each.requires_grad)
    local = map(local_shard, trained)
    return x_BLE.nbytes <= sum(each.nbytes for each in local)


def _layer_from(source: _LayerInput, layer: LayerFn, rotary: Rotary, over_ranks: AttendOnce | MixOnce) -> Tensor:
    with record_function(RECOMPUTE) if source.again else nullcontext():
        return layer(source(), rotary, over_ranks)
