"""Variables of a rank, each with its reason: the network for NCCL and Gloo, threads, CUDA, errors, files of a trial.

Also what is left to NCCL on purpose, what its own files on a node say, and known problems of values that users set.

Sources: NCCL's user guide, "Environment Variables", and its initEnv for the order of files: a variable of the
environment wins over the user's file, and that one over /etc/nccl.conf; Gloo's transport/tcp for how it reads an
interface name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.discovery.facts import Setting
from cluster.discovery.hcas import HcaChoice, InterfaceChoice
from cluster.environment.value import Variable, shown
from cluster.inventory.software import USAGE_REPORTS

DEFAULT_METHOD = "burst"
BLACKWELL = 10.0  # first compute capability of the family


def socket_values(choice: InterfaceChoice) -> Iterable[Variable]:
    """Interface of NCCL's bootstrap and of Gloo; nothing where no interface could be found."""
    if not choice.name:
        return
    if choice.name != "lo":  # on one host NCCL needs none; loopback would fail in a file that is later used on two
        yield Variable(
            name="NCCL_SOCKET_IFNAME",
            value=f"={choice.name}",  # a bare name is a prefix: eth1 also matches eth10
            reason=choice.reason,
            origin=choice.origin,
        )
    yield Variable(name="GLOO_SOCKET_IFNAME", value=choice.name, reason=choice.reason, origin=choice.origin)


def adapter_values(choice: HcaChoice, *, gid_index: int | None = None) -> Iterable[Variable]:
    """The adapters NCCL may use, by exact names; or none, stated once instead of discovered by every rank."""
    if choice.kept:
        counted = f"{len(choice.kept)} of the {len(choice.ports)} ports"
        yield Variable(
            name="NCCL_IB_HCA",
            value="=" + ",".join(choice.kept),  # without '=' names are prefixes: mlx5_1 also matches mlx5_10
            reason=f"{counted}: named by the site file" if choice.origin == "site" else f"{counted}: those near GPUs",
            origin=choice.origin,
        )
        if gid_index is not None:
            yield Variable(name="NCCL_IB_GID_INDEX", value=str(gid_index), reason="set by the site file", origin="site")
        return
    if choice.origin == "site":
        reason = "the site uses no adapter"
    elif choice.ports:
        reason = f"none of the {len(choice.ports)} ports can be used"
    else:
        reason = "this node has no RDMA adapter"
    # NCCL_NET=Socket would do it as well, but would also rule out network plugins, such as the one for EFA.
    yield Variable(
        name="NCCL_IB_DISABLE",
        value="1",
        reason=f"{reason}; all nodes then use sockets or a plugin, and none waits for another kind",
        origin=choice.origin,
    )


def process_values(
    *,
    device: Literal["cpu", "cuda"],
    cores: int,
    ranks: int,
    method: str = DEFAULT_METHOD,
    compute_capability: float | None = None,
) -> tuple[Variable, ...]:
    """Values for the ranks of one host, `ranks` of them on `cores` cores. `compute_capability` None: unknown."""
    share = max(1, cores // ranks)
    shared = f"{cores} cores shared by {ranks} rank{'s' if ranks > 1 else ''}"
    cuda = device == "cuda"
    threads = (
        ("OMP_NUM_THREADS", min(8, share), f"{shared}, at most 8: beside a GPU a few threads suffice")
        if cuda
        else ("OMP_NUM_THREADS", share, f"{shared}; ranks would compete for them otherwise")
    )
    before = [threads, _BLAS, *(_ON_GPU[:1] if cuda else _ON_CPU)]
    queues = connections(method, compute_capability) if cuda else None
    after = [*(_ON_GPU[1:] if cuda else ()), _NO_REPORTS]
    return (*_values(before), *((queues,) if queues else ()), *_values(after))


_Row = tuple[str, object, str]  # name, value, reason
_BLAS: _Row = ("OPENBLAS_NUM_THREADS", 1, "NumPy's pool computes nothing here, and its threads could not be forked")
_NO_REPORTS: _Row = (USAGE_REPORTS, 0, "Ray reports its use to its makers by default")
# Two threads on two cores that others used as well: a step of 30 ms took 300 to 2500 ms spinning, 40 to 140 ms
# sleeping.
_ON_CPU: tuple[_Row, ...] = (
    ("OMP_WAIT_POLICY", "PASSIVE", "threads that wait by spinning take the cores from those they wait for"),
)
_ON_GPU: tuple[_Row, ...] = (
    ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "long sequences fragment segments of a fixed size"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", 1, "a lost peer ends the rank instead of hanging it"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", 1, "a collective that times out leaves the flight recorder's file"),
    ("TORCH_FR_BUFFER_SIZE", 2000, "how many collectives the flight recorder remembers; 0 turns it off"),
)


