"""GPU profiles: what ships with the project, and what a site may add."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.inventory.site import GpuExpectation, Site
from cluster.profiles import FOLDER, NO_GPUS, find, load_profiles
from tests.cluster.gpu_outputs import MODELS, NAMES

H200 = (FOLDER / "h200.yaml").read_text()


@pytest.mark.parametrize("model", MODELS)
def test_every_threshold_of_a_model_names_its_source(model: str) -> None:
    profile = load_profiles()[NAMES[model]]
    assert profile.model == model.upper()
    for name in ("nvlink", "pcie", "fabric", "port", "ecc", "clocks", "xids", "gemm", "all_reduce"):
        assert len(getattr(profile, name).source) > 10, name


def test_the_numbers_that_differ_between_models() -> None:
    by_model = {model: load_profiles()[NAMES[model]] for model in MODELS}
    assert {m: p.nvlink.links for m, p in by_model.items()} == {"a100": 12, "a800": 8, "h100": 18, "h200": 18}
    assert {m: p.port.rate_gbps for m, p in by_model.items()} == {"a100": 200, "a800": 200, "h100": 400, "h200": 400}
    assert {m: (p.pcie.generation, p.pcie.width) for m, p in by_model.items()} == {
        "a100": (4, 16),
        "a800": (4, 8),
        "h100": (5, 16),
        "h200": (5, 16),
    }
    assert 64 in by_model["a100"].xids.reboot
    assert 64 in by_model["h100"].xids.reset


def test_a_board_is_found_by_its_whole_name_and_a_site_by_its_model() -> None:
    profiles = load_profiles()
    assert find("NVIDIA H200", profiles) is find("H200", profiles)
    for no_profile in ("NVIDIA H200 NVL", "NVIDIA H100 PCIe", "NVIDIA L40S", "", "200"):
        assert find(no_profile, profiles) is None


def test_a_folder_of_ones_own_adds_and_replaces(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        H200.replace("[NVIDIA H200]", "[NVIDIA H200, NVIDIA H200 NVL]").replace("links: 18", "links: 6")
    )
    profiles = load_profiles(tmp_path)
    assert profiles["NVIDIA H200 NVL"].nvlink.links == profiles["NVIDIA H200"].nvlink.links == 6
    assert profiles["NVIDIA H100 80GB HBM3"].nvlink.links == 18


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("links: 18", "link: 18", "unknown key nvlink.link; did you mean links?"),
        ("links: 18", "links: many", "nvlink.links is 'many'; expected a whole number"),
        (
            "  source: NVIDIA H200 specifications, 128 GB/s, which is 16 lanes of generation 5\n",
            "",
            "pcie lacks source",
        ),
        ("source: leptonai/gpud and Azure/azurehpc-health-checks, 400 Gb/s\n", "source: ' '\n", "source is empty"),
        ("[79]", "[79, 48]", "xids names 48 under two actions"),
        ("[NVIDIA H200]", "[]", "has no names"),
    ],
)
def test_a_wrong_profile_is_refused_with_file_and_line(tmp_path: Path, before: str, after: str, words: str) -> None:
    assert before in H200
    (tmp_path / "mine.yaml").write_text(H200.replace(before, after, 1))
    with pytest.raises(ValueError, match=r"mine\.yaml:\d+: ") as caught:
        load_profiles(tmp_path)
    assert words in str(caught.value)


def test_a_node_without_gpus_has_no_board() -> None:
    assert (NO_GPUS.count, NO_GPUS.profile) == (0, None)
    assert Site(gpus=GpuExpectation(count=0)).gpus.count == 0
