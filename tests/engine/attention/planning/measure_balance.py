"""How evenly packed documents are divided, and what is sent, over a thousand drawn sequences. Not a test:

    python -m tests.engine.attention.planning.measure_balance             # all tables, as Markdown
    python -m tests.engine.attention.planning.measure_balance --draws 4   # of each row; a thousand in all by default

Placements: layouts `contiguous`, `zigzag`, `striped` and `balanced`; equal chunks dealt by a min-heap, as
MagiAttention's dispatch does by default (each chunk, heaviest first, to the rank with least work that still takes
chunks), with chunks of 2,048 tokens as in its benchmark; and blocks packed into bins, as FCP (arXiv:2605.08524)
describes it: documents cut into blocks of at most 2,048 tokens, heaviest first to the rank with least work, cut once
more where a rank has no tokens left for all of one. Both are our own code, and send exactly the keys that a rank lacks,
as those systems do. Every rank holds 16,384 tokens, in nodes of 8.

Lengths of documents, all cut where the sequence ends:
- `magi`: the 14 bins of `exps/dist_attn/benchmark/datasets/default/doc_length_distribution.csv` in
  github.com/SandAI-org/MagiAttention at 2c64135: every document has the middle of its bin, and one longer than a
  quarter of the sequence is split into quarters, as its sampler does.
- `prolong-64K`, `prolong-512K`: shares of tokens as in ProLong's recipe (arXiv:2410.02660): 63% in documents of 64K
  tokens, of which 21% are in 512K in the second stage; the rest is its mix of short texts, taken as lognormal with a
  mean of 1,200 tokens (our assumption).
- `pile`: components by weight, with their mean sizes (arXiv:2101.00027, table 1), 4 bytes a token; lognormal around
  each mean with sigma 1 (our assumption).
- `lognormal` (median 1,100, sigma 1.5) and `pareto` (from 200 tokens, exponent 1.1): long tails.
"""

from __future__ import annotations

import argparse
import heapq
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.attention.comm_plan import RingTraffic
from engine.attention.cost import HardwareModel, Workload, choose_schedule, estimate
from engine.attention.geometry.dealing import deal
from engine.attention.geometry.layout import LAYOUTS
from engine.attention.masks import Documents
from engine.attention.masks.pairs import shards_of
from engine.attention.problem import Problem

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
RANK_TOKENS, NODE_SIZE, CHUNK = 1 << 14, 8, 2048
RANKS = (8, 16, 32, 64)
HARDWARE = HardwareModel(across_gib=40.0)  # of a network adapter of 400 Gb/s for each GPU
HEADS, KV_HEADS, HEAD_DIM = 64, 8, 128

# ---------------------------------------------------------------- lengths

MAGI = {  # middle of the bin: documents in it
    5: 30254, 30: 391188, 75: 699596, 150: 1377757, 350: 3794735, 762: 3316785, 1536: 2106566, 3072: 988525,
    6144: 410002, 12288: 173574, 24576: 115007, 49152: 18428, 98304: 22513, 163840: 18284,
}  # fmt: skip
PILE = (  # weight in %, mean KiB of a document
    (18.11, 4.33), (14.40, 30.55), (12.07, 538.36), (10.01, 3.85), (8.96, 46.61), (7.59, 5.25), (6.12, 15.06),
    (5.13, 2.16), (3.65, 4.08), (3.07, 1.30), (2.17, 398.73), (1.55, 30.48), (1.53, 1.11), (1.24, 8.00),
    (0.88, 545.48), (0.75, 369.87), (0.73, 68.87), (0.62, 4.92), (0.60, 22.55), (0.38, 73.37), (0.30, 2.11),
    (0.14, 1.78),
)  # fmt: skip


