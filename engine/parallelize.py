"""Applies parallelism, checkpointing and tiling to the one-device model, in the one order that works."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from engine.attention.algorithms.saved import Attend
from engine.attention.context import ContextParallel
from engine.checkpoint.counts import heads_at_once
from engine.checkpoint.recompute import Recompute, set_activations
from engine.initialise import Part, initialise
from engine.layers.head_groups import attend_in
from engine.layers.tiled_mlp import add_mlp_in
from engine.layers.tiled_projection import project_in
from engine.lm_head.loss_kernel import loss_sum_of
from engine.method import NativeMethod
from engine.models.decoder import Decoder, MixCall
from engine.models.matrices import Linear
from engine.ops.copies import Copies
from engine.ops.float8 import Float8Products, gpu_unsupported_reason
from engine.optimizer import gradient_norm
from engine.settings import TrialSettings, keeps_whole
from engine.shape import ModelShape


class WholeMatrices:
    """What a rank holds of the model before FSDP2 shards it: all of it.

    A `TensorParallelMethod` overrides these five.

    Args:
        shape: that of the whole model.
    """

    def __init__(self, shape: ModelShape) -> None:
        self.whole = shape

    def shape(self) -> ModelShape:
        """Of the model that one rank holds."""
        return self.whole

    def part(self, name: str) -> Part | None:
        """Which part of the parameter of that name this rank holds, None for all of it."""
        return None

    def set(self, model: Decoder, attend: Attend) -> None:
        """Make a model of `shape()` compute its share of the whole; `attend` is for the heads of `shape()`."""

    def complete_gradients(self, model: Decoder) -> None:
        """After the last backward of a step: add what other ranks have of the gradients held here. Collective."""

    def gradient_norm(self, model: Decoder) -> Tensor:
        """Global norm of the gradients of the whole model, 0-dim. Collective."""
        return gradient_norm(model.parameters())


class TensorParallelMethod(NativeMethod, Protocol):
    """A method that divides the model's matrices as well: it takes a `tp_size` above 1."""

    def tensor_parallel(self, cp: ContextParallel, settings: TrialSettings) -> WholeMatrices:
        """What this rank holds of them; `cp` are the `tp_size` ranks of its replica."""
        ...


def build_model(
    settings: TrialSettings,
    attend: Attend,
    mesh: DeviceMesh,
    matrices: WholeMatrices,
    *,
    windowed: Attend | None = None,
    mix: MixCall | None = None,
) -> tuple[Decoder, Recompute | None]:
    """The model of `settings` on this rank, ready to train: parameters sharded over `mesh`, fp32 (fp64 for fp64), or
    frozen ones in the dtype of the computation and adapters in fp32.
    Also the store of saved layer inputs, or None when nothing is recomputed.

    The model is built on the meta device and only shards are ever allocated, so its size is bounded by the memory of
    all ranks together.

    Args:
        settings: one trial.
        attend: the method's attention, bound to its context-parallel ranks.
        mesh: all ranks, data-parallel and context-parallel alike, on one axis; on two, parameters are sharded over the
            second and repeated along the first.
        matrices: what this rank holds of them; `mesh` are the ranks that hold the same.
        windowed: the attention of layers with a window, where it differs.
        mix: of linear layers among the same ranks, where there are some.
    """
    with torch.device("meta"):
        model = Decoder(matrices.shape()).to(torch.float64 if settings.dtype == "fp64" else torch.float32)
        if settings.lora is not None:
            model.adapt(settings.lora, frozen_dtype(settings))
    recompute = parallelize(model, settings, attend, mesh, matrices, windowed=windowed, mix=mix)
    initialise(model, settings.seed, torch.device(mesh.device_type, _current_index(mesh)), matrices.part)
    return model, recompute


