"""Method `burst`: BurstAttention on the engine's model and trainer. The settings are the paper's ablation switches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.attention.layout import LAYOUTS, split_refusal
from engine.attention.masks import Mask, TooManyTiles, imbalance, meeting, parse_mask
from engine.method import EngineCommand

if TYPE_CHECKING:
    from engine.attention.context import ContextParallel
    from engine.method import AttentionFn
    from engine.settings import TrialSettings

PREFERENCE = ("contiguous", "zigzag", "striped")
AS_GOOD = 1.05  # of the best imbalance: striped tiles alone cost kernels several per cent, further meetings come on top


class Burst(EngineCommand):
    """Query-side backward ring; layout, schedule, backward and kernel as the settings say."""

    name = "burst"
    system = "BurstEngine"
    source = "arXiv:2509.19836"

    def refuse(self, settings: TrialSettings) -> str | None:
        if settings.tp_size > 1:
            return f"burst has no tensor parallelism, found tp_size {settings.tp_size}; set tp_size to 1"
        return parse_mask(settings.mask).refusal(settings.seq_len) or split_refusal(
            self.layout(settings), settings.seq_len, settings.cp_size
        )

    def layout(self, settings: TrialSettings) -> str:
        if settings.layout != "auto":
            return settings.layout
        return choose_layout(parse_mask(settings.mask), settings.seq_len, settings.cp_size)

    def attention(self, cp: ContextParallel, settings: TrialSettings) -> AttentionFn:
        from engine.attention.bound import BoundAttention

        return BoundAttention(
            cp, settings, schedule=settings.schedule, backward=settings.backward, exchange=settings.exchange
        )


def choose_layout(mask: Mask, seq_len: int, cp_size: int) -> str:
    """The layout that shares the mask's work out most evenly; of those as good as the best, the simplest.

    Contiguous comes first: masks that look nearby then meet the fewest other ranks, and every meeting has the fewest
    tiles. Zigzag has two runs of tokens per rank; striped meets everyone everywhere. A layout that would cut the mask
    into too many tiles is passed over. Only layouts that can split the length are considered; when none can, all are,
    and the length is refused for the one that would have been best.

    Raises ValueError with the mask's refusal when it does not describe `seq_len` tokens.
    """
    names = [name for name in PREFERENCE if split_refusal(name, seq_len, cp_size) is None] or list(PREFERENCE)
    shares = {name: imbalance(mask, LAYOUTS[name], seq_len, cp_size) for name in names}
    good = [name for name in names if shares[name] <= min(shares.values()) * AS_GOOD]
    others = sorted(set(names) - set(good), key=shares.__getitem__)
    return next((name for name in [*good, *others] if _is_whole(mask, name, seq_len, cp_size)), good[0])


def _is_whole(mask: Mask, layout: str, seq_len: int, cp_size: int) -> bool:
    """The layout leaves the mask in pieces large enough to run, judged by the first shard against itself."""
    try:
        meeting(mask, LAYOUTS[layout], seq_len, cp_size, 0, 0)
    except TooManyTiles:
        return False
    return True


METHOD = Burst()
