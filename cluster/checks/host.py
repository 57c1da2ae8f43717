"""The host itself: cores, memory, processes, and the versions that nodes must share."""

from __future__ import annotations

import re

from cluster.checks import check
from cluster.files.errors import quantity
from cluster.inventory.site import Site
from cluster.probing.probe import VALUE, Output, Probe, printable
from cluster.probing.verdict import Verdict, ok, unknown, warn
from cluster.profiles import Board

_GOVERNORS = Probe(
    script="""
cat /sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor 2>/dev/null | sort | uniq -c
echo end
"""
)
_GOVERNOR = re.compile(r"^\s*(\d+) ([a-z_]+)$", re.MULTILINE)


@check(_GOVERNORS, "cpufreq of the kernel; NVIDIA dgxc-benchmarking", unreadable="the governors cannot be read")
def cpu_governor(output: Output, site: Site, board: Board) -> Verdict:
    """Warns when cores of a node with GPUs follow another governor than performance."""
    cores = {name: int(count) for count, name in _GOVERNOR.findall(output.text)}
    if not cores:
        return ok("this kernel leaves the clock to the processor or the hypervisor")
    listed = ", ".join(f"{count} x {name}" for name, count in sorted(cores.items()))
    if board.count and set(cores) != {"performance"}:
        return warn(f"governors are {listed}; expected performance: cpupower frequency-set -g performance")
    return ok(f"governors: {listed}")


_IDLE_STATES = Probe(
    script=VALUE
    + """
for state in /sys/devices/system/cpu/cpu[0-9]*/cpuidle/state*; do
    [ -d "$state" ] || continue
    value "$state/name"; name=$v
    value "$state/latency"; latency=$v
    value "$state/disable"; printf 'state %s|%s|%s\\n' "$latency" "$v" "$name"
done | sort | uniq -c
echo end
"""
)
_IDLE_STATE = re.compile(r"^\s*\d+ state (\d+)\|0\|(.+)$", re.MULTILINE)  # 0: not disabled


@check(
    _IDLE_STATES,
    "cpuidle of the kernel; the limit: cluster/profiles/node.yaml",
    unreadable="the cores' idle states cannot be read",
)
def cpu_idle(output: Output, site: Site, board: Board) -> Verdict:
    """Warns where cores of a node with GPUs may sleep so deeply that waking them takes longer than a message."""
    allowed = {name: int(latency) for latency, name in _IDLE_STATE.findall(output.text)}
    if not allowed:
        return ok("this kernel leaves idle states to the processor or the hypervisor")
    limit = board.limits.idle_warn_above_us
    deep = ", ".join(f"{name} ({latency} us)" for name, latency in sorted(allowed.items()) if latency > limit)
    if deep and board.count:
        return warn(f"cores may sleep in {deep}; expected at most {limit} us: cpupower idle-set -D {limit}")
    return ok(f"deepest idle state allowed: {max(allowed.values())} us")


_NUMA = Probe(
    script="""
value=absent
[ -r /proc/sys/kernel/numa_balancing ] && read -r value </proc/sys/kernel/numa_balancing
printf 'numa_balancing %s\\n' "$value"
"""
)


@check(_NUMA, "sysctl kernel.numa_balancing; NVIDIA dgxc-benchmarking")
def numa_balancing(output: Output, site: Site, board: Board) -> Verdict:
    """Warns when the kernel moves pages on a node with GPUs, which copy from them."""
    value = output.said.get("numa_balancing", "")
    if not value.isdigit() and value != "absent":
        return unknown(f"the setting cannot be read ({output.first_line})")
    if value in ("0", "absent"):
        return ok("off" if value == "0" else "this kernel has none")
    if board.count:
        return warn("on, which interrupts host copies; run sysctl kernel.numa_balancing=0")
    return ok("on, which matters to no GPU here")


_HUGE = Probe(
    script="""
grep -E '^(MemTotal|HugePages_Total|HugePages_Free|Hugepagesize):' /proc/meminfo
printf 'transparent %s\\n' "$(cat /sys/kernel/mm/transparent_hugepage/enabled 2>/dev/null)"
"""
)
_MEMORY = re.compile(r"^(\w+):\s+(\d+)", re.MULTILINE)
_CHOSEN = re.compile(r"^transparent .*\[(\w+)\]", re.MULTILINE)


@check(_HUGE, "/proc/meminfo, the kernel's hugetlbpage document; the limit: cluster/profiles/node.yaml")
def hugepages(output: Output, site: Site, board: Board) -> Verdict:
    """Warns where reserved pages that are free take more than a tenth of the host's memory."""
    found = {name: int(value) for name, value in _MEMORY.findall(output.text)}
    if not found.get("MemTotal"):
        return unknown(f"/proc/meminfo states no memory ({output.first_line})")
    mode = _CHOSEN.search(output.text)
    transparent, reserved = mode[1] if mode else "not in this kernel", found.get("HugePages_Total", 0)
    facts = {"transparent": transparent, "reserved": reserved}
    free_kib = found.get("HugePages_Free", 0) * found.get("Hugepagesize", 0)
    percent = 100 * free_kib / found["MemTotal"]
    if percent > board.limits.hugepages_warn_percent:
        taken = f"{free_kib / 2**20:.0f} GiB, {percent:.0f}% of memory"
        return warn(f"{taken}, are reserved as huge pages that nothing uses; lower vm.nr_hugepages", facts=facts)
    return ok(f"{reserved} huge pages reserved, transparent ones: {transparent}", facts=facts)