def frozen_dtype(settings: TrialSettings) -> torch.dtype:
    """Of parameters without a gradient: that of the computation."""
    return {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[settings.dtype]


def parallelize(
    model: Decoder,
    settings: TrialSettings,
    attend: Attend,
    mesh: DeviceMesh,
    matrices: WholeMatrices,
    *,
    windowed: Attend | None = None,
    mix: MixCall | None = None,
) -> Recompute | None:
    """Context parallelism, activation checkpointing, tiles, loss fusion, then FSDP2 around all of them, or none where
    one rank keeps all parameters. Returns the store of saved layer inputs, or None when nothing is recomputed."""
    model.shards = settings.cp_size * settings.tp_size
    recompute = set_layers(model, settings, attend, windowed, mix)
    model.head.loss_sum = loss_sum_of(settings, mesh.device_type)
    if settings.linear_dtype == "float8":
        multiply_in_float8(model, mesh.device_type)
    matrices.set(model, attend)
    if keeps_whole(settings):
        keep_parameters(model, settings)
    else:
        shard_parameters(model, settings, mesh)
    return recompute


def multiply_in_float8(model: Decoder, device_type: str) -> None:
    """From now on layers multiply by their matrices in float8: those of attention and of MLPs. Embedding and LM head do
    not, nor do mixers of linear layers, whose recurrences would raise the errors to powers.

    Raises ValueError with one sentence where this machine's GPU cannot.
    """
    if device_type == "cuda" and (reason := gpu_unsupported_reason()):
        raise ValueError(reason)
    products = Float8Products()
    for block in model.blocks:
        for name, module in block.named_modules():
            if isinstance(module, Linear) and not name.startswith("mixer."):
                module.products = products


def keep_parameters(model: Decoder, settings: TrialSettings) -> None:
    """Without FSDP2: whole parameters, and where compute runs in bf16 their copies, made once per step.

    They are made by the first forward, when the model is on its device, and again by any that finds the parameters
    changed.
    """
    if settings.dtype != "bf16":
        return
    kept: list[Copies] = []

    def refresh(*_: object) -> None:
        if not kept:
            kept.append(Copies([each for each in model.parameters() if each.requires_grad], torch.bfloat16))
        kept[0].refresh()

    model.register_forward_pre_hook(refresh)


def set_layers(
    model: Decoder,
    settings: TrialSettings,
    attend: Attend,
    windowed: Attend | None = None,
    mix: MixCall | None = None,
) -> Recompute | None:
    """Attention, linear layers, tiles, and the tensors that every layer saves for backward; returns what `parallelize`
    does."""
    again = settings.checkpoint.layers_again(len(model.blocks))
    for index, block in enumerate(model.blocks):
        recomputed = index < again
        block.attend = windowed if windowed is not None and block.windowed else attend
        block.mix = mix or block.mix
        block.project = project_in(settings.projection_tiles, recomputed=recomputed)
        if recomputed and settings.head_groups > 1 and not block.linear:
            at_once = heads_at_once(model.shape.kv_heads, settings.head_groups)
            block.attend_groups = attend_in(at_once, settings.projection_tiles)
        block.add_mlp = add_mlp_in(settings.mlp_tiles, saved=None if recomputed else settings.checkpoint.mlp)
        # A recomputed layer forms it first: its recomputation ends where the MLP begins.
        block.joins_sum = not recomputed
    return set_activations(settings.checkpoint, list(model.blocks))


def shard_parameters(model: Decoder, settings: TrialSettings, mesh: DeviceMesh) -> None:
    """FSDP2, one unit per block: parameters, gradients and optimizer states sharded over the last axis of `mesh`.

    Compute runs in bf16 where asked, from fp32 master weights, and gradients are reduced in fp32.
    """
    low_precision = settings.dtype == "bf16"
    precision = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if low_precision else None,
        reduce_dtype=torch.float32 if low_precision else None,
        cast_forward_inputs=False,  # RoPE's tables, arguments of a block, must stay fp32
    )
    units: list[FSDPModule] = []
    # A matrix that is embedding and LM head at once belongs to the root's unit, which stays gathered from the first of
    # its uses to the last.
    for unit in model.blocks if model.shape.tied else (model.embedding, *model.blocks):
        units.append(fully_shard(unit, mesh=mesh, mp_policy=precision))
    if not model.shape.tied:
        # The head's backward follows its forward at once: gathering the weight again would buy no memory.
        units.append(fully_shard(model.head, mesh=mesh, mp_policy=precision, reshard_after_forward=False))
    fully_shard(model, mesh=mesh, mp_policy=precision)
    _keep_labels_on_host(model)
    # The next unit in either direction, asked for before the present one computes.
    for unit, following in itertools.pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
    # An embedding's gradient needs no weight: gathering it once more would hold V x E elements for nothing.
    if not model.shape.tied:
        model.embedding.set_unshard_in_backward(False)
    # Each rank's loss is its share of one global mean, so the gradients of the ranks are summed. By default FSDP2
    # divides by the number of ranks; plain SUM because gloo has no pre-multiplied reduction.
    alone = mesh.size() == 1
    reduce = ReduceIntoFreedMemory(adds=settings.gradient_accumulation > 1, alone=alone)
    device = torch.device(mesh.device_type, _current_index(mesh))
    model.register_forward_pre_hook(lambda *_: reduce.forward_begins(device))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(None if alone else 1.0)  # by None one rank does not divide at all
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_reduce_scatter(reduce)


