"""Variables that say which way NCCL's and Gloo's traffic goes on one node.

Sources: NCCL's user guide, "Environment Variables"; Gloo's transport/tcp for what it makes of an interface name.
"""

from __future__ import annotations

from collections.abc import Iterable

from cluster.discovery.hcas import HcaChoice
from cluster.discovery.interface import InterfaceChoice
from cluster.environment.value import Value


def socket_values(choice: InterfaceChoice) -> Iterable[Value]:
    """Interface of NCCL's bootstrap and of Gloo; nothing where no interface could be found."""
    if not choice.name:
        return
    if choice.name != "lo":  # on one host NCCL finds its way; loopback in a file that is later used on two would not
        yield Value(
            name="NCCL_SOCKET_IFNAME",
            value=f"={choice.name}",  # a bare name is a prefix: eth1 also matches eth10
            reason=choice.reason,
            origin=choice.origin,
        )
    yield Value(name="GLOO_SOCKET_IFNAME", value=choice.name, reason=choice.reason, origin=choice.origin)


def adapter_values(choice: HcaChoice, *, gid_index: int | None = None) -> Iterable[Value]:
    """The adapters NCCL may use, by exact names; or none, said once instead of left to be found out by every rank."""
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
        reason = "the site wants no adapter used"
    elif choice.ports:
        reason = f"none of the {len(choice.ports)} ports can be used"
    else:
        reason = "this node has no RDMA adapter"
    # NCCL_NET=Socket would say it as well, but would also rule out network plugins, such as the one for EFA.
    yield Value(
        name="NCCL_IB_DISABLE",
        value="1",
        reason=f"{reason}; all nodes then use sockets or a plugin, and none waits for another kind",
        origin=choice.origin,
    )
