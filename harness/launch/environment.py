"""Environment variables of a trial's processes: what we set, why, and which of the user's are worth recording."""

from __future__ import annotations

from collections.abc import Mapping

from engine.settings import TrialSettings

# A user's own variables with these prefixes change what a trial does, so they are recorded with it (and win over ours).
RECORDED_PREFIXES = ("CUDA_", "GLOO_", "MKL_", "NCCL_", "OMP_", "OPENBLAS_", "PYTORCH_", "TORCH_", "TRITON_")


def render(
    settings: TrialSettings, *, device: str, cores: int, host_ranks: int, user: Mapping[str, str]
) -> dict[str, str]:
    """Variables every rank of a trial gets, the user's among them.

    `device` is "cpu" or "cuda"; `host_ranks` ranks share a host of `cores` cores; `user` is the environment `burst` was
    started with. Pure, so the result is recorded and tested as it is.
    """
    threads = max(1, cores // host_ranks)
    rendered = {
        # With torch's default, all cores for every rank, ranks fight for them. Beside a GPU a few threads suffice.
        "OMP_NUM_THREADS": str(threads if device == "cpu" else min(8, threads)),
        # NumPy's own pool computes nothing here, and would start threads at import that a fork server cannot hand on.
        "OPENBLAS_NUM_THREADS": "1",
    }
    if device == "cpu":
        # Threads that wait by spinning take the cores from those they wait for. Two threads on two cores that others
        # used as well: a step of 30 ms took 300 to 2500 ms spinning, 40 to 140 ms sleeping.
        rendered["OMP_WAIT_POLICY"] = "PASSIVE"
    else:
        rendered |= {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # long sequences fragment fixed segments
            # More streams than hardware queues would make a stream that waits for a peer hold up one that feeds it.
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # a lost peer ends the rank instead of hanging it
        }
    if host_ranks >= settings.world_size:
        rendered["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks on one host; Gloo's own guess may be a dead interface
    rendered |= {name: value for name, value in user.items() if name.startswith(RECORDED_PREFIXES)}
    return rendered


def rank_environment(rank: int, *, ranks: int, port: int, emulate_nodes: int = 1) -> dict[str, str]:
    """What torchrun would set for one rank of a job whose ranks are all on this host.

    With `emulate_nodes` above 1, consecutive ranks form that many logical nodes: NCCL takes hosts with different
    NCCL_HOSTID for different machines. The device index (LOCAL_RANK) stays that of the real host.
    """
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if emulate_nodes > 1:
        environment["NCCL_HOSTID"] = f"burst-node-{rank * emulate_nodes // ranks}"
    return environment
