"""Systems that are an attention function: `task: attention`, called through the `call.py` of the system's folder.

Where the system's interpreter can run the engine (Python 3.11 and newer), it does: `InWorker`, whose ranks are those of
`engine.worker`. Inputs, clocks, peaks and errors are then the engine's own. Elsewhere `baselines/programs/attention.py`
times the function, and prints one line of JSON per step.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baselines.programs import PROGRAMS
from baselines.programs.program_parts import MARK
from baselines.tokens import FOLDER, PLAIN
from baselines.upstream import PrintedSteps, Rendered, Upstream
from engine.attention.geometry.layout import Layout, Segment, Zigzag, merged, split_unsupported_reason
from engine.measurement import read_measurement

if TYPE_CHECKING:
    from baselines.install.places import InstallPlace
    from engine.measurement import Measurement
    from engine.method import NativeMethod
    from engine.settings import Task, TrialSettings

REQUEST_FILE = "attention.json"
ENTER = "baselines.enter"  # the program that each rank of `InWorker` starts as
_LINE = re.compile(rf"^{MARK}(\{{.*\}})$", re.MULTILINE)


def render_program(program: str, request: dict[str, object], trial_dir: Path, place: InstallPlace) -> Rendered:
    """One of our programs, run by the system's interpreter with the trial as a file of JSON."""
    return Rendered(
        command=(str(place.python), "-u", str(PROGRAMS / program), str(trial_dir / REQUEST_FILE)),
        environment=place.environment,
        files={REQUEST_FILE: json.dumps(request, indent=1) + "\n"},
    )


def parse_program(output: str) -> PrintedSteps:
    """What our programs print: a line per step, and one with the peaks at the end."""
    lines = [json.loads(text) for text in _LINE.findall(output)]
    steps = [line for line in lines if "seconds" in line]
    end: dict[str, Any] = next((line for line in reversed(lines) if "peak_allocated_bytes" in line), {})
    return PrintedSteps(
        step_seconds=[line["seconds"] for line in steps],
        forward_seconds=[line["forward_seconds"] for line in steps if "forward_seconds" in line],
        loss=[line["loss"] for line in steps if "loss" in line],
        grad_norm=[line["grad_norm"] for line in steps if "grad_norm" in line],
        peak_allocated_bytes=end.get("peak_allocated_bytes", []),
        peak_reserved_bytes=end.get("peak_reserved_bytes", []),
        own=end.get("own", {}),
        chosen={name: value for line in lines for name, value in line.get("chosen", {}).items()},
    )


class UpstreamAttention(Upstream):
    """The common part of systems that are called; adapters say how sequences are laid out, and what is refused."""

    tasks: tuple[Task, ...] = ("attention",)

    def request(self, settings: TrialSettings, source: Path) -> dict[str, object]:
        """The trial for `call.py`; adapters add what theirs reads. `source` is the system's checkout, where it has
        one."""
        model = settings.model
        return {
            "call": str(Path(__file__).parent / self.package / "call.py"),
            "source": str(source),
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

    def render(self, settings: TrialSettings, trial_dir: Path, place: InstallPlace) -> Rendered:
        return render_program("attention.py", self.request(settings, place.source), trial_dir, place)

    def parse(self, output: str) -> PrintedSteps:
        return parse_program(output)


class InWorker(UpstreamAttention):
    """Systems that the engine's worker calls, run by the system's interpreter (`baselines.enter`)."""

    honours = ("kernel", "schedule", "emulate_nodes")
    kernels: tuple[str, ...] = ("fa4", "fa2")  # that it can call; which one it does is what its environment has
    schedules: tuple[str, ...]  # that it has; the first is what `auto` stands for

    def command(self, trial_dir: Path) -> list[str]:
        return [sys.executable, "-m", ENTER, type(self).__module__, str(trial_dir)]

    def read(self, trial_dir: Path) -> Measurement:
        return read_measurement(trial_dir)

    def in_worker(self) -> NativeMethod:
        """The method as the engine's worker runs it."""
        from baselines.called_attention import CalledMethod

        return CalledMethod(self)

    def common_reason(self, settings: TrialSettings) -> str | None:
        if (reason := super().common_reason(settings)) is not None:
            return reason
        for name, known in (("kernel", self.kernels), ("schedule", self.schedules)):
            if (found := getattr(settings, name)) not in ("auto", *known):
                choices = " or ".join(("auto", *known))
                return f"{self.name} runs {name} {choices}, found {found}; set {name} to one it runs"
        return one_sequence_reason(self, settings)

    def schedule_of(self, settings: TrialSettings) -> str:
        """The schedule that runs."""
        return self.schedules[0] if settings.schedule == "auto" else settings.schedule

    def shards(self, settings: TrialSettings) -> Layout:
        """Which tokens each rank holds."""
        return Zigzag()

    def arrangement(self, settings: TrialSettings) -> str:
        """What runs, in the system's own words."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ShardParts:
    """Groups of consecutive ranks share the shards of another layout: rank r holds part r % size of shard r // size."""

    base: Layout
    size: int  # ranks of a group

    @property
    def name(self) -> str:
        return self.base.name

    def chunks(self, cp_size: int) -> int:
        return self.size * self.base.chunks(cp_size // self.size)

    def segments(self, seq_len: int, cp_size: int, cp_rank: int) -> tuple[Segment, ...]:
        shard, part = divmod(cp_rank, self.size)
        own = seq_len // cp_size
        begin, end = part * own, (part + 1) * own
        held, runs = 0, []
        for run in self.base.segments(seq_len, cp_size // self.size, shard):
            first, last = max(begin, held), min(end, held + run.count)
            if first < last:
                runs.append(Segment(run.start + (first - held) * run.step, last - first, run.step))
            held += run.count
        return merged(runs)


def head_ranks(settings: TrialSettings, schedule: str) -> int:
    """Ranks of an all-to-all of heads under the schedule that runs: all (`ulysses`), those of a node (`usp`), or one
    under the others, which exchange no heads.

    On one node `usp` has two all-to-alls, of half the ranks each; their size divides the heads.
    """
    size, model = settings.cp_size, settings.model
    if schedule != "usp":
        return size if schedule == "ulysses" else 1
    groups = settings.emulate_nodes if settings.emulate_nodes > 1 else 2 if size > 2 else 1
    return math.gcd(model.kv_heads, model.heads, size // math.gcd(size, groups))


def heads_reason(upstream: Upstream, settings: TrialSettings, schedule: str) -> str | None:
    """Why the heads cannot be divided among the ranks of the schedule's all-to-all, or None."""
    model, ranks = settings.model, head_ranks(settings, schedule)
    if math.gcd(model.heads, model.kv_heads) % ranks == 0:
        return None
    return (
        f"{upstream.name} needs heads divisible by the ranks that exchange them, found {model.kv_heads} KV heads of "
        f"model {model.name} and {ranks} ranks; choose another schedule or fewer ranks"
    )


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
