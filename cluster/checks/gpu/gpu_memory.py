"""GPU memory in use: is the node busy, and with which processes?

The artifact this project rebuilds took a node that did not answer for a free one and dropped busy nodes silently. Here
the memory in use decides, and the process list only names users: it does not show a process in another container.
"""

from __future__ import annotations

import math
import shlex

from cluster.checks import Check
from cluster.inventory.site import Site
from cluster.probing import nvidia_smi
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Verdict

GPU_FIELDS = ("index", "uuid", "memory.used")
PROCESS_FIELDS = ("gpu_uuid", "pid", "used_gpu_memory", "process_name")


def probe(site: Site) -> Probe:
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


def judge(output: Output, site: Site) -> Verdict:
    """Busy (a warning: the node is healthy, but not free) beyond the site's limits on one GPU or on all together."""
    if nvidia_smi.has_no_gpu(output):
        if site.gpus.count:
            return Verdict(level="unknown", summary="GPU memory in use cannot be read: nvidia-smi finds no GPU")
        return Verdict(level="ok", summary="no GPU, so no GPU memory in use", facts={"used_mib": {}})
    trouble = nvidia_smi.trouble(output)
    if trouble:
        return trouble
    gpus = nvidia_smi.parse(_tagged(output.text, "gpu"), GPU_FIELDS)
    used = {row["index"]: _mib(row["memory.used"]) for row in gpus}
    unread = [index for index, mib in used.items() if mib is None]
    if unread or not used:
        return Verdict(
            level="unknown",
            summary=f"memory in use cannot be read on GPU {', '.join(unread) or '(none listed)'}; "
            "MIG slices and unified memory do not report it",
        )
    known = {index: mib for index, mib in used.items() if mib is not None}
    facts = {"used_mib": known}
    limit = site.gpu_memory
    over = [index for index, mib in known.items() if mib > limit.one_gpu_mib]
    total = sum(known.values())
    if not over and total <= limit.all_gpus_mib:
        return Verdict(level="ok", summary=f"free: {total:g} MiB of GPU memory in use", facts=facts)
    users = _users(output.text, {row["uuid"]: row["index"] for row in gpus})
    where = f"on GPU {', '.join(over)}" if over else f"over {len(known)} GPUs"
    return Verdict(
        level="warn",
        summary=f"busy: {total:g} MiB of GPU memory in use {where} by "
        + (", ".join(users) or "a process this user cannot see"),
        action="monitor",
        busy=True,
        facts={**facts, "users": users},
    )


def _users(text: str, index_by_uuid: dict[str, str]) -> list[str]:
    """`alice: python (pid 4242, GPU 0, 71000 MiB)` for every listed process that still exists."""
    owners = dict(line.split(maxsplit=1) for line in _tagged(text, "owner").splitlines() if " " in line)
    return [
        f"{owners[row['pid']]}: {row['process_name'].rpartition('/')[2]} "
        f"(pid {row['pid']}, GPU {index_by_uuid.get(row['gpu_uuid'], '?')}, {row['used_gpu_memory']} MiB)"
        for row in nvidia_smi.parse(_tagged(text, "process"), PROCESS_FIELDS)
        if row["pid"] in owners
    ]


def _tagged(text: str, tag: str) -> str:
    """The lines that begin with `tag`, without it."""
    return "\n".join(line.removeprefix(f"{tag} ") for line in text.splitlines() if line.startswith(f"{tag} "))


def _mib(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # "[N/A]", where the device does not report it


CHECK = Check(source="facebookresearch/gcm (15 MiB); BurstEngine artifact, check.sh (100 MB)", probe=probe, judge=judge)
