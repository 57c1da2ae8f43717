"""Variables that differ from trial to trial: where NCCL and torch leave what is needed after a hang."""

from __future__ import annotations

from cluster.environment.value import Value


def trial_values(directory: str) -> tuple[Value, ...]:
    """Files below `directory`, which must exist and be the trial's own; %h and %p are filled in by NCCL."""
    return (
        Value(
            name="NCCL_DEBUG_FILE",
            value=f"{directory}/nccl.%h.%p.log",
            reason="one file per host and process, once NCCL_DEBUG is WARN, INFO or TRACE",
        ),
        Value(
            name="TORCH_FR_DUMP_TEMP_FILE",
            value=f"{directory}/flight_rank",
            reason="beginning of the flight recorder's file names; the rank follows",
        ),
    )
