"""Speeds of a GPU type and its links, as the prediction reads them: none is of a method or of a trial.

At most eight constants of a GPU type are fitted to measurements: seven of these, and the layers that wait in the memory
of the published systems. The speed of copies to host memory comes from the bus's specification, that of attention's
backward from the forward's where a file gives that alone.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.metrics.hardware import SPEEDS, Hardware, HardwareSpeeds

TERA = 1e12

# Of the speeds, those that are fitted.
FITTED = tuple(name for name in SPEEDS if name not in ("host_gib", "attention_backward_tflops"))

# Where a hardware file gives no speed: shares of its datasheet's peak that kernels of its time reach.
_GEMM_SHARE = 0.75
_FORWARD_SHARE = 0.65
BACKWARD_OF_FORWARD = 0.92  # attention's: FlashAttention's own tables of an A100 and an H100, long causal sequences


def speeds_of(hardware: Hardware, kernel: str | None = None) -> HardwareSpeeds:
    """The constants of a hardware file; those of attention are the named kernel's where the file has them measured, by
    tile where it has that.

    A figure that the file lacks follows from its peak; `assumed` names them.
    """
    given: dict[str, float] = dict(hardware.speeds)
    peak = hardware.peak_bf16_tflops
    given.setdefault("gemm_tflops", hardware.gemm_tflops or _GEMM_SHARE * peak)
    ceilings = hardware.kernel_ceilings
    chosen: Mapping[str, float] = ceilings.get(kernel or "", {})
    if not chosen and "attention_forward_tflops" not in given and ceilings:
        kernel = next(iter(ceilings))
        chosen = ceilings[kernel]
    given |= {f"attention_{direction}_tflops": tflops for direction, tflops in chosen.items()}
    forward = given.setdefault("attention_forward_tflops", _FORWARD_SHARE * peak)
    given.setdefault("attention_backward_tflops", BACKWARD_OF_FORWARD * forward)
    for name, value in _COMMON.items():
        given.setdefault(name, value)
    given.setdefault("across_default_gib", given["across_gib"])
    return HardwareSpeeds(**given, tiles=hardware.kernel_tiles.get(kernel or "") if chosen else None)


def assumed(hardware: Hardware) -> tuple[str, ...]:
    """Constants that no file gives, for which a common value stands."""
    known = set(hardware.speeds) | ({"gemm_tflops"} if hardware.gemm_tflops else set())
    if hardware.kernel_ceilings or "attention_forward_tflops" in known:
        known |= {"attention_forward_tflops", "attention_backward_tflops"}
    return tuple(name for name in SPEEDS if name not in known)


_COMMON = {"memory_gib": 1000.0, "inside_gib": 150.0, "across_gib": 10.0, "ring_step_seconds": 2e-3, "host_gib": 24.0}
