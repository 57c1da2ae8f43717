"""Known problems of variables that users set: applied to a site's own, and to an imported file."""

from __future__ import annotations

import re

from cluster.environment.nccl import setting_problem

_BARE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@-]*")

PER_METHOD = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "belongs to a method: Megatron-LM needs 1 before Blackwell, FSDP2 many queues",
}
PER_TRIAL = {
    **dict.fromkeys(
        (
            "MASTER_ADDR",
            "MASTER_PORT",
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "NODE_RANK",
            "GROUP_RANK",
        ),
        "is set for each rank of a trial",
    ),
    "CUDA_VISIBLE_DEVICES": "would hide GPUs from every trial; ranks take theirs by number",
    "NCCL_DEBUG_FILE": "is set for each trial, so that trials do not write over each other's",
    "NCCL_HOSTID": "is set for each rank where nodes are emulated",
    "OMP_NUM_THREADS": "follows from the node's cores and its ranks",
    "TORCH_FR_DUMP_TEMP_FILE": "is set for each trial, so that trials do not write over each other's",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "is set for each trial, so that trials do not write over each other's",
}
_INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def concern(name: str, value: str) -> str:
    """The known problem of this value, as one sentence that names the variable; "" when there is none."""
    problem = PER_METHOD.get(name) or PER_TRIAL.get(name) or _problem(name, value)
    return f"{name}={value} {problem}" if problem else ""


def _problem(name: str, value: str) -> str:
    if name == "NCCL_IB_HCA":
        return adapter_problem(value)
    if name in _INTERFACES:
        return interface_problem(name, value)
    if name == "NCCL_IB_GID_INDEX":
        return "is right on one node at best; NCCL finds the index by itself"
    if name == "PATH":
        return "replaces the node's own, also for compilers and nvidia-smi; software.python needs no entry there"
    if name == "LD_PRELOAD":
        return "is loaded into every rank and each program it starts; where a file is absent, ld.so goes on without it"
    if problem := setting_problem(name, value):
        return problem
    if name.startswith(("UCX_", "OMPI_", "I_MPI_")):
        return "matters to UCX and MPI alone, which take no part here"
    return ""


def adapter_problem(value: str) -> str:
    """The problem of a value of NCCL_IB_HCA: a list of prefixes, exact names behind '=', or '^' for all others."""
    if value.startswith("^"):
        return "leaves adapters out by name and so takes every other one, those for storage too"
    if not value.startswith("="):
        return "names prefixes: mlx5_1 also matches mlx5_10; write the exact names behind one '='"
    return ""


def interface_problem(name: str, value: str) -> str:
    """The problem of a value of NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME."""
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
