"""Why a trial cannot run on a machine. Pure data, torch never imported."""

from __future__ import annotations

import math
from pathlib import Path

from cluster.files.errors import counted
from engine.attention.geometry.layout import LAYOUTS, Layout, split_unsupported_reason
from engine.attention.masks import parse_mask
from engine.checkpoint.planning.memory import memory_of
from engine.combinations import head_dim_unsupported_reason, vocabulary_unsupported_reason
from engine.lm_head import loss_kernel
from engine.method import Method, method_unsupported_reason, schedule_unsupported_reason_on, unavailable_reason
from engine.ops import FLOAT8_CAPABILITY
from engine.settings import BYTE_VOCABULARY, TrialSettings, size_in_bytes
from engine.tasks import cuda_graph
from harness.base.errors import UsageError, one_of
from harness.machine.this_machine import Machine
from harness.metrics.hardware import hardware_for
from harness.metrics.throughput import GIB
from harness.spec.methods import is_native, method_named
from harness.spec.table import missing_entry_reason

MAX_RANKS = 1 << 16  # choosing a layout looks at every rank
MAX_CP_SIZE = 1 << 10  # the tiles of all pairs of ranks take 3 GiB then

# Kernels that exist for one kind of device only; `auto` and `reference` run on both.
_DEVICE_OF_KERNEL = {"cpu": "cpu", "fa2": "cuda", "cudnn": "cuda", "fa4": "cuda", "flex": "cuda"}
# Setting, its value, and the least compute capability of a GPU that has it.
_NEEDS_CAPABILITY = (("kernel", "fa4", 9.0), ("linear_dtype", "float8", FLOAT8_CAPABILITY))


def unsupported_reason(settings: TrialSettings, machine: Machine) -> str | None:
    """One sentence why this trial cannot run on this machine, or None.

    Reasons that hold on any machine come first, because a larger machine would not remove them.
    """
    method = method_named(settings.method)
    return (
        no_trial_reason(settings)
        or missing_entry_reason(settings.method, settings.settings)
        or _data_unsupported_reason(settings)
        or _refused_by(method, settings)
        or _layout_unsupported_reason(settings)
        or _schedule_unsupported_reason(settings, machine)
        or _head_unsupported_reason(settings, machine)
        or _device_unsupported_reason(settings, machine)
        or cuda_graph.unsupported_reason(settings, machine.device)
        or _memory_unsupported_reason(settings, machine)
        or unavailable_reason(method, machine.device, settings.kernel)
    )


def _refused_by(method: Method, settings: TrialSettings) -> str | None:
    """Raises UsageError for an answer that is no reason: a method may be a user's."""
    reason: object = method_unsupported_reason(method, settings)
    if reason is None or isinstance(reason, str):
        return reason
    raise UsageError(
        f"refuse of method {method.name} returned {reason!r}; expected None, or one sentence that says why the trial "
        "cannot run"
    )


def no_trial_reason(settings: TrialSettings) -> str | None:
    """Why these settings describe nothing of which time or memory could be predicted, or None."""
    return (
        _size_unsupported_reason(settings)
        or parse_mask(settings.mask).unsupported_reason(settings.seq_len)
        # A rank without a token: the models of time and memory divide by a rank's tokens.
        or (_layout_unsupported_reason(settings) if settings.row_tokens < settings.cp_size else None)
    )


def _size_unsupported_reason(settings: TrialSettings) -> str | None:
    """Sizes that do not fit each other."""
    world, parallel = settings.world_size, settings.cp_size * settings.tp_size
    if world > MAX_RANKS:
        return f"{world} ranks are more than a plan takes; choose at most {MAX_RANKS}"
    if settings.cp_size > MAX_CP_SIZE:
        return f"cp_size {settings.cp_size} is more than a plan takes; choose at most {MAX_CP_SIZE}"
    if world % parallel:
        return (
            f"cp_size {settings.cp_size} x tp_size {settings.tp_size} = {parallel} does not divide world_size {world}; "
            f"choose a world_size that is a multiple of {parallel}"
        )
    if world % settings.emulate_nodes:
        return (
            f"emulate_nodes {settings.emulate_nodes} does not divide world_size {world}; "
            "choose a number of nodes that divides it"
        )
    return None


def _data_unsupported_reason(settings: TrialSettings) -> str | None:
    """Tokens outside the model's vocabulary, or a store that cannot be read."""
    if settings.task != "train":
        return None
    if not Path(settings.data).is_dir():  # a text, whose tokens are bytes
        return vocabulary_unsupported_reason(settings, BYTE_VOCABULARY)
    from engine.data import vocabulary_of  # numpy comes with it

    try:
        return vocabulary_unsupported_reason(settings, vocabulary_of(settings.data))
    except ValueError as error:
        return str(error)


def _layout_unsupported_reason(settings: TrialSettings) -> str | None:
    """A sequence that does not split. Only native methods have a layout here; foreign programs check it themselves."""
    layout_of = getattr(method_named(settings.method), "layout", None)
    layout = None if layout_of is None else layout_of(settings)
    if layout_of is not None and (isinstance(layout, str) or layout is None) and layout not in LAYOUTS:
        raise UsageError(
            f"layout of method {settings.method} returned {layout!r}; expected {one_of(LAYOUTS)}, or a Layout"
        )
    whole = None if layout is None else split_unsupported_reason(layout, settings.row_tokens, settings.cp_size)
    return whole or _warm_up_unsupported_reason(settings, layout)


