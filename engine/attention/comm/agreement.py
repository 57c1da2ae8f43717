"""What ranks say to each other besides tensors: which call they are about to make, and where one of them failed.

Through the store of their process group, so on the host alone, whatever the backend. Ranks agree once for every new
plan, before its first message; a call with a plan says nothing. After a failure every rank says where it was, and names
the ranks that said nothing.

What is said, and the tags of messages, have the number of a call. A refused call has a number too. So a rank that
refuses a call which the others make has other numbers than they from then on, and no rank receives its messages.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

_PAUSES = (0.0005, 0.02)  # seconds between two looks at the store: the first, and the longest
_PATIENCE = 2.0  # seconds in which ranks that wait for the same message notice that it does not come

_agreements: WeakKeyDictionary[dist.ProcessGroup, Agreement] = WeakKeyDictionary()


@dataclass(slots=True)
class Calls:
    """Where the calls of a group's ranks are, on all of them alike."""

    begun: int = 0  # the number of the last call that began
    said: int = 0  # how often a rank spoke since then
    said_before: int = 0  # the same between it and the call before


class Agreement:
    """Of the ranks of one group. All contexts of a group share it, and `calls`."""

    def __init__(self, group: dist.ProcessGroup, timeout_seconds: float) -> None:
        self._store = dist.PrefixStore("burst_attention", _get_process_group_store(group))
        self._ranks, self._timeout_seconds = dist.get_process_group_ranks(group), timeout_seconds
        self._rank = dist.get_rank()
        self.calls = Calls()
        self._own_keys: list[str] = []  # of what it said, as long as others may read it
        self._last: Mapping[str, object] = {}  # what all agreed on last

    @classmethod
    def of(cls, group: dist.ProcessGroup, timeout_seconds: float) -> Agreement:
        """That of `group`, made at first use."""
        if group not in _agreements:
            _agreements[group] = cls(group, timeout_seconds)
        return _agreements[group]

    def refuse(self, reason: str) -> None:
        """Say that this rank refuses the call that it was asked for. Waits for nobody."""
        with contextlib.suppress(RuntimeError):  # the store has ended, and no rank can wait there
            self._say({"refused": reason})

    def reached(self, said: Mapping[str, object]) -> str | None:
        """Say what this rank is about to do, and wait until all have: one sentence when they differ, else None.

        Raises TimeoutError, which names the ranks that said nothing within the timeout, and RuntimeError where the
        process that serves the store has ended.
        """
        words = self._say(said)
        keys = [self._key(rank, self.calls.begun, self.calls.said) for rank in self._ranks]
        deadline, pause = time.monotonic() + self._timeout_seconds, _PAUSES[0]
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{_ranks(self._silent(keys))} did not come to this call{self._beside_the_last(json.loads(words))} "
                    f"within {self._timeout_seconds:g} s"
                )
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
        by_rank = dict(zip(self._ranks, map(json.loads, self._store.multi_get(keys)), strict=True))
        *earlier, last = self._own_keys
        for key in earlier:  # all are past what was said before
            self._store.delete_key(key)
        self._own_keys = [last]
        if (difference := _difference(by_rank)) is None:
            self._last = by_rank[self._rank]
        return difference

    def _say(self, said: Mapping[str, object]) -> str:
        """Say it, and return its words."""
        self.calls.said += 1
        self._own_keys.append(self._key(self._rank, self.calls.begun, self.calls.said))
        words = json.dumps(said, default=str)
        self._store.set(self._own_keys[-1], words)
        return words

    def failed(self, where: str, error: str | None) -> str:
        """Say where this rank failed, with an error of its own or none: what is known then of the other ranks, as part
        of a sentence."""
        try:
            self._store.set(f"failed/{self._rank}", json.dumps({"where": where, "error": error}))
            if error is not None:
                return ""
            keys = [f"failed/{rank}" for rank in self._ranks]
            deadline = time.monotonic() + min(_PATIENCE, self._timeout_seconds)
            while not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(_PAUSES[1])
            silent = self._silent(keys)
            found = [f"{_ranks(silent)} said nothing of this call"] if silent else []
            for rank, key in zip(self._ranks, keys, strict=True):
                if rank not in (*silent, self._rank):
                    said = json.loads(self._store.get(key))
                    found.append(f"rank {rank} {'failed' if said['error'] else 'waited'} in {said['where']}")
                    found[-1] += f" with {said['error']}" if said["error"] else ""
            ahead = {rank: self._said_alone(rank) for rank in self._ranks if rank != self._rank}
            found += [
                f"rank {rank} refused a call: {said['refused']}" for rank, said in ahead.items() if "refused" in said
            ]
            if begun := [rank for rank, said in ahead.items() if said and "refused" not in said]:
                difference = self._beside_the_last(ahead[begun[0]])
                found.append(f"{_ranks(begun)} began a new kind of call that this rank did not{difference}")
            return ", ".join(found)
        except RuntimeError:  # the process that serves the store has ended: nothing more can be known
            return ""

    def _said_alone(self, rank: int) -> Mapping[str, object]:
        """What `rank` said of this call, or the next one, where this rank said nothing; empty where it did not
        either."""
        calls = self.calls
        here = (
            self._key(rank, calls.begun - 1, calls.said_before + 1),
            self._key(rank, calls.begun, calls.said + 1),
        )
        found: Iterator[Mapping[str, object]] = (
            json.loads(self._store.get(key)) for key in here if self._store.check([key])
        )
        return next(found, {})

    def _beside_the_last(self, said: Mapping[str, object]) -> str:
        """How a call differs from the one that ranks agreed on last, as part of a sentence; nothing where they are of
        two kinds, such as attention and `unshard`."""
        if said.keys() != self._last.keys():
            return ""
        names = [name for name in said if said[name] != self._last[name]]
        here, there = (", ".join(f"{name} {each[name]}" for name in names) for each in (said, self._last))
        return f" ({here}; the last new kind had {there})" if names else ""

    def _silent(self, keys: Sequence[str]) -> list[int]:
        """The ranks whose key is not there."""
        return [rank for rank, key in zip(self._ranks, keys, strict=True) if not self._store.check([key])]

    def _key(self, rank: int, call: int, said: int) -> str:
        return f"{call}.{said}/{rank}"


def _difference(by_rank: Mapping[int, Mapping[str, object]]) -> str | None:
    """How ranks contradict each other, in one sentence that is the same on all of them, or None."""
    refusals = {rank: said["refused"] for rank, said in by_rank.items() if "refused" in said}
    if refusals:
        rank, reason = next(iter(refusals.items()))
        return f"{_ranks(list(refusals))} refused this call, and no rank can make it alone; rank {rank} said: {reason}"
    (first, said), *others = by_rank.items()
    for rank, other in others:
        if _kind(other) != _kind(said):
            return (
                f"ranks do not agree on this call: rank {first} is in {_kind(said)}, rank {rank} in {_kind(other)}; "
                "make the same calls in the same order on all ranks of the context"
            )
        names = [name for name in {**said, **other} if said.get(name) != other.get(name)]
        if names:
            here, there = (", ".join(f"{name} {each.get(name)}" for name in names) for each in (said, other))
            return (
                f"ranks do not agree on this call: rank {first} has {here}, rank {rank} has {there}; make it with the "
                "same shapes, mask and choices on all ranks of the context"
            )
    return None


def _kind(said: Mapping[str, object]) -> str:
    return "unshard" if "unshard" in said else "attention"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
