"""Is a trial's attention right? Its out, dq, dk and dv beside dense attention in float64, at any length.

Up to `DENSE_TOKENS` tokens every query row is compared. A longer problem has too many pairs for that, so a sample of
rows R stands for all: one more forward and backward runs with a gradient of out that is zero outside R. Then
`out[R]`, `dq[R]`, and dk and dv of *all* tokens follow from the rows R alone, and their truth costs |R| x S pairs. R
has rows in each run of positions of each rank, so a tile that a method leaves out, a chunk of another rank or a shifted
position shows in one of them.

Errors are relative: the Frobenius norm of the difference over that of the truth, of a whole tensor and of each run of
positions by itself. A fault in one run of a long sequence is small in the whole and large in its run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from engine.attention.context import ContextParallel
from engine.attention.geometry.layout import Segment, merged
from engine.attention.kernels.reference import visible_pairs
from engine.attention.masks import Mask
from engine.distributed import World

DENSE_TOKENS = 4096  # up to this length all rows are compared
TENSORS = ("out", "dq", "dk", "dv")
SAMPLED_ROWS = 256  # at most, but two of each run of positions
NOT_FINITE = 1e30  # the error of a tensor that holds NaN or infinity, which JSON has no numbers for
_SCORES_BYTES = 256 << 20  # of a block of scores in float64
_SMALL = 1e-3  # of the root mean square of a whole tensor: a run's truth counts as at least this large

ForwardBackward = Callable[[Tensor], tuple[Tensor, ...]]


def checked_rows(cp: ContextParallel, seq_len: int) -> tuple[Segment, ...]:
    """Query rows that are compared, in global positions: all of a short sequence; of a longer one the first and last
    row of each run of positions of each rank, and others at random, the same on every rank."""
    if seq_len <= DENSE_TOKENS:
        return (Segment(0, seq_len),)
    runs = [run for rank in range(cp.size) for run in cp.layout.segments(seq_len, cp.size, rank)]
    chance = random.Random(seq_len)  # noqa: S311 - a sample, no secret
    rows: set[int] = set()
    for run in runs:
        positions = run.positions()
        rows |= {positions[0], positions[-1]}
        rows |= {chance.choice(positions) for _ in range(SAMPLED_ROWS // len(runs) - 2)}
    return merged(Segment(row, 1) for row in sorted(rows))


def attention_errors(
    world: World, cp: ContextParallel, shards: Sequence[Tensor], mask: Mask, compute: ForwardBackward
) -> dict[str, Any]:
    """Entries of a measurement's `extra`: `error` by tensor, `error_at` (the rank and the run of its positions whose
    own error is largest), and `checked` where rows are a sample. `unchecked`, a reason, where memory did not suffice.

    `shards` are q, k, v and the gradient of out of this rank's tokens, `compute` gives (out, dq, dk, dv) for such a
    gradient. Collective over all ranks.
    """
    q_BLND, k_BLKD, v_BLKD, dout_BLND = shards
    seq_len = q_BLND.shape[1] * cp.size
    rows = checked_rows(cp, seq_len)
    positions = cp.positions(seq_len, q_BLND.device)
    row_positions = torch.cat([torch.arange(run.start, run.start + run.count) for run in rows]).to(q_BLND.device)
    # Of this rank's tokens those in rows, and their indices among the rows.
    mine = torch.isin(positions, row_positions)
    index = torch.searchsorted(row_positions, positions[mine])
    found = compute(dout_BLND * mine[None, :, None, None])
    q_BRND, dout_BRND = (_rows_of_all(cp, shard, mine, index, len(row_positions)) for shard in (q_BLND, dout_BLND))
    runs = cp.layout.segments(seq_len, cp.size, cp.rank)
    sums = [[[0.0, 0.0, 0.0] for _ in runs] for _ in TENSORS]  # squares of difference and truth, elements
    group, short = q_BLND.shape[2] // k_BLKD.shape[2], False
    for head in range(k_BLKD.shape[2]):
        queries, keys = slice(head * group, (head + 1) * group), slice(head, head + 1)
        k_BS1D, v_BS1D = (cp.unshard(shard[:, :, keys].detach(), dim=1) for shard in (k_BLKD, v_BLKD))
        try:
            truths = rows_truth(q_BRND[:, :, queries], k_BS1D, v_BS1D, dout_BRND[:, :, queries], mask, rows, positions)
            for name, (value, truth) in enumerate(zip(found, truths, strict=True)):
                of_rows = name < 2  # out and dq; dk and dv are of all tokens
                of_head = value[:, :, queries if of_rows else keys]
                truth = truth[:, index] if of_rows else truth
                difference = (of_head[:, mine] if of_rows else of_head).double() - truth
                _add_runs(sums[name], runs, mine if of_rows else None, difference, truth)
        except torch.OutOfMemoryError:  # the others are in the next collective call, so this rank goes on to it
            short = True
    tokens = [(run.start, run.positions()[-1]) for run in runs]
    everyone = cast(list[Any], world.gather((cp.rank, tokens, sums, short)))
    if any(short for *_, short in everyone):
        return {"unchecked": "GPU memory did not suffice for the comparison with float64"}
    errors, worst = _errors(everyone)
    result: dict[str, Any] = {"error": errors, "error_at": worst}
    if seq_len > DENSE_TOKENS:
        result["checked"] = {"tokens": seq_len, "rows": len(row_positions)}
    return result


def rows_truth(
    q_BRND: Tensor,
    k_BSKD: Tensor,
    v_BSKD: Tensor,
    dout_BRND: Tensor,
    mask: Mask,
    rows: tuple[Segment, ...],
    columns: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out_BRND, dq_BRND, dk_BCKD, dv_BCKD) in float64, of the query rows at `rows` and one KV head (K is 1): dk and dv
    of the tokens at `columns`, where the gradient of out is zero in all other rows.

    Scores are formed for some rows at a time. Rows that see no key give 0.
    """
    heads, head_dim, seq_len = q_BRND.shape[2], q_BRND.shape[3], k_BSKD.shape[1]
    scale = head_dim**-0.5
    k_BSD, v_BSD = k_BSKD[:, :, 0].double(), v_BSKD[:, :, 0].double()
    dk_BCD, dv_BCD = (torch.zeros_like(k_BSD[:, columns]) for _ in range(2))
    outs, dqs = [], []
    at_once = max(1, _SCORES_BYTES // (8 * seq_len * heads * q_BRND.shape[0]))
    first = 0
    for block in _blocks(rows, at_once):
        count = sum(run.count for run in block)
        q_BrND, dout_BrND = (tensor[:, first : first + count].double() for tensor in (q_BRND, dout_BRND))
        visible_rS = _visible(mask, block, seq_len, q_BRND.device)
        scores = torch.einsum("brnd,bsd->bnrs", q_BrND, k_BSD).mul_(scale)
        scores.masked_fill_(~visible_rS, -torch.inf)
        p = torch.where(visible_rS.any(1)[:, None], scores.softmax(-1), 0.0)
        outs.append(torch.einsum("bnrs,bsd->brnd", p, v_BSD))
        dv_BCD += torch.einsum("bnrc,brnd->bcd", p[..., columns], dout_BrND)
        dp = torch.einsum("brnd,bsd->bnrs", dout_BrND, v_BSD)
        ds = p.mul_(dp - (p * dp).sum(-1, keepdim=True)).mul_(scale)
        dqs.append(torch.einsum("bnrs,bsd->brnd", ds, k_BSD))
        dk_BCD += torch.einsum("bnrc,brnd->bcd", ds[..., columns], q_BrND)
        first += count
    return torch.cat(outs, 1), torch.cat(dqs, 1), dk_BCD[:, :, None], dv_BCD[:, :, None]


def _blocks(rows: tuple[Segment, ...], at_once: int) -> list[tuple[Segment, ...]]:
    """The rows in their order, at most `at_once` in a block."""
    blocks: list[list[Segment]] = [[]]
    room = at_once
    for run in rows:
        start, left = run.start, run.count
        while left:
            if not room:
                blocks.append([])
                room = at_once
            taken = min(left, room)
            blocks[-1].append(Segment(start, taken))
            start, left, room = start + taken, left - taken, room - taken
    return [tuple(block) for block in blocks]


def _visible(mask: Mask, rows: tuple[Segment, ...], seq_len: int, device: torch.device) -> Tensor:
    """Boolean rows x S: which keys each of these rows sees."""
    visible = torch.zeros(sum(run.count for run in rows), seq_len, dtype=torch.bool, device=device)
    for tile in mask.tiles(rows, (Segment(0, seq_len),)):
        visible[tile.q, tile.k] |= visible_pairs(tile.band, tile.rows, tile.columns, device)
    return visible


def _rows_of_all(cp: ContextParallel, shard_BLND: Tensor, mine: Tensor, index: Tensor, count: int) -> Tensor:
    """The checked rows of a sharded tensor, whole on every rank of the sequence. Collective."""
    shape = (shard_BLND.shape[0], count, *shard_BLND.shape[2:])
    rows = torch.zeros(shape, dtype=torch.float32, device=shard_BLND.device)  # holds bf16 and fp32 exactly
    if shard_BLND.dtype == torch.float64:
        rows = rows.double()
    rows[:, index] = shard_BLND.detach()[:, mine].to(rows.dtype)
    if cp.group is not None:
        torch.distributed.all_reduce(rows, group=cp.group)
    return rows


def _add_runs(
    sums: list[list[float]], runs: tuple[Segment, ...], mine: Tensor | None, difference: Tensor, truth: Tensor
) -> None:
    """Add squares to the sums of each run; `mine` selects the local tokens that the tensors hold, None: all."""
    first = token = 0
    for run, of_run in zip(runs, sums, strict=True):
        held = run.count if mine is None else int(mine[token : token + run.count].sum())
        part = slice(first, first + held)
        of_run[0] += difference[:, part].square().sum().item()
        of_run[1] += truth[:, part].square().sum().item()
        of_run[2] += difference[:, part].numel()
        first, token = first + held, token + run.count


def _errors(everyone: Sequence[Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """By tensor, the error of the whole and where it is largest, from the sums of all ranks."""
    errors, worst = {}, {}
    for name, tensor in enumerate(TENSORS):
        parts = [
            (rank, tokens, *of_run)
            for rank, runs, sums, _ in everyone
            for tokens, of_run in zip(runs, sums[name], strict=True)
        ]
        square, elements = sum(part[3] for part in parts), sum(part[4] for part in parts)
        least = _SMALL**2 * square / elements  # per element
        errors[tensor] = _relative(sum(part[2] for part in parts), square)
        error, rank, tokens = max(
            (_relative(difference, max(truth, least * count)), rank, tokens)
            for rank, tokens, difference, truth, count in parts
        )
        worst[tensor] = {"error": error, "rank": rank, "first_token": tokens[0], "last_token": tokens[1]}
    return errors, worst


def _relative(difference: float, truth: float) -> float:
    """The root of a quotient of sums of squares; `NOT_FINITE` where the difference is no number."""
    if not math.isfinite(difference):
        return NOT_FINITE
    if difference == 0:
        return 0.0
    return min(NOT_FINITE, math.sqrt(difference / truth)) if truth else NOT_FINITE
