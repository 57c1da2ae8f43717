"""GPUs as a node's property: all there, free, of one kind, and with what the driver itself asks for."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from cluster.checks import check
from cluster.inventory.site import Site
from cluster.probing import nvidia_smi
from cluster.probing.nvidia_smi import REPORT, GpuReport, judge_each, parse_report
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Action, Verdict, fail, ok, unknown, warn, with_facts
from cluster.profiles import Board

FIELDS = ("index", "uuid", "pci.bus_id", "name", "driver_version", "memory.total")


@check(
    Probe(script=nvidia_smi.REQUIRE + nvidia_smi.query(FIELDS), seconds=nvidia_smi.SECONDS),
    "nvidia-smi manual; facebookresearch/gcm; Azure/azurehpc-health-checks",
)
def gpus(output: Output, site: Site, board: Board) -> Verdict:
    """Fails when the number or the model differs from the site's, or a GPU cannot be read."""
    expected = site.gpus.count
    if nvidia_smi.has_no_gpu(output):
        reason = "no nvidia-smi" if output.exit_status == nvidia_smi.ABSENT else "nvidia-smi finds no device"
        if not expected:
            wish = "expects none" if expected == 0 else "names none"
            return ok(f"no GPU ({reason}), and the site {wish}", facts={"count": 0})
        summary = f"no GPU ({reason}), but the site expects {expected}; install the driver or look at the boards"
        return fail(summary, facts={"count": 0})
    if trouble := nvidia_smi.trouble(output):
        return trouble
    rows = nvidia_smi.parse(output.text, FIELDS)
    if not rows:
        return unknown(f"nvidia-smi printed no GPU ({output.first_line}); run it on the node")
    models = Counter(row["name"] for row in rows)
    driver = min(row["driver_version"] for row in rows)
    facts = {"count": len(rows), "models": dict(models), "driver": driver, "uuids": [row["uuid"] for row in rows]}
    found = " and ".join(f"{count} x {name}" for name, count in models.items())
    if expected is not None and len(rows) != expected:
        answering = ", ".join(row["index"] for row in rows)
        summary = f"{found}, but the site expects {expected} GPUs; GPUs that answer: {answering}"
        return fail(summary, "reboot" if len(rows) < expected else "isolate", facts=facts)
    if any(site.gpus.model not in name for name in models):
        summary = f"{found}, but the site expects {site.gpus.model}; correct the site file or take the node out"
        return fail(summary, facts=facts)
    if len(models) > 1:
        return warn(f"{found}: models differ within the node", facts=facts)
    return ok(f"{found}, driver {driver}", facts=facts)


GPU_FIELDS = ("index", "uuid", "memory.used")
PROCESS_FIELDS = ("gpu_uuid", "pid", "used_gpu_memory", "process_name")


def memory_probe(site: Site) -> Probe:
    """Rows tagged `gpu`, `process` and `owner PID USER`; samples again while memory is in use, as the site says.

    A process that ended before its owner was read has no `owner` row.
    """
    limit = site.gpu_memory
    idle = (
        f"$3 > {limit.one_gpu_mib:g} {{ busy = 1 }} {{ sum += $3 }} "
        f"END {{ exit (busy || sum > {limit.all_gpus_mib:g}) }}"
    )
    script = f"""{nvidia_smi.REQUIRE}
try=1
while :; do
    gpus=$({nvidia_smi.query(GPU_FIELDS)}) || {{ status=$?; printf '%s\\n' "$gpus"; exit "$status"; }}
    printf '%s\\n' "$gpus" | awk -F ', *' {shlex.quote(idle)} && break
    [ "$try" -ge {limit.tries} ] && break
    try=$((try + 1))
    sleep {limit.wait_seconds:g}
done
printf '%s\\n' "$gpus" | sed 's/^/gpu /'
processes=$({nvidia_smi.query(PROCESS_FIELDS, "compute-apps")}) || exit
[ -n "$processes" ] || exit 0
printf '%s\\n' "$processes" | sed 's/^/process /'
for pid in $(printf '%s\\n' "$processes" | awk -F ', *' '{{ print $2 }}'); do
    owner=$(stat -c %U "/proc/$pid" 2>/dev/null) && printf 'owner %s %s\\n' "$pid" "$owner"
done
exit 0
"""
    return Probe(script=script, seconds=nvidia_smi.SECONDS + math.ceil(limit.tries * limit.wait_seconds))


