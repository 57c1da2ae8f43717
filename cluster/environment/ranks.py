"""Variables of a rank: the network for NCCL and Gloo, threads, CUDA and error handling, and the files of a trial.

Sources: NCCL's user guide, "Environment Variables"; Gloo's transport/tcp for how it reads an interface name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from cluster.discovery.hcas import HcaChoice
from cluster.discovery.interface import InterfaceChoice
from cluster.environment.value import Value
from cluster.inventory.software import USAGE_REPORTS


def socket_values(choice: InterfaceChoice) -> Iterable[Value]:
    """Interface of NCCL's bootstrap and of Gloo; nothing where no interface could be found."""
    if not choice.name:
        return
    if choice.name != "lo":  # on one host NCCL needs none; loopback would fail in a file that is later used on two
        yield Value(
            name="NCCL_SOCKET_IFNAME",
            value=f"={choice.name}",  # a bare name is a prefix: eth1 also matches eth10
            reason=choice.reason,
            origin=choice.origin,
        )
    yield Value(name="GLOO_SOCKET_IFNAME", value=choice.name, reason=choice.reason, origin=choice.origin)


def adapter_values(choice: HcaChoice, *, gid_index: int | None = None) -> Iterable[Value]:
    """The adapters NCCL may use, by exact names; or none, stated once instead of discovered by every rank."""
    if choice.kept:
        counted = f"{len(choice.kept)} of the {len(choice.ports)} ports"
        yield Value(
            name="NCCL_IB_HCA",
            value="=" + ",".join(choice.kept),  # without '=' names are prefixes: mlx5_1 also matches mlx5_10
            reason=f"{counted}: named by the site file" if choice.origin == "site" else f"{counted}: those near GPUs",
            origin=choice.origin,
        )
        if gid_index is not None:
            yield Value(name="NCCL_IB_GID_INDEX", value=str(gid_index), reason="set by the site file", origin="site")
        return
    if choice.origin == "site":
        reason = "the site uses no adapter"
    elif choice.ports:
        reason = f"none of the {len(choice.ports)} ports can be used"
    else:
        reason = "this node has no RDMA adapter"
    # NCCL_NET=Socket would do it as well, but would also rule out network plugins, such as the one for EFA.
    yield Value(
        name="NCCL_IB_DISABLE",
        value="1",
        reason=f"{reason}; all nodes then use sockets or a plugin, and none waits for another kind",
        origin=choice.origin,
    )


DEFAULT_METHOD = "burst"
BLACKWELL = 10.0  # first compute capability of the family

_FLIGHT_RECORDER_ENTRIES = "2000"


def process_values(
    *,
    device: Literal["cpu", "cuda"],
    cores: int,
    ranks: int,
    method: str = DEFAULT_METHOD,
    compute_capability: float | None = None,
) -> tuple[Value, ...]:
    """Values for the ranks of one host, `ranks` of them on `cores` cores. `compute_capability` None: unknown."""
    return (
        *_threads(device, cores, ranks),
        *(_cuda(method, compute_capability) if device == "cuda" else ()),
        Value(name=USAGE_REPORTS, value="0", reason="Ray reports its use to its makers by default"),
    )


def _threads(device: str, cores: int, ranks: int) -> Iterable[Value]:
    share = max(1, cores // ranks)
    shared = f"{cores} cores shared by {ranks} rank{'s' if ranks > 1 else ''}"
    if device == "cpu":
        yield Value(
            name="OMP_NUM_THREADS", value=str(share), reason=f"{shared}; ranks would compete for them otherwise"
        )
    else:
        yield Value(
            name="OMP_NUM_THREADS",
            value=str(min(8, share)),
            reason=f"{shared}, at most 8: beside a GPU a few threads suffice",
        )
    yield Value(
        name="OPENBLAS_NUM_THREADS",
        value="1",
        reason="NumPy's pool computes nothing here, and its threads could not be forked",
    )
    if device == "cpu":
        # Two threads on two cores that others used as well: a step of 30 ms took 300 to 2500 ms spinning, 40 to 140 ms
        # sleeping.
        yield Value(
            name="OMP_WAIT_POLICY",
            value="PASSIVE",
            reason="threads that wait by spinning take the cores from those they wait for",
        )


def _cuda(method: str, compute_capability: float | None) -> Iterable[Value]:
    yield Value(
        name="PYTORCH_CUDA_ALLOC_CONF",
        value="expandable_segments:True",
        reason="long sequences fragment segments of a fixed size",
    )
    if (queues := connections(method, compute_capability)) is not None:
        yield queues
    yield Value(
        name="TORCH_NCCL_ASYNC_ERROR_HANDLING",
        value="1",
        reason="a lost peer ends the rank instead of hanging it",
    )
    yield Value(
        name="TORCH_NCCL_DUMP_ON_TIMEOUT",
        value="1",
        reason="a collective that times out leaves the flight recorder's file",
    )
    yield Value(
        name="TORCH_FR_BUFFER_SIZE",
        value=_FLIGHT_RECORDER_ENTRIES,
        reason="how many collectives the flight recorder remembers; 0 turns it off",
    )


def connections(method: str, compute_capability: float | None) -> Value | None:
    """CUDA_DEVICE_MAX_CONNECTIONS of a method, or None where the foreign system's own launcher decides.

    Hardware queues between host and GPU; CUDA reads it when the process first touches the driver, so it cannot be set
    later. Megatron-LM orders communication before computation by letting both pass through one queue, and refuses to
    start otherwise before Blackwell (its argument checks). Everything native runs on our trainer under FSDP2.
    """
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if not method.endswith("_upstream"):
        return Value(
            name=name,
            value="32",
            reason="with fewer queues than streams, one that waits for a peer can hold up one that feeds it",
            origin="method",
        )
    if not method.startswith("megatron"):
        return None
    if compute_capability is not None and compute_capability >= BLACKWELL:
        reason = "Megatron-LM needs a single queue only before Blackwell, and FSDP2 many"
        return Value(name=name, value="32", reason=reason, origin="method")
    reason = "Megatron-LM starts its communication before computation by sharing one queue"
    return Value(name=name, value="1", reason=reason, origin="method")


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
