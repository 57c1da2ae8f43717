"""What every Ray of ours is told through its environment, embedded or on a cluster's nodes."""

from __future__ import annotations

from collections.abc import Mapping

USAGE_REPORTS = "RAY_USAGE_STATS_ENABLED"  # Ray sends them to its makers unless this is 0

# Read by Ray's own processes, which inherit them; the ranks do not.
RAY_SETTINGS: Mapping[str, str] = {
    USAGE_REPORTS: "0",
    "RAY_memory_monitor_refresh_ms": "0",  # the kernel decides on host memory: a rank should die, not its supervisor
}
