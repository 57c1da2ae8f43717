"""Methods that run a compared system as its authors ship it: a foreign program in an environment of its own.

An adapter says which settings the system cannot run (`refuse`), writes the command, environment and files of one trial
(`render`) and reads what the program printed (`parse`). The launcher starts `baselines.drive` for each rank, which
starts the program. Throughput follows from our formula and the step times that the system printed; its own figures stay
beside them, in `extra`.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from baselines.tokens import TokenFormat
from engine.attention.masks import Documents, parse_mask
from engine.measurement import GpuState, Measurement, UpstreamRun, measured_part
from engine.reader import from_json, read_json

if TYPE_CHECKING:
    from baselines.install.places import InstallPlace
    from engine.settings import Task, TrialSettings

RAN_FILE = "upstream.json"
DOCUMENTS: Final = "documents:LENGTHS"
UPSTREAM: Final = "upstream"  # the entry of `measurement.extra` that says which system ran
LOGS = "logs"
GPUS = "gpus"
HOST_MEMORY = "host_memory"
# Settings of the engine that no foreign program has: each keeps its default.
_ENGINE_ONLY: Mapping[str, Any] = {
    "layout": "auto",
    "schedule": "auto",
    "backward": "auto",
    "kernel": "auto",
    "exchange": "auto",
    "grad_comm_dtype": "auto",
    "deterministic": False,
    "lm_head_fusion": True,
    "loss_kernel": "own",
    "linear_dtype": "same",
    "z_loss": 0.0,
    "projection_tiles": 1,
    "mlp_tiles": 1,
    "head_groups": 1,
    "head_tiles": 0,
    "optimizer_offload": False,
    "gradient_offload": False,
    "optimizer_states": None,
    "host_memory": "",
    "sharding": "full",
    "cuda_graph": "auto",
    "emulate_nodes": 1,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """One rank's program of a trial. RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are added, as torchrun
    does."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)  # over the launcher's
    files: Mapping[str, str] = field(default_factory=dict)  # path below the trial's -> content; bin/ is on its PATH
    folder: str = ""  # working directory; "" is the trial's


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintedSteps:
    """What a program printed, one entry per step where the system prints each step; the first are its warm-up."""

    step_seconds: Sequence[float] = ()
    tokens_per_gpu_per_second: Sequence[float] = ()  # in the place of seconds, where it prints speeds alone
    forward_seconds: Sequence[float] = ()
    loss: Sequence[float] = ()
    grad_norm: Sequence[float] = ()
    peak_allocated_bytes: Sequence[int] = ()  # of ranks that print it
    peak_reserved_bytes: Sequence[int] = ()
    own: Mapping[str, float] = field(default_factory=dict)  # its own throughput, TFLOP/s and memory, as it calls them
    chosen: Mapping[str, str] = field(default_factory=dict)  # what ran where the system itself chooses


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedSystem:
    """`upstream.json`: what `baselines.drive` started, and on which device."""

    flavour: str
    pin: str  # digest of the flavour
    commit: str  # of the checkout; "" where there is none
    command: list[str]
    environment: dict[str, str]
    device: str
    release: str = ""  # of the system, as its authors name it
    packages: dict[str, str] = field(default_factory=dict)
    borrowed: dict[str, str] = field(
        default_factory=dict
    )  # pinned packages that came from beside torch: name -> version
    builds: dict[str, str] = field(default_factory=dict)  # pinned packages that are another build: name -> which
    data: dict[str, object] = field(default_factory=dict)  # origin of the tokens, where it trained on the engine's
    ended: str = ""  # how, where it did not end by itself after its last step
    kernel: str = "unknown (upstream.json does not say)"  # of attention; see `UpstreamRun.kernel`


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedGpu:
    """`gpus/rank<r>.json`: the GPU of one rank, as `baselines.drive` saw it from outside of the program."""

    digest: str  # as `engine.memory.gpu_state.digest_of` gives it
    driver: str
    before: GpuState  # the program starts
    after: GpuState  # its last look between the first and the last step, else right after the last step


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidentMemory:
    """`host_memory/rank<r>.json`: the largest resident set of one rank's program."""

    peak_rss_bytes: int


