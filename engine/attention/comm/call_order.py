"""Whether the ranks of a context still exchange the same messages in the same order.

Messages between ranks carry no names: the n-th message sent is the n-th received, and slots and counters are numbered
in the same way. A rank that fails in the middle of a call has sent fewer messages than its peers wait for, and its next
call would receive messages of the failed one. So that call is refused, and the peers' wait ends with their group's
timeout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

_QUOTED_CHARACTERS = 160  # of another error's first line


class BrokenContext(RuntimeError):
    """An earlier call among these ranks failed halfway: a further one would wait for ever, or mix up messages."""


class PeerLost(RuntimeError):
    """Tensors of another rank were not received, or could not be sent to it."""


class CallOrder:
    """Whether one of the collective calls of a context failed."""

    def __init__(self) -> None:
        self._failure: str | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around collective steps. After an exception of any kind among them, later steps raise BrokenContext."""
        if self._failure is not None:
            raise BrokenContext(
                f"an earlier attention call failed on this rank between two messages ({self._failure}), so the ranks "
                "no longer agree on the next message; end all ranks and start them again, or make a new process group "
                "and a new ContextParallel on all of them"
            )
        try:
            yield
        except BaseException as error:
            if self._failure is None:
                self._failure = _quoted(error)
            raise


@contextmanager
def peers_needed(group: dist.ProcessGroup, peers: str) -> Iterator[None]:
    """Around sending, receiving and waiting: an error of the process group says that `peers` are missing, and why."""
    try:
        yield
    except RuntimeError as error:
        seconds = timeout_of(group).total_seconds()
        raise PeerLost(
            f"rank {dist.get_rank()} exchanged tensors with {peers} and did not receive them (timeout {seconds:g} s; "
            f"{_quoted(error)}); another rank failed or ended: find the first error of all ranks, then start them again"
        ) from error


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a rank of `group` waits for another."""
    device = torch.device("cuda" if "nccl" in dist.get_backend_config(group) else "cpu")
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def _quoted(error: BaseException) -> str:
    """An error's kind and first line, as part of a sentence."""
    lines = str(error).strip().splitlines() or ["no message"]
    words = f"{type(error).__name__}: {lines[0]}"
    return words if len(words) <= _QUOTED_CHARACTERS else words[: _QUOTED_CHARACTERS - 3] + "..."
