"""How long a new plan takes on one rank of 64, mask by mask. Not a test:

    python -m tests.engine.attention.planning.measure_planning           # 1M tokens, 64 ranks, flat ring and nodes of 8
    python -m tests.engine.attention.planning.measure_planning --packed  # what a step on packed documents adds

Processor time of everything that `plan_attention` computes from mask and layout where every setting is `auto` on GPUs
(the cost model's counts, the backward side, this rank's plans of forward and backward), with the tiles of this rank's
first step. Apart from it, the tiles of its other steps, each formed when it is first reached, while the GPU computes
the step before. The best of some, in ms. No tensors, no GPU.

With `--packed`, medians of 15 draws of documents with log-normal lengths (sigma 1.2) that fill 1M tokens: dealing them
to the ranks, the tables of all pairs of ranks, and the kernel calls of one rank.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

from engine.attention import comm_plan, resolve
from engine.attention.geometry.layout import LAYOUTS, Layout
from engine.attention.masks import (
    BlockSparse,
    Causal,
    Documents,
    Full,
    LocalGlobal,
    Mask,
    SlidingWindow,
    Strided,
    pairs,
)
from engine.attention.masks.mask import regions_of
from engine.attention.masks.pairs import shards_of
from engine.attention.problem import Problem
from engine.attention.resolve import Choices, HardwareModel

REPEATS, NODE_SIZE = 12, 8
CACHES = (
    regions_of,
    pairs.pair_table,
    comm_plan.ring_tables,
    comm_plan.comm_plan,
    comm_plan.ring_traffic,
    resolve.group_backward_bytes,
)


def masks(seq_len: int, documents: int) -> dict[str, Callable[[], Mask]]:
    """A new mask of each kind."""
    cuts = sorted(random.Random(0).sample(range(1, seq_len), documents - 1))
    lengths = [stop - start for start, stop in zip([0, *cuts], [*cuts, seq_len], strict=True)]
    near = [[abs(row - column) < 5 or column % 50 == 0 for column in range(256)] for row in range(256)]
    return {
        "causal": Causal,
        "full": Full,
        "window of 4K": lambda: SlidingWindow(4096),
        "window of 4K and 128, 64 global tokens": lambda: SlidingWindow(4096, 128, 64),
        f"{documents} documents": lambda: Documents(lengths),
        f"{documents} documents, not causal": lambda: Documents(lengths, causal=False),
        "10 documents": lambda: Documents([seq_len // 16 * 3 + 7, *[seq_len // 16] * 8], repeat=True),
        "1 document": lambda: Documents([seq_len]),
        "documents of 4K and 1K": lambda: Documents((4096, 1024), repeat=True),
        "local_global-2-1 of 4K, causal": lambda: BlockSparse(LocalGlobal(2, 1), 4096, causal=True),
        "local_global-2-1 of 4K": lambda: BlockSparse(LocalGlobal(2, 1), 4096),
        "strided-8 of 4K, causal": lambda: BlockSparse(Strided(8), 4096, causal=True),
        "strided-8 of 4K": lambda: BlockSparse(Strided(8), 4096),
        "grid of 4K, a window of blocks": lambda: BlockSparse(near, seq_len // 256, causal=True),
    }


def plan_seconds(mask: Mask, layout: Layout, node_size: int, seq_len: int, cp_size: int) -> tuple[float, float]:
    """(seconds of planning and the first step's calls, seconds of the other steps')."""
    for cache in CACHES:
        cache.cache_clear()
    shards_of(layout, seq_len, cp_size)  # of the context, not of the mask
    problem = Problem(
        mask=mask, layout=layout, seq_len=seq_len, batch=1, heads=32, kv_heads=8, head_dim=128, input_bytes=2,
        cp_size=cp_size, node_size=NODE_SIZE,
    )  # fmt: skip
    schedule, rank = "ring" if node_size == cp_size else "double_ring", cp_size // 3
    started = time.process_time()
    resolve.resolve(problem, HardwareModel(), Choices())  # the estimate of every schedule
    choice = resolve.resolve(problem, HardwareModel(), Choices(schedule=schedule))
    plans = [
        comm_plan.comm_plan(mask, layout, choice.division.ring, seq_len, rank, queries)
        for queries in {False, choice.sends_queries}
    ]
    assert all(plan.steps[0].calls for plan in plans)
    planned = time.process_time()
    for plan in plans:
        for step in plan.steps:
            assert step.calls is not None
    return planned - started, time.process_time() - planned


def packed_seconds(lengths: list[int], ranks: int) -> tuple[float, float, float]:
    """Seconds of dealing documents, of the tables of all pairs of ranks, and of the calls of one rank."""
    started = time.process_time()
    mask = Documents(lengths)
    layout = resolve.balanced(mask)
    layout.segments(mask.tokens, ranks, 1)
    dealt = time.process_time()
    table = pairs.pair_table(mask, layout, mask.tokens, ranks)
    formed = time.process_time()
    for owner in range(ranks):
        table.calls(ranks // 3, owner)
    return dealt - started, formed - dealt, time.process_time() - formed


def lognormal(documents: int, tokens: int, seed: int) -> list[int]:
    """Lengths of so many documents that fill so many tokens."""
    chance = random.Random(seed)
    drawn = [chance.lognormvariate(0, 1.2) for _ in range(documents)]
    lengths = [max(1, int(tokens * each / sum(drawn))) for each in drawn]
    lengths[lengths.index(max(lengths))] += tokens - sum(lengths)
    return lengths


def packed_table(tokens: int) -> None:
    """A step on packed documents, as Markdown."""
    print("| documents | ranks | dealing | tables of all pairs | calls of one rank | sum |\n|---|---|---|---|---|---|")
    packed_seconds(lognormal(100, tokens, 99), 8)
    for documents, ranks in ((100, 8), (1000, 8), (1000, 64)):
        runs = [packed_seconds(lognormal(documents, tokens, seed), ranks) for seed in range(15)]
        cells = [statistics.median(each) for each in (*zip(*runs, strict=True), [sum(run) for run in runs])]
        print(f"| {documents:,} | {ranks} |", *(f"{1e3 * each:.1f} ms |" for each in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--packed", action="store_true")
    chosen = parser.parse_args()
    if chosen.packed:
        packed_table(chosen.tokens)
        return
    layouts = ("contiguous", "zigzag", "striped")
    print("ms of a plan with its first step's calls (+ ms of the other steps'), by layout; flat ring / nodes of 8")
    print("| mask |", *(f"{layout} |" for layout in layouts))
    print("| --- |", *("--- |" for _ in layouts))
    for name, make in masks(chosen.tokens, chosen.documents).items():
        cells = []
        for layout in layouts:
            found = []
            for node_size in (chosen.ranks, NODE_SIZE):
                case = LAYOUTS[layout], node_size, chosen.tokens, chosen.ranks
                runs = [plan_seconds(make(), *case)]
                runs += [plan_seconds(make(), *case) for _ in range(REPEATS if runs[0][1] < 0.2 else 2)]
                planned, tiles = (1e3 * min(each) for each in zip(*runs, strict=True))
                found.append(f"{planned:.1f} (+ {tiles:.1f})")
            cells.append(" / ".join(found))
        print(f"| {name} |", *(f"{cell} |" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