def _values(rows: Iterable[_Row]) -> tuple[Variable, ...]:
    return tuple(Variable(name=name, value=str(value), reason=reason) for name, value, reason in rows)


def connections(method: str, compute_capability: float | None) -> Variable | None:
    """CUDA_DEVICE_MAX_CONNECTIONS of a method, or None where the foreign system's own launcher decides.

    Hardware queues between host and GPU; CUDA reads it when the process first touches the driver, so it cannot be set
    later. Megatron-LM orders communication before computation by letting both pass through one queue, and refuses to
    start otherwise before Blackwell (its argument checks). Everything native runs on our trainer under FSDP2.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if not method.endswith("_upstream"):
        return Variable(
            name=name,
            value="32",
            reason="with fewer queues than streams, one that waits for a peer can hold up one that feeds it",
            origin="method",
        )
    if not method.startswith("megatron"):
        return None
    if compute_capability is not None and compute_capability >= BLACKWELL:
        reason = "Megatron-LM needs a single queue only before Blackwell, and FSDP2 many"
        return Variable(name=name, value="32", reason=reason, origin="method")
    reason = "Megatron-LM starts its communication before computation by sharing one queue"
    return Variable(name=name, value="1", reason=reason, origin="method")


def trial_values(directory: str) -> tuple[Variable, ...]:
    """Files below `directory`, which must exist and be the trial's own; %h and %p are filled in by NCCL."""
    return _values(
        (
            (
                "NCCL_DEBUG_FILE",
                f"{directory}/nccl.%h.%p.log",
                "one file per host and process, once NCCL_DEBUG is WARN, INFO or TRACE",
            ),
            (
                "TORCH_FR_DUMP_TEMP_FILE",
                f"{directory}/flight_rank",
                "beginning of the flight recorder's file names; the rank follows",
            ),
        )
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftAlone:
    """A variable that is not rendered on purpose."""

    name: str
    default: str  # what NCCL does without it
    reason: str  # one sentence without a full stop
    accepts: re.Pattern[str]
    accepted: str  # the same in words


def _left(name: str, default: str, accepts: str, accepted: str, reason: str) -> LeftAlone:
    return LeftAlone(name=name, default=default, reason=reason, accepts=re.compile(accepts), accepted=accepted)


_BYTE = r"\d{1,2}|1\d\d|2[0-4]\d|25[0-5]"
LEFT_ALONE: tuple[LeftAlone, ...] = (
    _left("NCCL_CROSS_NIC", "2: NCCL tries", "[012]", "0, 1 or 2",
          "whether rings may change rails depends on the switches above the adapters, which no node can see: 0 where "
          "every rail has its own, 1 where all share one"),
    _left("NCCL_PXN_DISABLE", "0: used", "[01]", "0 or 1",
          "by PXN a GPU sends through another's adapter over NVLink, so that messages stay on a rail; NCCL uses it "
          "only where NVLink allows, and all-to-all gains most"),
    _left("NCCL_TUNER_PLUGIN", "found by its name", r"\S+", "a library's name or path",
          "a tuner holds the measurements of one kind of cluster; the vendor that installs it names it in nccl.conf"),
    _left("NCCL_TUNER_CONFIG_PATH", "none", r"/.*", "an absolute path",
          "belongs to the tuner that reads it"),
    _left("NCCL_COLLNET_ENABLE", "0: off", "[01]", "0 or 1",
          "SHARP reduces in the switches, which needs a plugin and an aggregation manager; rings send point to point "
          "and gain nothing, and a reserved tree that is busy fails the job's start"),
    _left("NCCL_IB_QPS_PER_CONNECTION", "1", r"[1-9]\d?|1[01]\d|12[0-8]", "1 to 128",
          "more queue pairs spread one connection over the paths of a fabric that routes by hash, and cost elsewhere; "
          "the paper's artifact sets 8, and so does the site file of its reproduction"),
    _left("NCCL_IB_SL", "0", r"\d|1[0-5]", "0 to 15",
          "the service level that the fabric keeps for RDMA is known to its operators alone"),
    _left("NCCL_IB_TC", "0", _BYTE, "0 to 255",
          "the traffic class that RoCE switches keep lossless is known to their operators alone; with a wrong one "
          "packets are dropped under load, so ask for it and set it in the site's environment"),
    _left("NCCL_IB_TIMEOUT", "20 (18 before 2.23)", r"[1-9]|[12]\d|3[01]", "1 to 31",
          "4.1 us x 2^20, tried 8 times, is 34 s until a lost link ends a rank; more hides a broken link, less ends "
          "runs while a switch restarts"),
    _left("NCCL_IB_RETRY_CNT", "7", "[0-7]", "0 to 7",
          "multiplies the timeout; 7 is the most that the transport knows"),
    _left("NCCL_P2P_NET_CHUNKSIZE", "131072", r"[1-9]\d*", "a number of bytes",
          "the pieces in which a ring's blocks cross the network; larger ones can fill a fast link better and take "
          "buffers, and no measurement here says which: time a sweep with both before setting it"),
    _left("NCCL_TOPO_FILE", "read from the kernel", r"/.*", "an absolute path",
          "only a virtual machine that hides its PCI tree needs one; its cloud installs the file and names it in "
          "nccl.conf"),
)  # fmt: skip


def configured(settings: Sequence[Setting], values: Sequence[Variable]) -> tuple[tuple[Variable, ...], list[str]]:
    """The values that NCCL takes from its files, and a warning for each line that another value replaces.

    `settings` in NCCL's order: of two lines for one name the first counts, and `values` of the environment win.
    """
    ours = {value.name: value for value in values}
    taken: dict[str, Variable] = {}
    warnings = []
    for setting in settings:
        place = f"line {setting.line} of {setting.file}"
        text = f"{setting.name}={shown(setting.name, setting.value)}"
        rival = ours.get(setting.name)
        if rival is not None and rival.value != setting.value:
            instead = shown(rival.name, rival.value)
            warnings.append(f"{place} says {text}, but the environment wins with {instead} ({rival.reason})")
        elif rival is None and setting.name in taken:
            if taken[setting.name].value != setting.value:
                warnings.append(f"{place} says {text}, but {taken[setting.name].reason} comes first")
        elif rival is None:
            taken[setting.name] = Variable(name=setting.name, value=setting.value, reason=place, origin="file")
    return tuple(taken.values()), warnings


_BARE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*")
_OF_RANKS = "MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK"
_OF_TRIALS = "NCCL_DEBUG_FILE TORCH_FR_DUMP_TEMP_FILE TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_PROBLEMS: Mapping[str, str] = {
    **dict.fromkeys(_OF_RANKS.split(), "is set for each rank of a trial"),
    **dict.fromkeys(_OF_TRIALS.split(), "is set for each trial, so that trials do not write over each other's"),
    "CUDA_DEVICE_MAX_CONNECTIONS": "belongs to a method: Megatron-LM needs 1 before Blackwell, FSDP2 many queues",
    "CUDA_VISIBLE_DEVICES": "would hide GPUs from every trial; ranks take theirs by number",
    "NCCL_HOSTID": "is set for each rank where nodes are emulated",
    "OMP_NUM_THREADS": "follows from the node's cores and its ranks",
    "NCCL_IB_GID_INDEX": "is right on one node at best; NCCL finds the index by itself",
    "PATH": "replaces the node's own, also for compilers and nvidia-smi; software.python needs no entry there",
    "LD_PRELOAD": "is loaded into every rank and each program it starts; where a file is absent, ld.so goes on "
    "without it",
}


