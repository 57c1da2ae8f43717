"""Thresholds of each GPU model: one YAML file per model, with the source of every number.

A check that needs a threshold is unknown, never ok, for a model without a profile. Imports `files` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.files import reader
from cluster.profiles.thresholds import Profile as Profile

FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Board:
    """The GPUs of one node, as known before its checks are judged."""

    name: str = ""  # as nvidia-smi prints it; empty: none
    count: int = 0
    profile: Profile | None = None

    def is_lone(self, expected: int | None) -> bool:
        """True for a node that has, and is expected to have, one GPU only: there is nothing to link it to."""
        return self.count == 1 and (expected or 1) == 1

    @property
    def no_profile(self) -> str:
        """The sentence of a check without a threshold for this model."""
        return (
            f"{self.name or 'this GPU'} has no profile, so there is nothing to compare with; "
            "write one after cluster/profiles/h200.yaml and pass its folder with --profiles"
        )


NO_GPUS = Board()


def load_profiles(*folders: Path) -> dict[str, Profile]:
    """Profiles by GPU name: those of this project and of `folders`; a later folder wins.

    Raises UsageError for a file that is not a valid profile and for a folder that holds none.
    """
    profiles: dict[str, Profile] = {}
    for folder in (FOLDER, *folders):
        paths = sorted(folder.glob("*.yaml"))
        if not paths:
            raise ValueError(f"{folder} holds no profile; give a folder with files such as cluster/profiles/h200.yaml")
        for path in paths:
            profile = reader.load(Profile, path, "GPU profile")
            profiles.update(dict.fromkeys(profile.names, profile))
    return profiles


def find(name: str, profiles: Mapping[str, Profile]) -> Profile | None:
    """The profile of a full GPU name, or of the model a site writes (`H200`) when one profile has that title."""
    if name in profiles:
        return profiles[name]
    titled = {profile.model: profile for profile in profiles.values()}
    return titled.get(name)
