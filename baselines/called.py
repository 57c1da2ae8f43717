"""Systems that are an attention function: `task: attention`, called by a program of ours in their environment.

`baselines/programs/attention.py` makes the inputs, calls the function that the system's folder names in `call.py`,
times it as the engine's attention task does, and prints one line of JSON per step.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baselines.install.places import Place
from baselines.programs import PROGRAMS
from baselines.programs.program_parts import MARK
from baselines.tokens import FOLDER, PLAIN
from baselines.upstream import Printed, Rendered, Upstream
from engine.attention.geometry.layout import split_unsupported_reason

if TYPE_CHECKING:
    from engine.settings import Task, TrialSettings

REQUEST_FILE = "attention.json"
# Of transformers' attention: what torch chooses, cuDNN's first, or FlashAttention-4 where it lies beside torch.
KERNELS = ("auto", "cudnn", "fa4")
_LINE = re.compile(rf"^{MARK}(\{{.*\}})$", re.MULTILINE)


def render_program(program: str, request: dict[str, object], trial_dir: Path, place: Place) -> Rendered:
    """One of our programs, run by the system's interpreter with the trial as a file of JSON."""
    return Rendered(
        command=(str(place.python), "-u", str(PROGRAMS / program), str(trial_dir / REQUEST_FILE)),
        environment=place.environment,
        files={REQUEST_FILE: json.dumps(request, indent=1) + "\n"},
    )


def parse_program(output: str) -> Printed:
    """What our programs print: a line per step, and one with the peaks at the end."""
    lines = [json.loads(text) for text in _LINE.findall(output)]
    steps = [line for line in lines if "seconds" in line]
    end: dict[str, Any] = next((line for line in reversed(lines) if "peak_allocated_bytes" in line), {})
    return Printed(
        step_seconds=[line["seconds"] for line in steps],
        forward_seconds=[line["forward_seconds"] for line in steps if "forward_seconds" in line],
        loss=[line["loss"] for line in steps if "loss" in line],
        grad_norm=[line["grad_norm"] for line in steps if "grad_norm" in line],
        peak_allocated_bytes=end.get("peak_allocated_bytes", []),
        peak_reserved_bytes=end.get("peak_reserved_bytes", []),
        own=end.get("own", {}),
    )


class UpstreamAttention(Upstream):
    """The common part of systems that are called; adapters say how sequences are laid out, and what is refused."""

    tasks: tuple[Task, ...] = ("attention",)

    def request(self, settings: TrialSettings, place: Place) -> dict[str, object]:
        """The trial for the program; adapters add what their `call.py` reads."""
        model = settings.model
        return {
            "call": str(Path(__file__).parent / self.package / "call.py"),
            "source": str(place.source),
            "seq_len": settings.seq_len,
            "batch_size": settings.batch_size,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "dtype": settings.dtype,
            "cp_size": settings.cp_size,
            "schedule": settings.schedule,
            "steps": self.steps(settings),
            "seed": settings.seed,
        }

    def render(self, settings: TrialSettings, trial_dir: Path, place: Place) -> Rendered:
        return render_program("attention.py", self.request(settings, place), trial_dir, place)

    def parse(self, output: str) -> Printed:
        return parse_program(output)


def kernel_reason(upstream: Upstream, settings: TrialSettings) -> str | None:
    """Why transformers cannot attend with the trial's kernel, or None."""
    if settings.kernel in KERNELS:
        return None
    return f"{upstream.name} runs kernel {' or '.join(KERNELS)}, found {settings.kernel}; set kernel to one it runs"


def one_sequence_reason(upstream: Upstream, settings: TrialSettings) -> str | None:
    """Why a zigzag ring over all ranks cannot run the trial, or None."""
    if settings.world_size != settings.cp_size:
        return (
            f"{upstream.name} runs one sequence, found world_size {settings.world_size}; set it to cp_size "
            f"{settings.cp_size}"
        )
    return split_unsupported_reason("zigzag", settings.seq_len, settings.cp_size)


def training_request(settings: TrialSettings, steps: int, trial_dir: Path) -> dict[str, object]:
    """A training trial for the programs of ours that train, which read the engine's tokens."""
    model = settings.model
    return {
        "vocab": model.vocab,
        "hidden": model.hidden,
        "ffn": model.ffn,
        "layers": model.layers,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "norm_eps": model.norm_eps,
        "rope_base": model.rope_base,
        "seq_len": settings.seq_len,
        "batch_size": settings.batch_size,
        "cp_size": settings.cp_size,
        "recompute": bool(settings.checkpoint.every),
        "kernel": settings.kernel,
        "learning_rate": settings.learning_rate,
        "steps": steps,
        "seed": settings.seed,
        "tokens": str(trial_dir / FOLDER / PLAIN),
    }