@check(memory_probe, "facebookresearch/gcm (15 MiB); BurstEngine artifact, check.sh (100 MB)")
def gpu_memory(output: Output, site: Site, board: Board) -> Verdict:
    """Busy (a warning: healthy, but not free) beyond the site's limits on one GPU or on all together.

    The artifact this project rebuilds took a node that did not answer for a free one, and dropped busy nodes silently.
    The memory in use decides; the process list only names users, as it lacks processes in other containers.
    """
    if nvidia_smi.has_no_gpu(output):
        if site.gpus.count:
            return unknown("GPU memory in use cannot be read: nvidia-smi finds no GPU")
        return ok("no GPU, so no GPU memory in use", facts={"used_mib": {}})
    if trouble := nvidia_smi.trouble(output):
        return trouble
    found = nvidia_smi.parse("\n".join(output.rows("gpu")), GPU_FIELDS)
    used = {row["index"]: _mib(row["memory.used"]) for row in found}
    known = {index: mib for index, mib in used.items() if mib is not None}
    if len(known) < len(used) or not used:
        unread = ", ".join(index for index in used if index not in known) or "(none listed)"
        return unknown(f"memory in use cannot be read on GPU {unread}; MIG slices and unified memory do not report it")
    over = [index for index, mib in known.items() if mib > site.gpu_memory.one_gpu_mib]
    total = sum(known.values())
    if not over and total <= site.gpu_memory.all_gpus_mib:
        return ok(f"free: {total:g} MiB of GPU memory in use", facts={"used_mib": known})
    users = _users(output, {row["uuid"]: row["index"] for row in found})
    where = f"on GPU {', '.join(over)}" if over else f"over {len(known)} GPUs"
    by = ", ".join(users) or "a process this user cannot see"
    summary = f"busy: {total:g} MiB of GPU memory in use {where} by {by}"
    return replace(warn(summary, facts={"used_mib": known, "users": users}), busy=True)


def _users(output: Output, index_by_uuid: dict[str, str]) -> list[str]:
    """`alice: python (pid 4242, GPU 0, 71000 MiB)` for every listed process that still exists."""
    owners = dict(row.split(maxsplit=1) for row in output.rows("owner") if " " in row)
    return [
        f"{owners[row['pid']]}: {row['process_name'].rpartition('/')[2]} "
        f"(pid {row['pid']}, GPU {index_by_uuid.get(row['gpu_uuid'], '?')}, {row['used_gpu_memory']} MiB)"
        for row in nvidia_smi.parse("\n".join(output.rows("process")), PROCESS_FIELDS)
        if row["pid"] in owners
    ]


def _mib(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # "[N/A]", where the device does not report it


@check(REPORT, "nvidia-smi -q; a VBIOS of its own fails, this project's list of checks")
def gpu_versions(output: Output, site: Site, board: Board) -> Verdict:
    """Fails when GPUs of one model carry different VBIOS versions; cluster/discovery/drift.py compares the nodes."""
    if nothing := nvidia_smi.blocked(output, site):
        return nothing
    node, reports = parse_report(output.text)
    driver, cuda = node.get("Driver Version"), node.get("CUDA Version")
    by_model: dict[str, set[str]] = {}
    for gpu in reports:
        if vbios := gpu.text("VBIOS Version"):
            by_model.setdefault(gpu.text("Product Name") or "GPU", set()).add(vbios)
    if not driver or not by_model:
        return unknown(f"nvidia-smi -q states no versions ({output.first_line})")
    versions = {model: sorted(found) for model, found in sorted(by_model.items())}
    several = "; ".join(f"{model}: {', '.join(found)}" for model, found in versions.items() if len(found) > 1)
    if several:
        verdict = fail(f"GPUs of one model differ in VBIOS ({several})")
    else:
        listed = ", ".join(found[0] for found in versions.values())
        verdict = ok(f"driver {driver}, CUDA {cuda or 'not stated'}, VBIOS {listed}")
    return with_facts(verdict, driver=driver, cuda=cuda, vbios=versions)


@check(REPORT, "NVIDIA driver persistence; Azure/azurehpc-health-checks")
def gpu_persistence(output: Output, site: Site, board: Board) -> Verdict:
    """Warns where persistence mode is off: first programs wait for the driver, and settings of the GPU are lost."""

    def findings(gpu: GpuReport) -> Iterator[Verdict]:
        mode = gpu.text("Persistence Mode")
        if mode is None:
            yield unknown("does not say whether persistence mode is on")
        elif mode != "Enabled":
            yield warn(f"has persistence mode {mode.lower()}; start nvidia-persistenced, or run nvidia-smi -pm 1")

    return judge_each(output, site, findings, "persistence mode is on for {gpus}")


_RECOVERIES: dict[str, Action] = {"Reset": "reset", "Reboot": "reboot"}  # others begin with draining: isolate


@check(REPORT, "NVML, NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, driver 570 and newer; GPU Recovery Action of nvidia-smi -q")
def gpu_recovery(output: Output, site: Site, board: Board) -> Verdict:
    """NVIDIA's own verdict: fails for any recovery that the driver asks for. ok for a driver without such a field."""
    if "GPU Recovery Action" not in output.text and "Driver Version" in output.text:
        return ok("this driver names no recovery actions (570 and newer do)")

    def findings(gpu: GpuReport) -> Iterator[Verdict]:
        wanted = gpu.entries.get("GPU Recovery Action", "None")
        if wanted not in ("None", "N/A"):
            yield fail(
                f"needs the recovery action {wanted!r} as its driver reports", _RECOVERIES.get(wanted, "isolate")
            )

    return judge_each(output, site, findings, "the driver asks for no recovery of {gpus}")
