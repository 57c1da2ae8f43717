"""Time and memory of a trial on given GPUs, predicted from its settings without running it.

Time is a lower bound: all matrix products and attention, repeated ones included, at the speeds measured on this
hardware in bf16, without waiting, launches and elementwise work.

Memory is that of the engine's tensors (docs/memory.md) at the three moments that may be the fullest: in the LM head,
with all saved tensors and no gradients yet; in the backward of the last layer, just after; and in that of the first
layer, with no saved tensors left and all gradients. Allocators' rounding and kernels' workspaces are left out. The
estimate is within 15% of the committed records of H200 (tests/harness/test_predict.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.attention.masks import Causal, parse_mask
from engine.checkpoint.counts import group_starts, inputs_at_once, inputs_in_store
from engine.settings import BYTES_OF, TrialSettings
from harness.metrics.ceilings import kernel_bound_seconds
from harness.metrics.flops import work_of
from harness.metrics.hardware import Hardware
from harness.metrics.throughput import GIB

_PROCESS = 2 * GIB  # of host memory: interpreter, torch, CUDA's own
_HEAD_TILE = 1 * GIB  # logits of one tile (engine.lm_head.tiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of one trial; None where nothing is predicted."""

    seconds: float | None  # of a step, or of a call: a lower bound
    gpu_gib: float | None  # of the fullest rank, approximately
    host_gib: float | None  # of one rank's process, approximately


def predict(settings: TrialSettings, hardware: Hardware) -> Prediction:
    """Time and memory of a trial on GPUs of this kind."""
    memory = training_memory(settings) if settings.task == "train" else None
    return Prediction(
        seconds=_seconds(settings, hardware),
        gpu_gib=memory.gpu / GIB if memory else None,
        host_gib=memory.host / GIB if memory else None,
    )