def _warm_up_unsupported_reason(settings: TrialSettings, layout: str | Layout | None) -> str | None:
    """Why steps of `steps.warmup_seq_len` tokens cannot be run, or None. `layout`: the trial's own, by which shorter
    sequences are split too; None where the method has none."""
    seq_len = settings.steps.warmup_seq_len
    if settings.task != "train" or seq_len in (0, settings.seq_len) or not settings.steps.warmup:
        return None
    if seq_len > settings.seq_len:
        return (
            f"steps.warmup_seq_len {seq_len} is longer than seq_len {settings.seq_len}, and takes more memory; give "
            "fewer tokens, or 0, which warms up at the trial's own length"
        )
    reason = parse_mask(settings.mask).unsupported_reason(seq_len)
    if reason is None and layout is not None:
        reason = split_unsupported_reason(layout, seq_len, settings.cp_size)
    return reason and f"steps.warmup_seq_len {seq_len} cannot be run: {reason}; 0 warms up at the trial's own length"


def _schedule_unsupported_reason(settings: TrialSettings, machine: Machine) -> str | None:
    """Heads that the schedule cannot exchange between this machine's nodes; None where the ranks do not fit it."""
    nodes = settings.emulate_nodes if settings.emulate_nodes > 1 else machine.nodes_for(settings.world_size)
    return None if nodes is None else schedule_unsupported_reason_on(method_named(settings.method), settings, nodes)


def _head_unsupported_reason(settings: TrialSettings, machine: Machine) -> str | None:
    """An LM head that this machine cannot run with these settings, or that does not depend on the method."""
    if settings.task == "lm_head" and settings.method != "burst":
        return (
            f"task lm_head runs no attention, so {settings.method} would measure the same as burst; set method to burst"
        )
    has_none = settings.task in ("attention", "linear")
    return None if has_none else loss_kernel.unsupported_reason(settings, machine.device)


def _device_unsupported_reason(settings: TrialSettings, machine: Machine) -> str | None:
    """More ranks than the machine holds, or a kernel for another kind of device."""
    needs, holds = settings.world_size, machine.max_ranks
    if machine.nodes > 1 and machine.nodes_for(needs) is None:
        return (
            f"{needs} ranks do not spread evenly over the {machine.nodes} nodes with {machine.node_ranks} each; "
            f"choose a world_size that does, at most {holds}, or give --nodes more of them"
        )
    if needs > holds:
        if machine.device == "cuda":
            found = f"{counted(machine.gpu_count, 'GPU')} ({machine.gpu_name})"
            return (
                f"{needs} ranks need {needs} GPUs, but this machine has {found}; "
                f"use more GPUs or a smaller {_what_asks_for_ranks(settings)}"
            )
        processes = "one process" if holds == 1 else f"{holds} processes"
        return (
            f"{needs} ranks are more than the {processes} this machine without GPUs takes; "
            f"use GPUs or a {_what_asks_for_ranks(settings)} of at most {holds}"
        )
    if _DEVICE_OF_KERNEL.get(settings.kernel, machine.device) != machine.device:
        missing = "GPU, and this machine has none" if machine.device == "cpu" else "CPU, and the ranks here use GPUs"
        return f"kernel {settings.kernel} needs a {missing}; choose kernel auto or one that runs here"
    return _heads_unsupported_reason(settings) or _gpu_unsupported_reason(settings, machine)


def _heads_unsupported_reason(settings: TrialSettings) -> str | None:
    """Heads that the engine's kernel does not take, where a trial attends; others' programs have kernels of theirs."""
    if settings.task not in ("train", "attention") or not is_native(method_named(settings.method)):
        return None
    return head_dim_unsupported_reason(settings.kernel, settings.model.head_dim, settings.model.output_dim)


def _gpu_unsupported_reason(settings: TrialSettings, machine: Machine) -> str | None:
    """A setting that GPUs of this kind are too old for, where a hardware file says how old they are."""
    hardware = hardware_for(machine.gpu_name)
    found = None if hardware is None else hardware.compute_capability
    for name, value, least in _NEEDS_CAPABILITY:
        if found is not None and found < least and getattr(settings, name) == value:
            return (
                f"{name} {value} needs compute capability {least:.1f} or newer, and {machine.gpu_name} has "
                f"{found:.1f}; leave {name} out"
            )
    return None


def _what_asks_for_ranks(settings: TrialSettings) -> str:
    """The setting whose value is the number of ranks; no method splits both the sequence and the weights."""
    if settings.world_size > settings.cp_size * settings.tp_size:
        return "world_size"
    return "tp_size" if settings.tp_size > 1 else "cp_size"


def _memory_unsupported_reason(settings: TrialSettings, machine: Machine) -> str | None:
    """A training trial that would fill a host's memory, and so end more than itself, or take more than the setting
    `host_memory`. A full GPU ends only the trial."""
    if settings.task != "train" or not (machine.memory_gib or settings.host_memory):
        return None
    memory = memory_of(settings, on_gpu=machine.device == "cuda")
    of_rank = memory.host if machine.device == "cuda" else memory.without_gpu
    if of_rank > settings.host_bytes:
        budget = size_in_bytes(settings.memory, "memory") if settings.memory else math.inf
        too = f"{memory.reserved / GIB:,.3g} GiB of its GPU, where memory is {settings.memory}, and "
        return (
            f"a rank would hold about {too if memory.reserved > budget else ''}{of_rank / GIB:,.3g} GiB of its host's "
            f"memory, and host_memory is {settings.host_memory}; allow more, or keep less (docs/memory.md)"
        )
    ranks = -(-settings.world_size // (machine.nodes_for(settings.world_size) or 1))
    needed = ranks * of_rank / GIB
    if not machine.memory_gib or needed <= machine.memory_gib:
        return None
    return (
        f"its ranks would hold about {needed:,.0f} GiB of a host's memory, and there are {machine.memory_gib:g}; take "
        "a smaller model, batch or sequence, or more hosts, or keep less (docs/memory.md)"
    )