def concern(name: str, value: str) -> str:
    """The known problem of a value that a user sets, as one sentence that names the variable; "" when there is none."""
    problem = _PROBLEMS.get(name) or _problem(name, value)
    return f"{name}={shown(name, value)} {problem}" if problem else ""


def _problem(name: str, value: str) -> str:
    if name == "NCCL_IB_HCA" and value.startswith("^"):
        return "leaves adapters out by name and so takes every other one, those for storage too"
    if name == "NCCL_IB_HCA" and not value.startswith("="):
        return "names prefixes: mlx5_1 also matches mlx5_10; write the exact names behind one '='"
    if name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        return _interface_problem(name, value)
    if name.startswith(("UCX_", "OMPI_", "I_MPI_")):
        return "matters to UCX and MPI alone, which take no part here"
    accepting = next((left for left in LEFT_ALONE if left.name == name), None)
    if accepting is not None and not accepting.accepts.fullmatch(value):
        return f"is no value of it: NCCL takes {accepting.accepted}"
    return ""


def _interface_problem(name: str, value: str) -> str:
    if "^" in value:
        why = "which Gloo takes for a name" if name.startswith("GLOO") else "so any other interface can be chosen"
        return f"leaves interfaces out, {why}; the route to the head names the right one"
    if "," in value:
        return "names several interfaces; the route to the head names the right one"
    if name.startswith("NCCL") and not value.startswith("="):
        return "is a prefix: eth1 also matches eth10; write the exact name behind '='"
    if not _BARE_NAME.fullmatch(value.removeprefix("=") if name.startswith("NCCL") else value):
        return "is no interface's name"
    return ""