class Upstream:
    """The common part of all adapters."""

    name: str  # <system>_upstream
    package: str  # folder of its pin
    system: str
    source: str
    tasks: tuple[Task, ...] = ("train",)
    dtypes: tuple[str, ...] = ("bf16",)
    masks: tuple[str, ...] = ("causal",)  # DOCUMENTS stands for causal documents of given lengths
    honours: tuple[str, ...] = ()  # of the settings that only the engine has otherwise
    warmup = 0  # steps whose printed times are not those of one step; run beside the trial's own warm-up
    end_seconds = 20.0  # after its last step, in which the program ends by itself, or is ended
    most_tp = 1  # tensor-parallel ranks
    # What `checkpoint.upstream` may say, and the pattern of each: "block N" recomputes N layers.
    recomputes: Mapping[str, str] = {}
    repeats_batches = False  # whether it takes several micro-batches per step
    offloads_parts = False  # whether a part of the optimizer can be in host memory, where it honours optimizer_offload
    tokens: TokenFormat = ""  # in which form it reads the engine's tokens; without one it makes its own
    beyond_llama: tuple[str, ...] = ()  # architectures of `engine.models` that it trains besides Llama
    fa4_beside_torch = False  # whether `kernel: fa4` is FlashAttention-4 that lay beside torch at installation
    attends = ""  # the kernel of attention in words, where every trial asks it for the same

    def refuse(self, settings: TrialSettings) -> str | None:
        """Pure: why no installation can run this trial, or None."""
        return self.common_reason(settings) or self.own_reason(settings)

    def own_reason(self, settings: TrialSettings) -> str | None:
        """What the system itself cannot run; adapters replace this."""
        return None

    def common_reason(self, settings: TrialSettings) -> str | None:
        """Settings that are the engine's, and what the adapter does not offer."""
        for name, (found, known) in {
            "task": (settings.task, self.tasks),
            "dtype": (settings.dtype, self.dtypes),
            "mask": (DOCUMENTS if document_lengths(settings) else settings.mask, self.masks),
        }.items():
            if found not in known:
                return f"{self.name} runs {name} {' or '.join(known)}, found {found}; set {name} to one it runs"
        for name, default in _ENGINE_ONLY.items():
            if name not in self.honours and (found := getattr(settings, name)) != default:
                remedy = f"leave {name} out" if default == "" else f"set {name} to {_word(default)}"
                return f"{self.name} has no choice of {name}, found {found}; {remedy}"
        if settings.optimizer_offload not in (False, True) and not self.offloads_parts:
            return (
                f"{self.name} moves the whole optimizer to the host or none of it, found optimizer_offload "
                f"{settings.optimizer_offload}; set it to true or false"
            )
        words = settings.checkpoint.upstream
        if words != "default" and not any(re.fullmatch(pattern, words) for pattern in self.recomputes.values()):
            forms = " or ".join(self.recomputes) or "nothing"
            return f"{self.name} takes {forms} as checkpoint.upstream, found {words!r}; set it to what it takes"
        if settings.task == "train" and settings.checkpoint.offload != "none":
            return f"{self.name} keeps what it saves on the GPU; set checkpoint.offload to none"
        for name, default in (("whole_layers", 0), ("mlp", 1.0), ("replay", "hold"), ("host_layers", 0)):
            if settings.task == "train" and (found := getattr(settings.checkpoint, name)) != default:
                return f"{self.name} has no choice of checkpoint.{name}, found {found}; set it to {_word(default)}"
        if settings.steps.warmup_seq_len:
            return f"{self.name} trains on one length; set steps.warmup_seq_len to 0"
        if settings.tp_size > self.most_tp:
            return f"{self.name} runs with tp_size up to {self.most_tp}, found {settings.tp_size}; set tp_size lower"
        if settings.gradient_accumulation > 1 and not self.repeats_batches:
            return (
                f"{self.name} runs one batch per step, found gradient_accumulation {settings.gradient_accumulation}; "
                "set it to 1"
            )
        return None

    @property
    def places(self) -> list[InstallPlace]:
        """Its installations, the preferred one first: a release before the paper's copy."""
        from baselines.install.places import InstallPlace  # reads pins, which interpreters of systems cannot

        pinned = InstallPlace(system=self.package, flavour="current").pin
        return [InstallPlace(system=self.package, flavour=flavour) for flavour in reversed(pinned.flavours)]

    @property
    def place(self) -> InstallPlace:
        """The installation that runs: the first whole one, else the preferred one."""
        return next((place for place in self.places if place.condition()[0] == "installed"), self.places[0])

    def unavailable(self, device: str, kernel: str = "auto") -> str | None:
        """Why this machine, whose ranks use `device`, cannot run it with this `kernel`, or None; what installs it is
        named."""
        place = self.place
        if device not in place.pinned.devices:
            needs = "GPUs, and this machine has none" if device == "cpu" else "CPU ranks, and those here use GPUs"
            return f"{self.system} needs {needs}; run it on another machine"
        if (reason := place.not_installed_reason(self.system)) is not None:
            return reason
        if device != "cpu" and place.stand_ins and not place.has_flash_attention_4:
            return (
                f"{self.system} has a stand-in for {', '.join(place.stand_ins)}, which runs on CPU ranks alone; "
                f"install the real one beside torch, then {place.install_command} --anew"
            )
        if device != "cpu" and kernel == "fa4" and self.fa4_beside_torch and not place.has_flash_attention_4:
            return (
                f"{self.system} was installed where no FlashAttention-4 lay beside torch, found kernel fa4; install "
                f"flash-attn-4 beside torch, then {place.install_command} --anew"
            )
        return None

    def command(self, trial_dir: Path) -> list[str]:
        return [sys.executable, "-m", "baselines.drive", str(trial_dir)]

    def render(self, settings: TrialSettings, trial_dir: Path, place: InstallPlace) -> Rendered:
        """The system's own command for one rank of a trial. Pure."""
        raise NotImplementedError

    def parse(self, output: str) -> PrintedSteps:
        """What the program printed on one rank. Pure."""
        raise NotImplementedError

    def kernel(self, settings: TrialSettings, place: InstallPlace, environment: Mapping[str, str]) -> str:
        """What computes attention, as the program's command, configuration and `environment` say: the engine's name of
        a kernel where they ask for that one alone, the order where they give several, else `unknown (why)`. Pure.
        """
        return self.attends or f"unknown ({self.system} does not say)"

    def steps(self, settings: TrialSettings) -> int:
        """Steps that the program runs in all."""
        return max(settings.steps.warmup, self.warmup) + settings.steps.after_warmup

    def read(self, trial_dir: Path) -> Measurement:
        """The measurement of a finished trial: that of the rank which printed the most steps.

        Raises FileNotFoundError when nothing was started, ValueError when fewer steps were printed than were to be.
        """
        from baselines.drive import settings_of

        settings = settings_of(trial_dir)
        ran = from_json(StartedSystem, read_json(trial_dir / RAN_FILE))
        printed = [self.parse(text) for text in outputs(trial_dir)]
        best = max(printed, key=lambda each: len(seconds_of(each, settings)), default=PrintedSteps())
        seconds, steps = seconds_of(best, settings), settings.steps
        if len(seconds) < self.steps(settings):
            raise ValueError(f"{self.system} printed {len(seconds)} steps, expected {self.steps(settings)}")
        for label, values in (("seconds", seconds), ("loss", best.loss), ("grad_norm", best.grad_norm)):
            if (wrong := next((each for each in values if not math.isfinite(each)), None)) is not None:
                raise ValueError(f"{self.system} printed {label} {wrong}, expected a finite number")
        gpus = watched_gpus(trial_dir)
        driver = next((gpu.driver for gpu in gpus if gpu.driver), "")
        # It may print more steps of warm-up than the trial has, and the forwards of fewer.
        part, extra = measured_part(replace(steps, warmup=len(seconds) - steps.after_warmup), seconds)
        lacking = len(seconds) - len(best.forward_seconds)
        return Measurement(
            step_seconds=seconds[part],
            forward_seconds=list(best.forward_seconds[max(0, part.start - lacking) : max(0, part.stop - lacking)]),
            loss=list(best.loss),
            grad_norm=list(best.grad_norm),
            peak_allocated_bytes=_all(each.peak_allocated_bytes for each in printed),
            peak_reserved_bytes=_all(each.peak_reserved_bytes for each in printed),
            peak_rss_bytes=resident_bytes(trial_dir),
            chosen={"kernel": ran.kernel, **best.chosen},
            device=ran.device,
            software=dict(ran.packages) | ({"driver": driver} if driver else {}),
            gpus=[gpu.digest for gpu in gpus],
            gpus_before=[gpu.before for gpu in gpus],
            gpus_after=[gpu.after for gpu in gpus],
            data=ran.data
            or ({"origin": f"tokens that {self.system} makes or reads by itself"} if settings.task == "train" else {}),
            extra=extra | {UPSTREAM: described(ran, printed=best.own)},
        )


