"""Speeds of a GPU type and its links, as the prediction reads them: none is of a method or of a trial.

Eight of them may be fitted to measurements; the speed of copies to host memory comes from the bus's specification.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.metrics.hardware import SPEEDS, Hardware, Speeds

TERA = 1e12

FITTED = tuple(name for name in SPEEDS if name != "host_gib")

# Where a hardware file gives no speed: shares of its datasheet's peak that kernels of its time reach.
_GEMM_SHARE = 0.75
_ATTENTION_SHARE = {"forward": 0.65, "backward": 0.6}


def speeds_of(hardware: Hardware, kernel: str | None = None) -> Speeds:
    """The constants of a hardware file; those of attention are the named kernel's where the file has them measured.

    A figure that the file lacks follows from its peak; `assumed` names them.
    """
    given: dict[str, float] = dict(hardware.speeds)
    peak = hardware.peak_bf16_tflops
    given.setdefault("gemm_tflops", hardware.gemm_tflops or _GEMM_SHARE * peak)
    ceilings = hardware.kernel_ceilings
    chosen: Mapping[str, float] = ceilings.get(kernel or "", {})
    if not chosen and "attention_forward_tflops" not in given and ceilings:
        chosen = next(iter(ceilings.values()))
    for direction, share in _ATTENTION_SHARE.items():
        name = f"attention_{direction}_tflops"
        if direction in chosen:
            given[name] = chosen[direction]
        given.setdefault(name, share * peak)
    for name, value in _COMMON.items():
        given.setdefault(name, value)
    given.setdefault("across_default_gib", given["across_gib"])
    return Speeds(**given)


def assumed(hardware: Hardware) -> tuple[str, ...]:
    """Constants that no file gives, for which a common value stands."""
    known = set(hardware.speeds) | ({"gemm_tflops"} if hardware.gemm_tflops else set())
    if hardware.kernel_ceilings:
        known |= {"attention_forward_tflops", "attention_backward_tflops"}
    return tuple(name for name in SPEEDS if name not in known)


_COMMON = {"memory_gib": 1000.0, "inside_gib": 150.0, "across_gib": 10.0, "ring_step_seconds": 2e-3, "host_gib": 24.0}
