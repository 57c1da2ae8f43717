"""Which global positions each context-parallel rank holds, and the order in which ranks receive each other's. Pure
integer code.

A layout cuts the sequence into equal shards, each a few arithmetic runs of positions (`Segment`). Causal attention over
contiguous shards leaves rank 0 almost idle; zigzag (chunks r and 2P-1-r of 2P) and striped (every P-th token) give all
ranks equal work. Sources: zigzag, Llama 3 (arXiv:2407.21783, section 3.3.2); striped, arXiv:2311.09431.

Selective checkpointing cuts the sequence into a head, recomputed in backward, and a tail, saved. Because shards
ascend in position, a rank's tokens of the head are the first of its local tokens.

On a flat ring, chunks move one rank on at every step. On a double ring (BurstAttention, arXiv:2403.09347, section 3.3;
LoongTrain, arXiv:2406.18485), in outer step c and inner step t, local rank i of node n holds the chunk of node n - c,
local rank i - t; a transfer between nodes starts with its outer step and may last as long as the inner steps of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions start, start + step, ..., `count` of them."""

    start: int
    count: int
    step: int = 1

    def positions(self) -> range:
        """The global positions, ascending."""
        return range(self.start, self.start + self.count * self.step, self.step)

    def count_before(self, cut: int) -> int:
        """How many of the positions are before `cut`."""
        return min(self.count, max(0, -((self.start - cut) // self.step)))


class Layout(Protocol):
    """How a sequence is divided among `cp_size` ranks. Shards are equal, disjoint, and ascending in position."""

    @property
    def name(self) -> str: ...

    def __hash__(self) -> int: ...

    def chunks(self, cp_size: int) -> int:
        """Equal chunks the sequence is cut into: lengths that split are its multiples."""
        ...

    def segments(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Segment, ...]:
        """Positions `cp_rank` holds, in the order of its local tokens. `seq_len` is a multiple of `chunks(cp_size)`."""
        ...


@dataclass(frozen=True, slots=True)
class Contiguous:
    """Rank r holds the r-th of P consecutive parts."""

    name: str = "contiguous"

    def chunks(self, cp_size: int) -> int:
        return cp_size

    def segments(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Segment, ...]:
        shard = seq_len // cp_size
        return (Segment(cp_rank * shard, shard),)


@dataclass(frozen=True, slots=True)
class Zigzag:
    """Rank r holds chunks r and 2P-1-r of 2P, one from each end: equal causal work for every rank."""

    name: str = "zigzag"

    def chunks(self, cp_size: int) -> int:
        return 2 * cp_size

    def segments(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Segment, ...]:
        chunk = seq_len // (2 * cp_size)
        if cp_size == 1:
            return (Segment(0, seq_len),)
        if cp_rank == cp_size - 1:  # its two chunks touch
            return (Segment(cp_rank * chunk, 2 * chunk),)
        return (Segment(cp_rank * chunk, chunk), Segment((2 * cp_size - 1 - cp_rank) * chunk, chunk))


@dataclass(frozen=True, slots=True)
class SplitZigzag:
    """Zigzag over the head and over the tail of the sequence, each by itself: both are divided evenly.

    Args:
        tail: fraction of the sequence, from its end, that is the tail; with 0 or 1 this is plain zigzag.
    """

    tail: float
    name: str = "split_zigzag"

    def chunks(self, cp_size: int) -> int:
        return 2 * cp_size

    def segments(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Segment, ...]:
        cut = tail_cut(self.tail, seq_len, cp_size)
        head = Zigzag().segments(cut, cp_size, cp_rank)
        tail = Zigzag().segments(seq_len - cut, cp_size, cp_rank)
        return merged(part for part in (*head, *(Segment(cut + s.start, s.count) for s in tail)) if part.count)


@dataclass(frozen=True, slots=True)
class Striped:
    """Rank r holds tokens r, r + P, r + 2P, ...: nearly equal causal work, off by one diagonal."""

    name: str = "striped"

    def chunks(self, cp_size: int) -> int:
        return cp_size

    def segments(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Segment, ...]:
        return (Segment(cp_rank, seq_len // cp_size, cp_size),)


@dataclass(frozen=True, slots=True)
class ZigzagOfDocuments:
    """Zigzag over each packed document by itself: rank r holds chunks r and 2P-1-r of every document. Megatron-LM cuts
    packed sequences so.

    Args:
        lengths: tokens of each document, multiples of 2P, in the order of the sequence; none: one document fills it.
    """

    lengths: tuple[int, ...] = ()
    name: str = "zigzag_of_documents"

    def chunks(self, cp_size: int) -> int:
        return 2 * cp_size

    def segments(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Segment, ...]:
        """Raises ValueError for a document that 2P chunks do not divide."""
        lengths = self.lengths or (seq_len,)
        if wrong := [length for length in lengths if length % (2 * cp_size)]:
            raise ValueError(
                f"a document has {wrong[0]} tokens, which do not split into 2 x cp_size = {2 * cp_size} equal chunks; "
                "pad each document to a multiple of them"
            )
        if sum(lengths) != seq_len:
            raise ValueError(
                f"{len(lengths)} documents hold {sum(lengths)} tokens and the sequence has {seq_len}; give lengths "
                "that sum to it"
            )
        runs: list[Segment] = []
        start = 0
        for length in lengths:
            parts = Zigzag().segments(length, cp_size, cp_rank)
            runs += [Segment(start + part.start, part.count) for part in parts]
            start += length
        return merged(runs)


@dataclass(frozen=True, slots=True)
class Gathered:
    """Shards of another layout put together: rank i holds the tokens of `members[i]`, in order of position."""

    base: Layout
    members: tuple[tuple[int, ...], ...]  # ranks of the base layout

    @property
    def name(self) -> str:
        return self.base.name

    def chunks(self, cp_size: int) -> int:
        return self.base.chunks(sum(map(len, self.members)))

    def segments(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Segment, ...]:
        base_size = sum(map(len, self.members))
        parts = [part for rank in self.members[cp_rank] for part in self.base.segments(seq_len, base_size, rank)]
        return merged(sorted(parts, key=lambda segment: segment.start))


def merged(parts: Iterable[Segment]) -> tuple[Segment, ...]:
    """Ascending runs of positions, those that touch as one."""
    runs: list[Segment] = []
    for part in parts:
        if runs and part.step == 1 and runs[-1].start + runs[-1].count == part.start:
            runs[-1] = Segment(runs[-1].start, runs[-1].count + part.count)
        else:
            runs.append(part)
    return tuple(runs)


def rows_before(segments: tuple[Segment, ...], cut: int) -> int:
    """How many local tokens, the first ones, are before global position `cut`."""
    return sum(segment.count_before(cut) for segment in segments)


def split_at(segments: tuple[Segment, ...], cut: int) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """The runs of positions before `cut`, and those from it on."""
    near: list[Segment] = []
    far: list[Segment] = []
    for segment in segments:
        count = segment.count_before(cut)
        if count in (0, segment.count):
            (near if count else far).append(segment)
            continue
        near.append(Segment(segment.start, count, segment.step))
        far.append(Segment(segment.start + count * segment.step, segment.count - count, segment.step))
    return tuple(near), tuple(far)


def tail_cut(tail: float, seq_len: int, cp_size: int) -> int:
    """Global position at which a tail of that fraction of the sequence begins, the same under every layout.

    Rounded to whole chunks where the length has them (2 x cp_size of them, else cp_size), so that layouts that can
    divide head and tail evenly do. Raises ValueError when `tail` is no fraction.
    """
    if not isinstance(tail, Real) or not 0 <= tail <= 1:
        raise ValueError(f"tail is {tail!r}; give a fraction of the sequence from 0 to 1")
    unit = next(chunks for chunks in (2 * cp_size, cp_size, 1) if seq_len % chunks == 0) if cp_size > 1 else 1
    return seq_len - round(tail * seq_len / unit) * unit


LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (Contiguous(), Zigzag(), Striped())}


def layout_named(name: str) -> Layout:
    """Look a layout up by name. Raises ValueError naming the known ones."""
    if name == "split_zigzag":
        raise ValueError("layout 'split_zigzag' needs to know where the tail begins; pass SplitZigzag(tail=FRACTION)")
    if name == "balanced":
        raise ValueError(
            "layout 'balanced' needs the lengths of the documents; pass Balanced(lengths), or choose_layout(mask, ...)"
        )
    if name not in LAYOUTS:
        raise ValueError(f"layout {name!r} is unknown; choose one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def as_layout(layout: str | Layout) -> Layout:
    """The layout itself; a name is looked up by `layout_named`. Raises ValueError for what is neither."""
    if isinstance(layout, str):
        return layout_named(layout)
    if not hasattr(layout, "segments"):
        raise ValueError(
            f"layout is {layout!r}; give zigzag, contiguous or striped, or one such as SplitZigzag(tail=0.5)"
        )
    return layout


def split_unsupported_reason(layout: str | Layout, seq_len: int, cp_size: int) -> str | None:
    """Why `seq_len` tokens cannot be divided among `cp_size` ranks, with the nearest lengths that can, or None."""
    if cp_size == 1:
        return None
    layout = as_layout(layout)
    chunks = layout.chunks(cp_size)
    if seq_len % chunks == 0:
        return None
    below, above = seq_len // chunks * chunks, (seq_len // chunks + 1) * chunks
    nearest = f"{below} and {above}" if below else f"{above}"
    size = f"2 x cp_size = {chunks}" if chunks == 2 * cp_size else f"cp_size = {chunks}"
    wanted = f"{size} equal {layout.name} chunks"
    return f"seq_len {seq_len} does not split into {wanted}; the nearest lengths that do: {nearest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """Order in which every rank processes every chunk. node_size == cp_size is the flat ring."""

    cp_size: int
    node_size: int  # CP ranks per node; divides cp_size

    def __post_init__(self) -> None:
        if self.node_size < 1 or self.cp_size % self.node_size:
            raise ValueError(
                f"node_size {self.node_size} does not divide cp_size {self.cp_size}; give ranks per node that do"
            )

    @property
    def nodes(self) -> int:
        return self.cp_size // self.node_size

    def owner(self, cp_rank: int, step: int) -> int:
        """CP rank whose chunk `cp_rank` processes at `step`, 0 <= step < cp_size."""
        node, local_rank = divmod(cp_rank, self.node_size)
        outer_step, inner_step = divmod(step, self.node_size)
        return (node - outer_step) % self.nodes * self.node_size + (local_rank - inner_step) % self.node_size
