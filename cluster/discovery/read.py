"""From a node to its `NodeFacts`: probes in POSIX shell that change nothing run in one command; their output is parsed.

Parsing is pure. A value that a node did not give is absent from the facts, and `unread` says which probe failed.
`root` is put before every path below /sys and /proc, so that tests can point the same script at a tree of their own.
Sources: the kernel's Documentation/ABI (sysfs-class-infiniband, sysfs-class-net, sysfs-bus-pci), ip-route(8).
"""

from __future__ import annotations

import ipaddress
import json
import re
import secrets
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cluster.discovery.facts import Device, Gpu, Interface, LinkLayer, NodeFacts, Port, Route, Setting
from cluster.inventory.site import Site
from cluster.probing import nvidia_smi
from cluster.probing.probe import Output, Probe, parse_outputs, render_script
from cluster.transport.runner import Runner, Unreachable

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


def read_node(
    node: str, runner: Runner, site: Site, *, head: str | None, deadline_seconds: float, root: str = ""
) -> NodeFacts:
    """Facts of one node. `head` is the head node's IPv4 address, None on a machine that works alone; `root` is put
    before /sys and /proc. Raises Unreachable when the connection breaks or the node's shell runs nothing."""
    python = site.software.python or sys.executable
    questions = probes(
        head=head,
        storage=site.storage.servers,
        python=python,
        nccl_conf=site.environment.get("NCCL_CONF_FILE", ""),
        files=[value for name in NCCL_PATHS if (value := site.environment.get(name, "")).startswith("/")],
        root=root,
    )
    mark = secrets.token_hex(8)
    completed = runner.run(["sh", "-s"], stdin=render_script(questions, mark), deadline_seconds=deadline_seconds)
    outputs = parse_outputs(completed.stdout, mark)
    if not outputs:
        complaint = Output(text=completed.stderr).first_line or "no output"
        raise Unreachable(f"{node} answered, but its shell ran no probe ({complaint}); log in and try sh there")
    # A probe without output was still running when the connection's deadline passed.
    silent = {name: Output(text="", exit_status=None) for name in questions if name not in outputs}
    return parse(node, {**outputs, **silent})


_Record = dict[str, list[str]]

_ROOT_BUS = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# A part of a rendered value must be a name; anything else that a node prints is dropped.
_INTERFACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]{0,14}")
_PORT = re.compile(r"([A-Za-z0-9_.-]+):(\d+)")


def parse(node: str, outputs: Mapping[str, Output]) -> NodeFacts:
    """Facts of `node` from the outputs of `probes`."""
    text = {name: output.text for name, output in outputs.items()}
    table = text.get("table", "")
    smi = outputs.get("nvidia_smi", Output(text="", exit_status=nvidia_smi.ABSENT))
    rows = [] if smi.exit_status else nvidia_smi.parse(smi.text, NVIDIA_FIELDS)
    interfaces = tuple(_interfaces(text.get("interfaces", ""), _json_list(text.get("addresses", ""))))
    head = [_route(line, table, interfaces) for line in text.get("head", "").splitlines() if line.strip()]
    storage = [_route(line, table, interfaces) for line in text.get("storage", "").splitlines() if line.strip()]
    settings, problems = _settings(text.get("nccl_conf", ""))
    return NodeFacts(
        node=node,
        cores=_number(text.get("cores", "")),
        interfaces=interfaces,
        ports=tuple(_ports(text.get("ports", ""))),
        gpus=tuple(_gpus(text.get("pci", ""), rows)),
        head_route=head[0] if head else None,
        storage_routes=tuple(dict.fromkeys(storage)),
        driver=rows[0]["driver_version"] if rows else None,
        nccl=text.get("nccl", "").strip() or None,
        nccl_conf=tuple(settings),
        absent=tuple(dict.fromkeys(line for line in text.get("absent", "").splitlines() if line.startswith("/"))),
        unread=(*_unread(outputs, smi), *problems),
    )


def _unread(outputs: Mapping[str, Output], smi: Output) -> Iterable[str]:
    for name, output in outputs.items():
        if output.timed_out:
            yield f"the probe {name} did not end in time, so its facts are unknown"
    if not smi.timed_out and not nvidia_smi.has_no_gpu(smi) and (trouble := nvidia_smi.trouble(smi)):
        yield trouble.summary


def _records(text: str) -> dict[str, _Record]:
    """Lines `name TAB key TAB value` as name -> key -> values; lines of any other form are left out."""
    records: dict[str, _Record] = {}
    for line in text.splitlines():
        name, *rest = line.split("\t")
        if len(rest) == 2:
            values = records.setdefault(name, {}).setdefault(rest[0], [])
            if rest[1]:
                values.append(rest[1])
    return records


def _one(record: _Record, key: str) -> str:
    return (record.get(key) or [""])[0]


def _number(text: str) -> int | None:
    """A whole number of 0 or more; sysfs writes -1 for unknown."""
    return int(text) if text.strip().isdecimal() and text.isascii() else None


def _device(record: _Record) -> Device:
    parts = _one(record, "path").split("/")
    roots = [number for number, part in enumerate(parts) if _ROOT_BUS.fullmatch(part)]
    bridges = [part for part in parts[roots[-1] + 1 :] if _PCI_ADDRESS.fullmatch(part)] if roots else []
    path = (parts[roots[-1]], *bridges) if bridges else ()
    return Device(path=path, numa_node=_number(_one(record, "numa")))


