"""Seconds that a choice adds to a step: work done again, copies that no computation hides, and sums over tiles."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, replace

from engine.checkpoint.counts import (
    added_weights,
    gathering_bytes,
    group_starts,
    group_states,
    head_share,
    layer_pairs,
    layers_run_again,
    moment_bytes,
    repeated_attention,
    repeated_products,
)
from engine.checkpoint.planning.memory import MemoryModel
from engine.checkpoint.planning.memory_settings import MemorySettings
from engine.lm_head.loss_kernel import gpu_tile_tokens
from engine.lora import MLP, adapter_parameters, adapter_passes, trained_weights
from engine.settings import BYTES_OF, Checkpoint, TrialSettings, hosted_fraction, keeps_whole, late_fraction

# Of the time of copies to the host and back, what a step grows by although computation hides them. On one H200
# attention of 64K tokens takes 2 to 4% longer while copies to the host go on, a matrix product 1%, and both 0.2 to 0.7%
# longer during copies back (docs/notes/2026-11-27-layers-on-the-host.md).
CONTENTION = 0.02
# Of the speed of copies to the host in one direction, that of each where both are busy: 44.0 of 51.5 GiB/s, of
# page-locked memory on one H200. In a step that passed 51.6 GB of moments they came at 41.6 GiB/s and left at 47.9.
BOTH_WAYS = 0.855
_ATTENTION_BACKWARD = 2.6  # of the time of its forward, with FlashAttention-4 there
# The time of a layer that runs again, less that of its products and attention, as the number of hidden states that a
# GPU reads or writes in that time. Fitted to three plans of the 1b model at 64K tokens on one H200
# (results/published/h200x1/memory_budget, 40 GiB): its products alone account for half of the layer's time. A fit and
# no count: by the tensors' sizes, norms, sums, rotary embedding and SwiGLU read and write 25 hidden states in a forward
# of that shape.
PASSES_AGAIN = 75
_FORWARD_PASSES = 25  # of a forward, by that count


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpeeds:
    """Of one GPU. The defaults are those of no particular one: their ratios decide, and these vary little."""

    gemm: float = 500e12  # FLOP/s of large matrix products
    float8: float = 940e12  # of those in float8
    attention: float = 450e12  # FLOP/s of attention's forward
    memory: float = 3e12  # bytes/s of the GPU's own memory
    host_link: float = 40e9  # bytes/s between GPU and host, one direction


class CostModel:
    """Seconds of one rank's step beyond one that repeats and moves nothing."""

    def __init__(self, settings: TrialSettings, speeds: GpuSpeeds) -> None:
        if settings.linear_dtype == "float8":
            speeds = replace(speeds, gemm=speeds.float8)
        self._settings, self._speeds, model = settings, speeds, settings.model
        self._together = True
        micro = settings.gradient_accumulation
        self._rank_tokens = settings.seq_len // settings.cp_size * settings.batch_size  # of a micro-batch
        self._tokens = self._rank_tokens * micro
        pairs = layer_pairs(settings) * settings.batch_size * micro / settings.cp_size
        dims = model.head_dim + model.output_dim
        self._attention = 2.0 * model.heads * dims * pairs / speeds.attention  # of one layer's forward
        item = BYTES_OF[settings.dtype]
        wide = max(4, item)
        self._copy = item * self._tokens * model.hidden / speeds.host_link  # of one hidden state
        row = item * model.output_dim + 4  # of output and LSE, of one token and head
        attending = model.attention_layers / model.layers
        self._copy_attention = attending * self._tokens * model.heads * row / speeds.host_link  # of a layer, on average
        elements = PASSES_AGAIN * model.hidden * (1 + model.mlp_share) / 2 + adapter_passes(model, settings.lora)[0]
        self._passes = item * self._tokens * elements / speeds.memory  # of one layer's forward
        of_mlp = adapter_passes(model, settings.lora, MLP)[0]
        self._passes_of_mlp = item * self._tokens * of_mlp / speeds.memory  # likewise, beyond multiplications
        weights = model.layer_matrices + model.recurrence_products + adapter_parameters(model, settings.lora)
        self._layer = 2.0 * self._tokens * weights / speeds.gemm + self._passes + self._attention
        self._moments = copied_moments(settings) / BOTH_WAYS / speeds.host_link  # of all, each way at once
        self._gradients = copied_gradients(settings) / speeds.host_link  # likewise, one way
        # Of reading and writing the sum of one weight's gradient; in float8 also what is added to it.
        self._sum = (2 if settings.linear_dtype == "same" else 4) * wide * micro / speeds.memory
        # Where one rank keeps its parameters whole, but not with moments on the host.
        whole = keeps_whole(settings, optimizer_offload=False)
        self._gathering = micro * gathering_bytes(settings) / speeds.memory if whole else 0.0
        # What hides copies of a layer kept whole: a forward, or backward of attention and of projections before it.
        self._forward = self._layer - self._passes * (1 - _FORWARD_PASSES / PASSES_AGAIN)
        products = 2.0 if settings.lora is not None else 4.0  # frozen matrices have no gradients
        projected = products * self._tokens * model.projection_parameters / speeds.gemm
        self._hiding = _ATTENTION_BACKWARD * self._attention + projected
        self._memory = MemoryModel(settings)
        self._heads: dict[float, float] = {}
        self._group_copies = item * self._tokens * attending / speeds.memory  # of one element, in a layer, on average
        self._offloads: dict[tuple[bool | float, bool], float] = {}
        self._repeated: dict[tuple[Checkpoint, int, int, int], float] = {}
        # The LM head's own tiles are sized for speed: only more of them cost time.
        own = gpu_tile_tokens(model.vocab, model.hidden, item, self._rank_tokens)
        self.own_head_tiles, self._head_run = math.ceil(self._rank_tokens / own), self._sum * model.vocab * model.hidden
        if settings.lora is not None:
            self._head_run = 0.0  # its weight has no gradient that tiles add to

    def apart(self) -> CostModel:
        """The same without what moments and layers in host memory add to each other: no more for any choice."""
        apart = copy(self)
        apart._together = False
        return apart

    def seconds(self, choice: MemorySettings) -> float:
        """What the choice adds."""
        return self.bound(choice) + self._split(choice) + self._beside_moments(choice)

    def bound(self, choice: MemorySettings) -> float:
        """The same without what a cut between kept and other tokens of the MLP adds, so that it falls with every kept
        token; and without what moments and layers in host memory add to each other."""
        return self.fixed(choice) + self.repeated(choice)

    def _split(self, choice: MemorySettings) -> float:
        """Tokens whose MLP products are kept and those whose are not are different runs, with a sum over them."""
        model, lora = self._settings.model, self._settings.lora
        whole = model.layers - choice.checkpoint.layers_again(model.layers)
        if choice.checkpoint.mlp in (0, 1):
            return 0.0
        return (2 if choice.mlp_tiles == 1 else 1) * self._sum * trained_weights(model, lora, MLP) * whole

    def fixed(self, choice: MemorySettings) -> float:
        """Of it, what no choice of `tail`, `whole_layers` and `mlp` changes but for the copies: tiles and moments."""
        settings = self._settings
        added = self._sum * added_weights(settings.model, choice.mlp_tiles, choice.projection_tiles, settings.lora)
        added += self._offloaded(choice)
        if choice.head_tiles:
            added += max(0, choice.head_tiles - self.own_head_tiles) * self._head_run
        return added

    def _offloaded(self, choice: MemorySettings) -> float:
        """Of it, what states and gradients in host memory add."""
        offload = choice.optimizer_offload
        key = offload, choice.gradient_offload
        if key not in self._offloads:
            settings, added = self._settings, self._gathering if offload else 0.0
            gradients = self._gradients * choice.gradient_offload
            coming = self._moments + gradients / BOTH_WAYS  # with their moments
            forward = self._forward * settings.model.layers / settings.gradient_accumulation  # of the first micro-batch
            added += update_seconds(settings, float(offload), coming, forward)
            added += gradient_seconds(settings, offload, gradients, 2 * self._forward)
            self._offloads[key] = added
        return self._offloads[key]

    def repeated(self, choice: MemorySettings) -> float:
        """Of it, repeated work, and the copies of what is offloaded: equal for choices that differ in nothing else."""
        key = (choice.checkpoint, choice.projection_tiles, choice.mlp_tiles, choice.head_groups)
        if key not in self._repeated:
            self._repeated[key] = self._repeat(choice)
        return self._repeated[key]

    def _repeat(self, choice: MemorySettings) -> float:
        checkpoint, model = choice.checkpoint, self._settings.model
        products = repeated_products(
            self._settings,
            checkpoint,
            projection_tiles=choice.projection_tiles,
            mlp_tiles=choice.mlp_tiles,
            head_groups=choice.head_groups,
            tokens=self._tokens,
            rank_tokens=self._rank_tokens,
        )
        added = products / self._speeds.gemm + layers_run_again(model, checkpoint) * self._passes
        again = checkpoint.layers_again(model.layers)
        added += (model.layers - again) * (1 - checkpoint.mlp) * self._passes_of_mlp
        added += self._hosted(choice)
        if not again:
            return added
        if choice.head_groups > 1:
            added += again * group_states(model, choice.head_groups) * self._group_copies
        added += self._attention * repeated_attention(checkpoint, model.layers, self._head_share(checkpoint.tail))
        if checkpoint.offload == "none":
            return added
        copies = group_starts(checkpoint, again) * self._copy
        if checkpoint.offload == "all":
            copies += again * checkpoint.tail * self._copy_attention
        hidden = again * self._layer  # the time of the layers that are computed meanwhile, in either direction
        if choice.head_groups > 1:  # nothing hides copies back, which begin when their memory is free
            added += min(copies, hidden)  # the others are waited for anyway
        return added + 2 * (max(0.0, copies - hidden) + CONTENTION * min(copies, hidden))

    def _hosted(self, choice: MemorySettings, beside: float = 0.0) -> float:
        """Copies of the layers that are kept whole in host memory."""
        layers = self._settings.model.layers
        if not (hosted := len(choice.checkpoint.hosted(layers))):
            return 0.0
        copied = self._memory.saved_of_layer(choice) * self._settings.gradient_accumulation / self._speeds.host_link
        spread = layers - choice.checkpoint.layers_again(layers) - 1
        return hosted_seconds(hosted, spread, copied, self._forward, self._hiding, beside)

    def _beside_moments(self, choice: MemorySettings) -> float:
        """What these copies take longer because moments leave for the host in the same forward."""
        late = late_fraction(self._settings, choice.optimizer_offload)
        if not (self._together and late and choice.checkpoint.host_layers):
            return 0.0
        return self._hosted(choice, self._moments * late) - self._hosted(choice)

    def _head_share(self, tail: float) -> float:
        if tail not in self._heads:
            self._heads[tail] = head_share(self._settings, tail)
        return self._heads[tail]


