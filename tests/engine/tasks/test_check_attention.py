"""The float64 truth that trials of attention are compared with, on ranks that share a sequence."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from engine import ContextParallel
from engine.attention.geometry.layout import LAYOUTS, Segment, SplitZigzag
from engine.attention.geometry.rectangles import region_areas
from engine.attention.geometry.shards import ShardSegments
from engine.attention.masks import Mask, parse_mask
from engine.attention.masks.mask import regions_of
from engine.attention.reference import dense_gradients
from engine.distributed import World
from engine.measurement import NOT_FINITE
from engine.tasks import check_attention
from engine.tasks.check_attention import DENSE_TOKENS, SAMPLED_ROWS, TENSORS, attention_errors, checked_rows
from tests.ranks import run_on_ranks
from tests.slow import slow

TOKENS, HEADS, KV_HEADS, HEAD_DIM = 192, 4, 2, 8
MASKS = (
    "causal",
    "full",
    "sliding_window:20",
    "sliding_window:0",  # a query sees itself alone: dq and dk are 0
    "sliding_window:16:0:3",
    "documents:50,1,2,139",
    "documents:64,128:full",
    "block_sparse:32:local_global-1-1:causal",
    "block_sparse:64:100/110/000",  # the last queries see no key
)


class Ranks:
    """What the check needs of `engine.distributed.World`."""

    rank = property(lambda self: dist.get_rank())
    attempt = World.attempt

    def gather(self, value: object) -> list[object]:
        values: list[object] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values


def exact(cp: ContextParallel, mask: Mask, dtype: torch.dtype = torch.float64, sampled: bool = True) -> Any:
    """A problem on these ranks, and a function that computes it by a dense float64 run of the whole."""
    check_attention.DENSE_TOKENS, check_attention.SAMPLED_ROWS = (
        (TOKENS // 2, 48) if sampled else (TOKENS, SAMPLED_ROWS)
    )
    generator = torch.Generator().manual_seed(0)
    shards = [
        cp.shard(torch.randn(2, TOKENS, heads, HEAD_DIM, generator=generator).to(dtype), 1).clone()
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]

    def compute(dout_BLND: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = [cp.unshard(tensor) for tensor in (*shards[:3], dout_BLND)]
        return tuple(cp.shard(truth, 1).clone() for truth in dense_gradients(*whole, mask))  # type: ignore[call-arg]

    return shards, compute


def errors_of(layout: str, dtype: torch.dtype, sampled: bool) -> dict[str, dict[str, Any]]:
    """What is found of an exact computation, by mask."""
    cp, found = ContextParallel(layout=layout), {}
    for setting in MASKS:
        mask = parse_mask(setting)
        shards, compute = exact(cp, mask, dtype, sampled)
        found[setting] = attention_errors(cast(World, Ranks()), cp, shards, mask, compute)
        assert shards[3].abs().sum(dim=(0, 2, 3)).min() > 0  # the gradient given is no longer 0 anywhere
    return found


@pytest.mark.parametrize(
    ("ranks", "layout", "dtype", "sampled"),
    [
        (1, "contiguous", torch.float64, True),
        (2, "zigzag", torch.float64, True),
        (2, "striped", torch.bfloat16, False),
        (3, "contiguous", torch.float32, False),
        *slow((4, "zigzag", torch.float32, True)),
    ],
)
def test_a_dense_run_has_no_error_under_any_mask(ranks: int, layout: str, dtype: torch.dtype, sampled: bool) -> None:
    for each in run_on_ranks(ranks, errors_of, layout, dtype, sampled):
        for mask, extra in each.items():
            assert max(extra["error"].values()) < 1e-13, mask
            assert max(at["error"] for at in extra["error_at"].values()) < 1e-13, mask
            rows = extra.get("checked", {}).get("rows")
            assert (rows is not None and 16 < rows < TOKENS) if sampled else rows is None


FAULTS = {
    # name: (tensor, mask, what becomes wrong on rank 1, the place: tokens, and the head where one alone is wrong)
    "a run": ("out", "causal", lambda x: x[:, :40].mul_(1.1), (48, 143), None),
    "a run of a head": ("dq", "causal", lambda x: x[:, :40, 3].mul_(1.1), (48, 143), 3),
    "infinity": ("dv", "causal", lambda x: x[0, 5, 1].fill_(float("inf")), (48, 143), 1),
    "NaN": ("dq", "causal", lambda x: x[1, 0, 2].fill_(float("nan")), (48, 143), 2),
    "one token": ("dk", "full", lambda x: x[:, 7].mul_(1.5), (55, 55), None),
    "one token of a head": ("dk", "full", lambda x: x[1, 7, 1].mul_(1.5), (55, 55), 1),
    "what has to be 0": ("dk", "block_sparse:64:100/110/000", lambda x: x[:, 95].fill_(1e-3), (143, 143), None),
}


def found_faults() -> dict[str, Any]:
    """What the check says of each fault; two ranks hold 0 to 47 with 144 to 191, and 48 to 143."""
    cp, found = ContextParallel(), {}
    for name, (tensor, setting, spoil, _, _) in FAULTS.items():
        shards, compute = exact(cp, parse_mask(setting))

        def spoilt(dout, compute=compute, tensor=tensor, spoil=spoil):
            tensors = compute(dout)
            if cp.rank == 1:
                spoil(tensors[TENSORS.index(tensor)])
            return tensors

        found[name] = attention_errors(cast(World, Ranks()), cp, shards, parse_mask(setting), spoilt)
    return found


def test_an_error_is_found_in_its_tensor_on_its_rank_at_its_tokens_and_in_its_head() -> None:
    for each in run_on_ranks(2, found_faults):
        for name, extra in each.items():
            tensor, _, _, (first, last), head = FAULTS[name]
            at = extra["error_at"][tensor]
            assert (at["rank"], at["first_token"], at["last_token"]) == (1, first, last), name
            assert head is None or at["head"] == head, name
            assert at["error"] > 1e-4, name
            if name in ("infinity", "NaN"):
                assert extra["error"][tensor] == at["error"] == NOT_FINITE
            assert all(extra["error"][other] < 1e-13 for other in TENSORS if other != tensor), name


def without_memory() -> tuple[dict[str, Any], bool]:
    """What is recorded where rank 1 cannot form the truth, and whether the ranks still agree afterwards."""
    cp = ContextParallel()
    shards, compute = exact(cp, parse_mask("causal"))
    if cp.rank == 1:

        def attend(truth: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

        check_attention._DenseAttention64.attend = attend  # type: ignore[method-assign]
    extra = attention_errors(cast(World, Ranks()), cp, shards, parse_mask("causal"), compute)
    return extra, bool(torch.equal(cp.unshard(shards[0])[:, ::TOKENS], cp.unshard(shards[0])[:, ::TOKENS]))


def test_a_rank_without_memory_for_the_truth_leaves_a_reason_and_no_rank_waiting() -> None:
    for extra, agree in run_on_ranks(2, without_memory):
        assert extra == {"unchecked": "rank 1: CUDA out of memory. Tried to allocate 2.00 GiB."}
        assert agree


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), SplitZigzag(tail=0.5)], ids=lambda one: one.name)
@pytest.mark.parametrize("ranks", [1, 8, 64, 512])
def test_a_sample_has_rows_of_every_run_of_every_rank(layout, ranks: int) -> None:
    cp = cast(ContextParallel, SimpleNamespace(layout=layout, size=ranks))
    rows = checked_rows(cp, 1 << 20)
    runs = [run.positions() for rank in range(ranks) for run in layout.segments(1 << 20, ranks, rank)]
    assert rows == sorted(set(rows)) == checked_rows(cp, 1 << 20)
    held = [sum(row in run for row in rows) for run in runs]
    assert min(held) >= 1
    assert len(rows) <= max(SAMPLED_ROWS, len(runs))
    if 2 * len(runs) <= SAMPLED_ROWS:
        assert all({run[0], run[-1]} <= set(rows) for run in runs)
    assert checked_rows(cp, DENSE_TOKENS) == list(range(DENSE_TOKENS))


def test_a_row_of_a_mask_with_many_blocks_is_read_off_its_pattern_not_off_tiles() -> None:
    """A row against 8192 blocks takes seconds to form in tiles, and too many of them are refused."""
    mask, rows = parse_mask("block_sparse:128:strided-2:causal"), [0, 127, 128, 500_000, (1 << 20) - 1]
    starts_RI, stops_RI = check_attention.seen_runs(mask, rows, 1 << 20)
    queries = ShardSegments.of(*((Segment(row, 1),) for row in rows))
    pairs = region_areas(regions_of(mask, 1 << 20), queries).tolist()
    assert (stops_RI - starts_RI).sum(dim=1).tolist() == pairs
    assert (starts_RI[1:, 0] % 128 == 0).all()
