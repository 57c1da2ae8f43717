"""Probes of discovery (`cluster.probing.probe`): POSIX shell that reads from a node and changes nothing.

`root` is put before every path below /sys and /proc, so that tests can point the same script at a tree of their own.
Sources: the kernel's Documentation/ABI (sysfs-class-infiniband, sysfs-class-net, sysfs-bus-pci), ip-route(8).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from cluster.probing import nvidia_smi
from cluster.probing.probe import Probe

STORAGE_MOUNTS = ("nfs", "nfs4", "lustre", "ceph", "glusterfs")  # file systems whose mount names a server's address
MAX_STORAGE_ROUTES = 32  # a Lustre client may list every server of a site

# The first line of a file, or nothing where reading fails: `speed` of an interface that is down is an error.
_SHELL = """\
first() { [ -r "$1" ] && head -n 1 -- "$1" 2>/dev/null; }
fact() { printf '%s\\t%s\\t%s\\n' "$1" "$2" "$3"; }
device() { fact "$1" path "$(readlink -f -- "$2")"; fact "$1" numa "$(first "$2/numa_node")"; }
"""
_INTERFACES = """\
for net in "$root"/sys/class/net/*; do
    [ -e "$net/mtu" ] || continue
    name=${net##*/}
    for key in operstate mtu speed dev_port; do fact "$name" "$key" "$(first "$net/$key")"; done
    [ -e "$net/device" ] && device "$name" "$net/device"
    [ -d "$net/bonding" ] && fact "$name" bond yes
    for lower in "$net"/lower_*; do
        { [ -e "$lower" ] || [ -L "$lower" ]; } && fact "$name" lower "${lower##*/lower_}"
    done
done
:
"""
_PORTS = """\
for port in "$root"/sys/class/infiniband/*/ports/*; do
    [ -e "$port/state" ] || continue
    hca=${port%/ports/*}
    name=${hca##*/}:${port##*/}
    for key in state phys_state rate link_layer; do fact "$name" "$key" "$(first "$port/$key")"; done
    device "$name" "$hca/device"
done
:
"""
# 0x10de is NVIDIA; 0x0300 and 0x0302 are the classes of display and 3D controllers, which its GPUs are.
_GPUS = """\
for pci in "$root"/sys/bus/pci/devices/*; do
    [ "$(first "$pci/vendor")" = 0x10de ] || continue
    case $(first "$pci/class") in 0x0300*|0x0302*) device "${pci##*/}" "$pci" ;; esac
done
:
"""
_ROUTE = """\
route() { printf '%s\\t' "$1"; ip -4 -json route get "$1" 2>/dev/null || echo; }
"""

# NCCL reads NCCL_CONF_FILE, else ~/.nccl.conf, and then /etc/nccl.conf; the first value of a name counts.
_NCCL_CONF = """\
chosen=${chosen:-${NCCL_CONF_FILE:-}}
case $chosen in
"") user=$HOME/.nccl.conf ;;
"~/"*) user=$HOME/${chosen#"~/"} ;;
*) user=$chosen ;;
esac
for file in "$user" /etc/nccl.conf; do
    [ -r "$root$file" ] && awk -v file="$file" '{ print file "\\t" NR "\\t" $0 }' "$root$file"
done
"""
# Variables whose value can be the path of a file on the node.
NCCL_PATHS = ("NCCL_TOPO_FILE", "NCCL_TUNER_CONFIG_PATH", "NCCL_TUNER_PLUGIN", "NCCL_NET_PLUGIN")
NVIDIA_FIELDS = ("pci.bus_id", "name", "compute_cap", "driver_version")


def probes(
    *,
    head: str | None,
    storage: Sequence[str] = (),
    python: str,
    nccl_conf: str = "",
    files: Sequence[str] = (),
    root: str = "",
) -> dict[str, Probe]:
    """Probes of a node by name. `head` is the head node's IPv4 address, `storage` those of file servers known
    beforehand; `python` is the node's interpreter, whose NCCL version is read; `nccl_conf` the site's NCCL_CONF_FILE,
    and `files` those that its variables name for NCCL."""
    begin = f"root={shlex.quote(root)}\n{_SHELL}"
    addresses = " ".join(map(shlex.quote, storage))
    mounts = "|".join(STORAGE_MOUNTS)
    settings = f"chosen={shlex.quote(nccl_conf)}\n{_NCCL_CONF}"
    return {
        # nproc would take the caller's OMP_NUM_THREADS for the number of cores.
        "cores": Probe(script="unset OMP_NUM_THREADS OMP_THREAD_LIMIT; nproc"),
        "interfaces": Probe(script=begin + _INTERFACES),
        # Linux 4.14's iproute2 and newer print JSON on one line; for any other the kernel's table is used.
        "addresses": Probe(script="ip -json addr 2>/dev/null || :"),
        "table": Probe(script=begin + 'cat -- "$root/proc/net/route" 2>/dev/null || :'),
        "head": Probe(script=_ROUTE + (f"route {shlex.quote(head)}" if head else ":")),
        "storage": Probe(
            script=f"""{begin}{_ROUTE}\
servers=$(while read -r source _ type options _; do
    case $type in {mounts}) printf '%s,%s\\n' "$source" "$options" ;; esac
done < "$root/proc/mounts" | grep -oE '(^|[,@/:=])([0-9]{{1,3}}\\.){{3}}[0-9]{{1,3}}' | grep -oE '[0-9.]+$')
some=$(printf '%s\\n' "$servers" | sort -u | head -n {MAX_STORAGE_ROUTES})
for server in {addresses} $some; do route "$server"; done
"""
        ),
        "ports": Probe(script=begin + _PORTS),
        "pci": Probe(script=begin + _GPUS),
        "nvidia_smi": Probe(script=nvidia_smi.REQUIRE + nvidia_smi.query(NVIDIA_FIELDS), seconds=nvidia_smi.SECONDS),
        "nccl_conf": Probe(script=f"{begin}{settings}:"),
        "absent": Probe(
            script=f"""{begin}absent() {{ [ -r "$root$1" ] || printf '%s\\n' "$1"; }}
for file in {" ".join(map(shlex.quote, files))}; do absent "$file"; done
{{ {settings}}} | sed -nE 's,^[^\t]*\t[0-9]+\t({"|".join(NCCL_PATHS)})=(/.*),\\2,p' |
    while IFS= read -r file; do absent "$file"; done
:
"""
        ),
        "nccl": Probe(script=f"{shlex.quote(python)} -c {shlex.quote(_NCCL)} 2>/dev/null || :"),
    }


# The version is read from the wheel's metadata: importing torch would take seconds.
_NCCL = """\
from importlib.metadata import distributions
for found in distributions():
    if (found.metadata["Name"] or "").startswith("nvidia-nccl-cu"):
        print(found.version)
"""
