"""Reports for programs: one JSON object per node and line."""

from __future__ import annotations

import json
from typing import Any

from cluster.health.nodes import NodeReport


def json_line(report: NodeReport) -> str:
    """One node as one line of JSON; keys are only ever added."""
    host = report.host
    node: dict[str, Any] = {
        "node": host.name,
        "target": host.target or None,
        "verdict": report.level,
        "action": report.action,
        "usable": report.usable,
        "seconds": round(report.seconds, 3),
        "checks": {
            name: {
                "verdict": verdict.level,
                "action": verdict.action,
                "busy": verdict.busy,
                "summary": verdict.summary,
                "facts": dict(verdict.facts),
            }
            for name, verdict in report.verdicts.items()
        },
    }
    return json.dumps(node, allow_nan=False)
