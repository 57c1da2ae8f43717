"""GPUs: are all there, of the model the site expects, and does the driver answer?"""

from __future__ import annotations

from collections import Counter

from cluster.checks import Check
from cluster.inventory.site import Site
from cluster.probing import nvidia_smi
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Verdict

FIELDS = ("index", "uuid", "pci.bus_id", "name", "driver_version", "memory.total")


def probe(site: Site) -> Probe:
    """One row per GPU."""
    return Probe(script=nvidia_smi.REQUIRE + nvidia_smi.query(FIELDS), seconds=nvidia_smi.SECONDS)


def judge(output: Output, site: Site) -> Verdict:
    """Fails when the number or the model differs from the site's, or a GPU cannot be read."""
    expected = site.gpus.count
    if nvidia_smi.has_no_gpu(output):
        return _without_gpu(output, site)
    trouble = nvidia_smi.trouble(output)
    if trouble:
        return trouble
    rows = nvidia_smi.parse(output.text, FIELDS)
    if not rows:
        return Verdict(level="unknown", summary=f"nvidia-smi printed no GPU ({output.first_line}); run it on the node")
    models = Counter(row["name"] for row in rows)
    drivers = sorted({row["driver_version"] for row in rows})
    facts = {"count": len(rows), "models": dict(models), "driver": drivers[0], "uuids": [row["uuid"] for row in rows]}
    found = " and ".join(f"{count} x {name}" for name, count in models.items())
    if expected is not None and len(rows) != expected:
        return Verdict(
            level="fail",
            summary=f"{found}, but the site expects {expected} GPUs; GPUs that answer: "
            + ", ".join(row["index"] for row in rows),
            action="reboot" if len(rows) < expected else "isolate",
            facts=facts,
        )
    other_models = [name for name in models if site.gpus.model not in name]
    if other_models:
        return Verdict(
            level="fail",
            summary=f"{found}, but the site expects {site.gpus.model}; correct the site file or take the node out",
            action="isolate",
            facts=facts,
        )
    if len(models) > 1:
        return Verdict(level="warn", summary=f"{found}: models differ within the node", action="monitor", facts=facts)
    return Verdict(level="ok", summary=f"{found}, driver {drivers[0]}", facts=facts)


def _without_gpu(output: Output, site: Site) -> Verdict:
    reason = "no nvidia-smi" if output.exit_status == nvidia_smi.ABSENT else "nvidia-smi finds no device"
    if not site.gpus.count:
        wish = "expects none" if site.gpus.count == 0 else "names none"
        return Verdict(level="ok", summary=f"no GPU ({reason}), and the site {wish}", facts={"count": 0})
    return Verdict(
        level="fail",
        summary=f"no GPU ({reason}), but the site expects {site.gpus.count}; install the driver or look at the boards",
        action="isolate",
        facts={"count": 0},
    )


CHECK = Check(source="nvidia-smi manual; facebookresearch/gcm; Azure/azurehpc-health-checks", probe=probe, judge=judge)
