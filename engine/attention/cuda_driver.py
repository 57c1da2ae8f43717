"""The few CUDA driver calls torch does not offer: copies between addresses, and counters a stream writes or awaits.

Each call only enqueues work on a stream and returns. Raises RuntimeError when the driver refuses it.
Source: CUDA driver API reference, "Stream Memory Operations" and "Memory Management".
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

WAIT_UNTIL_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ; the comparison is cyclic
MASK_32 = 0xFFFFFFFF


@lru_cache(maxsize=1)
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    stream, address, value = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
    driver.cuStreamWaitValue32_v2.argtypes = (stream, address, value, ctypes.c_uint)
    driver.cuStreamWriteValue32_v2.argtypes = (stream, address, value, ctypes.c_uint)
    driver.cuMemcpyAsync.argtypes = (address, address, ctypes.c_size_t, stream)
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