def _magi(chance: np.random.Generator, seq_len: int) -> Iterator[int]:
    most = seq_len // 4
    counts = np.array(list(MAGI.values()))
    while True:
        length = int(chance.choice(list(MAGI), p=counts / counts.sum()))
        yield from [most] * (length // most)
        if length % most:
            yield length % most


def _mixture(chance: np.random.Generator, parts: list[tuple[float, float, float]]) -> Iterator[int]:
    """Parts are (share of the tokens, mean length, sigma); sigma 0: all of that length."""
    counts = np.array([share / mean for share, mean, _ in parts])
    while True:
        _, mean, sigma = parts[chance.choice(len(parts), p=counts / counts.sum())]
        yield int(chance.lognormal(math.log(mean) - sigma**2 / 2, sigma)) if sigma else int(mean)


LENGTHS: dict[str, Callable[[np.random.Generator, int], Iterator[int]]] = {
    "magi": _magi,
    "prolong-64K": lambda chance, _: _mixture(chance, [(0.63, 1 << 16, 0), (0.37, 1200, 1.0)]),
    "prolong-512K": lambda chance, _: _mixture(chance, [(0.21, 1 << 19, 0), (0.42, 1 << 16, 0), (0.37, 1200, 1.0)]),
    "pile": lambda chance, _: _mixture(chance, [(weight, 256 * size, 1.0) for weight, size in PILE]),
    "lognormal": lambda chance, _: (int(chance.lognormal(7, 1.5)) for _ in iter(int, 1)),
    "pareto": lambda chance, _: (int(200 * (chance.pareto(1.1) + 1)) for _ in iter(int, 1)),
}


def drawn(kind: str, seq_len: int, seed: int) -> tuple[int, ...]:
    """Lengths of documents that fill a sequence."""
    chance, lengths, left = np.random.default_rng([seed, *kind.encode()]), [], seq_len
    for length in LENGTHS[kind](chance, seq_len):
        lengths.append(min(max(1, length), left))
        left -= lengths[-1]
        if not left:
            break
    order = chance.permutation(len(lengths))  # a drawn document is not cut at the end alone
    return tuple(lengths[at] for at in order)


# ---------------------------------------------------------------- placements


class Pieces(NamedTuple):
    """Parts of documents on ranks: tokens [first, last) of a document."""

    rank: Integers
    document: Integers
    first: Integers
    last: Integers


def pieces_of(lengths: tuple[int, ...], rank: Integers, start: Integers, stop: Integers) -> Pieces:
    """From runs of positions [start, stop), each on a rank."""
    bounds = np.cumsum((0, *lengths))
    low, high = np.searchsorted(bounds, start, side="right") - 1, np.searchsorted(bounds, stop)
    count = high - low
    run = np.repeat(np.arange(len(rank)), count)
    document = np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count) + low[run]
    first = np.maximum(start[run], bounds[document]) - bounds[document]
    last = np.minimum(stop[run], bounds[document + 1]) - bounds[document]
    return Pieces(rank[run], document, first, last)


def of_layout(name: str) -> Callable[[tuple[int, ...], int], Pieces]:
    def place(lengths: tuple[int, ...], ranks: int) -> Pieces:
        shards = shards_of(LAYOUTS[name], sum(lengths), ranks)
        return pieces_of(lengths, shards.shard, shards.start, shards.start + shards.count)

    return place


def balanced(lengths: tuple[int, ...], ranks: int) -> Pieces:
    dealt = deal(lengths, ranks)
    return pieces_of(lengths, dealt.shard, dealt.start, dealt.start + dealt.count)