def copied_moments(settings: TrialSettings) -> float:
    """Bytes of a rank's moments, which a step copies to the GPU and back where they are in host memory."""
    return moment_bytes(settings) * settings.trained_parameters / settings.world_size


def copied_gradients(settings: TrialSettings) -> float:
    """Bytes of a rank's gradients, which backward copies to the host, and the update back, with `gradient_offload`."""
    return max(4, BYTES_OF[settings.dtype]) * settings.trained_parameters / settings.world_size


def gradient_seconds(settings: TrialSettings, offload: bool | float, copies: float, backward: float) -> float:
    """Seconds that a step takes longer because gradients leave for the host, all of them in `copies` seconds: each
    layer's while the backward of the next computes, `backward` seconds, which else waits for the memory. Twice the
    contention of other copies: 8B at 32K in 80 GiB took 0.16 s longer with them on one H200, 0.13 by the rest of this.
    """
    hosted, layers = hosted_fraction(settings, offload) * copies, settings.model.layers
    waits = layers * max(0.0, hosted / layers - backward)
    return waits + 2 * CONTENTION * (hosted - waits)


def update_seconds(settings: TrialSettings, offload: float, moments: float, forward: float) -> float:
    """Seconds that a step takes longer for the fraction `offload` of the moments in host memory. Copies of all to the
    GPU, gradients among them if they are on the host, take `moments` seconds, as others go back.

    The updates run while the next forward computes, `forward` seconds (`engine.memory.moments`): before its first layer
    are those of embedding and two layers, whose moments are the last to go to the host, before its last layer all.
    Moments in 8 bits are waited for.
    """
    hosted = hosted_fraction(settings, offload) * moments
    if settings.optimizer_states is not None:
        return hosted
    model, lora = settings.model, settings.lora
    layer, table = model.layer_parameters, model.vocab * model.hidden
    first = 2 * layer + table if lora is None else 2 * adapter_parameters(model, lora)
    waited = max(0.0, hosted - (1 - min(1.0, first / settings.trained_parameters)) * moments)
    beside, hiding = hosted - waited, forward * (model.layers - 1) / model.layers
    return waited + max(0.0, beside - hiding) + 2 * CONTENTION * min(beside, hiding)


def hosted_seconds(hosted: int, spread: int, copy: float, layer: float, hiding: float, beside: float = 0.0) -> float:
    """Seconds that a step takes longer for `hosted` layers kept whole in host memory, of each of which a copy takes
    `copy` seconds, there or back: what is waited for, and of the rest what computation takes longer meanwhile.

    They are spread over `spread` layers, whose forwards take `layer` seconds each and hide copies to the host; a copy
    back is hidden by the next layer's backward of attention and of the projections before it, `hiding` seconds. Other
    copies to the host take `beside` seconds meanwhile.
    """
    room = max(0.0, spread * layer - beside)
    waits = max(0.0, hosted * copy - room) + hosted * max(0.0, copy - hiding)
    return waits + CONTENTION * max(0.0, 2 * hosted * copy - waits)
