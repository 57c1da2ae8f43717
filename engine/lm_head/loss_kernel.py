"""Which implementations of the LM head's loss can run: pure data, without torch.

`own` is `engine.lm_head.fused`; the others are libraries, called as they ship. Plans, workers and `burst doctor` use
the same functions and so give the same reasons.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from engine.settings import TrialSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """A library with a fused LM head and loss for GPUs."""

    module: str  # as imported
    requirement: str  # as pip takes it; pyproject.toml has the same
    source: str
    dtypes: tuple[str, ...]  # of the settings, those it supports
    z_loss: bool  # it has this term

    def unsupported_reason(self) -> str | None:
        """One sentence with the line that installs it, or None when it is installed."""
        if importlib.util.find_spec(self.module) is not None:
            return None
        return f"{self.module} is not installed; pip install {self.requirement}"


LIBRARIES = {
    "liger": Library(
        module="liger_kernel",
        requirement="liger-kernel==0.8.5",
        source="Liger Kernel, arXiv:2410.10989",
        dtypes=("bf16", "fp32"),
        z_loss=True,
    ),
    "cce": Library(
        module="cut_cross_entropy",
        requirement="cut-cross-entropy==25.1.1",
        source="Cut Cross-Entropy, arXiv:2411.09009",
        dtypes=("bf16",),
        z_loss=False,
    ),
}


def forms_tiles(settings: TrialSettings) -> bool:
    """Whether the engine's fused loss runs, which takes a number of tiles."""
    return settings.lm_head_fusion and settings.loss_kernel == "own"


def unsupported_reason(settings: TrialSettings, device_type: str) -> str | None:
    """One sentence why the LM head's loss cannot be formed as asked on this device (cuda, cpu) and machine, or None.

    Reasons that hold on any machine are first.
    """
    name = settings.loss_kernel
    library = LIBRARIES.get(name)
    if settings.head_tiles and not forms_tiles(settings):
        other = f"loss_kernel {name} sizes its own" if settings.lm_head_fusion else "lm_head_fusion is false"
        return f"head_tiles is {settings.head_tiles}, but {other}; set head_tiles to 0, or let the engine form the loss"
    if library is None:
        return None
    if not settings.lm_head_fusion:
        return f"loss_kernel {name} is fused, but lm_head_fusion is false; set loss_kernel to own or fuse"
    if settings.dtype not in library.dtypes:
        takes = " or ".join(library.dtypes)
        return f"loss_kernel {name} takes dtype {takes}, found {settings.dtype}; choose loss_kernel own for it"
    if settings.z_loss and not library.z_loss:
        return (
            f"loss_kernel {name} has no z-loss, found z_loss {settings.z_loss:g}; choose own or liger, or set it to 0"
        )
    if device_type != "cuda":
        return f"loss_kernel {name} needs a GPU, and this machine has none; choose loss_kernel own"
    reason = library.unsupported_reason()
    return None if reason is None else f"loss_kernel {name} cannot run: {reason}"


def available(device_type: str) -> list[tuple[str, bool, str]]:
    """Every implementation: name, whether this machine can run it, and one sentence. The lines of `burst doctor`."""
    lines = [("own", True, "ready")]
    for name, library in LIBRARIES.items():
        reason = library.unsupported_reason()
        if reason is None and device_type != "cuda":
            reason = f"{library.requirement.partition('==')[0]} is installed, but needs a GPU"
        lines.append((name, reason is None, reason or f"ready ({library.source})"))
    return lines
