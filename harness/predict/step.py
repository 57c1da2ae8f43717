"""Seconds of one training step, or of one call of attention, by phase.

A step is the sum of what the GPU does one after another: attention along the method's schedule, and a table of terms
(`terms`), each with its FLOPs and bytes. Parameters that are gathered, and activations that go to the host and back,
cost time where they take longer than the layer they overlap with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from engine.attention.problem import Problem
from engine.checkpoint.counts import (
    added_weights,
    gathering_bytes,
    group_states,
    layers_run_again,
)
from engine.checkpoint.planning.cost import (
    BOTH_WAYS,
    copied_gradients,
    copied_moments,
    gradient_seconds,
    hosted_seconds,
    update_seconds,
)
from engine.checkpoint.planning.memory import MemoryModel
from engine.checkpoint.planning.memory_settings import memory_settings_of
from engine.linear.volume import CHUNK, sent_bytes
from engine.lora import adapter_parameters, adapter_passes
from engine.settings import BYTES_OF, TrialSettings, hosted_fraction, keeps_whole, late_fraction, share_in_8_bits
from engine.tasks.cuda_graph import not_captured_reason
from harness.metrics.flops import StepFlops
from harness.metrics.hardware import HardwareSpeeds
from harness.metrics.throughput import GIB, TERA
from harness.predict.attention import (
    LayerAttention,
    Pass,
    attention_passes,
    attention_problem,
    context_ranks_of_node,
    layer_attention,
    tensor_parallel_seconds,
)
from harness.predict.packed import step_work

# Passes over one token's hidden states in a layer, read and written, in elements of the hidden size or of the MLP's.
_FORWARD_HIDDEN = 4 + 6  # two norms, two sums with the residual
_BACKWARD_HIDDEN = 10 + 6  # the norms' gradients and their weights', the sums of gradients
_FORWARD_MLP, _BACKWARD_MLP = 3, 8  # the product of gate and up; its gradient, and the product once more
_ROTARY = 2  # read and written, of queries and keys
# The same of a linear layer's forward: in elements of its channels the convolution with its activation, and its parts
# as tensors of their own; in elements of its values the norm with the gate. Delta nets have one kernel, which reads two
# tensors and writes one; Mamba-2 has time steps, skip, gate and norm as operations of their own, which read and write
# about 20.
_MIXER_CHANNELS, _MIXER_VALUES = 4, {"gated_delta_net": 3, "mamba2": 20}
# Of a recurrence beside its products, forward and backward: as many bytes as the GPU could move meanwhile, in elements
# of a value head's key, value and share of the state that is kept for each chunk. Measured with flash-linear-attention
# 0.6 at 128K and 256K tokens (results/published/h200x1/linear_layers).
_RECURRENCE_PASSES = {"gated_delta_net": (10.3, 24.7), "mamba2": (5.3, 11.7)}
# Bytes per parameter of a rank's shard and step. AdamW's update reads and writes the parameter and reads the gradient,
# and both moments both ways; the norm reads the gradient before.
_UPDATE_BYTES, _NORM_BYTES = 8 + 4, 4
# The same of an element whose moments have 8 bits: as many bytes as the GPU could move while the library's kernel
# computes, which moves 16 itself. It takes 33.7 ms for 1.07e9 elements of the 1b model in a trace of a step on one H200
# (bitsandbytes 0.50.2).
_UPDATE_IN_8_BITS = 111.5
# In one pass over whole parameters it clips too and writes the copy. Else clipping is a pass of its own, and whole
# parameters are read for their copies.
_COPY_BYTES, _CLIPPING_BYTES, _READ_BYTES = 2, 8, 4
# Of the host for all kernels of a layer, forward and backward, by linear_dtype, on one GPU: 0.070 to 0.081 s for 16
# layers of up to 4096 tokens, by host (results/published/h200x1: short_sequences, float8_launches). With casts to
# float8 steps of 4096 and 8192 tokens took 0.120 to 0.139 s at the median (float8_launches, float8_loss), replayed as
# CUDA graphs 0.054 and 0.105. A step that is not replayed takes at least as long.
_LAUNCH_SECONDS = {"same": 0.0047, "float8": 0.0080}
# Of the host for one call of attention and its backward. Its launches and the GPU's work overlap in part: both go into
# the time by their powers. Fitted to 2K to 8K tokens on one H200 (results/published/h200x1: attention_short, packed).
_CALL_LAUNCH_SECONDS, _OVERLAP = 0.75e-3, 1.5
# Bytes that casts to float8 read and write (engine.ops.float8): 2 for the largest value, which SwiGLU finds itself and
# forward leaves to backward, 2 for the cast, 1 for the numbers and 1 for their transpose. Of norms and of SwiGLU's
# gradients numbers are written in place of bf16: these are the bytes beyond. Per token, in forward, backward and a
# layer's recomputation, which ends before the MLP, of the widths of hidden states, queries, keys with values, and the
# MLP; then per weight. Backward of hidden states adds one product to another.
_CAST_FORWARD = {"hidden": 1 + 1, "queries": 5, "keys": 0, "ffn": 3}
_CAST_BACKWARD = {"hidden": 6 - 1 + 6 - 1 + 6, "queries": 3 + 6, "keys": 6, "ffn": 1 + 2 * 2}
_CAST_AGAIN = {"hidden": 1 + 1, "queries": 5, "keys": 0, "ffn": 0}
_CAST_WEIGHT = 5, 3, 2
# Of casts, where that of elementwise passes is 1: by what steps of 16K and 64K tokens took longer, in a development run
# on an H200.
CAST_SPEED = 0.69


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds by phase, in the order of a report; what a trial does not have is missing."""

    phases: Mapping[str, float]
    attention: LayerAttention
    attention_forward: float  # seconds of one forward of one layer's attention, waiting included

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def bottleneck(self) -> str:
        """The phase that takes longest."""
        return max(self.phases, key=lambda name: self.phases[name])