def _seconds(settings: TrialSettings, hardware: Hardware) -> float | None:
    kernels = [settings.kernel] if settings.kernel != "auto" else list(hardware.kernel_ceilings)
    if settings.dtype != "bf16" or not kernels:
        return None
    work = work_of(settings)
    once = kernel_bound_seconds(work, hardware, kernels[0])  # nothing repeated
    if once is None:
        return None
    again = work.recomputed_layers / hardware.gemm_tflops if hardware.gemm_tflops else 0.0  # attention repeats none
    if work.recomputed_attention:
        again += work.recomputed_attention / hardware.kernel_ceilings[kernels[0]]["forward"]
    return (once + again / 1e12) / settings.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank."""

    gpu: float
    host: float

    @property
    def without_gpu(self) -> float:
        """Of a rank on a CPU, where all is host memory and the process itself takes less."""
        return self.gpu + self.host - _PROCESS


def training_memory(settings: TrialSettings) -> Memory:
    """The most that one rank of a training trial holds on its GPU and on the host."""
    return _Estimate(settings).memory()


class _Estimate:
    """The terms of one trial, in bytes per rank."""

    def __init__(self, settings: TrialSettings) -> None:
        self._settings, shape = settings, settings.model
        item = BYTES_OF[settings.dtype]
        self._wide = max(4, item)  # of master weights, gradients and moments
        self._item = item
        tokens = settings.seq_len * settings.batch_size / settings.cp_size
        self._mlp_state = item * tokens * shape.ffn
        self._state = item * tokens * shape.hidden  # one hidden state of all tokens of the rank
        self._query = item * tokens * shape.heads * shape.head_dim  # queries, attention's output, their gradients
        self._keys = 2 * item * tokens * shape.kv_heads * shape.head_dim  # keys and values
        self._lse = 4 * tokens * shape.heads
        self._logits = (4 + item) * tokens * shape.vocab
        shards = settings.world_size
        if settings.sharding == "hybrid":
            shards = max(1, shards // max(1, settings.emulate_nodes))
        self._parameters = shape.parameters / shards

    def memory(self) -> Memory:
        settings, checkpoint = self._settings, self._settings.checkpoint
        wide, moments = self._wide * self._parameters, 2 * self._wide * self._parameters
        inputs, attention = self._kept()
        whole = self._whole()
        on_host = float(_PROCESS)
        device = wide
        if settings.optimizer_offload:
            on_host += moments
        else:
            device += moments
        kept = 0.0
        if checkpoint.offload != "none" and inputs:
            again = checkpoint.layers_again(settings.model.layers)
            on_host += inputs_in_store(checkpoint, again) * self._state
        else:
            kept += inputs
        if checkpoint.offload == "all":
            on_host += attention
        else:
            kept += attention
        # In the LM head all is held; in the last layer too; recomputed layers come when whole ones have been passed.
        last = self._gathered() + (self._whole_layer() if whole else self._layer())
        moments_of_peak = [kept + whole + self._head(), kept + whole + last, wide + last]
        if checkpoint.layers_again(settings.model.layers):
            moments_of_peak += [kept + self._gathered() + self._layer(), wide + self._gathered() + self._layer()]
        fullest = max(moments_of_peak)
        return Memory(gpu=device + fullest, host=on_host)

    def _kept(self) -> tuple[float, float]:
        """Inputs and attention's results of the layers that backward recomputes, of a whole forward."""
        checkpoint = self._settings.checkpoint
        again = checkpoint.layers_again(self._settings.model.layers)
        if not again:
            return 0.0, 0.0
        return group_starts(checkpoint, again) * self._state, again * checkpoint.tail * (self._query + self._lse)

    def _whole(self) -> float:
        """All saved tensors of the layers that are not recomputed: their input and the MLP's, queries, keys and
        values, attention's results, and the kept products of the MLP's first matrices."""
        shape, checkpoint = self._settings.model, self._settings.checkpoint
        kept = 2 * self._state + 2 * self._query + self._keys + self._lse
        if shape.qk_norm and self._settings.projection_tiles == 1:  # torch's: normed input, and q and k before the norm
            kept += self._state + self._query + self._keys / 2
        kept += checkpoint.mlp * (2 if shape.gated else 1) * self._mlp_state
        return (shape.layers - checkpoint.layers_again(shape.layers)) * kept

    def _whole_layer(self) -> float:
        """The backward of such a layer beyond its saved tensors: the larger of the MLP's and attention's."""
        settings, gates = self._settings, 2 if self._settings.model.gated else 1
        runs = settings.mlp_tiles if settings.checkpoint.mlp in (0, 1) else 2 * settings.mlp_tiles
        mlp = (1 + gates) * self._mlp_state / settings.mlp_tiles
        if runs > 1:
            mlp += self._wide * (1 + gates) * settings.model.hidden * settings.model.ffn
        # Gradients before and after, the normed states and their gradient; or of out, q, k, v and the residual.
        return max(4 * self._state + mlp, self._state + 2 * self._query + self._keys + self._received())

    def _gathered(self) -> float:
        """Two layers' parameters, and the gradient of one as computed and as reduced."""
        return (3 * self._item + self._wide) * self._settings.model.layer_parameters

    def _head(self) -> float:
        """Weight, its gradient summed, as computed and as reduced; the logits; input, norm and gradient of the head."""
        shape, fused = self._settings.model, self._settings.lm_head_fusion
        weight = (2 * self._item + 2 * self._wide) * shape.vocab * shape.hidden
        return weight + (min(self._logits, _HEAD_TILE) if fused else self._logits) + 3 * self._state

    def _layer(self) -> float:
        """One layer's backward beyond the saved tensors: the larger of the MLP's and attention's."""
        settings, checkpoint = self._settings, self._settings.checkpoint
        shape = settings.model
        held = self._query + self._keys  # computed again, for attention's backward
        if settings.projection_tiles == 1:
            held += self._state  # normed
        if checkpoint.every > 1 or checkpoint.offload != "none":
            held += self._state  # the input is not among the saved tensors
        if checkpoint.replay == "hold" and checkpoint.every > 1:
            outputs = 0.0 if checkpoint.offload == "none" and checkpoint.tail == 1 else self._query
            held += inputs_at_once(checkpoint, shape.layers) * (self._state + outputs)
        gates = 2 if shape.gated else 1
        if settings.mlp_tiles > 1:
            run = (1 + gates) * self._mlp_state / settings.mlp_tiles
            mlp = run + self._wide * (1 + gates) * shape.hidden * shape.ffn
        else:
            mlp = 2 * (1 + gates) * self._mlp_state
        output = 0.0 if checkpoint.tail == 1 and checkpoint.offload != "all" else self._query
        in_mlp = held + output + 3 * self._state + mlp  # gradients before and after, the MLP's input
        in_attention = held + self._state + self._query + self._query + self._keys  # gradients: residual, out, q, k, v
        return max(in_mlp, in_attention + self._received())

    def _received(self) -> float:
        """Received chunks and the gradients sent back: the part of them that the mask uses."""
        settings = self._settings
        if settings.cp_size == 1:
            return 0.0
        used = min(1.0, parse_mask(settings.mask).area(settings.seq_len) / Causal().area(settings.seq_len))
        return used * (4 * self._query + 2 * self._keys)
