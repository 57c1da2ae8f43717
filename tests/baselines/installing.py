"""Upstream systems for tests: the installation that is there, or one made from the package index in a test's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from baselines.install.build import install_system
from baselines.install.places import InstallPlace
from baselines.pin import FOLDER, load_pin
from cluster.files.errors import UsageError


def installed(system: str, base: Path, *, fetch: bool = False) -> InstallPlace:
    """The system's preferred flavour. With `fetch` one that is not there is installed below `base`; skips, with the
    reason, where pip cannot fetch it, or where it would take long."""
    place = InstallPlace(system=system, flavour=load_pin(system).flavours[-1])
    condition, sentence = place.condition()
    if condition == "installed":
        return place
    if not fetch:
        pytest.skip(f"{system} is {condition}; {sentence}")
    (base / system).mkdir(exist_ok=True)
    shutil.copy(FOLDER / system / "pin.yaml", base / system)
    place = InstallPlace(system=system, flavour=place.flavour, base=base)
    try:
        install_system(place, say=lambda _: None)
    except UsageError as error:
        if "pip download failed" not in str(error):
            raise
        pytest.skip(f"{system} cannot be fetched here: {error}")
    return place