def step_time(
    settings: TrialSettings, speeds: HardwareSpeeds, *, node_ranks: int, attention: LayerAttention | None = None
) -> StepTime:
    """Predicted seconds of one step or call. `node_ranks`: GPUs of a node that the trial uses; `attention`: of a layer,
    by default as the method's ranks resolve it. Raises ValueError for a method or settings that are not modelled."""
    if settings.task == "linear":
        raise ValueError("no time is predicted of task linear; run it")
    node_size = context_ranks_of_node(settings, node_ranks)
    problem = attention_problem(settings, node_size)
    attention = attention or layer_attention(settings, problem, speeds)
    work, ranks = step_work(settings), settings.world_size
    phases: dict[str, float] = {}
    if settings.task == "lm_head":
        phases["LM head"] = work.all_head / ranks / (speeds.gemm_tflops * TERA)
        return StepTime(phases=phases, attention=attention, attention_forward=0.0)
    if settings.task == "train" and speeds.tiles is not None:
        speeds = replace(speeds, tiles=speeds.tiles.in_step())
    forward, backward = attention_passes(attention, speeds)
    calls = settings.gradient_accumulation if settings.task == "train" else 1
    if settings.task == "attention":
        _add(phases, "attention forward", forward, 1.0)
        _add(phases, "attention backward", backward, 1.0)
        computing = sum(phases.values())
        together = (computing**_OVERLAP + _CALL_LAUNCH_SECONDS**_OVERLAP) ** (1 / _OVERLAP)
        phases["waiting for launches"] = together - computing
        return StepTime(phases=_ordered(phases), attention=attention, attention_forward=forward.seconds)
    layers = settings.model.layers * calls
    again = work.recomputed_attention / work.attention if work.attention else 0.0
    for mask in settings.masks:  # layers with a window choose their own schedule
        ahead, back = forward, backward
        if mask != settings.masks[0]:
            inside = replace(attention_problem(settings, node_size, mask), layout=problem.layout)
            ahead, back = attention_passes(layer_attention(settings, inside, speeds), speeds)
        count = settings.layer_masks.count(mask) * calls
        _add(phases, "attention forward", ahead, count)
        _add(phases, "attention again", ahead, count * again)
        _add(phases, "attention backward", back, count)
    across = attention.across_gib(speeds)
    _add_waiting(phases, tensor_parallel_seconds(settings, speeds, node_ranks, across), 1.0)
    runs = 2 + layers_run_again(settings.model, settings.checkpoint) / settings.model.layers  # and one backward
    _add_waiting(phases, _linear_layers_waiting(settings, problem, speeds, across), runs * calls)
    phases |= {term.phase: term.seconds(speeds, ranks) for term in terms(settings, work)}
    computing = sum(phases.values()) / layers / 3  # of one layer in one direction, about
    gathering = _gather_seconds(settings, speeds, node_ranks, across)
    moving = _offload_bytes(settings) / (speeds.host_gib * GIB)
    phases["parameters"] = layers * 3 * max(0.0, gathering - computing)
    copied = 0.0 if keeps_whole(settings) else gathering_bytes(settings)
    phases["parameters"] += copied * calls / (speeds.memory_gib * GIB)
    waits = max(0.0, moving - computing)
    phases["host copies"] = layers * 2 * waits
    if settings.head_groups > 1:  # nothing hides copies back
        phases["host copies"] += settings.checkpoint.layers_again(settings.model.layers) * calls * (moving - waits)
    computed = phases["attention forward"] + (phases["matrix products"] + phases["elementwise"]) / 3  # of a step, about
    offload, link = float(settings.optimizer_offload), speeds.host_gib * GIB
    moments, gradients = copied_moments(settings), copied_gradients(settings) * settings.gradient_offload
    beside = moments / (BOTH_WAYS * link) * late_fraction(settings, offload)
    if beside:
        coming = (moments + gradients) / (BOTH_WAYS * link)
        phases["host copies"] += update_seconds(settings, offload, coming, computed / calls)
        phases["host copies"] += gradient_seconds(settings, offload, gradients / link, 2 * computed / layers)
    phases["host copies"] += _hosted_seconds(settings, speeds, forward, backward, phases, beside)
    if not_captured_reason(settings, "cuda") is not None:
        launching = layers * _LAUNCH_SECONDS[settings.linear_dtype]
        phases["waiting for launches"] = max(0.0, launching - sum(phases.values()))
    return StepTime(phases=_ordered(phases), attention=attention, attention_forward=forward.seconds)


