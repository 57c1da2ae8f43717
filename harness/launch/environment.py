"""Environment variables of a trial's processes: those of `cluster.environment`, the user's over them, a rank's own.

`cluster.environment` states each value with its reason, for launches and for `burst cluster env` alike. Adapters and
interfaces of several hosts (NCCL_IB_HCA, NCCL_SOCKET_IFNAME) are chosen on each of them (`cluster.discovery.hcas`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from cluster.discovery.hcas import InterfaceChoice
from cluster.environment.ranks import process_values, socket_values, trial_values
from cluster.environment.value import overlaid, variables
from engine.settings import TrialSettings

# A user's own variables with these prefixes change what a trial does, so they are recorded with it (and win over ours).
RECORDED_PREFIXES = ("CUDA_", "GLOO_", "MKL_", "NCCL_", "OMP_", "OPENBLAS_", "PYTORCH_", "TORCH_", "TRITON_")

_ONE_HOST = InterfaceChoice(name="lo", reason="all ranks share this host", origin="default")


def render(
    settings: TrialSettings,
    *,
    device: Literal["cpu", "cuda"],
    cores: int,
    host_ranks: int,
    user: Mapping[str, str],
) -> dict[str, str]:
    """Variables every rank of a trial on this machine gets, the user's among them.

    `host_ranks` ranks share a host of `cores` cores; `user` is the environment `burst` was started with. Pure, so the
    result is recorded and tested as it is.
    """
    values = process_values(device=device, cores=cores, ranks=host_ranks, method=settings.method)
    if host_ranks >= settings.world_size:
        values += tuple(socket_values(_ONE_HOST))  # Gloo's own guess may be a dead interface
    own = {name: value for name, value in user.items() if name.startswith(RECORDED_PREFIXES)}
    return variables(overlaid(values, own, by="set in the shell burst was started from", origin="user"))


def rank_environment(
    rank: int,
    *,
    ranks: int,
    port: int,
    emulate_nodes: int = 1,
    address: str = "127.0.0.1",
    host_ranks: int | None = None,
) -> dict[str, str]:
    """The variables that torchrun would set for one rank of a job: by default all its `ranks` are on this host, else
    consecutive `host_ranks` of them on each host, and rank 0 on the host with `address`.

    With `emulate_nodes` above 1, consecutive ranks form that many logical nodes: NCCL takes hosts with different
    NCCL_HOSTID for different machines. The device index (LOCAL_RANK) stays that of the real host.
    """
    host_ranks = host_ranks or ranks
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % host_ranks),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(host_ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    if emulate_nodes > 1:
        environment["NCCL_HOSTID"] = f"burst-node-{rank * emulate_nodes // ranks}"
    return environment


def trial_environment(logs: str, given: Mapping[str, str]) -> dict[str, str]:
    """Paths below `logs` for the files that NCCL and the flight recorder write, except for names that `given` sets.

    Given to each rank and not to the job's environment, because trials that share that share a fork server.
    """
    return {name: value for name, value in variables(trial_values(logs)).items() if name not in given}
