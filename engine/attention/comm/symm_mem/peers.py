"""Whether ranks of a node can write into each other's GPU memory, decided from the reports of all, alike on all.

A process may see only its own GPU (CUDA_VISIBLE_DEVICES), and then its device 0 is not its neighbour's: GPUs are
identified by UUID. NVML, which lists the host's GPUs, answers for those that the process does not see.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

_P2P_WRITE = 1  # NVML_P2P_CAPS_INDEX_WRITE
_UUID_CHARACTERS = 96  # NVML_DEVICE_UUID_V2_BUFFER_SIZE


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFacts:
    """Facts about the GPU of one rank."""

    unsupported_reason: str | None = None  # why it cannot copy to any other GPU
    uuid: str = ""
    ordinal: int = 0  # of the device in this process
    reaches: frozenset[str] = frozenset()  # UUIDs of the GPUs whose memory it can address
    overlaps: bool = False  # torch may register memory of several ranks under one ordinal


def report(device: torch.device, unsupported_reason: str | None) -> PeerFacts:
    """This rank's report of its GPU `device`; `unsupported_reason` is that of the process by itself."""
    if unsupported_reason is not None:
        return PeerFacts(unsupported_reason=unsupported_reason)
    here = torch.cuda.current_device() if device.index is None else device.index
    uuids = [_bare(str(torch.cuda.get_device_properties(i).uuid)) for i in range(torch.cuda.device_count())]
    seen = {uuid for i, uuid in enumerate(uuids) if i != here and torch.cuda.can_device_access_peer(here, i)}
    return PeerFacts(
        uuid=uuids[here],
        ordinal=here,
        reaches=frozenset(seen | (_reached_by_nvml(uuids[here]) - set(uuids))),
        overlaps=os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1",
    )


def copies_unsupported_reason(reports: Sequence[PeerFacts], node_size: int) -> str | None:
    """Why ranks of a node, `node_size` consecutive ones, cannot copy into each other's memory; None where all can.

    `reports` are all ranks' in rank order, so that every rank finds the same answer.
    """
    for rank, mine in enumerate(reports):
        if mine.unsupported_reason is not None:
            alike = all(other.unsupported_reason for other in reports)
            return mine.unsupported_reason if alike else f"rank {rank}: {mine.unsupported_reason}"
    for (one, mine), (other, theirs) in itertools.combinations(enumerate(reports), 2):
        if one // node_size != other // node_size:
            continue
        pair = f"exchange copy_engine needs GPUs that address each other's memory and ranks {one} and {other}"
        if mine.uuid == theirs.uuid:
            return f"{pair} share one; give each a GPU of its own or choose direct"
        if theirs.uuid not in mine.reaches or mine.uuid not in theirs.reaches:
            return f"{pair} have GPUs that do not, or cannot be asked; choose direct"
        if mine.ordinal == theirs.ordinal and not (mine.overlaps and theirs.overlaps):
            return (
                f"{pair} both call theirs cuda:{mine.ordinal}, which torch's symmetric memory refuses; let every rank "
                "see all GPUs of its node or choose direct"
            )
    return None


def agreed_unsupported_reason(group: dist.ProcessGroup, mine: PeerFacts, node_size: int) -> str | None:
    """`copies_unsupported_reason` of all ranks of `group`. Collective."""
    reports = [mine] * dist.get_world_size(group)
    dist.all_gather_object(reports, mine, group=group)
    return copies_unsupported_reason(reports, node_size)


def _bare(uuid: str) -> str:
    """A UUID as torch and NVML both write it."""
    return uuid.removeprefix("GPU-").lower()


def _reached_by_nvml(uuid: str) -> set[str]:
    """UUIDs of this host's GPUs whose memory the GPU `uuid` can write; none where NVML is not installed.

    Source: NVML API reference, nvmlDeviceGetP2PStatus.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2():
            return set()
    except (OSError, AttributeError):
        return set()
    try:
        count, status, name = ctypes.c_uint(), ctypes.c_int(), ctypes.create_string_buffer(_UUID_CHARACTERS)
        gpus: dict[str, ctypes.c_void_p] = {}
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return set()
        for index in range(count.value):
            gpu = ctypes.c_void_p()
            found = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(gpu)) == 0
            if found and nvml.nvmlDeviceGetUUID(gpu, name, ctypes.c_uint(len(name))) == 0:
                gpus[_bare(name.value.decode())] = gpu
        own = gpus.pop(uuid, None)
        return {
            peer
            for peer, gpu in gpus.items()
            if own is not None
            and nvml.nvmlDeviceGetP2PStatus(own, gpu, _P2P_WRITE, ctypes.byref(status)) == 0
            and status.value == 0
        }
    finally:
        nvml.nvmlShutdown()
