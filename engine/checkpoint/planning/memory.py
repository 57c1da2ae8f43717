"""Memory of one rank in training, from its settings and without running it: allocated, reserved and host bytes.

The sum of the engine's tensors (docs/memory.md) at the moments that may be the fullest: in the LM head, with all saved
tensors and no gradients; then in the backward of the first, the second and the last layer of each kind, those kept
whole and those computed again, and of layers in groups or beside layers on the host, with the saved tensors of the
layers before and the gradients of the layers after.
Layers with attention and linear layers are kinds of their own.

torch's allocator keeps memory by stream. Gradients have memory of the computation's stream, also where FSDP2 reduces
them (`engine.parallelize.ReduceIntoFreedMemory`), so they take the place of freed activations. What is reserved is the
fullest moment and what FSDP2's own streams keep: in records about as much as embedding and LM head have gradients.
Where one rank keeps its parameters whole there are copies of all parameters instead of gathered ones.
Chunks that arrive by copy engine have memory of their own, held throughout (`receive_slot_bytes`).
cuBLAS workspaces are small and among what the allocator rounds up; the CUDA context is outside the allocator.

Against the training records that are judged (`harness.plan.own_records`) allocated is within 3%, and reserved within
10%, but where parameters were sharded before 26 November 2026: gradients had memory of their own there. Since then one
GPU alone has been measured. tests/engine/checkpoint/test_planning_memory.py keeps that.
"""

from __future__ import annotations

import itertools
import math
import operator
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

from engine.attention.masks import Causal, parse_mask
from engine.attention.resolve import resolve_trial
from engine.checkpoint.counts import group_starts, heads_at_once, inputs_in_store, kept_at_once, moment_bytes
from engine.checkpoint.planning.memory_settings import MemorySettings, memory_settings_of, open_names
from engine.linear.volume import CHUNK, state_bytes
from engine.lm_head.loss_kernel import gpu_tile_tokens
from engine.lora import MLP, PROJECTIONS, adapter_parameters, trained_weights
from engine.settings import (
    BUFFERS,
    BYTES_OF,
    PIECE_ELEMENTS,
    Checkpoint,
    TrialSettings,
    hosted_fraction,
    keeps_whole,
    late_fraction,
    parts_hosted,
)
from engine.shape import ModelShape

GIB = 1 << 30

