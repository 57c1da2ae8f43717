"""Variables every rank gets whatever the network is: threads, CUDA's queues and allocator, what to do about a hang."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from cluster.environment.value import Value
from cluster.inventory.ray_settings import USAGE_REPORTS

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
        Value(name=USAGE_REPORTS, value="0", reason="Ray reports its use to its makers unless told not to"),
    )


def _threads(device: str, cores: int, ranks: int) -> Iterable[Value]:
    share = max(1, cores // ranks)
    shared = f"{cores} cores shared by {ranks} rank{'s' if ranks > 1 else ''}"
    if device == "cpu":
        yield Value(name="OMP_NUM_THREADS", value=str(share), reason=f"{shared}; ranks would fight for them otherwise")
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