class ReduceIntoFreedMemory:
    """FSDP2's reduce-scatter, with the reduced gradients in memory of the computation's stream.

    torch's allocator keeps freed memory by stream. By default FSDP2 takes the memory of reduced gradients on the stream
    that reduces them, so all gradients of a step are reserved beside the activations at their fullest. Here they take
    the place of activations that backward has freed. Before FSDP2 asks for the memory of a result, its stream starts to
    wait for the computation's, so the result is written after the last use of whatever had its memory. At the end of
    backward the computation's stream waits for all reductions, so what later has that memory is written after the
    gradients' last use.

    A rank alone has nothing to reduce: the tensor that its gradients were copied into is the result. FSDP2 would copy
    it, and with a factor to divide by make a third one.

    Args:
        adds: whether a result may be added to an earlier one, as with gradient accumulation. Its memory is then freed
            while FSDP2's stream still reads it, and is marked with that stream.
        alone: whether there is no other rank.
    """

    def __init__(self, *, adds: bool, alone: bool) -> None:
        self._adds, self._alone = adds, alone
        self._compute: torch.Stream | None = None
        self._given: Tensor | None = None  # of a rank alone, what is reduced next

    def forward_begins(self, device: torch.device) -> None:
        """Take the current stream for the computation's: autograd runs backward on that of forward."""
        self._compute = torch.get_device_module(device).current_stream(device)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory on the computation's stream, whichever is the current one: FSDP2 asks on the computation's for what it
        reduces, and on its own for the result."""
        runtime = torch.get_device_module(device)
        current = runtime.current_stream(device)
        if self._compute is None or current == self._compute:
            result = torch.empty(*size, dtype=dtype, device=device)
            self._given = result if self._alone and self._compute is not None else None
            return result
        given, self._given = self._given, None
        if given is not None and (given.shape, given.dtype) == (torch.Size(size), dtype):
            result = given
        else:
            with runtime.stream(self._compute):
                result = torch.empty(*size, dtype=dtype, device=device)
        if self._adds and device.type != "cpu":
            result.record_stream(current)
        return result

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        if output_tensor is input_tensor:  # of a rank alone
            return None
        # torch 2.13 has given it another name.
        reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        work: dist.Work | None = reduce(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work


def _keep_labels_on_host(model: Decoder) -> None:
    """Hide the labels from FSDP2's root, which copies every tensor of its inputs to the GPU and waits for the copy.

    The LM head reads the labels on the host, and copies them without a wait. FSDP2 hands on a function as it is.
    """

    def hide(_: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return *args[:2], *(partial(_same, labels_BL) for labels_BL in args[2:])

    def show(_: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return *args[:2], *(labels_BL() for labels_BL in args[2:])

    model.register_forward_pre_hook(hide, prepend=True)  # before FSDP2's own
    model.register_forward_pre_hook(show)


def _same(labels_BL: Tensor | None) -> Tensor | None:
    return labels_BL


def sum_across_nodes(model: Decoder, now: bool) -> None:
    """Whether backward sums gradients over the first of two mesh axes from now on, or holds the sums over the second,
    sharded, for a later backward to add to. No effect where the mesh has one axis."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(now)


def _current_index(mesh: DeviceMesh) -> int | None:
    return torch.cuda.current_device() if mesh.device_type == "cuda" else None
