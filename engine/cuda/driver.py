"""CUDA driver calls that torch does not offer: copies between addresses, and counters a stream writes or awaits.

Each call only enqueues work on a stream and returns. Raises RuntimeError when the driver returns an error.
Source: CUDA driver API reference, "Stream Memory Operations" and "Memory Management".
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

MASK_32 = 0xFFFFFFFF
WAIT_VALUE_32, WRITE_VALUE_32 = 1, 2  # CUstreamBatchMemOpType; a wait's default is "at least", cyclic
DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
POINTER_OPERAND = 1  # CU_MEMCPY_OPERAND_TYPE_POINTER
BESIDE_THE_DEFAULT_STREAM = 1  # CU_STREAM_NON_BLOCKING
BESIDE_COMPUTE_IN_STREAM_ORDER = (
    1 << 32 | 1
)  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams of a wait or a write."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


def _end(name: str) -> tuple[tuple[str, type], ...]:
    """Fields of CUDA_MEMCPY3D for the source or the target of a copy."""
    return (
        *((f"{name}_{part}", ctypes.c_size_t) for part in ("x", "y", "z", "level")),
        (f"{name}_type", ctypes.c_int),
        (f"{name}_host", ctypes.c_void_p),
        (name, ctypes.c_uint64),
        (f"{name}_array", ctypes.c_void_p),
        (f"{name}_reserved", ctypes.c_void_p),
        (f"{name}_pitch", ctypes.c_size_t),
        (f"{name}_height", ctypes.c_size_t),
    )


class _Box(ctypes.Structure):
    """CUDA_MEMCPY3D: a box of bytes, rows and layers, cut out of memory at either end."""

    _fields_ = (
        *_end("source"),
        *_end("target"),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    )


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """Equally long rows to copy, in equally many of one or more layers."""

    source: int  # bytes from the start of the tensor it is cut from
    target: int  # bytes from the start of the place it is written to
    width: int  # bytes of a row
    rows: int
    source_pitch: int  # bytes from one row to the next
    target_pitch: int
    layers: int = 1
    source_layer: int = 0  # rows from one layer to the next; 0: its own
    target_layer: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that are copied."""
        return self.width * self.rows * self.layers


@lru_cache(maxsize=1)
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    stream, address = ctypes.c_void_p, ctypes.c_uint64
    driver.cuStreamBatchMemOp_v2.argtypes = (stream, ctypes.c_uint, ctypes.POINTER(_Operation), ctypes.c_uint)
    driver.cuMemcpyAsync.argtypes = (address, address, ctypes.c_size_t, stream)
    driver.cuStreamCreateWithPriority.argtypes = (ctypes.POINTER(stream), ctypes.c_uint, ctypes.c_int)
    driver.cuMemcpy3DAsync_v2.argtypes = (ctypes.POINTER(_Box), stream)
    if hasattr(driver, "cuMemcpy3DBatchAsync_v2"):  # from CUDA 13 on
        driver.cuMemcpy3DBatchAsync_v2.argtypes = (ctypes.c_size_t, ctypes.c_void_p, ctypes.c_ulonglong, stream)
    return driver


def driver_unsupported_reason() -> str | None:
    """Why the driver cannot be called from here, or None."""
    try:
        _driver()
    except (OSError, AttributeError) as error:
        return str(error)
    return None


def _check(code: int, call: str) -> None:
    if code:
        raise RuntimeError(f"{call} failed with CUDA driver error {code}; set exchange to direct")


def create_stream(priority: int) -> int:
    """Handle of a new stream of this thread's device, which does not wait for the default stream."""
    handle = ctypes.c_void_p()
    _check(
        _driver().cuStreamCreateWithPriority(ctypes.byref(handle), BESIDE_THE_DEFAULT_STREAM, priority),
        "making a stream",
    )
    assert handle.value is not None, "the driver gave no stream and no error"
    return handle.value


def copy(stream: int, to: int, source: int, nbytes: int) -> None:
    """Copy `nbytes` between addresses of any GPUs, by a copy engine."""
    _check(_driver().cuMemcpyAsync(to, source, nbytes, stream), "a copy between GPUs")