def _linear_layers_waiting(settings: TrialSettings, problem: Problem, speeds: HardwareSpeeds, across: float) -> Pass:
    """Waiting for tokens in another order, inputs of the rank before, and states, in one forward or one backward of all
    linear layers: both send equally many bytes.

    Bytes are those of the rank that sends most, over its links inside the node and of `across` GiB/s to other nodes,
    one after the other. No kernels: recurrences are terms of their own.
    """
    if not any(settings.model.linear_layers) or problem.cp_size == 1:
        return Pass(kernels=0.0)
    sent = sent_bytes(
        settings.model, problem.layout, problem.seq_len, problem.cp_size, dtype=settings.dtype, batch_size=problem.batch
    )
    node = np.arange(problem.cp_size) // problem.node_size
    same = node[:, None] == node
    inside, between = (int((sent * where).sum(1).max()) for where in (same, ~same))
    return Pass(kernels=0.0, inside=inside / (speeds.inside_gib * GIB), across=between / (across * GIB))


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """Work of one phase of a step that overlaps with nothing."""

    phase: str
    flops: float = 0.0  # of matrix products, over all ranks
    float8: float = 0.0  # share of them that is formed in float8
    memory_bytes: float = 0.0  # that a rank reads and writes in its GPU's memory
    host_bytes: float = 0.0  # that a rank moves to its host and back at once, in each direction
    meanwhile_bytes: float = 0.0  # that it reads and writes in its GPU's memory meanwhile

    def seconds(self, speeds: HardwareSpeeds, ranks: int) -> float:
        """On this many ranks."""
        products = self.flops / (TERA * ranks)
        products *= (1 - self.float8) / speeds.gemm_tflops + self.float8 / speeds.float8_tflops
        memory, link = speeds.memory_gib * GIB, BOTH_WAYS * speeds.host_gib * GIB
        return products + self.memory_bytes / memory + max(self.host_bytes / link, self.meanwhile_bytes / memory)


def terms(settings: TrialSettings, work: StepFlops) -> tuple[Term, ...]:
    """The phases of a training step besides attention and what overlaps with a layer."""
    model, shard = settings.model, settings.trained_parameters / settings.world_size
    updated = _update_bytes(settings)
    offload = settings.optimizer_offload
    waited = hosted_fraction(settings, offload) - late_fraction(settings, offload)  # of the updates
    float8 = 0.0
    if settings.linear_dtype == "float8":
        float8 = model.float8_matrices / (model.layer_matrices + model.recurrence_products)
    return (
        Term(phase="matrix products", flops=work.all_layers, float8=float8),
        Term(phase="matrix products again", flops=work.recomputed_layers, float8=float8),
        Term(phase="casts to float8", memory_bytes=_cast_bytes(settings, work) / CAST_SPEED),
        Term(phase="elementwise", memory_bytes=_elementwise_bytes(settings, work)),
        Term(phase="recurrences", memory_bytes=_recurrence_bytes(settings, work)),
        Term(phase="LM head", flops=work.all_head, memory_bytes=_logits_bytes(settings)),
        Term(
            phase="optimizer",
            memory_bytes=shard * (_NORM_BYTES + (1 - waited) * updated + _after_update_bytes(settings)),
            host_bytes=copied_moments(settings) * waited,
            meanwhile_bytes=shard * waited * updated,
        ),
    )