def document_lengths(settings: TrialSettings) -> list[int]:
    """Tokens of each causal document of a sequence under mask documents:LENGTHS; empty under any other mask."""
    mask = parse_mask(settings.mask)
    if not isinstance(mask, Documents) or not mask.causal or mask.left is not None or mask.spans:
        return []
    return mask.lengths_in(settings.seq_len)


def described(ran: StartedSystem, printed: Mapping[str, float] | None = None) -> UpstreamRun:
    """What a record says of the system that ran, in `measurement.extra`; `printed`: what it says of its own speed."""
    found: UpstreamRun = {
        "flavour": ran.flavour,
        "pin": ran.pin,
        "commit": ran.commit,
        "release": ran.release,
        "command": ran.command,
        "environment": ran.environment,
    }
    if printed is not None:
        found["printed"] = dict(printed)
    if ran.borrowed:
        found["borrowed"] = ran.borrowed
    if ran.builds:
        found["builds"] = ran.builds
    if ran.ended:
        found["ended"] = ran.ended
    return found


def seconds_of(printed: PrintedSteps, settings: TrialSettings) -> list[float]:
    """Seconds of each printed step, from its tokens per second where the system prints those."""
    tokens = settings.seq_len * settings.batch_size * settings.dp_size * settings.gradient_accumulation
    speeds = printed.tokens_per_gpu_per_second
    return list(printed.step_seconds) or [tokens / settings.world_size / speed for speed in speeds if speed > 0]


