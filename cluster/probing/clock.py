"""Clock skew of a node, from the times around the one command that runs its probes.

The four-timestamp method of NTP (RFC 5905, section 8): the duration of the probes cancels out. The connection itself
measures it, as it does reachability, so it is no file of cluster/checks.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.probing.verdict import Verdict

WARN_SECONDS = 1.0  # this project's judgement: logs of several nodes can no longer be put in order


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockReading:
    """Seconds since 1970: ours before and after the command, the node's at its begin and end; None: not printed."""

    sent: float
    begun: float | None
    ended: float | None
    received: float

    @property
    def offset_seconds(self) -> float:
        """How far the node is ahead."""
        assert self.begun is not None
        assert self.ended is not None
        return ((self.begun - self.sent) + (self.ended - self.received)) / 2

    @property
    def uncertainty_seconds(self) -> float:
        """Half the duration of both transfers: the offset may be wrong by this much."""
        assert self.begun is not None
        assert self.ended is not None
        return max(0.0, ((self.begun - self.sent) - (self.ended - self.received)) / 2)


def judge(reading: ClockReading) -> Verdict:
    """Warns when the node is certainly more than a second ahead or behind."""
    if reading.begun is None or reading.ended is None:
        return Verdict(level="unknown", summary="the node did not print its time; its date command may be no GNU date")
    offset, uncertainty = reading.offset_seconds, reading.uncertainty_seconds
    facts = {"offset_seconds": round(offset, 3), "uncertainty_seconds": round(uncertainty, 3)}
    if abs(offset) - uncertainty > WARN_SECONDS:
        side = "ahead of" if offset > 0 else "behind"
        summary = f"{abs(offset):.1f} s {side} this machine; let chrony or ntpd set both clocks"
        return Verdict(level="warn", summary=summary, action="monitor", facts=facts)
    return Verdict(level="ok", summary=f"within {max(abs(offset), uncertainty):.2f} s of this machine", facts=facts)