@check(Probe(script="cat /proc/meminfo"), "/proc/meminfo, proc(5)")
def host_memory(output: Output, site: Site, board: Board) -> Verdict:
    """Warns at the site's percentage. In use is the total less the available memory."""
    kib = {name: int(value) for name, value in _MEMORY.findall(output.text)}
    if not kib.get("MemTotal") or "MemAvailable" not in kib:
        return unknown(f"/proc/meminfo does not say how much is free ({output.first_line})")
    total_gib, available_gib = kib["MemTotal"] / 2**20, kib["MemAvailable"] / 2**20
    percent = 100 * (1 - available_gib / total_gib)
    summary = f"host memory {percent:.0f}% in use, {available_gib:.0f} of {total_gib:.0f} GiB available"
    facts = {"percent": round(percent, 1), "available_gib": round(available_gib, 1), "total_gib": round(total_gib, 1)}
    limit = site.host_memory.warn_percent
    if percent >= limit:
        return warn(f"{summary}; the site warns at {limit:g}%", facts=facts)
    return ok(summary, facts=facts)


_SHM = "/dev/shm"  # noqa: S108 - looked at, never written to
_FREE = re.compile(r"\s\d+\s+\d+\s+(\d+)\s+(?:\d+%|-)\s+/.*$", re.MULTILINE)


@check(Probe(script=f"df -P -k {_SHM}"), "NCCL troubleshooting, shared memory; the limit: cluster/profiles/node.yaml")
def shared_memory(output: Output, site: Site, board: Board) -> Verdict:
    """Warns where NCCL and data loaders have too little for each GPU; a container has 64 MiB by default."""
    match = _FREE.search(output.text)
    if not match:
        return unknown(f"{_SHM} cannot be read ({output.first_line})")
    free_gib = int(match[1]) / 2**20
    wanted = board.limits.shm_gib_per_gpu * (board.count or site.gpus.count or 0)
    left = f"{_SHM} has {quantity(free_gib)} GiB left"
    return warn(f"{left}, expected {wanted:g}; enlarge it (docker: --ipc=host)") if free_gib < wanted else ok(left)


# Both states are normal for a moment, so only processes that a second look finds again are reported. Threads of the
# kernel (their parent is process 2) wait in state D by design.
_PROCESSES = Probe(
    script="""
look() {
    ps -eo state=,ppid=,pid=,user=,comm= |
        awk '$1 ~ /^Z/ || ($1 ~ /^D/ && $2 != 2) { print substr($1, 1, 1), $3, $4, $5 }'
}
command -v ps >/dev/null 2>&1 || exit 127
first=$(look)
if [ -n "$first" ]; then
    sleep 1
    look | while IFS= read -r line; do
        case "
$first
" in *"
$line
"*) printf 'stuck %s\\n' "$line" ;; esac
    done
fi
echo end
"""
)
_PROCESSES_SHOWN = 5


@check(_PROCESSES, "ps(1); facebookresearch/gcm (zombies)")
def processes(output: Output, site: Site, board: Board) -> Verdict:
    """Warns on zombies and on processes stuck in the kernel, which often hold a GPU or wait for a dead mount."""
    if output.exit_status == 127:
        return unknown("no ps command to list processes with; install procps")
    if "end" not in output.lines:
        return unknown(f"processes cannot be listed ({output.first_line})")
    stuck = [printable(row).split(" ", 3) for row in output.rows("stuck")]
    parts = []
    for letter, words in (("D", "stuck in the kernel"), ("Z", "zombie")):
        found = [f"{name} (pid {pid}, {user})" for state, pid, user, name in stuck if state == letter]
        if found:
            more = " ..." if len(found) > _PROCESSES_SHOWN else ""
            parts.append(f"{len(found)} {words}: {', '.join(found[:_PROCESSES_SHOWN])}{more}")
    return warn("; ".join(parts)) if parts else ok("no zombie, and none stuck in the kernel")


# `ofed_info -s` prints `MLNX_OFED_LINUX-23.10-0.5.5.0:`; without it, the version of the adapter's own kernel module.
_VERSIONS = Probe(
    script="""
printf 'kernel %s\\n' "$(uname -r)"
printf 'system %s\\n' "$(. /etc/os-release 2>/dev/null && printf '%s' "$PRETTY_NAME")"
ofed=$(ofed_info -s 2>/dev/null)
[ -n "$ofed" ] || ofed=$(cat /sys/module/mlx5_core/version 2>/dev/null)
printf 'ofed %s\\n' "${ofed%:}"
"""
)


@check(_VERSIONS, "uname(1); os-release(5); ofed_info of MLNX_OFED")
def host_versions(output: Output, site: Site, board: Board) -> Verdict:
    """ok, with kernel, distribution and OFED as facts; cluster/discovery/drift.py compares the nodes."""
    said = {name: printable(value.strip()) for name, value in output.said.items()}
    if not said.get("kernel") or "ofed" not in said:
        return unknown(f"the kernel's version cannot be read ({output.first_line})")
    named = [f"kernel {said['kernel']}", said.get("system", ""), f"OFED {said['ofed']}" if said["ofed"] else ""]
    facts = {"kernel": said["kernel"], "system": said.get("system") or None, "ofed": said["ofed"] or None}
    return ok(", ".join(filter(None, named)), facts=facts)