def outputs(trial_dir: Path) -> list[str]:
    """What each rank printed, rank 0 first."""
    return [path.read_text(encoding="utf-8", errors="replace") for path in _of_ranks(trial_dir / LOGS, ".log")]


def watched_gpus(trial_dir: Path) -> list[WatchedGpu]:
    """The GPU of each rank, rank 0 first; empty on CPU ranks."""
    return [from_json(WatchedGpu, read_json(path)) for path in _of_ranks(trial_dir / GPUS, ".json")]


def resident_bytes(trial_dir: Path) -> list[int]:
    """Peak resident set of each rank's program, rank 0 first."""
    found = [read_json(path) for path in _of_ranks(trial_dir / HOST_MEMORY, ".json")]
    return [from_json(ResidentMemory, each).peak_rss_bytes for each in found]


def _of_ranks(folder: Path, ending: str) -> list[Path]:
    return sorted(folder.glob(f"rank*{ending}"), key=lambda path: int(path.stem.removeprefix("rank") or 0))


def arguments(text: str, **values: object) -> tuple[str, ...]:
    """Words of a command as one writes them in a shell, over several lines, `{name}` filled in from `values`."""
    return tuple(word.format(**values) for word in text.split())


def foreign_environment(given: Mapping[str, str], own: Mapping[str, str], programs: Sequence[Path]) -> dict[str, str]:
    """A rank's environment without what leads Python to packages of ours, with the system's own variables, and with
    folders of programs that come first."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV"}
    # torch's recorder of collectives, which the launcher switches on: each system has its own settings of it.
    kept = {
        name: value
        for name, value in given.items()
        if name not in dropped and not name.startswith(("TORCH_NCCL_", "TORCH_FR_"))
    }
    path = ":".join([*map(str, programs), given.get("PATH", os.defpath)])
    return kept | {"PYTHONNOUSERSITE": "1", "PATH": path} | dict(own)


def _all(parts: Iterable[Sequence[int]]) -> list[int]:
    return [value for part in parts for value in part]


def _word(value: object) -> str:
    words: dict[object, str] = {True: "true", False: "false"} if isinstance(value, bool) else {None: "null"}
    return str(words.get(value, value))
