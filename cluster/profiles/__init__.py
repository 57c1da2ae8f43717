"""Thresholds as data: a YAML file per GPU model, one for nodes of any kind, one for XIDs; each number has a source.

A check that needs a threshold of a model is unknown, never ok, for a model without a profile. Imports `files` alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from cluster.files import reader

XidAction = Literal["monitor", "reset", "reboot", "isolate"]
FOLDER = Path(__file__).parent
NODE_FILE, XID_FILE = "node.yaml", "xids.yaml"  # every other file of a folder is a GPU model


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sourced:
    source: str

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise ValueError("a threshold's source is empty; name the document or project the numbers come from")


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvlink(_Sourced):
    """Links of every GPU; `warn_errors` counted errors on a GPU, or more, are a warning."""

    links: int
    warn_errors: int = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Pcie(_Sourced):
    """The link between a GPU and its host."""

    generation: int
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric(_Sourced):
    """NVSwitch boards need a fabric manager; from Hopper on each GPU also reports whether it has joined the fabric."""

    manager: bool
    registration: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PortThresholds(_Sourced):
    """Rate of each compute port in Gb/s."""

    rate_gbps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Ecc(_Sourced):
    """Uncorrectable SRAM errors over the board's life above which the vendor replaces it."""

    return_above_sram_errors: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Clocks(_Sourced):
    """Highest SM clock, and how far below it a GPU may be set."""

    sm_mhz: int
    warn_below_mhz: int
    fail_below_mhz: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Xids(_Sourced):
    """Numbers for which this model needs another action than the catalogue has."""

    reboot: tuple[int, ...] = ()
    reset: tuple[int, ...] = ()
    monitor: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _Sourced.__post_init__(self)
        numbers = (*self.reboot, *self.reset, *self.monitor)
        twice = sorted({number for number in numbers if numbers.count(number) > 1})
        if twice:
            raise ValueError(f"xids names {twice[0]} under two actions; keep one")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm(_Sourced):
    """bf16 GEMM of a healthy GPU, in TFLOP/s: shown beside the fleet's median, which decides."""

    tflops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce(_Sourced):
    """Bus bandwidth of a large all-reduce over the 8 GPUs of a healthy node, in GB/s."""

    gb_per_second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One GPU model. `names` are the exact names nvidia-smi prints for the boards it holds for."""

    model: str
    names: tuple[str, ...]
    nvlink: Nvlink
    pcie: Pcie
    fabric: Fabric
    port: PortThresholds
    ecc: Ecc
    clocks: Clocks
    gemm: Gemm
    all_reduce: AllReduce
    xids: Xids | None = None

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError(f"the profile {self.model} has no names; give those that nvidia-smi -L prints")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLimits(_Sourced):
    """Thresholds that do not depend on the model of the GPUs. What a site expects of its nodes stands in the site."""

    clock_warn_seconds: float  # between a node's clock and this machine's
    idle_warn_above_us: int  # until a core's deepest idle state has ended
    hugepages_warn_percent: float  # of memory, reserved and free
    shm_gib_per_gpu: float  # free in /dev/shm
    memlock_least_gib: float
    xid_hours: float  # of the kernel log, also for SXIDs
    disk_error_hours: float
    flap_hours: float
    flaps_fail: int  # lost links of one interface
    power_fail_above_share: float  # of a GPU's own highest limit
    # Shares of the fleet's median below which a measured speed is a warning, by what is measured.
    device_below: float
    host_copy_below: float
    peer_copy_below: float
    pair_below: float
    rail_below: float
    # The least share of the published speed of a GPU, and of an adapter's rate.
    of_published: float
    of_rate: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Xid:
    """One number of NVIDIA's catalogue. `monitor` is a warning, other actions a failure."""

    number: int
    action: XidAction
    means: str
    do: str = ""  # beside or after the action


@dataclass(frozen=True, kw_only=True, slots=True)
class _Catalogue(_Sourced):
    xids: tuple[Xid, ...]

    def __post_init__(self) -> None:
        _Sourced.__post_init__(self)
        numbers = [xid.number for xid in self.xids]
        twice = sorted({number for number in numbers if numbers.count(number) > 1})
        if twice:
            raise ValueError(f"xids has the number {twice[0]} twice; keep one")


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiles:
    """Everything that folders of thresholds hold."""

    models: Mapping[str, Profile]  # by GPU name
    limits: NodeLimits
    xids: Mapping[int, Xid]

    def find(self, name: str) -> Profile | None:
        """The profile of a full GPU name, or of the model a site writes (`H200`) when one profile has that title."""
        return self.models.get(name) or {profile.model: profile for profile in self.models.values()}.get(name)

    def board(self, name: str, count: int) -> Board:
        """These GPUs with their thresholds; no name for a node without GPUs."""
        return Board(name=name, count=count, profile=self.find(name), profiles=self)


def load_profiles(*folders: Path) -> Profiles:
    """The thresholds of this project and of `folders`; a later folder wins, file by file.

    Raises UsageError for a file that is not valid and for a folder that holds none.
    """
    models: dict[str, Profile] = {}
    shared: dict[str, Path] = {}
    for folder in (FOLDER, *folders):
        paths = sorted(folder.glob("*.yaml"))
        if not paths:
            raise ValueError(f"{folder} holds no profile; give a folder with files such as cluster/profiles/h200.yaml")
        for path in paths:
            if path.name in (NODE_FILE, XID_FILE):
                shared[path.name] = path
            else:
                profile = reader.load(Profile, path, "GPU profile")
                models.update(dict.fromkeys(profile.names, profile))
    catalogue = reader.load(_Catalogue, shared[XID_FILE], "catalogue of XIDs")
    return Profiles(
        models=models,
        limits=reader.load(NodeLimits, shared[NODE_FILE], "profile of nodes"),
        xids={xid.number: xid for xid in catalogue.xids},
    )


default_profiles = functools.cache(load_profiles)


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """The GPUs of one node, as known before its checks are judged, and the thresholds that hold for it."""

    name: str = ""  # as nvidia-smi prints it; empty: none
    count: int = 0
    profile: Profile | None = None
    profiles: Profiles = field(default_factory=default_profiles, repr=False)

    def is_lone(self, expected: int | None) -> bool:
        """True for a node that has, and is expected to have, one GPU only: there is nothing to link it to."""
        return self.count == 1 and (expected or 1) == 1

    @property
    def limits(self) -> NodeLimits:
        """The thresholds of nodes."""
        return self.profiles.limits

    @property
    def no_profile(self) -> str:
        """The sentence of a check without a threshold for this model."""
        return (
            f"{self.name or 'this GPU'} has no profile, so there is nothing to compare with; "
            "write one after cluster/profiles/h200.yaml and pass its folder with --profiles"
        )

    def xid(self, number: int) -> Xid | None:
        """The meaning of an XID, with the action that this model needs; None for a number of no catalogue."""
        known, own = self.profiles.xids.get(number), self.profile.xids if self.profile else None
        if known and own:
            for action in ("reboot", "reset", "monitor"):
                if number in getattr(own, action):
                    return replace(known, action=action)
        return known
