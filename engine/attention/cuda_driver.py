"""The few CUDA driver calls torch does not offer: copies between addresses, and counters a stream writes or awaits.

Each call only enqueues work on a stream and returns. Raises RuntimeError when the driver refuses it.
Source: CUDA driver API reference, "Stream Memory Operations" and "Memory Management".
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

WAIT_UNTIL_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ; the comparison is cyclic
MASK_32 = 0xFFFFFFFF
DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE


class _Box(ctypes.Structure):
    """CUDA_MEMCPY3D: a box of bytes, rows and layers, cut out of memory at either end."""

    _fields_ = (
        *((f"source_{name}", ctypes.c_size_t) for name in ("x", "y", "z", "level")),
        ("source_type", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_reserved", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("source_height", ctypes.c_size_t),
        *((f"target_{name}", ctypes.c_size_t) for name in ("x", "y", "z", "level")),
        ("target_type", ctypes.c_int),
        ("target_host", ctypes.c_void_p),
        ("target", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("target_reserved", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("target_height", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    )


@dataclass(frozen=True, slots=True)
class Block:
    """Equally long rows to copy, in equally many of one or more layers. Distances are in bytes between rows and in rows
    between layers; `source` and `target` are addresses, or offsets to be added to one."""

    source: int
    target: int
    width: int  # bytes of a row
    rows: int = 1
    source_pitch: int = 0
    target_pitch: int = 0
    layers: int = 1
    source_layer: int = 0
    target_layer: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return self.width * self.rows * self.layers


@lru_cache(maxsize=1)
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    stream, address, value = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
    driver.cuStreamWaitValue32_v2.argtypes = (stream, address, value, ctypes.c_uint)
    driver.cuStreamWriteValue32_v2.argtypes = (stream, address, value, ctypes.c_uint)
    driver.cuMemcpyAsync.argtypes = (address, address, ctypes.c_size_t, stream)
    driver.cuMemcpy3DAsync_v2.argtypes = (ctypes.POINTER(_Box), stream)
    return driver


def driver_missing() -> str | None:
    """Why the driver cannot be called from here, or None."""
    try:
        _driver()
    except (OSError, AttributeError) as error:
        return str(error)
    return None


def _check(code: int, call: str) -> None:
    if code:
        raise RuntimeError(f"{call} failed with CUDA driver error {code}; set exchange to direct")


def await_counter(stream: int, address: int, value: int) -> None:
    """Make `stream` wait until the 32-bit counter at `address` is at least `value`."""
    _check(_driver().cuStreamWaitValue32_v2(stream, address, value & MASK_32, WAIT_UNTIL_AT_LEAST), "a stream's wait")


def set_counter(stream: int, address: int, value: int) -> None:
    """Set the 32-bit counter at `address`, once everything before it on `stream` is done and visible to all GPUs."""
    _check(_driver().cuStreamWriteValue32_v2(stream, address, value & MASK_32, 0), "a stream's write")


def copy(stream: int, to: int, source: int, nbytes: int) -> None:
    """Copy `nbytes` between addresses of any GPUs, by a copy engine."""
    _check(_driver().cuMemcpyAsync(to, source, nbytes, stream), "a copy between GPUs")


def copy_block(stream: int, block: Block, target: int) -> None:
    """Copy `block` to `target` + its own offset, by a copy engine: rows of 512 bytes go as fast as one long run."""
    if block.rows * block.layers == 1:
        copy(stream, target + block.target, block.source, block.width)
        return
    box = _Box()
    box.source_type = box.target_type = DEVICE_MEMORY
    box.source, box.target = block.source, target + block.target
    box.source_pitch, box.target_pitch = block.source_pitch, block.target_pitch
    # The height of a layer need not hold its rows alone: it is the way to the next layer.
    box.source_height, box.target_height = block.source_layer or block.rows, block.target_layer or block.rows
    box.width, box.height, box.depth = block.width, block.rows, block.layers
    _check(_driver().cuMemcpy3DAsync_v2(ctypes.byref(box), stream), "a copy of rows between GPUs")
