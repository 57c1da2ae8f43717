"""The entry of a measurement for its traced step until the trace is read, and for good if it never is.

No torch, because programs that only read measurements use it.
"""

from __future__ import annotations

from typing import Final

from engine.measurement import Of, Profile

TRACE_FILE = "trace.json.gz"  # of a trial, in the Chrome trace format: rank 0's
PROFILE: Final = "profile"  # of `Measurement.extra`: where the time of the traced step went
_REASON = "the trial ended before the trace was read"
_UNDER_WAY: dict[Of, str] = {
    "extra_step": "while one more step was traced",
    "measured_step": "while the trace of the measured step was read",
}


def unfinished(of: Of) -> Profile:
    """In place of the numbers, until they are there."""
    return {"of": of, "reason": _REASON}


def cut_off(profile: Profile, how: str) -> Profile:
    """`profile` of a trial that then ended as `how` says, where it was still unfinished; any other as it is."""
    if profile.get("reason") != _REASON:
        return profile
    return {"of": profile["of"], "reason": f"the trial ended {_UNDER_WAY[profile['of']]}: {how}"}