def _update_bytes(settings: TrialSettings) -> float:
    """Bytes per parameter of the update, on average."""
    narrow = 0.0 if settings.optimizer_states is None else share_in_8_bits(settings.model)
    wide = _UPDATE_BYTES + 4 * max(4, BYTES_OF[settings.dtype])
    return (1 - narrow) * wide + narrow * _UPDATE_IN_8_BITS


def _after_update_bytes(settings: TrialSettings) -> int:
    """Bytes per parameter of clipping and of copies."""
    if not keeps_whole(settings):
        return _CLIPPING_BYTES
    return _COPY_BYTES if settings.optimizer_states is None else _COPY_BYTES + _CLIPPING_BYTES + _READ_BYTES


_WAITING = {"inside": "waiting inside nodes", "across": "waiting between nodes", "steps": "schedule's steps"}
_ORDER = (
    "matrix products", "matrix products again", "attention forward", "attention again", "attention backward",
    "elementwise", "casts to float8", "recurrences", "LM head", "optimizer", "schedule's steps", "waiting inside nodes",
    "waiting between nodes", "parameters", "host copies", "waiting for launches",
)  # fmt: skip


def _add(phases: dict[str, float], name: str, one: Pass, count: float) -> None:
    """Add a pass of attention, `count` times: the time of its kernels under `name`, each wait under its own name."""
    phases[name] = phases.get(name, 0.0) + one.kernels * count
    _add_waiting(phases, one, count)


def _add_waiting(phases: dict[str, float], one: Pass, count: float) -> None:
    for part, phase in _WAITING.items():
        phases[phase] = phases.get(phase, 0.0) + getattr(one, part) * count


def _ordered(phases: Mapping[str, float]) -> dict[str, float]:
    return {name: phases[name] for name in _ORDER if phases.get(name)}


def _sharing(settings: TrialSettings) -> int:
    """Ranks among which the elements of one sequence's states are divided: by tokens, or by columns."""
    return settings.cp_size * settings.tp_size


def _tokens(settings: TrialSettings) -> float:
    """Of a step, of one rank."""
    return settings.seq_len * settings.batch_size * settings.gradient_accumulation / _sharing(settings)


def _again(work: StepFlops) -> float:
    """Forwards of a layer that backward runs."""
    return work.recomputed_layers / work.layers if work.layers else 0.0


def _elementwise_bytes(settings: TrialSettings, work: StepFlops) -> float:
    """Bytes that a rank's elementwise passes read and write in a step."""
    model, item = settings.model, BYTES_OF[settings.dtype]
    rotary = _ROTARY * (model.heads + (1 if model.kv_latent else model.kv_heads)) * model.rotated_dim
    of_adapters = adapter_passes(model, settings.lora)
    hidden, ffn = model.hidden * (1 + model.mlp_share) / 2, model.ffn * model.mlp_share  # a layer may have one half
    forward = _FORWARD_HIDDEN * hidden + _FORWARD_MLP * ffn + rotary + of_adapters[0]
    backward = _BACKWARD_HIDDEN * hidden + _BACKWARD_MLP * ffn + rotary + of_adapters[1]
    again = _again(work)
    values = model.linear_heads * model.linear_value_dim
    channels = 2 * model.linear_key_heads * model.linear_key_dim + values
    mixer = _MIXER_CHANNELS * channels + _MIXER_VALUES.get(model.linear, 0) * values
    mixers = sum(model.linear_layers) * mixer * (3 + again)
    layers = model.layers * ((1 + again) * forward + backward)
    attending = settings.checkpoint.layers_again(model.layers) * model.attention_layers / model.layers
    layers += attending * group_states(model, settings.head_groups)
    return item * _tokens(settings) * (layers + mixers) + _tile_bytes(settings)


def _cast_bytes(settings: TrialSettings, work: StepFlops) -> float:
    """Bytes that a rank's casts to float8 read and write in a step, and its sums over tiles beyond `_tile_bytes`, since
    products in float8 are added to sums by a pass of their own."""
    if settings.linear_dtype == "same":
        return 0.0
    model, again = settings.model, _again(work)
    attending, with_mlp = model.attention_layers, model.layers * model.mlp_share
    widths = {
        "hidden": (attending + with_mlp) / 2 * model.hidden,
        "queries": attending * model.heads * model.head_dim,
        "keys": attending * 2 * model.kv_heads * model.head_dim,
        "ffn": with_mlp * model.ffn * (1 if model.gated else 2),
    }
    of_a_token = sum(
        width * (_CAST_FORWARD[name] + _CAST_BACKWARD[name] + again * _CAST_AGAIN[name])
        for name, width in widths.items()
    )
    forward, backward, recomputed = _CAST_WEIGHT
    of_a_weight = forward + backward + again * recomputed
    of_weights = of_a_weight * model.layers * model.float8_matrices * settings.gradient_accumulation
    return _tokens(settings) * of_a_token + of_weights + _tile_bytes(settings)