def _interfaces(text: str, listed: list[dict[str, Any]]) -> Iterable[Interface]:
    """Interfaces from sysfs and `ip`. Where `ip` answers, only its list counts: sysfs can be another namespace's."""
    records = _records(text)
    entries = {str(entry.get("ifname", "")): entry for entry in listed} or {name: {} for name in records}
    for name, entry in entries.items():
        if not _INTERFACE.fullmatch(name):
            continue
        record = records.get(name, {})
        state = str(entry.get("operstate", "")) or _one(record, "operstate")
        yield Interface(
            name=name,
            up=state.lower() in ("up", "unknown"),  # loopback and some virtual ones never report up
            mtu=_number(str(entry.get("mtu", "")) or _one(record, "mtu")),
            speed_mbps=_number(_one(record, "speed")),
            device=_device(record),
            dev_port=_number(_one(record, "dev_port")) or 0,
            is_bond="bond" in record,
            lower=tuple(record.get("lower", [])),
            addresses=tuple(
                info["local"] for info in entry.get("addr_info", []) if info.get("family") == "inet" and "local" in info
            ),
        )


def _json_list(text: str) -> list[dict[str, Any]]:
    """The JSON list of objects that `ip -json` prints; empty for anything else."""
    try:
        value = json.loads(text)
    except ValueError:
        return []
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _route(line: str, table: str, interfaces: Iterable[Interface]) -> Route:
    """One line `address TAB answer of ip`; without an answer, the kernel's table decides."""
    target, _, answer = line.partition("\t")
    found = next(iter(_json_list(answer)), {})
    name, source = str(found.get("dev", "")), found.get("prefsrc")
    if not name:
        name, source = interface_for(target, table), None
    if name == "lo" and not target.startswith("127."):
        # The address is the node's own, so its route is loopback; other nodes reach it at the interface that has it.
        name = next((interface.name for interface in interfaces if target in interface.addresses), "")
    if not _INTERFACE.fullmatch(name):
        return Route(target=target, interface="")
    return Route(target=target, interface=name, source=str(source) if source else None)


def _ports(text: str) -> Iterable[Port]:
    for name, record in _records(text).items():
        if not (match := _PORT.fullmatch(name)):
            continue
        rate = re.match(r"\d+(\.\d+)?", _one(record, "rate"))  # "400 Gb/sec (4X NDR)"
        yield Port(
            hca=match[1],
            number=int(match[2]),
            state=_word(_one(record, "state")),
            phys_state=_word(_one(record, "phys_state")),
            rate_gbps=float(rate[0]) if rate else None,
            link_layer=_link_layer(_one(record, "link_layer")),
            device=_device(record),
        )


def _word(text: str) -> str:
    """The word of `4: ACTIVE`."""
    return text.partition(":")[2].strip() or text


def _link_layer(text: str) -> LinkLayer:
    return "InfiniBand" if text == "InfiniBand" else "Ethernet" if text == "Ethernet" else "other"


def _gpus(text: str, rows: list[dict[str, str]]) -> Iterable[Gpu]:
    """GPUs that the driver lists, in a container not all of the machine's; without a driver those on the bus."""
    devices = {address: _device(record) for address, record in _records(text).items()}
    if not rows:
        yield from (Gpu(address=address, device=device) for address, device in devices.items())
    for row in rows:
        # nvidia-smi writes 00000000:19:00.0, the kernel 0000:19:00.0.
        address = re.sub(r"^0{4}(?=[0-9a-f]{4}:)", "", row["pci.bus_id"].lower())
        capability = re.fullmatch(r"\d+\.\d+", row["compute_cap"])
        yield Gpu(
            address=address,
            device=devices.get(address, Device()),
            name=row["name"],
            compute_capability=float(capability[0]) if capability else None,
        )


_SETTING = re.compile(r"([^\t]+)\t(\d+)\t([A-Za-z_][A-Za-z0-9_]*)=(.*)")
_REMARK = re.compile(r"[^\t]+\t\d+\t\s*(#.*)?")


def _settings(text: str) -> tuple[list[Setting], list[str]]:
    """Settings in lines `file TAB number TAB line`, and a sentence for each line that NCCL cannot understand.

    NCCL takes no blanks around a name.
    """
    settings, problems = [], []
    for line in text.splitlines():
        if match := _SETTING.fullmatch(line):
            settings.append(Setting(file=match[1], line=int(match[2]), name=match[3], value=match[4]))
        elif line.count("\t") >= 2 and not _REMARK.fullmatch(line):
            file, number, content = line.split("\t", 2)
            problems.append(
                f"line {number} of {file} is {content[:60]!r}; NCCL expects NAME=VALUE without blanks around the name"
            )
    return settings, problems


_UP, _REJECT = 0x1, 0x200  # RTF_UP, RTF_REJECT


def interface_for(target: str, table: str) -> str:
    """Interface of the most specific route to an IPv4 address, of equals the one with the smallest metric; "" for none.

    Numbers in the table are in the host's byte order, which is little-endian on x86-64 and arm64. The table leaves out
    a node's own addresses, so the interface to one of them is that of its network.
    """
    address = ipaddress.ip_address(target)
    if address.version != 4:
        return ""
    if address.is_loopback:
        return "lo"
    best: tuple[int, int, str] | None = None
    for line in table.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8:
            continue
        try:
            destination, flags, mask = _little(fields[1]), int(fields[3], 16), _little(fields[7])
            metric = int(fields[6])
        except ValueError:
            continue
        if flags & (_UP | _REJECT) == _UP and int(address) & mask == destination:
            candidate = (-mask.bit_count(), metric, fields[0])
            best = min(best, candidate) if best else candidate
    return best[2] if best else ""


def _little(text: str) -> int:
    return int.from_bytes(bytes.fromhex(text), "little")
