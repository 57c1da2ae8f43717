"""Does a training trial compute what it says? One step of a small problem, against a dense float64 step in one process.

A trial's own length has no reference: a dense run of it fits nowhere. So after the measured steps the same ranks take
one step of a check problem with the trial's method and settings, on a model and a sequence that are small. The loss,
the gradient of every parameter, the final hidden states and the gradient at the embedding's output are compared with a
dense step in float64.

Shape letters: B sequences, S tokens of a sequence, L tokens held here, E hidden size, T tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.attention.context import ContextParallel
from engine.attention.geometry.layout import as_layout
from engine.attention.masks import (
    BlockGrid,
    BlockSparse,
    Documents,
    LocalGlobal,
    Mask,
    SlidingWindow,
    Strided,
    parse_mask,
)
from engine.data.sequences import PackedSequences
from engine.distributed import World
from engine.initialise import STD, draw, held_rows, initialise
from engine.linear.shard import Mix
from engine.lm_head.loss import plain_loss_sum
from engine.lm_head.loss_kernel import IGNORE
from engine.measurement import UNCHECKED, ErrorPlace, Extra, finite_error
from engine.memory.offload import local_shard
from engine.method import NativeMethod
from engine.models.decoder import Decoder, DenseAttention
from engine.parallelize import frozen_dtype
from engine.settings import Backward, ExchangeName, Kernel, Layout, Schedule, Steps, TrialSettings
from engine.shape import EMBEDDING, ModelShape
from engine.tasks.check_data import RandomTokens, check_data
from engine.tasks.task import documents_of
from engine.tasks.train import TrainTask

TOKENS = 256  # of a sequence of the check problem; more where so many ranks share it that each would hold few
_LAYERS, _HIDDEN, _FFN, _VOCAB, _HEADS = 3, 128, 384, 512, 8  # the most that it keeps of a larger model
_LINEAR_KEY_HEADS = 2  # likewise, of linear layers
_SHORTEST_RUN = 8  # tokens that a scaled window or document keeps, where it has as many
_BLOCKS = 32  # per side, the most that it keeps of a block-sparse mask
_CHOICES: dict[str, Any] = {
    "layout": Layout,
    "schedule": Schedule,
    "backward": Backward,
    "exchange": ExchangeName,
    "kernel": Kernel,
}
_ENOUGH = 256  # elements of a gradient whose rounding averages out: fewer have no entry in `error_scale`
# Of a matrix's output, what its adapters add: were it as much as the matrix, rounding would grow with the rank.
_ADAPTED = 0.25
_NEGLIGIBLE = 1e-6  # of the gradients' usual size: below it a gradient is zero but for rounding

HIDDEN, DINPUT, LOSS = "hidden", "dinput", "loss"  # tensors beside the parameters' gradients


def check_training(settings: TrialSettings, method: NativeMethod, world: World, resolved: dict[str, str]) -> Extra:
    """Entries of `Measurement.extra` that say how far a trial's training is from a dense float64 step. Collective.

    - `error`: relative error (Frobenius norms) of `loss`, `hidden`, `dinput` and, by parameter name, each gradient.
    - `error_scale`: by the same names, <found, truth> / |truth|^2 - 1: rounding has no direction and leaves it near 0,
      a wrong factor does not. Left out where a gradient has few elements, or is 0 but for rounding.
    - `error_at`: of `hidden` and `dinput`, the rank that errs most and the tokens where; of a gradient, the row.
    - `checked`: `tokens`, the length of the check problem.
    - `unchecked` in their place: one sentence, where the method or the machine refuses the check problem.

    `resolved` says what the trial's `auto` became. Changes no random state, and keeps no tensor.
    """
    problem = check_problem(settings, method, resolved)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # for what is not allocated by torch, such as communicators
    try:
        return _CheckedStep(problem, method, world).compared()
    except ValueError as error:  # raised by all ranks alike, as those that refuse a trial
        return {UNCHECKED: str(error)}


def check_problem(settings: TrialSettings, method: NativeMethod, resolved: dict[str, str]) -> TrialSettings:
    """The settings of the step that stands for a training trial: those of the trial, sizes aside.

    Kept: method, parallel sizes, dtype, head dim, queries per KV head, which ranks divide the heads evenly, q and k
    norm, gate, kind of mask, what `auto` became, and whether layers are computed again, held in groups, tiled, sharded
    and accumulated. Of a larger model or longer sequence three layers and some hundred tokens stay, with windows,
    documents and blocks scaled as the sequence is. A trial that is as small keeps its own shape and length.
    """
    model = _small_model(settings)
    checkpoint = settings.checkpoint
    if model.layers < settings.model.layers:
        most = 2 if checkpoint.host_layers else 1  # the last of them is not in host memory
        whole = model.layers if checkpoint.whole_layers >= settings.model.layers else min(checkpoint.whole_layers, most)
        checkpoint = replace(checkpoint, every=min(checkpoint.every, 2), whole_layers=whole)
    hosted = max(0, model.layers - checkpoint.layers_again(model.layers) - 1)
    checkpoint = replace(checkpoint, host_layers=min(checkpoint.host_layers, hosted))
    problem = replace(
        settings,
        model=model,
        checkpoint=checkpoint,
        batch_size=min(settings.batch_size, 2),
        gradient_accumulation=min(settings.gradient_accumulation, 2),
        mlp_tiles=min(settings.mlp_tiles, 4),
        projection_tiles=min(settings.projection_tiles, 4),
        head_groups=min(settings.head_groups, model.kv_heads),
        head_tiles=min(settings.head_tiles, 4),
        optimizer_states=None,  # no update is compared
        gradient_offload=settings.gradient_offload and bool(settings.optimizer_offload),  # which the planner chose
        cuda_graph="none",
        steps=Steps(warmup=0, measured=1),
        learning_rate=1.0,
        data="",
        settings="equal",
        planned="",
    )
    for name, values in _CHOICES.items():
        value: Any = resolved.get(name)
        if getattr(problem, name) == "auto" and value in get_args(values):
            chosen = replace(problem, **{name: value})
            problem = problem if method.refuse(chosen) else chosen
    unit = as_layout(method.layout(problem)).chunks(settings.cp_size * settings.tp_size)
    tokens = -(-max(TOKENS, 4 * unit) // unit) * unit
    if settings.seq_len <= tokens:
        return problem
    if any(model.windowed):
        window = min(model.window, max(_SHORTEST_RUN, round(model.window * tokens / settings.seq_len)))
        mask = problem.mask if problem.packs else "causal"
        return replace(problem, seq_len=tokens, mask=mask, model=replace(model, window=window))
    scaled, tokens = _scaled(parse_mask(settings.mask), settings.seq_len, tokens, unit)
    return replace(problem, seq_len=tokens, mask=str(scaled))


def _small_model(settings: TrialSettings) -> ModelShape:
    """Its heads are as many as leave each number of ranks that may divide them what it is for the trial's model."""
    shape, tp_size = settings.model, settings.tp_size
    group, ranks = shape.heads // shape.kv_heads, settings.cp_size * tp_size
    divisors = [count for count in range(1, ranks + 1) if ranks % count == 0]

    def divided(kv_heads: int) -> list[tuple[bool, bool]]:
        return [(kv_heads % count == 0, kv_heads * group % count == 0) for count in divisors]

    def cut(size: int, most: int) -> int:
        return size if size <= most else -(-most // tp_size) * tp_size

    kv_heads = shape.kv_heads
    if shape.heads > _HEADS:
        fewer = (count for count in range(min(2, kv_heads), kv_heads) if kv_heads % count == 0)
        kv_heads = next((count for count in fewer if divided(count) == divided(kv_heads)), kv_heads)
    # Few layers have every kind of layers too, and of two kinds also linear layers in a row.
    kinds = set(_kinds(shape))
    pattern = "".join(kind for kind in "lLwWfF" if kind in kinds)
    if len(kinds) == 2 and shape.linear_runs < sum(shape.linear_layers):
        pattern = pattern[0] + pattern
    group_linear = shape.linear_heads // max(1, shape.linear_key_heads)
    key_heads = min(shape.linear_key_heads, _LINEAR_KEY_HEADS)
    return replace(
        shape,
        name=f"{shape.name}, checked",
        layer_pattern=pattern if len(kinds) > 1 else shape.layer_pattern,
        linear_heads=key_heads * group_linear,
        linear_key_heads=key_heads,
        layers=min(shape.layers, max(_LAYERS, len(kinds))),
        hidden=min(shape.hidden, _HIDDEN),
        ffn=cut(shape.ffn, _FFN),
        vocab=cut(shape.vocab, _VOCAB),
        heads=kv_heads * group,
        kv_heads=kv_heads,
    )


def _kinds(shape: ModelShape) -> Iterator[str]:
    """Letters of the layers, which say w where there is a window alone."""
    for windowed, linear, mlp in zip(shape.windowed, shape.linear_layers, shape.mlps, strict=True):
        letter = "l" if linear else "w" if windowed else "f"
        yield letter if mlp else letter.upper()


def _scaled(mask: Mask, seq_len: int, tokens: int, unit: int) -> tuple[Mask, int]:
    """A mask of the same kind for about `tokens` tokens in place of `seq_len`, and the multiple of `unit` it is for."""

    def run(length: int) -> int:
        return min(length, max(_SHORTEST_RUN, round(length * tokens / seq_len)))

    if isinstance(mask, SlidingWindow):
        return SlidingWindow(run(mask.left), run(mask.right), run(mask.global_tokens)), tokens
    if isinstance(mask, Documents):
        lengths, left = [], tokens
        for length in mask.lengths:
            if left > 0:
                lengths.append(run(length) if mask.repeat else min(run(length), left))
                left -= lengths[-1]
        if left > 0 and not mask.repeat:
            lengths[-1] += left
        left_keys = None if mask.left is None else run(mask.left)
        return Documents(tuple(lengths), mask.causal, mask.repeat, left_keys), tokens
    if isinstance(mask, BlockSparse):
        blocks = -(-seq_len // mask.block_size)
        kept = min(blocks, _BLOCKS)

        def count(number: int) -> int:
            return min(number, max(1, round(number * kept / blocks)))

        pattern = mask.pattern
        if isinstance(pattern, Strided):
            pattern = Strided(min(pattern.stride, max(2, count(pattern.stride))))
        elif isinstance(pattern, LocalGlobal):
            pattern = LocalGlobal(count(pattern.reach), count(pattern.global_blocks))
        else:
            pattern = BlockGrid(tuple(row[:kept] for row in cast(BlockGrid, pattern).rows[:kept]))
        size = -(-tokens // kept)
        while size * kept // unit * unit <= size * (kept - 1):  # no multiple of `unit` ends in the last block
            size += 1
        return BlockSparse(pattern, size, causal=mask.causal), size * kept // unit * unit
    return mask, tokens


def dense_model(settings: TrialSettings, device: torch.device) -> Decoder:
    """The model of one process, in fp32: no FSDP, no checkpointing, no fusion, dense attention. Frozen parameters are
    in the dtype of the computation."""
    with torch.device("meta"):
        model = Decoder(settings.model)
        if settings.lora is not None:
            model.adapt(settings.lora, frozen_dtype(settings))
    initialise(model, settings.seed, device)
    for block in model.blocks:
        if not block.windowed:
            block.attend = DenseAttention(parse_mask(settings.mask))
        block.mix = Mix(documents=documents_of(settings))
    model.head.loss_sum = partial(plain_loss_sum, z_loss=settings.z_loss)
    return model


@dataclass(slots=True)
class _PassTensors:
    """What one model's passes leave beside its gradients: a tensor [B, tokens, E] per micro-batch."""

    hidden: list[Tensor] = field(default_factory=list)  # of the final norm
    dinput: list[Tensor] = field(default_factory=list)  # gradient of the embedding's output


@contextmanager
def _seen_in(model: Decoder) -> Iterator[_PassTensors]:
    """Collect from the passes of `model` within the context."""
    seen = _PassTensors()

    def keep_gradient(_module: nn.Module, _inputs: object, x_BLE: Tensor) -> None:
        x_BLE.register_hook(lambda grad_BLE: seen.dinput.append(grad_BLE.detach()))

    hooks = [
        model.norm.register_forward_hook(lambda _module, _inputs, x_BLE: seen.hidden.append(x_BLE.detach())),
        model.embedding.register_forward_hook(keep_gradient),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


class _CheckedStep:
    """One step of a check problem on these ranks, and the dense one. Creating it is collective."""

    def __init__(self, problem: TrialSettings, method: NativeMethod, world: World) -> None:
        self.problem, self.world = problem, world
        self.sequences = check_data(problem)
        self.task = TrainTask(problem, method, world, sequences=self.sequences)
        self.cp: ContextParallel = self.task.cp
        self._factors = _factors(problem.model)
        self._multiply(self.task.model)

    @torch.no_grad()
    def _multiply(self, model: Decoder) -> None:
        if (lora := self.problem.lora) is not None:
            # The elements of the first adapter have the variance 1 / (3 inputs), those of the matrix 1 / inputs.
            draw_second_adapters(model, self.problem.seed, _ADAPTED / (lora.scale * math.sqrt(lora.rank / 3)))
        for name, parameter in model.named_parameters():
            local_shard(parameter).mul_(self._factors.get(name, 1.0))

    def compared(self) -> Extra:
        """The extras of `check_training`. Collective."""
        with _seen_in(self.task.model) as seen:
            loss = self.task.gradients(0)
        dist.all_reduce(loss)
        dense_loss, gradients, dense = self._dense()
        pairs = {
            HIDDEN: (torch.cat(seen.hidden), self._shard(dense.hidden[0])),
            DINPUT: (torch.cat(seen.dinput), self._shard(dense.dinput[0])),
        }
        at = {name: self._worst(found, truth) for name, (found, truth) in pairs.items()}
        rows: dict[str, tuple[float, int]] = {}
        for name, parameter in self.task.model.named_parameters():
            if name not in gradients:  # frozen
                continue
            first_row, held = self._held(name, parameter, gradients[name])
            # One that no gradient reaches has none.
            found = self.task.gradient_of(parameter)
            pairs[name] = (torch.zeros_like(held) if found is None else found.to(held.device), held)
            rows[name] = _worst_row(*pairs[name], first_row)
        rows_of_ranks = self.world.gather(rows)
        # Of a tensor that several ranks hold every element counts equally often, so the sums of all ranks will do.
        sums_T4 = torch.stack([_sums(found, truth) for found, truth in pairs.values()])
        dist.all_reduce(sums_T4)
        sums = dict(zip(pairs, sums_T4.tolist(), strict=True))
        # What one element of a gradient usually is, squared.
        usual = sum(sums[name][1] for name in gradients) / sum(sums[name][3] for name in gradients)
        error, scale = {LOSS: finite_error(abs(loss.item() / dense_loss.item() - 1))}, {}
        for name, (off, true, product, count) in sums.items():
            zero = name in gradients and true <= count * _NEGLIGIBLE**2 * usual  # as dq where a query sees one key
            size = count * usual if zero else true  # squared, of all copies
            error[name] = finite_error(math.sqrt(off / size))
            if name in gradients:
                of_row, row = max(found[name] for found in rows_of_ranks)
                copies = count / gradients[name].numel()
                at[name] = {"row": row, "error": finite_error(math.sqrt(of_row * copies / size))}
            if not zero and (name not in gradients or gradients[name].numel() >= _ENOUGH):
                scale[name] = finite_error(product / true - 1)
        return {"error": error, "error_scale": scale, "error_at": at, "checked": {"tokens": self.problem.seq_len}}

    def _dense(self) -> tuple[Tensor, dict[str, Tensor], _PassTensors]:
        """Loss and gradients of the whole step in float64, on every rank, and what was seen of this replica's
        sequences, [B, S, E] each. The first rank of each replica computes them. Collective."""
        problem, device = self.problem, self.world.device
        model = dense_model(problem, device)
        if problem.dtype == "fp64":
            model = model.double()
        self._multiply(model)
        if problem.dtype == "bf16":  # the numbers that the ranks compute with
            model = model.bfloat16()
        model = model.double()
        rows, targets = self._rows()
        loss = torch.zeros((), dtype=torch.float64, device=device)
        shape = (len(rows), problem.row_tokens, problem.model.hidden)
        seen = _PassTensors(*([torch.zeros(shape, dtype=torch.float64, device=device)] for _ in range(2)))
        if self.cp.rank == 0:
            model.longest = problem.seq_len if problem.packs else 0
            with _seen_in(model) as own:
                for tokens_S, labels_S in itertools.chain.from_iterable(rows):
                    positions_S = torch.arange(len(tokens_S), device=device)
                    part = model(tokens_S[None].to(device), positions_S, labels_S[None].to(device)) / targets
                    part.backward()
                    loss += part.detach()
            seen = _PassTensors(*([torch.cat(parts, dim=1).view(shape)] for parts in (own.hidden, own.dinput)))
        if self.cp.size > 1:
            assert self.cp.group is not None
            first = dist.get_global_rank(self.cp.group, 0)
            for tensor in (*seen.hidden, *seen.dinput):
                dist.broadcast(tensor, first, group=self.cp.group)
        gradients = {
            name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        for tensor in (loss, *gradients.values()):
            dist.all_reduce(tensor)
        return loss, gradients, seen

    def _shard(self, whole_BSE: Tensor) -> Tensor:
        """This rank's tokens of the sequences of its replica: each packed row may have a layout of its own."""
        if not isinstance(self.sequences, PackedSequences):
            return self.cp.shard(whole_BSE, dim=1)
        first = self.world.replica * len(whole_BSE)
        rows = (self.task.packed_row(first + number) for number in range(len(whole_BSE)))
        parts = zip(whole_BSE.split(1), rows, strict=True)
        return torch.cat([self.task.mask_of(row).cp.shard(whole_1SE, dim=1) for whole_1SE, row in parts])

    def _rows(self) -> tuple[list[list[tuple[Tensor, Tensor]]], int]:
        """This replica's sequences: tokens and labels of a sequence, or of each document of a packed micro-batch; and
        how many labels all replicas have."""
        problem, sequences = self.problem, self.sequences
        if isinstance(sequences, PackedSequences):
            found, targets, micro_batches = [], 0, problem.gradient_accumulation
            for number in range(micro_batches * problem.dp_size):
                row = self.task.packed_row(number)
                targets += int((row.labels_S != IGNORE).sum())
                if number // micro_batches == self.world.replica:
                    parts = (each.split(row.lengths.tolist()) for each in (row.tokens_S, row.labels_S))
                    found.append(list(zip(*parts, strict=True)))
            return found, targets
        count = problem.batch_size * problem.gradient_accumulation
        batch = cast(RandomTokens, sequences).batch(self.world.replica, 0, 1, count, problem.seq_len)
        return [[pair] for pair in zip(*batch, strict=True)], batch[1].numel() * problem.dp_size

    def _held(self, name: str, parameter: nn.Parameter, whole: Tensor) -> tuple[int, Tensor]:
        """The part of a parameter's whole gradient that this rank holds, and which row of the whole is its first."""
        part, before = self.task.matrices.part(name), 0
        if part is not None:
            dim, number, parts = part
            whole = whole.chunk(parts, dim)[number]
            before = number * len(whole) if dim == 0 else 0
        first_row, local = held_rows(parameter)
        return before + first_row, whole[first_row : first_row + local.shape[0]]

    def _worst(self, found_BLE: Tensor, truth_BLE: Tensor) -> ErrorPlace:
        """The rank with the largest relative error, and the first and last of its tokens that err at least half as
        much as the one that errs most. Collective."""
        off_L = torch.nan_to_num((found_BLE.double() - truth_BLE).square().sum((0, 2)), nan=math.inf)
        error = finite_error(math.sqrt(off_L.sum().item() / max(truth_BLE.square().sum().item(), 1e-300)))
        cp = self.cp
        if isinstance(self.sequences, PackedSequences):  # the places in the first of its packed rows
            cp = self.task.mask_of(self.task.packed_row(self.world.replica * len(found_BLE))).cp
        segments = cp.segments(self.problem.row_tokens)
        positions = [position for segment in segments for position in segment.positions()]
        marked = (off_L >= off_L.max() / 4).nonzero().flatten().tolist()
        found = self.world.gather((error, min(positions[place] for place in marked), max(positions[i] for i in marked)))
        rank = max(range(len(found)), key=lambda each: found[each][0])
        error, first, last = found[rank]
        return {"rank": rank, "first_token": first, "last_token": last, "error": error}


@torch.no_grad()
def draw_second_adapters(model: Decoder, seed: int, std: float) -> None:
    """Values for every second adapter B, which is zero before a first step: the first one, A, then has no gradient."""
    for name, parameter in model.named_parameters():
        if name.endswith(".lora_B"):
            first_row, local = held_rows(parameter)
            if local.numel():
                draw(local, first_row, parameter.shape[0], f"{seed}:{name}", std)


def _factors(shape: ModelShape) -> dict[str, float]:
    """By name, what each matrix but the embedding is multiplied with: a sum over its inputs then has their deviation.

    As first drawn, scores are nearly equal and a layer adds little to the residual stream, so that a wrong attention
    would hardly show. A model in training is not like that.
    """
    with torch.device("meta"):
        model = Decoder(shape)
    return {
        name: 1 / (STD * math.sqrt(parameter.shape[1]))
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1 and name != EMBEDDING and not name.endswith(".conv.weight")
    }


def _worst_row(found: Tensor, truth: Tensor, first_row: int) -> tuple[float, int]:
    """The largest squared difference of a row, and that row's number in the whole, whose row `first_row` is the first
    here; (0, 0) where a rank holds none."""
    if not len(truth):
        return 0.0, 0
    off = torch.nan_to_num((found.double() - truth).square().view(len(truth), -1).sum(1), nan=math.inf)
    row = int(off.argmax())
    return float(off[row]), first_row + row


def _sums(found: Tensor, truth: Tensor) -> Tensor:
    """|found - truth|^2, |truth|^2, <found, truth> and the number of elements, in float64."""
    found = found.double()
    sums = ((found - truth).square().sum(), truth.square().sum(), (found * truth).sum())
    return torch.stack([*sums, torch.tensor(float(truth.numel()), dtype=torch.float64, device=truth.device)])