def _recurrence_bytes(settings: TrialSettings, work: StepFlops) -> float:
    """Bytes that a rank could move while the recurrences of its linear layers run in a step, beside their products."""
    model = settings.model
    forward, backward = _RECURRENCE_PASSES.get(model.linear, (0.0, 0.0))
    state = model.linear_key_dim * model.linear_value_dim / CHUNK
    head = model.linear_key_dim + model.linear_value_dim + state
    elements = sum(model.linear_layers) * model.linear_heads * head * ((1 + _again(work)) * forward + backward)
    return BYTES_OF[settings.dtype] * _tokens(settings) * elements


def _tile_bytes(settings: TrialSettings) -> float:
    """Bytes of the sums of weights' gradients that tiles of a layer read and write, once per tile and micro-batch."""
    weights = added_weights(settings.model, settings.mlp_tiles, settings.projection_tiles, settings.lora)
    return 2.0 * max(4, BYTES_OF[settings.dtype]) * settings.gradient_accumulation * weights


def _logits_bytes(settings: TrialSettings) -> float:
    """Bytes of logits that are read and written beside the products: several times where the head is not fused."""
    passes = 2 * BYTES_OF[settings.dtype] if settings.lm_head_fusion else 4 * (4 + BYTES_OF[settings.dtype])
    return float(passes) * _tokens(settings) * settings.model.vocab


def _gather_seconds(settings: TrialSettings, speeds: HardwareSpeeds, node_ranks: int, across: float) -> float:
    """Of gathering one layer's parameters, or of reducing its gradients: each node receives what others hold, over
    the links of all its GPUs, each of `across` GiB/s."""
    ranks, node_ranks = settings.world_size // settings.tp_size, max(1, node_ranks // settings.tp_size)
    nbytes = settings.model.layer_parameters * BYTES_OF[settings.dtype] / settings.tp_size
    nodes = -(-ranks // node_ranks)
    inside = nbytes * (min(ranks, node_ranks) - 1) / min(ranks, node_ranks) / (speeds.inside_gib * GIB)
    return inside + (nbytes * (nodes - 1) / nodes / (across * GIB * node_ranks) if nodes > 1 else 0.0)


def _hosted_seconds(
    settings: TrialSettings,
    speeds: HardwareSpeeds,
    forward: Pass,
    backward: Pass,
    phases: Mapping[str, float],
    beside: float,
) -> float:
    """That a step takes longer for layers that are kept whole in host memory, where moments are copied for `beside`
    seconds meanwhile."""
    model, checkpoint = settings.model, settings.checkpoint
    layers, calls = model.layers, settings.gradient_accumulation
    if not (hosted := len(checkpoint.hosted(layers))):
        return 0.0
    copy = MemoryModel(settings).saved_of_layer(memory_settings_of(settings)) / (speeds.host_gib * GIB)
    attending = model.attention_layers / layers
    tokens, speed = _tokens(settings) / calls, speeds.gemm_tflops * TERA
    weights = model.layer_matrices + model.recurrence_products + adapter_parameters(model, settings.lora)
    of_layer = 2.0 * tokens * weights / speed + phases.get("elementwise", 0.0) / 3 / layers / calls
    products = 2.0 if settings.lora is not None else 4.0  # frozen matrices have no gradients
    projections = products * tokens * model.projection_parameters / speed
    return calls * hosted_seconds(
        hosted=hosted,
        spread=layers - checkpoint.layers_again(layers) - 1,
        copy=copy,
        layer=of_layer + attending * forward.seconds,
        hiding=attending * backward.seconds + projections,
        beside=beside / calls,
    )


def _offload_bytes(settings: TrialSettings) -> float:
    """Bytes of one layer that go to the host in forward, and come back in backward."""
    checkpoint, model = settings.checkpoint, settings.model
    if checkpoint.offload == "none" or not checkpoint.every:
        return 0.0
    tokens = settings.seq_len * settings.batch_size / _sharing(settings)
    elements = model.hidden / checkpoint.every
    if checkpoint.offload == "all":
        elements += checkpoint.tail * model.heads * model.output_dim
    return BYTES_OF[settings.dtype] * tokens * elements