_PROCESS = 2 * GIB  # of host memory: interpreter, torch, CUDA's own
_LINEAR_KERNELS = 0.5 * GIB  # more of it where kernels of linear layers are compiled and timed: 0.2 to 0.9 in records
_AUTOGRAD_MLP = 3.5  # intermediates of a first matrix's width that autograd holds of one, and their gradients
# The same of a plain MLP by its first matrices: products, their gradients, and that of what the last matrix takes.
_TORCH_MLP = {1: 3, 2: 5}
_KERNEL_SUMS = 2 * GIB  # of dQ in fp32 at most
# How attention of a layer is called: once, again with kept outputs, or again with a tail that may cut the layout.
_CALLS = ("once", "again", "cut")
_ROUNDING = 1.005  # reserved over asked for: blocks of 512 bytes, segments of 2 MiB
_SMALL = 0.15 * GIB  # reserved for workspaces, norms and the blocks between others


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The most that one rank holds at any moment, in bytes."""

    allocated: float  # of tensors on its GPU
    reserved: float  # by the allocator
    host: float

    @property
    def without_gpu(self) -> float:
        """Of a rank on a CPU, where all is host memory and the process itself takes less."""
        return self.allocated + self.host - _PROCESS


def memory_of(settings: TrialSettings, *, on_gpu: bool = True) -> RankMemory:
    """Memory of one rank of a training trial with its settings as they are."""
    return MemoryModel(settings, on_gpu=on_gpu).of(memory_settings_of(settings))


def receive_slot_bytes(settings: TrialSettings) -> int:
    """Bytes of all receive slots of the fullest rank in a trial of method `burst` whose GPUs of a node can copy into
    each other's memory. A node is one of `emulate_nodes`; between nodes `auto` chooses as with the cost model's own
    speed of the link, which ranks measure. A trial that cannot run has no slots: it is refused elsewhere.

    Layers with a window resolve their own schedule: one that the others share has slots of the larger size, another
    one slots of its own.
    """
    if settings.cp_size % settings.emulate_nodes:
        return 0
    slots: dict[tuple[str, str | None, str], int] = {}
    for mask in settings.masks:
        try:
            found = resolve_trial(settings, settings.cp_size // settings.emulate_nodes, mask=mask)
        except ValueError:
            return 0
        sharing = (found.schedule, found.head_exchange, found.exchange)
        slots[sharing] = max(slots.get(sharing, 0), found.receive_slot_bytes)
    return sum(slots.values())


@dataclass(frozen=True, slots=True)
class _OfParameters:
    """Bytes that depend on how a rank holds its parameters."""

    copies: float  # all the time
    gathered: float  # while a layer's backward runs, with the layer before gathered ahead
    gathered_first: float  # the same of the first layer
    gathered_forward: float  # while a layer's forward runs, with the next one gathered ahead
    embedding: float  # while its gradient is reduced, which is the last one
    head: float  # in the LM head: weight and its gradients
    head_weight: float  # of these, what is there before the gradients are
    mlp_sums: float  # of weight gradients over several runs
    of_streams: float  # reserved by FSDP2's own streams


@dataclass(frozen=True, kw_only=True, slots=True)
class _Hosted:
    """Moments in host memory."""

    fraction: float  # of all elements
    wait: bool  # whether updates of the step before run in forward
    layers: tuple[int, ...]  # that have such a matrix
    head: bool  # whether the LM head has


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mixer:
    """Bytes of a linear layer before its MLP, with the kernels of flash-linear-attention; 0 where there is none. A
    count by the tensors' sizes; no run on several GPUs has checked what ranks exchange."""

    saved: float = 0.0  # for its backward
    gradients: float = 0.0  # in its backward

    @classmethod
    def of(cls, settings: TrialSettings) -> _Mixer:
        shape, item = settings.model, BYTES_OF[settings.dtype]
        if not any(shape.linear_layers):
            return cls()
        tokens = item * settings.seq_len * settings.batch_size / settings.cp_size
        keys, values = shape.linear_key_heads * shape.linear_key_dim, shape.linear_heads * shape.linear_value_dim
        delta, shared = shape.linear == "gated_delta_net", settings.cp_size > 1
        repeated = shape.linear_heads * shape.linear_key_dim  # a key of every value head
        wide = max(4, item) / item  # what is fp32, in elements of the dtype
        # The recurrence's output, the gate, and what one kernel makes of both; of Mamba-2 the output, the gate before
        # and after its activation, their product, and the normed product before and after its weight.
        after = (3 if delta else 6) * values
        # The normed input; channels before and after the activated convolution, which is one kernel. The delta rule
        # saves a matrix of each chunk; Mamba-2 values times time steps, and queries and keys of every value head.
        saved: float = shape.hidden + 2 * (2 * keys + values) + after
        saved += shape.linear_heads * CHUNK if delta else values + 2 * repeated
        states, written = 0, values
        if shared:  # the input in consecutive order, what tokens read of the state before in fp32, the states
            of_map, of_state = state_bytes(shape, settings.dtype, settings.batch_size)
            saved, states = saved + shape.hidden, 2 * of_map + 3 * of_state
            saved += (1 + wide) * repeated if delta else wide * (keys + values)
            written += repeated if delta else 0
        # In the recurrence's backward nothing of `after` is left. There are gradients of the input and of what the
        # recurrence gives, the states before each chunk and their gradients, and of the tensors that the kernels make:
        # four of the delta rule as wide as keys, four as wide as values; or gradients of queries, keys and values, and
        # that of values which pass by.
        of_chunks = 2 * repeated * (written // shape.linear_heads) / CHUNK
        made = of_chunks + 4 * repeated + 5 * written if delta else wide * of_chunks + 2 * repeated + 3 * values
        gradients = shape.hidden + max(made - after, 2 * values)
        return cls(saved=tokens * saved + states, gradients=tokens * gradients + states)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """The layers of a model that are alike: with attention or linear, with an MLP or without."""

    words: str  # one of its layers, told from the model's other kinds
    linear: bool
    mlp: bool
    places: tuple[int, ...]  # of its layers, counted from 0

    @classmethod
    def all_of(cls, shape: ModelShape) -> tuple[_Kind, ...]:
        found: dict[tuple[bool, bool], list[int]] = {}
        for place, kind in enumerate(zip(shape.linear_layers, shape.mlps, strict=True)):
            found.setdefault(kind, []).append(place)
        words = {kind: "linear layer" if kind[0] else "attention layer" for kind in found}
        words |= {kind: f"{words[kind]} without MLP" for kind in found if not kind[1]}
        several = len(found) > 1
        return tuple(
            cls(words=words[kind] if several else "layer", linear=kind[0], mlp=kind[1], places=tuple(places))
            for kind, places in found.items()
        )

    def between(self, first: int, end: int) -> tuple[int, ...]:
        """The places of its layers from `first` to before `end`."""
        return self.places[bisect_left(self.places, first) : bisect_left(self.places, end)]

    def among(self, places: tuple[int, ...]) -> tuple[int, ...]:
        """Of these places those of its layers."""
        return _in_both(places, self.places)

    def ends(self, first: int, end: int) -> dict[str, int]:
        """Of these the last one and the first one. Before the model's first layer no other one is gathered ahead, so
        that the second one's backward may hold more."""
        places = self.between(first, end)
        found = {"last": places[-1], "first": places[0]} if places else {}
        return found | ({"second": places[1]} if len(places) > 1 and places[0] == 0 else {})


@lru_cache(maxsize=1 << 12)
def _in_both(places: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(place for place in places if place in others)


class MemoryModel:
    """Memory of a rank of one trial by choice. `settings` give everything that no `MemorySettings` holds."""

    def __init__(self, settings: TrialSettings, *, on_gpu: bool = True) -> None:
        """`on_gpu`: chunks may arrive by copy engine, in slots."""
        shape = settings.model
        item = BYTES_OF[settings.dtype]
        wide = max(4, item)  # of master weights, gradients and moments
        tokens = settings.seq_len * settings.batch_size / settings.cp_size
        self._layers, self._shape, self._fused = shape.layers, shape, settings.lm_head_fusion
        self._item, self._tokens = item, tokens
        self._gates = 2 if shape.gated else 1
        self._by_autograd = _TORCH_MLP[self._gates] if shape.plain_mlp else _AUTOGRAD_MLP * self._gates
        self._mlp_state = item * tokens * shape.ffn
        self._state = item * tokens * shape.hidden  # one hidden state of all tokens of the rank
        self._query = item * tokens * shape.heads * shape.head_dim  # queries, their gradients
        self._output = item * tokens * shape.heads * shape.output_dim  # attention's output, its gradient
        self._keys = item * tokens * shape.sent_key_dims  # keys and values, or what they are formed from
        # Keys and values formed from a latent, and their gradients, of one chunk.
        dims = shape.head_dim + shape.output_dim if shape.kv_latent else 0
        self._expanded = 2 * item * tokens * shape.heads * dims
        self._lse = 4 * tokens * shape.heads
        # RoPE's cosines and sines.
        self._tables = wide * settings.seq_len / settings.cp_size * shape.rotated_dim * len(set(shape.rope_of_window))
        # Sigmoids of attention's gate, and the output that is multiplied by them.
        self._gated = 2 * self._output if shape.attention_gate else 0.0
        self._mixer = _Mixer.of(settings)
        self._kinds = _Kind.all_of(shape)
        self._attention_before = (0, *itertools.accumulate(not linear for linear in shape.linear_layers))
        shards = settings.world_size
        if settings.sharding == "hybrid":
            shards = max(1, shards // max(1, settings.emulate_nodes))
        # Frozen parameters are there once, in the dtype of the computation, and only the others have gradients.
        lora, table, trained = settings.lora, shape.vocab * shape.hidden, shape.largest_layer
        layer, learns = trained, 1  # of all parameters; whether the head has a gradient
        gradient = shape.layer_parameters  # of a layer, on average
        self._frozen = 0.0
        self._adapted = frozenset(() if lora is None else lora.targets)
        self._between = 0.0 if lora is None else item * tokens * lora.rank  # what an adapter's A gives its B
        if shape.plain_mlp and not shape.gated and "down" in self._adapted:
            self._by_autograd += 1  # the product, which its adapter needs beside its gradient
        if lora is not None:
            self._frozen, learns = item * shape.parameters / shards, 0
            trained = gradient = adapter_parameters(shape, lora)
            layer += trained
        self._parameters = wide * settings.trained_parameters / shards
        self._states = moment_bytes(settings) * settings.trained_parameters / shards
        # Of all elements, those in the buffers of updates (`engine.memory.moments`).
        widest = max(shape.hidden, shape.ffn, shape.heads * shape.head_dim)
        largest = max(map(math.prod, shape.parameter_sizes().values())) if lora is None else lora.rank * widest
        piece = min(PIECE_ELEMENTS, largest / shards)
        self._in_buffers = min(1.0, BUFFERS * piece * shards / settings.trained_parameters)
        self._layer_gradient = wide * gradient / shards
        # A matrix that is embedding and LM head stays gathered, and its gradient is reduced when both have added to it.
        tied = (1 + learns) * item * table if shape.tied else 0.0
        self._head_gradient = learns * wide * ((0 if shape.tied else table) + shape.hidden) / shards
        # Two layers' parameters, and the gradient of one as computed and as it is reduced, which of a rank alone is the
        # result itself; the first layer has none before.
        alone = settings.world_size == 1
        reduced = item * trained + (0 if alone else wide * trained)
        in_head = item + (1 if alone else 2) * wide
        # The embedding's, as computed, then reduced beside all others.
        of_embedding = learns * table * (wide + (item if alone else max(item, wide / shards)))
        sharded = _OfParameters(
            copies=0.0,
            gathered=2 * item * layer + reduced + tied,
            gathered_first=item * layer + reduced + tied,
            gathered_forward=2 * item * layer + tied,
            embedding=of_embedding + (item * table if shape.tied else 0.0),
            head=(item + learns * in_head) * table,
            head_weight=item * table,
            mlp_sums=wide * trained_weights(shape, lora, MLP) / shape.mlp_share,  # of a layer that has an MLP
            of_streams=(1 if shape.tied else 2) * (wide if learns else item) * table,
        )
        # Gradients are formed where they stay, sums over several runs among them.
        whole = _OfParameters(
            copies=item * settings.trained_parameters if item < wide else 0.0,
            gathered=wide * trained,
            gathered_first=wide * trained,
            gathered_forward=0.0,
            embedding=learns * (wide + (item if item < wide else 0)) * table,
            head=learns * (item + 2 * wide) * table,
            head_weight=0.0,
            mlp_sums=0.0,
            of_streams=0.0,
        )
        self._by_offload = tuple(
            whole if keeps_whole(settings, optimizer_offload=offload) else sharded for offload in (False, True)
        )
        # fp32 sums of dQ, and of dK and dV where query heads share them, that FlashAttention-4 forms in backward.
        self._sums = 0.0
        if settings.dtype == "bf16":
            self._sums = 2 * self._query + (2 * self._keys if shape.kv_heads < shape.heads else 0.0)
        # A head that is not fused frees its logits in the inputs' dtype before it takes wider ones, which need larger
        # blocks: the allocator keeps these as they are.
        narrow = not self._fused and item < 4
        self._left_by_head = item * self._tokens * shape.vocab if narrow else 0.0
        # Casts to float8 in an MLP's backward, a byte each: of its matrices, the first ones also transposed; of a run's
        # dout, with its transpose, where those of the normed input take its place; and of SwiGLU's result and gradients
        # five times its width, in place of which saved products leave four (`_numbers`: one width). A sum over runs
        # holds one more product.
        self._casts = self._casts_of_run = self._cast_sum = self._numbers = 0.0
        if settings.linear_dtype == "float8":
            matrix = shape.hidden * shape.ffn
            self._casts, self._cast_sum = (1.0 + 2 * self._gates) * matrix, float(wide * matrix)
            self._casts_of_run, self._numbers = 2 * tokens * shape.hidden, tokens * shape.ffn
        # A run of all tokens in the backward of an MLP written by hand: widths, the normed states, and their gradient,
        # for which in bf16 one width is gone.
        spared = 0.0 if self._casts else min(self._state, self._mlp_state)
        self._of_run = (1 + self._gates) * self._mlp_state + 2 * self._state - spared
        # What an MLP saves of tokens whose products are kept, were they all.
        self._saved_products = self._between * len(self._adapted & set(MLP))
        if shape.plain_mlp:  # of frozen matrices also what adapters take: the normed input, and the product
            self._saved_products += (self._gates + ("down" in self._adapted)) * self._mlp_state
            self._saved_products += self._state if self._adapted & {"gate", "up"} else 0.0
        else:
            # torch's: products before and after activation and multiplication, normed input, branch before its norm.
            self._saved_products += 2 * self._gates * self._mlp_state + 2 * self._state
        self._received = 0.0
        if settings.cp_size > 1:
            # Received chunks and the gradients sent back: the part of them that the mask uses.
            used = min(1.0, parse_mask(settings.masks[0]).area(settings.seq_len) / Causal().area(settings.seq_len))
            queries = 0 if shape.kv_latent else 2 * (self._query + self._output)  # a latent is sent in backward too
            self._received = used * (queries + (6 if shape.kv_latent else 2) * self._keys)
        self._process = _PROCESS + (_LINEAR_KERNELS if on_gpu and any(shape.linear_layers) else 0)
        self._plain_mlp = settings.plain_mlp
        self._settings, self._copies = settings, on_gpu and settings.method == "burst"
        self._slots: dict[str, int] = {}  # by one of `_CALLS`
        self._by_fraction: dict[bool | float, _Hosted] = {}  # by `optimizer_offload`

    @property
    def alike(self) -> bool:
        """Whether all layers are of one kind."""
        return len(self._kinds) == 1

    @property
    def hidden_state(self) -> float:
        """Bytes of one hidden state of all tokens of the rank."""
        return self._state

    @property
    def attention_result(self) -> float:
        """Bytes of one layer's attention output and LSE."""
        return self._output + self._lse

    @property
    def has_slots(self) -> bool:
        """Whether a rank holds slots to receive into, of which there may be more or fewer by the tail that is kept."""
        return any(map(self._slots_of, _CALLS))

    def of(self, choice: MemorySettings, *, least: bool = False) -> RankMemory:
        """The most that a rank holds with this choice; `least`: no more than with any choice of `checkpoint.mlp` and at
        least as much kept, because what the MLP of a layer kept whole needs for a moment is left out."""
        inputs, attention, _ = self._kept(choice.checkpoint)
        slots = min(map(self._slots_of, _CALLS)) if least else self._slots_with(choice.checkpoint)
        moments = self._moments(choice, inputs, attention, least)
        base = self._always(choice) + slots
        fullest = max(activations + gradients for _, activations, gradients in moments)
        reserved = max(fullest, moments[0][1] + self._left_by_head)  # in the head there are no gradients yet
        reserved += self._by_offload[bool(choice.optimizer_offload)].of_streams
        return RankMemory(
            allocated=base + fullest,
            reserved=_SMALL + _ROUNDING * (base + reserved),
            host=self.host(choice),
        )

    def host(self, choice: MemorySettings) -> float:
        """Bytes of host memory alone: more with a larger part of the MLP kept and, where layers are alike, with each
        more layer there."""
        _, _, of_checkpoint = self._kept(choice.checkpoint)
        return self._process + of_checkpoint + self._saved_on_host(choice) + self._of_optimizer_on_host(choice)

    def _of_optimizer_on_host(self, choice: MemorySettings) -> float:
        """Of the same moments, and gradients that come beside them."""
        return (self._states + self._parameters * choice.gradient_offload) * self._away(choice)

    def updates_wait(self, choice: MemorySettings) -> bool:
        """Whether updates of the step before run in forward, which holds gradients until then."""
        return self._hosted(choice).wait

    def at_head(self, choice: MemorySettings) -> RankMemory:
        """No more than `of(choice, least=True)`, and never less with more layers kept whole: the moment of the LM head
        without what leaves for the host."""
        inputs, attention, _ = self._kept(choice.checkpoint)
        saved = self._saved_on_device(choice)
        held = self._by_offload[bool(choice.optimizer_offload)]
        base = self._always(choice) + min(map(self._slots_of, _CALLS))
        needed = base + inputs + attention + saved + self._head(choice.head_tiles, held)
        return RankMemory(
            allocated=needed,
            reserved=_SMALL + _ROUNDING * (needed + held.of_streams),
            host=self._process + self._of_optimizer_on_host(choice),
        )

    def by_moment(self, choice: MemorySettings) -> dict[str, float]:
        """Allocated bytes at the moments that may be the fullest, and in the optimizer's update, in their order."""
        base = self._always(choice) + self._slots_with(choice.checkpoint)
        inputs, attention, _ = self._kept(choice.checkpoint)
        moments = self._moments(choice, inputs, attention, least=False)
        return {name: base + activations + gradients for name, activations, gradients in moments}

    def saved_of_layer(self, choice: MemorySettings) -> float:
        """What a layer kept whole saves, on average."""
        parts = (self._saved_whole(choice, kind) * len(kind.places) for kind in self._kinds)
        return sum(parts) / self._layers

    def _saved_on_device(self, choice: MemorySettings) -> float:
        """Of all layers that are kept whole there."""
        again = choice.checkpoint.layers_again(self._layers)
        whole = sum(self._saved_whole(choice, kind) * len(kind.between(again, self._layers)) for kind in self._kinds)
        return whole - (self._saved_on_host(choice) if choice.checkpoint.host_layers else 0.0)

    def _saved_on_host(self, choice: MemorySettings) -> float:
        """The same in host memory."""
        if not choice.checkpoint.host_layers:
            return 0.0
        hosted = choice.checkpoint.hosted(self._layers)
        return sum(self._saved_whole(choice, kind) * len(kind.among(hosted)) for kind in self._kinds)

    def _always(self, choice: MemorySettings) -> float:
        """Bytes on the device at every moment: parameters, their copies, the optimizer's states, and RoPE's tables."""
        copies = self._by_offload[bool(choice.optimizer_offload)].copies
        return self._frozen + self._parameters + self._states * (1 - self._away(choice)) + copies + self._tables

    def _away(self, choice: MemorySettings) -> float:
        """Of the optimizer's states the part in host memory."""
        return self._hosted(choice).fraction

    def _hosted(self, choice: MemorySettings) -> _Hosted:
        offload = choice.optimizer_offload
        if offload not in self._by_fraction:
            layers, head = parts_hosted(self._settings, offload)
            wait = late_fraction(self._settings, offload) > 0
            found = _Hosted(fraction=hosted_fraction(self._settings, offload), wait=wait, layers=layers, head=head)
            self._by_fraction[offload] = found
        return self._by_fraction[offload]

    def _slots_with(self, checkpoint: Checkpoint) -> int:
        """Bytes that are held to receive into, whatever the moment."""
        if not checkpoint.reuses_attention(self._layers):
            return self._slots_of("once")
        return self._slots_of("cut" if 0 < checkpoint.tail < 1 else "again")

    def _slots_of(self, calls: str) -> int:
        """The same by one of `_CALLS`; for a tail that the planner chooses, the most of three."""
        if not self._copies:
            return 0
        if calls not in self._slots:
            own, chosen = self._settings.checkpoint.tail, "checkpoint.tail" in open_names(self._settings)
            cuts = (0.25, 0.5, 0.75) if chosen or own in (0, 1) else (own,)
            each = {"once": [Checkpoint(every=0)], "again": [Checkpoint()], "cut": [Checkpoint(tail=f) for f in cuts]}
            trials = (replace(self._settings, checkpoint=checkpoint) for checkpoint in each[calls])
            self._slots[calls] = max(map(receive_slot_bytes, trials))
        return self._slots[calls]

    def _received_beside(self, checkpoint: Checkpoint) -> float:
        """Of what attention receives and sends back, the bytes that have no slot."""
        return max(0.0, self._received - self._slots_with(checkpoint))

    def _moments(
        self, choice: MemorySettings, inputs: float, attention: float, least: bool
    ) -> list[tuple[str, float, float]]:
        """(name, bytes without gradients, bytes of gradients) of each moment, beyond the bytes of `_always`. `inputs`
        and `attention` are those of `_kept`."""
        checkpoint, layers = choice.checkpoint, self._layers
        held = self._by_offload[bool(choice.optimizer_offload)]
        again = checkpoint.layers_again(layers)
        below = inputs + attention
        # What the last layer put leaves until backward, where no other layer follows. Then a hidden state comes back
        # while attention's gradients are formed, by what records allocated; not in groups of heads, where copies begin
        # when the layer before is done.
        leaving = 0.0
        if again == layers and checkpoint.offload != "none":
            leaving += self._state if (again - 1) % checkpoint.every == 0 else 0.0
            leaving += self._attention_put(checkpoint)
        coming = self._state if again and checkpoint.offload == "all" else 0.0
        saved = [self._saved_whole(choice, kind) for kind in self._kinds]
        hosted = checkpoint.hosted(layers) if checkpoint.host_layers else ()
        hosted_of = [kind.among(hosted) for kind in self._kinds]

        def saved_until(place: int) -> float:
            """Of layers kept whole on the device, up to this one, and of this one wherever it is."""
            counts = [len(kind.between(again, place + 1)) for kind in self._kinds]
            if hosted:
                away = (bisect_left(places, place) for places in hosted_of)
                counts = list(map(operator.sub, counts, away))
            return below + leaving + sum(map(operator.mul, saved, counts))

        def of_whole(place: int) -> float:
            """The backward of a layer kept whole, while the layer before comes back if it is on the host."""
            coming = self._saved_whole(choice, self._kind(place - 1)) if place - 1 in hosted else 0.0
            return self._whole_layer(choice, self._kind(place), held.mlp_sums, least, coming)

        def kept_until(place: int) -> float:
            """Of layers that are computed again, up to this one."""
            of_inputs = inputs * group_starts(checkpoint, place + 1) / group_starts(checkpoint, again)
            return of_inputs + attention * self._attention_of(place + 1) / max(1, self._attention_of(again))

        found: list[tuple[int, str, float]] = []  # place, name, bytes without gradients
        for kind, is_whole in itertools.product(self._kinds, (True, False)):
            ends = kind.ends(again, layers) if is_whole else kind.ends(0, again)
            part = " kept whole" if is_whole else " computed again"
            named: list[tuple[int, str]] = []
            for which, place in ends.items():
                told = again in (0, layers) or place == (layers - 1 if which == "last" else 0)
                named.append((place, f"backward of the {which} {kind.words}{'' if told else part}"))
            if not is_whole:
                others = kind.among(self._in_groups(checkpoint, again))
                named += [(place, f"backward of layer {place + 1}") for place in others if place not in ends.values()]
            beside = coming if choice.head_groups == 1 or kind.linear else 0.0
            for place, name in named:
                if is_whole:
                    peak = saved_until(place) + self._whole_layer(choice, kind, held.mlp_sums, least)
                else:
                    peak = kept_until(place) + self._layer(choice, kind, held.mlp_sums, place, beside)
                found.append((place, name, (held.gathered if place else held.gathered_first) + peak))
        # The fullest layer with or beside tensors that come back is near either end, where layers are alike.
        near = {*hosted[:2], *hosted[-2:]}
        near |= {each + 1 for each in near}
        for place in near if self.alike else range(again, layers) if hosted else ():
            gathered = held.gathered if place else held.gathered_first
            found.append((place, f"backward of layer {place + 1}", saved_until(place) + gathered + of_whole(place)))
        found.sort(key=lambda each: -each[0])
        forward: list[tuple[str, float, float]] = []
        for kind in self._kinds:
            if not (ends := kind.ends(0, again)):
                continue
            part = "" if again == layers and self.alike else " computed again"
            computing = self._again_forward(choice, kind) + held.gathered_forward
            for which in ("last", "first"):
                name, place = f"forward of the {which} {kind.words}{part}", ends[which]
                forward.append((name, kept_until(place) + computing, self._waiting_in_forward(place, choice)))
        fullest: Iterable[int] = ()
        if hosted:
            settled = checkpoint.settled(layers)
            waits = self.updates_wait(choice) and not choice.gradient_offload  # the fewer, the later the layer
            fullest = range(again, settled + 1) if waits else sorted({hosted[-1], settled})
        for place in fullest:
            going = hosted[: bisect_left(hosted, place)][-1:]  # has not left yet
            before = sum(self._saved_whole(choice, self._kind(each)) for each in going)
            computing = self._whole_forward(choice, self._kind(place), least) + held.gathered_forward
            waiting = self._waiting_in_forward(place, choice)
            forward.append((f"forward of layer {place + 1}", saved_until(place) + before + computing, waiting))
        return [
            ("LM head", saved_until(layers - 1) + self._head(choice.head_tiles, held), 0.0),
            *forward,
            *((name, activations, self._gradients(place, choice)) for place, name, activations in found),
            ("backward of the embedding", self._state + held.embedding, self._gradients(-1, choice)),
            ("optimizer", 0.0, self._on_device(self._parameters, choice) + self._buffers(choice)),
        ]

    def _in_groups(self, checkpoint: Checkpoint, again: int) -> tuple[int, ...]:
        """Places of layers that are computed again, of which one may be the fullest for what its group holds. Where
        layers are alike, that and gradients change from group to group by as much each time, and within one too, but
        for inputs that `bisect` keeps on the device."""
        every = checkpoint.every
        if every < 2:
            return ()
        if not self.alike:
            return tuple(range(again))
        starts = {0, max(0, again // every - 1) * every, (again - 1) // every * every}
        groups = [range(start, min(start + every, again)) for start in starts if start < again]
        all_of = checkpoint.replay == "bisect" and checkpoint.offload == "none"
        return tuple(sorted({place for group in groups for place in (group if all_of else (group[0], group[-1]))}))

    def _gradients(self, layer: int, choice: MemorySettings) -> float:
        """Sharded gradients when the backward of `layer`, counted from 0, begins: the head's and later layers'."""
        later = self._layers - 1 - layer
        return self._on_device(
            self._head_gradient + later * self._layer_gradient,
            choice,
            self._layer_gradient * min(later, 2) + self._head_gradient * (later < 2),
        )

    def _on_device(self, gradients: float, choice: MemorySettings, leaving: float = 0.0) -> float:
        """Of gradients what is on the device, where those that go to host memory take `leaving` bytes on their way."""
        if not choice.gradient_offload:
            return gradients
        return min(gradients, (1 - self._away(choice)) * gradients + leaving)

    def _waiting_in_forward(self, layer: int, choice: MemorySettings) -> float:
        """Gradients that updates still read when the forward of `layer` begins, counted from 0, at most: those of parts
        after the next layer with moments in host memory; and the buffers of updates (`engine.memory.moments`)."""
        hosted = self._hosted(choice)
        if layer + 1 == self._layers or not hosted.wait:
            return 0.0
        later = len(hosted.layers) - bisect_left(hosted.layers, layer + 2)
        gradients = self._head_gradient * hosted.head + later * self._layer_gradient
        return (0.0 if choice.gradient_offload else gradients) + self._buffers(choice)

    def _buffers(self, choice: MemorySettings) -> float:
        """What passes through the GPU at once of states in host memory, and of gradients there."""
        if not choice.optimizer_offload:
            return 0.0
        each = self._states + self._parameters * choice.gradient_offload
        return self._in_buffers * each

    def _kept(self, checkpoint: Checkpoint) -> tuple[float, float, float]:
        """Inputs and attention's results of the layers that backward computes again, of a whole forward: on the device
        each, then what is on the host."""
        again = checkpoint.layers_again(self._layers)
        if not again:
            return 0.0, 0.0, 0.0
        inputs = group_starts(checkpoint, again) * self._state
        attention = self._attention_of(again) * checkpoint.tail * self.attention_result
        host = 0.0
        if checkpoint.offload != "none":
            inputs, host = 0.0, inputs_in_store(checkpoint, again) * self._state
        if checkpoint.offload == "all":
            attention, host = 0.0, host + attention
        return inputs, attention, host

    def _attention_of(self, layers: int) -> int:
        """Of the first `layers` layers those with attention."""
        return self._attention_before[layers]

    def _saved_whole(self, choice: MemorySettings, kind: _Kind) -> float:
        """Saved tensors of a layer that is not computed again: its input and the MLP's, queries, keys and values and
        attention's results, or those of a linear layer's mixer, and the kept products of the MLP's first matrices."""
        kept = self._state + (self._mixer.saved if kind.linear else self._saved_attention(choice))
        return kept + self._saved_mlp(choice, kind)

    def _saved_mlp(self, choice: MemorySettings, kind: _Kind) -> float:
        """Of it, the MLP's."""
        return self._state + choice.checkpoint.mlp * self._saved_products if kind.mlp else 0.0

    def _saved_attention(self, choice: MemorySettings) -> float:
        """Of it, queries, keys, values and attention's results, and what their projections save."""
        kept = self._query + self._output + self._keys + self._lse
        shape = self._shape
        by_torch = shape.qk_norm or not shape.plain_projection
        if self._settings.lora is not None:
            by_torch = not self._adapted.isdisjoint(PROJECTIONS)
        if choice.projection_tiles == 1 and by_torch:  # its normed input
            kept += 0.0 if shape.norms == "after" else self._state
        if choice.projection_tiles == 1 and shape.qk_norm:  # q and k before the norm
            kept += self._query + self._keys / 2
        if shape.norms != "before":
            kept += self._state  # attention's branch before its norm
        kept += self._gated
        kept += self._between * len(self._adapted & {"output", *(PROJECTIONS if choice.projection_tiles == 1 else ())})
        return kept

    def _kind(self, place: int) -> _Kind:
        """That of the layer at this place."""
        return next(kind for kind in self._kinds if place in kind.places)

    def _whole_forward(self, choice: MemorySettings, kind: _Kind, least: bool) -> float:
        """The forward of such a layer beyond its saved tensors: a run of its MLP, the branch and the output. Runs whose
        first products are saved come last."""
        run, mlp = 1 / choice.mlp_tiles, choice.checkpoint.mlp
        formed = max((1 + self._gates) * min(run, 1 - mlp) - self._gates * mlp, min(run, mlp))
        return (0.0 if least or not kind.mlp else formed * self._mlp_state) + 2 * self._state

    def _again_forward(self, choice: MemorySettings, kind: _Kind) -> float:
        """The forward of a layer that is computed again, beyond what is kept of it: the larger of its mixer's and its
        MLP's. Attention's results that go to the host leave until those of the next layer are there."""
        checkpoint = choice.checkpoint
        kept = checkpoint.every == 1 and checkpoint.offload == "none"
        given = 0.0 if kept else self._state  # its input
        if kind.linear:
            mixer = self._mixer.saved
        else:
            heads = self._query + self._keys
            formed = heads + (self._state + heads) / choice.projection_tiles  # before and after their rotation
            out = self._output_again(checkpoint)
            attending = self._expanded / 2 + self._gated + out + min(self._keys, self._received_beside(checkpoint))
            mixer = max(formed, heads + attending)
        # Beside its input and its output, and in tiles one run's: of the first matrices and of what the last one takes.
        of_run = self._state + (1 + self._gates) * self._mlp_state
        mlp = 2 * self._state + of_run / choice.mlp_tiles if kind.mlp else 0.0
        return given + self._attention_put(checkpoint) + max(mixer, mlp)

    def _attention_put(self, checkpoint: Checkpoint) -> float:
        """What a layer's attention sends to the host."""
        return checkpoint.tail * self.attention_result if checkpoint.offload == "all" else 0.0

    def _output_again(self, checkpoint: Checkpoint) -> float:
        """Attention's output of a layer that is computed again, where it is not the one that is kept on the device."""
        return self._output if checkpoint.tail < 1 or checkpoint.offload == "all" else 0.0

    def _whole_layer(
        self, choice: MemorySettings, kind: _Kind, mlp_sums: float, least: bool, coming: float = 0.0
    ) -> float:
        """The backward of such a layer beyond its saved tensors: the larger of the MLP's and the mixer's, during which
        what the MLP saved is gone, and bytes are `coming` from the host."""
        of_mlp = self._in_whole_mlp(choice, mlp_sums, least) if kind.mlp else 0.0
        return max(of_mlp, self._in_mixer(choice, kind) - self._saved_mlp(choice, kind) + coming)

    def _in_whole_mlp(self, choice: MemorySettings, mlp_sums: float, least: bool) -> float:
        """The backward of its MLP: gradients before and after, and what one run holds; `least`: no more than with any
        part of its products kept."""
        mlp, tiles = choice.checkpoint.mlp, choice.mlp_tiles
        run = 1 / tiles
        again, saved = min(run, 1 - mlp), min(run, mlp)
        sums = mlp_sums + self._cast_sum if tiles > 1 or 0 < mlp < 1 else 0.0
        if not self._plain_mlp:
            # The saved part goes first, as a whole, and is gone then. The product goes before its gradients come.
            products = 2 if "down" in self._adapted else 1 + self._gates
            of_saved = self._state + products * mlp * self._mlp_state
            if least or not again:
                return self._state if least else of_saved + sums
            # The gradient of what both parts were given is as long as all tokens.
            joined = (1 - mlp) * self._state if mlp else 0.0
            formed = self._by_autograd * again * self._mlp_state - mlp * self._saved_products
            return sums + max(of_saved, 2 * (1 + again) * self._state + joined + formed)
        if least:  # of a run of half of the tokens or fewer there is one, whatever is kept
            return 2 * self._state + min(run, 0.5) * self._of_run
        # Gradient of the product, then products again, in whose place their gradients are formed. Of saved products as
        # much: what they give takes the place of its gradient, or in an MLP without gate the products' gradient does.
        longest = max(again, saved)
        held = max(5 * again, saved) * self._numbers + self._casts + self._casts_of_run * longest
        return 2 * self._state + longest * self._of_run + held + sums

    def _in_mixer(self, choice: MemorySettings, kind: _Kind) -> float:
        """The backward of attention in all heads at once, gradients of out, q, k, v and the residual; or of a linear
        layer's mixer."""
        if kind.linear:
            return self._state + self._mixer.gradients
        gradients = self._state + self._query + self._output + self._keys + self._expanded
        return gradients + self._sums_of(self._shape.kv_heads) + self._received_beside(choice.checkpoint)

    def _layer(
        self, choice: MemorySettings, kind: _Kind, mlp_sums: float, place: int = 0, coming: float = 0.0
    ) -> float:
        """The backward of the layer at this place, which is computed again, beyond the saved tensors: the larger of the
        MLP's and the mixer's, during which bytes are `coming` from the host for the first one of a group."""
        checkpoint = choice.checkpoint
        earlier = place % checkpoint.every  # of its group
        coming = 0.0 if earlier else coming
        # Its input and those of the earlier ones, which are not among the saved tensors but for the group's first on
        # the device; and attention's results of these, where they are not those that are kept.
        on_device, output = checkpoint.offload == "none", self._output_again(checkpoint)
        if checkpoint.replay == "hold":
            inputs = (earlier + (not on_device)) * self._state
            attending = self._attention_of(place) - self._attention_of(place - earlier)
            inputs += attending * (self.attention_result if output else 0.0)
        else:
            between = kept_at_once(checkpoint, earlier + 1) if on_device else 0
            inputs = (between + (earlier > 0 or not on_device)) * self._state
        if self._shape.norms != "before":
            inputs += 2 * self._state  # the branches before their norms
        if not self._plain_mlp:
            mlp = self._by_autograd * self._mlp_state / choice.mlp_tiles
            mlp += mlp_sums if choice.mlp_tiles > 1 else 0.0
        elif choice.mlp_tiles > 1 or self._casts:
            of_all = self._of_run + self._casts_of_run + 5 * self._numbers
            mlp = of_all / choice.mlp_tiles + self._casts
            mlp += (mlp_sums + self._cast_sum) if choice.mlp_tiles > 1 else 0.0
        else:
            mlp = _TORCH_MLP[self._gates] * self._mlp_state
        mlp += 3 * self._state  # gradients before and after, the MLP's input
        if not kind.mlp:
            mlp = 0.0
        if kind.linear:
            return inputs + self._mixer.saved + max(mlp, self._in_mixer(choice, kind) + coming)
        if choice.head_groups > 1:
            # Of all heads the output's gradient, those of q, k and v, and the residual's. Then the output is gone, in
            # whose place the gradient of q may be, and that of the input is formed.
            gradients = self._state + self._output + self._query + self._keys
            in_attention = gradients + (0.0 if output == self._query else output)
            found = gradients + self._state
            projected = (2 * self._state + self._query + self._keys) / choice.projection_tiles
            in_attention = max(in_attention + self._of_group(choice.head_groups), found + projected)
            return inputs + max(output + mlp, in_attention)
        # Computed again, for attention's backward.
        held = self._query + self._keys + self._gated + self._between * len(self._adapted)
        if choice.projection_tiles == 1:
            held += self._state  # normed
        return inputs + held + max(output + mlp, self._in_mixer(choice, kind) + coming)

    def _of_group(self, head_groups: int) -> float:
        """What backward forms of one group of heads: queries, keys and values, their gradients, the output and its
        gradient side by side, and the kernel's sums."""
        heads = heads_at_once(self._shape.kv_heads, head_groups)
        share = heads / self._shape.kv_heads
        return share * (2 * self._query + 2 * self._keys + 2 * self._output) + self._sums_of(heads)

    def _sums_of(self, kv_heads: int) -> float:
        """A kernel's sums in the backward of so many KV heads: of long tiles it takes some of them at a time
        (`engine.attention.kernels.fa4.kv_heads_at_once`)."""
        per_head = 2 * self._query / self._shape.kv_heads
        calls = -(-kv_heads // max(1, min(kv_heads, int(_KERNEL_SUMS // per_head))))
        return -(-kv_heads // calls) / self._shape.kv_heads * self._sums

    def _head(self, tiles: int, held: _OfParameters) -> float:
        """Weight and its gradients, the logits of one of `tiles` runs of tokens, or with 0 of a tile that the LM head
        chooses; input, norm and gradient of the head.

        A head that is not fused holds in backward, of all logits in fp32 or wider, the log probabilities, their
        gradient and the gradient of the logits (`engine.lm_head.loss`), and forms the weight's gradients when of these
        the last one is left, in the inputs' dtype.
        """
        tokens, logit = self._tokens, self._item * self._shape.vocab
        if self._fused:
            own = gpu_tile_tokens(self._shape.vocab, self._shape.hidden, self._item, tokens)
            tokens = -(-tokens // tiles) if tiles else own
            needed = held.head + logit * min(tokens, self._tokens)
        else:
            wide = 3 * max(4, self._item) * self._shape.vocab
            needed = max(held.head_weight + wide * tokens, held.head + logit * tokens)
        return needed + 3 * self._state
