"""`layout: auto`: the layout that divides a mask's work most evenly among the ranks. Integer code."""

from __future__ import annotations

from collections.abc import Sequence

from engine.attention.geometry.layout import LAYOUTS, Layout, SplitZigzag, split_unsupported_reason, tail_cut
from engine.attention.masks import Mask, TooManyTiles, imbalance, kept_share, parse_mask, rank_pair_tiles
from engine.attention.masks.mask import FirstRows
from engine.attention.planning.cost_model import RUNS_OF_TOKENS
from engine.settings import TrialSettings

PREFERENCE = tuple(LAYOUTS[name] for name in ("contiguous", "zigzag", "striped"))
AS_GOOD = 1.05  # of the best imbalance: striped tiles cost kernels several per cent, and further ring steps are added


def choose_layout(mask: Mask, seq_len: int, cp_size: int) -> str:
    """The layout that divides the mask's work most evenly; of those as good as the best, the simplest.

    Contiguous is preferred: with local masks a rank then needs chunks of the fewest other ranks, and every step has the
    fewest tiles. Zigzag has two runs of tokens per rank; striped has tiles with every rank. A layout that would cut the
    mask into too many tiles is skipped. Only layouts that can split the length are considered; when none can, all are,
    and the error names the one that would have been best.

    Raises ValueError with the mask's `unsupported_reason` when it does not describe `seq_len` tokens.
    """
    return best_layout(mask, seq_len, cp_size).name


def best_layout(
    mask: Mask, seq_len: int, cp_size: int, tail: float = 1.0, among: Sequence[Layout] = PREFERENCE
) -> Layout:
    """`choose_layout` where attention's outputs are saved for the last `tail` of the sequence and recomputed before it.

    With a tail between 0 and 1 the recomputed work and the saved rows should be divided evenly as well, and zigzag over
    head and tail is one more candidate.
    """
    cut = tail_cut(tail, seq_len, cp_size)
    layouts = list(among)
    if 0 < cut < seq_len:
        layouts.insert(layouts.index(LAYOUTS["zigzag"]) + 1, SplitZigzag(tail))
    layouts = [layout for layout in layouts if split_unsupported_reason(layout, seq_len, cp_size) is None] or layouts

    def unevenness(layout: Layout) -> float:
        work = imbalance(mask, layout, seq_len, cp_size)
        if not 0 < cut < seq_len:
            return work
        kept = kept_share(layout, seq_len, cp_size, cut) * seq_len / (seq_len - cut)
        return max(work, kept, imbalance(FirstRows(mask, cut), layout, seq_len, cp_size))

    shares = {layout: unevenness(layout) for layout in layouts}
    good = [layout for layout in layouts if shares[layout] <= min(shares.values()) * AS_GOOD]
    others = sorted(set(layouts) - set(good), key=shares.__getitem__)
    return next((layout for layout in [*good, *others] if _is_whole(mask, layout, seq_len, cp_size)), good[0])


def _is_whole(mask: Mask, layout: Layout, seq_len: int, cp_size: int) -> bool:
    """Whether the mask has few enough tiles under this layout, judged by the first shard against itself."""
    try:
        rank_pair_tiles(mask, layout, seq_len, cp_size, 0, 0)
    except TooManyTiles:
        return False
    return True


def trial_layout(settings: TrialSettings) -> str | Layout:
    """The layout of a trial of method `burst`: its own, or for `auto` the best."""
    tail = settings.checkpoint.tail
    if settings.layout == "split_zigzag":
        return SplitZigzag(tail)
    if settings.layout != "auto":
        return settings.layout
    recomputes = settings.task == "train" and settings.checkpoint.layers_again(settings.model.layers) > 0
    # An all-to-all or all-gather moves runs of consecutive tokens.
    among = [each for each in PREFERENCE if each.name != "striped" or settings.schedule not in RUNS_OF_TOKENS]
    return best_layout(
        parse_mask(settings.mask), settings.seq_len, settings.cp_size, tail if recomputes else 1.0, among
    )
