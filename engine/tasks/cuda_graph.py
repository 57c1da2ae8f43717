"""Whether a training step is captured as CUDA graphs: pure data, without torch, so that plans give the same reasons.

A captured step repeats the same kernels on the same memory. So whatever a step decides on the host, or exchanges with
another process, keeps it from being captured. The model has no dropout, and so no random state.
"""

from __future__ import annotations

from engine.settings import TrialSettings

MOST_TOKENS = 8192  # that `auto` captures: above, the kernels take longer than their launches (docs/train.md)
KERNELS = ("fa4",)  # of attention that `auto` captures; with others a capture has not been measured


def unsupported_reason(settings: TrialSettings, device_type: str) -> str | None:
    """Why this `cuda_graph` cannot hold on this device (cuda, cpu), one sentence; None where it can."""
    if settings.task != "train" or settings.cuda_graph != "step":
        return None
    reason = obstacle(settings, device_type)
    return None if reason is None else f"cuda_graph is step, but {reason}; set cuda_graph to none or auto"


def not_captured_reason(settings: TrialSettings, device_type: str) -> str | None:
    """Why the host launches every step of these settings, a clause; None where steps are captured, though under `auto`
    for the `KERNELS` alone. `step` must have been found possible."""
    if settings.cuda_graph != "auto":
        return None if settings.cuda_graph == "step" else f"cuda_graph is {settings.cuda_graph}"
    if reason := obstacle(settings, device_type):
        return reason
    tokens = settings.batch_size * settings.seq_len
    return None if tokens <= MOST_TOKENS else f"auto captures up to {MOST_TOKENS} tokens, and a step has {tokens}"


def obstacle(settings: TrialSettings, device_type: str) -> str | None:
    """What keeps a step of these settings from being captured: a clause without a capital or a full stop."""
    checkpoint, steps = settings.checkpoint, settings.steps
    if device_type != "cuda":
        return "this machine has no GPU"
    if settings.world_size > 1:
        return f"{settings.world_size} ranks exchange tensors in a step, and only a step of one rank can be captured"
    if settings.packs:
        return "every step has other documents (mask documents)"
    if any(settings.model.linear_layers):
        return f"model {settings.model.name} has linear layers, of which no capture has been tried"
    if settings.optimizer_offload:
        return "the optimizer's states are in host memory (optimizer_offload)"
    if settings.optimizer_states is not None:
        return f"the kernel of optimizer_states {settings.optimizer_states} takes the learning rate from the host"
    if checkpoint.offload != "none":
        return f"saved tensors go to host memory (checkpoint.offload: {checkpoint.offload})"
    if checkpoint.hosted(settings.model.layers):
        return f"saved tensors go to host memory (checkpoint.host_layers: {checkpoint.host_layers})"
    if settings.dtype == "fp64":
        return "no kernel updates parameters of dtype fp64 at a learning rate on the device"
    if settings.lm_head_fusion and settings.loss_kernel != "own":
        return f"loss_kernel {settings.loss_kernel} reads the labels on the host"
    if steps.warmup_seq_len not in (0, settings.seq_len):
        return f"steps.warmup_seq_len {steps.warmup_seq_len} gives the warm-up another length"
    if not steps.warmup:
        return "steps.warmup is 0, and the step before a capture would be measured"
    return None
