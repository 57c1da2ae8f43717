"""How transfers between nodes get their turn beside attention kernels (setting `between_nodes`). No torch.

A kernel of NCCL needs multiprocessors, and clusters of blocks need several of one group at once. An attention kernel
has more blocks than a GPU has multiprocessors, and a block runs for milliseconds where it goes through many tokens: a
message that is started after such a kernel waits until the last of its blocks has started. Remedies, which can be
combined and are all off by default:

    priority      NCCL's kernels run on streams of high priority: they take the next multiprocessor that is free
    no_clusters   these kernels ask for single blocks in place of clusters of four
    ctas:N        they have at most N blocks
    reserve:N     while a transfer between nodes is under way, attention kernels leave at least N multiprocessors alone
    blocks:N      meanwhile no block of an attention kernel goes through more than N keys (backward: queries)
    ahead         the head chunk after the next is sent before the next is waited for, not after

The first three belong to the communicators of groups whose ranks are on several nodes; no other group has them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

PLAIN_NAME = "plain"
MAX_CTAS = 32  # that NCCL takes
_SHORT = {"k": 1 << 10, "": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenNodes:
    """The setting as values."""

    priority: bool = False
    no_clusters: bool = False
    ctas: int = 0  # most blocks of a kernel of NCCL; 0: as many as NCCL takes
    reserve: int = 0  # multiprocessors
    blocks: int = 0  # tokens; 0: as many as there are
    ahead: bool = False

    @property
    def needs_nccl(self) -> tuple[str, ...]:
        """Names of the remedies in use that only NCCL's kernels on GPUs need."""
        return tuple(name for name in ("priority", "no_clusters", "ctas", "reserve") if getattr(self, name))

    @property
    def sets_groups(self) -> bool:
        """Whether communicators between nodes differ from others."""
        return self.priority or self.no_clusters or self.ctas > 0

    def __str__(self) -> str:
        """As it is written in experiment files."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        parts = (name if value is True else f"{name}:{value}" for name, value in values if value)
        return "+".join(parts) or PLAIN_NAME


PLAIN = BetweenNodes()
_FLAGS = ("priority", "no_clusters", "ahead")
_NUMBERS = ("ctas", "reserve", "blocks")


def parse_between_nodes(text: str) -> BetweenNodes:
    """The setting from its text: `plain`, or remedies joined by `+`, such as `priority+blocks:16k`.

    Raises ValueError for any other text.
    """
    if text == PLAIN_NAME:
        return PLAIN
    found: dict[str, int | bool] = {}
    for part in text.split("+"):
        match = re.fullmatch(r"([a-z_]{1,20})(?::([1-9]\d{0,8})(k?))?", part)
        name, number = (match[1], match[2]) if match else ("", None)
        if match is None or (name not in _FLAGS if number is None else name not in _NUMBERS):
            raise ValueError(
                f"between_nodes has {part[:40]!r}; give {PLAIN_NAME}, or {', '.join(_FLAGS)}, "
                f"{', '.join(f'{each}:N' for each in _NUMBERS)} joined by +"
            )
        if name in found:
            raise ValueError(f"between_nodes has {name} twice; give each remedy once")
        found[name] = True if number is None else int(number) * _SHORT[match[3]]
    if found.get("ctas", 1) > MAX_CTAS:
        raise ValueError(f"between_nodes has ctas:{found['ctas']}; give 1 to {MAX_CTAS}")
    return BetweenNodes(**found)  # type: ignore[arg-type]
