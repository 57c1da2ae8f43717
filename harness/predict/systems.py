"""Memory of a rank of the systems that the paper compares, as each holds its tensors; none of it is this engine's.

A sum of tensors at the moments that may be the fullest: in the LM head, with all saved tensors; and in the backward of
the last and of the first layer. What a system keeps, in which dtype, comes from its code (`SystemMemory.source`), read
at thunlp/BurstEngine 426eb7a. One number does not: parameters and gradients that are gathered on a stream of their own
free their memory when the GPU has caught up with the host, which is layers ahead. `waiting_layers` of the hardware file
says how many layers' parameters wait on average; it is one of the constants that were fitted.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.settings import BYTES_OF, TrialSettings
from harness.predict.attention import LayerAttention

_FP32 = 4
_STATES = 12  # bytes per parameter: AdamW's moments and the parameter itself, in fp32
# Tensors of the MLP's width in the backward of an MLP whose operators are torch's own: gate and up, the activation, the
# product; then the product's gradient, both factors' and these in one tensor.
_MLP_STATES = {True: 4 + 4, False: 2 + 2}
_HIDDEN_STATES = 4  # residual, normed states and their gradients
_INPUTS, _KERNEL = 5, 3  # of attention: Q, K, V, output and its gradient; what the kernel writes in backward


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemMemory:
    """How a system holds tensors. Bytes are per element."""

    name: str
    whole: bool = False  # each rank holds all parameters and gradients; else 1 / ranks of them
    gradient_bytes: int = 2  # of parameters
    gradients_stay: bool = False  # from the first step on; else they come to be in backward
    states_on_host: float | None = 0.0  # share of the optimizer's states; None: as the setting says
    logits_bytes: int  # in all per logit, where the loss takes whole logits
    sum_bytes: int = 2  # of attention's gradients while they are summed
    source: str


BURST_ENGINE = SystemMemory(
    name="BurstEngine",
    states_on_host=None,
    logits_bytes=2 + 2,  # logits, and the softmax that becomes their gradient
    source="BMTrain: optim/adam.py:76-84, zero_context.py, loss/cross_entropy.py:7-36; cpm/layers/feedforward.py",
)
INTERN_EVO = SystemMemory(
    name="InternEvo",
    states_on_host=1.0,
    logits_bytes=2 + 4 + 4,  # logits, the same in fp32, and the metric's copy of these
    sum_bytes=_FP32,
    source="InternEvo: configs/7B_llama2.py:106, core/naive_amp.py:93-97, model/metrics.py, model/ops/ring_flash_attn",
)
MEGATRON_DEEPSPEED = SystemMemory(
    name="Megatron-DeepSpeed",
    states_on_host=0.8,
    logits_bytes=2 + 4 + 4,  # logits, the same in fp32, and less their maximum
    source="Megatron-DeepSpeed: script/ds.json:18, megatron/core/tensor_parallel/cross_entropy.py:20-68",
)
MEGATRON_LM = SystemMemory(
    name="Megatron-LM",
    whole=True,
    gradient_bytes=_FP32,
    gradients_stay=True,
    logits_bytes=2 + 4 + 4,
    source="Megatron-LM: multi.sh:139, core/distributed/param_and_grad_buffer.py, tensor_parallel/cross_entropy.py",
)
# Of the methods of an experiment file, where `settings: as_published` stands for what the system's own scripts do.
SYSTEM_OF = {
    "burst": BURST_ENGINE,
    "loongtrain_double_ring": INTERN_EVO,
    "loongtrain_usp": INTERN_EVO,
    "ulysses": MEGATRON_DEEPSPEED,
    "megatron_cp": MEGATRON_LM,
    "megatron_tp": MEGATRON_LM,
}


def attention_states(system: SystemMemory, attention: LayerAttention) -> float:
    """Tensors of the size of a rank's queries that attention's backward holds at once.

    A chunk is received per ring while another is computed with. Of circulating gradients there are three sets: summed,
    under way and just sent. Sums in the inputs' dtype are the results; wider ones are rounded to them.
    """
    wide = system.sum_bytes / 2
    states: float = _INPUTS + _KERNEL
    if system.sum_bytes > 2:
        states += 3  # results
    if attention.schedule in ("ulysses", "usp", "usp_transposed"):
        states += _INPUTS  # exchanged
    if attention.schedule in ("ulysses", "tensor_parallel"):
        return states
    states += 2 * (2 if attention.schedule == "double_ring" else 1)
    return states + wide * (1 + 3 * 2 if attention.resolved.backward == "key_value" else 2 + 3)


def system_memory(
    settings: TrialSettings, system: SystemMemory, attention: LayerAttention, waiting_layers: float
) -> float:
    """Bytes that a rank's allocator holds at most: of a training step, or of a call of attention."""
    model, item = settings.model, BYTES_OF[settings.dtype]
    tokens = settings.seq_len * settings.batch_size / (settings.cp_size * settings.tp_size)
    query = item * tokens * model.heads * model.head_dim
    states = attention_states(system, attention) * query
    if settings.task == "attention":
        return states
    hidden = item * tokens * model.hidden
    parameters = model.parameters / settings.tp_size
    shard = parameters if system.whole else model.parameters / settings.world_size
    alone = settings.world_size == settings.tp_size or system.whole  # nothing is gathered
    host = system.states_on_host
    kept_states = 1 - (float(settings.optimizer_offload) if host is None else host)
    always = item * shard + kept_states * _STATES * model.parameters / settings.world_size
    gradients = system.gradient_bytes * shard
    if system.gradients_stay:
        always, gradients = always + gradients, 0.0
    checkpoint = settings.checkpoint
    saved = model.layers * hidden  # each layer's input
    saved += model.layers * checkpoint.tail * (query + _FP32 * tokens * model.heads)
    mlp = _MLP_STATES[model.gated] * item * tokens * model.ffn + _HIDDEN_STATES * hidden
    layer = max(mlp, states + _HIDDEN_STATES * hidden)
    waiting = 0.0 if alone else waiting_layers * item * model.layer_parameters
    head = 0.0 if settings.lm_head_fusion else system.logits_bytes * tokens * model.vocab
    moments = (saved + head, saved + layer, saved / model.layers + layer + gradients)
    return always + waiting + max(moments)