class Counters:
    """32-bit counters that are awaited together, or set together, by one driver call."""

    def __init__(self, addresses: Sequence[int]) -> None:
        self._waits, self._writes = _operations(addresses, WAIT_VALUE_32), _operations(addresses, WRITE_VALUE_32)

    def wait(self, stream: int, value: int) -> None:
        """Make `stream` wait until each counter is at least `value`."""
        _launch(stream, self._waits, value)

    def set(self, stream: int, value: int) -> None:
        """Set the counters, once everything before it on `stream` is done and visible to all GPUs."""
        _launch(stream, self._writes, value)


def _operations(addresses: Sequence[int], kind: int) -> Any:
    """An operation of this kind on each address, in one array."""
    operations = (_Operation * len(addresses))()
    for operation, address in zip(operations, addresses, strict=True):
        operation.kind, operation.address = kind, address
    return operations


def _launch(stream: int, operations: Any, value: int) -> None:
    """Enqueue the operations, all with `value`."""
    for operation in operations:
        operation.value = value & MASK_32
    if code := _driver().cuStreamBatchMemOp_v2(stream, len(operations), operations, 0):
        _check(code, "a stream's counter operation")


class CopyBatch:
    """Copies between any GPUs by copy engine, planned once and launched with other addresses each time.

    Each entry is a block, the index of its source tensor, and that of its target place. They may run at the
    same time and in any order. Rows of 512 bytes cross between GPUs as fast as one long run.
    """

    def __init__(self, entries: Sequence[tuple[StridedCopy, int, int]]) -> None:
        self.nbytes = sum(block.nbytes for block, _tensor, _place in entries)
        self._tensors = np.array([tensor for _block, tensor, _place in entries])
        self._places = np.array([place for _block, _tensor, place in entries])
        self._from = np.array([block.source for block, _tensor, _place in entries], dtype=np.uint64)
        self._to = np.array([block.target for block, _tensor, _place in entries], dtype=np.uint64)
        # CUDA_MEMCPY3D_BATCH_OP as words of eight bytes: two operands (kind, address, row pitch, rows per layer, hint),
        # the extent, and flags.
        self._words = np.zeros((len(entries), 14), dtype=np.uint64)
        self._words[:, [0, 5]], self._words[:, 13] = POINTER_OPERAND, BESIDE_COMPUTE_IN_STREAM_ORDER
        for words, (block, _tensor, _place) in zip(self._words, entries, strict=True):
            words[2:4] = block.source_pitch, block.source_layer
            words[7:9] = block.target_pitch, block.target_layer
            words[10:13] = block.width, block.rows, block.layers
        self._list = self._words.ctypes.data_as(ctypes.c_void_p)
        self._addresses: tuple[int, ...] = ()  # of the last launch: those of a model's steps repeat

    def launch(self, stream: int, tensors: Sequence[int], places: Sequence[int]) -> None:
        """Enqueue all copies, by one driver call where the driver has it: `tensors` and `places` are the addresses for
        the entries' indices in this launch."""
        addresses = (*tensors, *places)
        if addresses != self._addresses:
            self._words[:, 1] = np.array(tensors, dtype=np.uint64)[self._tensors] + self._from
            self._words[:, 6] = np.array(places, dtype=np.uint64)[self._places] + self._to
            self._addresses = addresses
        driver = _driver()
        if hasattr(driver, "cuMemcpy3DBatchAsync_v2"):
            code = driver.cuMemcpy3DBatchAsync_v2(len(self._words), self._list, 0, stream)
            _check(code, "a batch of copies between GPUs")
            return
        for words in self._words.tolist():
            _check(driver.cuMemcpy3DAsync_v2(ctypes.byref(_box(words)), stream), "a copy of rows between GPUs")


def _box(words: list[int]) -> _Box:
    """One of the copies of `CopyBatch` in the older call's format."""
    box = _Box(source_type=DEVICE_MEMORY, target_type=DEVICE_MEMORY)
    box.source, box.source_pitch, box.source_height = words[1], words[2], words[3] or words[11]
    box.target, box.target_pitch, box.target_height = words[6], words[7], words[8] or words[11]
    box.width, box.height, box.depth = words[10:13]
    return box