def heap_of_chunks(lengths: tuple[int, ...], ranks: int) -> Pieces:
    """Equal chunks of the sequence, heaviest first to the rank with least work that has fewer than its share."""
    seq_len = sum(lengths)
    starts = np.arange(0, seq_len, CHUNK)
    pieces = pieces_of(lengths, np.arange(len(starts)), starts, starts + CHUNK)
    work = np.bincount(pieces.rank, weights=pairs(pieces))
    heap, taken, rank_of = [(0.0, rank) for rank in range(ranks)], [0] * ranks, np.zeros_like(starts)
    for chunk in np.argsort(-work, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        rank_of[chunk] = rank
        taken[rank] += 1
        if taken[rank] < len(starts) // ranks:
            heapq.heappush(heap, (load + work[chunk], rank))
    return pieces_of(lengths, rank_of, starts, starts + CHUNK)


def bins_of_blocks(lengths: tuple[int, ...], ranks: int) -> Pieces:
    """Blocks of documents, heaviest first to the rank with least work; cut where it has no tokens left."""
    size = sum(lengths) // ranks
    blocks = [
        (document, first, min(first + CHUNK, length))
        for document, length in enumerate(lengths)
        for first in range(0, length, CHUNK)
    ]
    blocks.sort(key=lambda block: block[1] ** 2 - block[2] ** 2)
    heap, room, found = [(0.0, rank) for rank in range(ranks)], [size] * ranks, []
    for document, first, last in blocks:
        while first < last:
            load, rank = heapq.heappop(heap)
            stop = min(last, first + room[rank])
            found.append((rank, document, first, stop))
            room[rank] -= stop - first
            if room[rank]:
                heapq.heappush(heap, (load + (stop**2 - first**2) / 2, rank))
            first = stop
    return Pieces(*np.array(found, dtype=np.int64).T)


PLACEMENTS: dict[str, Callable[[tuple[int, ...], int], Pieces]] = {
    "contiguous": of_layout("contiguous"),
    "zigzag": of_layout("zigzag"),
    "heap of chunks": heap_of_chunks,
    "bins of blocks": bins_of_blocks,
    "balanced": balanced,
}
STRIPED = "striped"


# ---------------------------------------------------------------- what they cost


@dataclass(frozen=True)
class Cost:
    imbalance: float  # most visible pairs of a rank over the mean
    spread: float  # most less fewest, over the mean
    received: float  # tokens whose keys and values ranks receive, over those of the sequence
    most_received: float  # by one rank, over the tokens of a rank
    seconds: float  # of a ring by the cost model, forward and backward of one layer
    auto_seconds: float  # of the schedule that the cost model chooses


def pairs(pieces: Pieces) -> Floats:
    """Visible pairs of each piece, causal inside its document."""
    return (pieces.last * (pieces.last + 1) - pieces.first * (pieces.first + 1)) / 2


def needed(pieces: Pieces, workers: Integers, count: int, ranks: int) -> Integers:
    """[owners, workers]: tokens of each rank whose keys a worker sees. `workers`: which one computes each piece."""
    document = pieces.document
    ends = np.zeros((count, int(document.max()) + 1), dtype=np.int64)
    np.maximum.at(ends, (workers, document), pieces.last)
    found = np.zeros((ranks, count), dtype=np.int64)
    for worker in range(count):
        seen = np.clip(ends[worker, document] - pieces.first, 0, pieces.last - pieces.first)
        found[:, worker] = np.bincount(pieces.rank, weights=seen, minlength=ranks)
    return found


def cost_of(lengths: tuple[int, ...], ranks: int, work: Floats, by_rank: Integers, by_node: Integers) -> Cost:
    """`by_rank`, `by_node`: tokens of each rank that each rank, and each node, needs."""
    nodes, size = max(1, ranks // NODE_SIZE), min(ranks, NODE_SIZE)
    owners, local = np.arange(ranks) // size, np.arange(ranks) % size
    foreign = by_rank * (1 - np.eye(ranks, dtype=np.int64))
    near = np.where(owners[:, None] == owners, foreign, 0)
    if nodes > 1:  # what a node receives goes to its rank of the same place, and from there to the others
        far = np.where(owners[:, None] == np.arange(nodes), 0, by_node)
        of_rank = np.array([far[local == rank % size, rank // size].sum() for rank in range(ranks)])
        inside = [foreign[:, rank].sum() - foreign[local == rank % size, rank].sum() for rank in range(ranks)]
        near_tokens = max(max(inside), int(near.sum(axis=0).max()))
        left_far = of_rank.max() / (RANK_TOKENS * (nodes - 1))
    else:
        near_tokens, left_far = int(near.sum(axis=0).max()), 0.0
    left = RingTraffic(
        steps=int((by_rank > 0).sum(axis=0).max()) / ranks,
        near=near_tokens / max(1, RANK_TOKENS * nodes * (size - 1)),
        far=float(left_far),
    )
    imbalance = float(work.max() / work.mean())
    problem = Problem(
        mask=Documents(lengths), layout=LAYOUTS["contiguous"], seq_len=sum(lengths), batch=1, heads=HEADS,
        kv_heads=KV_HEADS, head_dim=HEAD_DIM, input_bytes=2, cp_size=ranks, node_size=size,
    )  # fmt: skip
    workload = Workload.of(problem, counts_traffic=False)
    workload = replace(workload, left=left, forward_flops=workload.forward_flops * imbalance)
    return Cost(
        imbalance=imbalance,
        spread=float((work.max() - work.min()) / work.mean()),
        received=float(foreign.sum() / sum(lengths)),
        most_received=float(foreign.sum(axis=0).max() / RANK_TOKENS),
        seconds=estimate("ring" if nodes == 1 else "double_ring", workload, HARDWARE),
        auto_seconds=choose_schedule(workload, "balanced", HARDWARE).seconds[0][1],
    )


def placed(name: str, lengths: tuple[int, ...], ranks: int) -> Cost:
    nodes = max(1, ranks // NODE_SIZE)
    if name == STRIPED:
        return striped(lengths, ranks)
    pieces = PLACEMENTS[name](lengths, ranks)
    tokens = np.bincount(pieces.rank, weights=pieces.last - pieces.first, minlength=ranks)
    assert (tokens == sum(lengths) // ranks).all(), name
    work = np.bincount(pieces.rank, weights=pairs(pieces), minlength=ranks).astype(np.float64)
    by_rank = needed(pieces, pieces.rank, ranks, ranks)
    return cost_of(lengths, ranks, work, by_rank, needed(pieces, pieces.rank // NODE_SIZE, nodes, ranks))


def striped(lengths: tuple[int, ...], ranks: int) -> Cost:
    """Rank r holds every token at position r modulo the ranks; a rank in a document needs nearly all of its keys."""
    bounds = np.cumsum((0, *lengths))
    held = -((np.arange(ranks)[:, None] - bounds) // ranks)  # tokens of each rank before each bound
    counts = np.diff(held, axis=1)  # [ranks, documents]
    first = np.arange(ranks)[:, None] + held[:, :-1] * ranks - bounds[:-1]
    work: Floats = (counts * (first + 1.0) + ranks * counts * (counts - 1) / 2).sum(axis=1)
    by_rank = counts @ (counts > 0).T
    by_node = counts @ (counts > 0).reshape(-1, min(ranks, NODE_SIZE), len(lengths)).any(axis=1).T
    return cost_of(lengths, ranks, work, by_rank, by_node)


def least(lengths: tuple[int, ...], ranks: int) -> float:
    """The least that ranks receive, over the tokens of the sequence, where nothing has to be balanced: a document
    longer than a rank lies on as few ranks as can hold it, one part after another."""
    size = sum(lengths) // ranks
    return sum(max(0, length - at * size) for length in lengths for at in range(1, -(-length // size))) / sum(lengths)


NAMES = (*(name for name in PLACEMENTS if name != "balanced"), STRIPED, "balanced")


def table(title: str, cells: dict[tuple[str, int], list[str]], head: list[str]) -> None:
    print(f"\n{title}\n")
    print("| lengths, ranks |", " | ".join(head), "|")
    print("|---|" + "---|" * len(head))
    for (kind, ranks), row in cells.items():
        print(f"| {kind}, {ranks} |", " | ".join(row), "|", flush=True)


def simulate(draws: int, ranks_of: tuple[int, ...]) -> None:
    balance: dict[tuple[str, int], list[str]] = {}
    sent: dict[tuple[str, int], list[str]] = {}
    seconds: dict[tuple[str, int], list[str]] = {}
    milliseconds, losses = [], 0
    for kind in LENGTHS:
        for ranks in ranks_of:
            found: dict[str, list[Cost]] = {name: [] for name in NAMES}
            lower, documents = [], []
            for seed in range(draws):
                lengths = drawn(kind, ranks * RANK_TOKENS, seed)
                documents.append(len(lengths))
                lower.append(least(lengths, ranks))
                started = time.process_time()
                deal(lengths, ranks)
                milliseconds.append(1e3 * (time.process_time() - started))
                for name in NAMES:
                    found[name].append(placed(name, lengths, ranks))
                fastest = min(found[name][-1].seconds for name in NAMES)
                losses += found["balanced"][-1].seconds > 1.01 * fastest
            case, ours = (kind, ranks), np.array([each.seconds for each in found["balanced"]])
            balance[case] = [f"{np.mean(documents):.0f}"]
            balance[case] += [
                f"{np.mean([c.imbalance for c in of]):.2f} ({max(c.imbalance for c in of):.2f})"
                for of in found.values()
            ]
            balance[case].append(f"{max(c.spread for c in found['balanced']):.3f}")
            sent[case] = [f"{np.mean(lower):.2f}"]
            sent[case] += [
                f"{np.mean([c.received for c in of]):.2f} ({np.mean([c.most_received for c in of]):.2f})"
                for of in found.values()
            ]
            seconds[case] = [f"{1e3 * ours.mean():.2f}"]
            seconds[case] += [
                f"{np.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                for name in NAMES[:-1]
                for ratios in [np.array([each.seconds for each in found[name]]) / ours]
            ]
    names = list(NAMES)
    table("Most visible pairs of a rank over the mean: mean of the draws (worst)", balance,
          ["documents", *names, "balanced, most less fewest"])  # fmt: skip
    table("Tokens of keys and values received, over those of the sequence (by the fullest rank, over a rank's)", sent,
          ["least", *names])  # fmt: skip
    table("Predicted time over that of balanced: mean (least to most)", seconds, ["balanced, ms", *names[:-1]])
    count = len(milliseconds)
    print(f"\n{count} draws; balanced is more than 1% slower than the fastest of the others in {losses} of them.")
    print(f"deal: median {np.median(milliseconds):.2f} ms of processor time, most {max(milliseconds):.2f} ms.")


def more_ranks(draws: int, tokens: int = 1 << 17) -> None:
    """Predicted time of the same sequences on more and more ranks, with the schedule that `auto` takes."""
    global RANK_TOKENS
    before, rows = RANK_TOKENS, {}
    counts = (1, 2, 4, 8, 16, 32, 64)
    for kind in LENGTHS:
        found = []
        for seed in range(draws):
            lengths, times = drawn(kind, tokens, seed), []
            for ranks in counts:
                RANK_TOKENS = tokens // ranks
                times.append(1e3 * placed("balanced", lengths, ranks).auto_seconds)
            found.append(times)
        slower = [sum(times[at + 1] > times[at] * 1.001 for times in found) for at in range(len(counts) - 1)]
        mean = np.mean(found, axis=0)
        rows[kind, tokens] = [
            f"{mean[0]:.2f}",
            *(f"{each:.2f} ({late})" for each, late in zip(mean[1:], slower, strict=True)),
        ]
    RANK_TOKENS = before
    table(f"Predicted ms of {tokens} tokens by ranks (draws of {draws} that are slower than on half as many)", rows,
          [str(ranks) for ranks in counts])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=42, help="sequences of each row")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    chosen = parser.parse_args()
    simulate(chosen.draws, tuple(chosen.ranks))
    more_ranks(min(chosen.draws, 20))
    more_ranks(min(chosen.draws, 20), 1 << 20)


if __name__ == "__main__":
    main()
