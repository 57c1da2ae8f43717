"""GPU profiles: what ships with the project, and what a site may add."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.inventory.site import GpuExpectation, Site
from cluster.profiles import FOLDER, Board, load_profiles
from tests.cluster.gpu_outputs import MODELS, NAMES

H200 = (FOLDER / "h200.yaml").read_text()


@pytest.mark.parametrize("model", MODELS)
def test_every_threshold_of_a_model_names_its_source(model: str) -> None:
    profile = load_profiles().models[NAMES[model]]
    assert profile.model == model.upper()
    for name in ("nvlink", "pcie", "fabric", "port", "ecc", "clocks", "gemm", "all_reduce"):
        assert len(getattr(profile, name).source) > 10, name


def test_the_numbers_that_differ_between_models() -> None:
    by_model = {model: load_profiles().models[NAMES[model]] for model in MODELS}
    assert {m: p.nvlink.links for m, p in by_model.items()} == {"a100": 12, "a800": 8, "h100": 18, "h200": 18}
    assert {m: p.port.rate_gbps for m, p in by_model.items()} == {"a100": 200, "a800": 200, "h100": 400, "h200": 400}
    assert {m: (p.pcie.generation, p.pcie.width) for m, p in by_model.items()} == {
        "a100": (4, 16),
        "a800": (4, 8),
        "h100": (5, 16),
        "h200": (5, 16),
    }
    boards = {model: load_profiles().board(NAMES[model], 8) for model in MODELS}
    actions = {model: board.xid(64).action for model, board in boards.items()}  # type: ignore[union-attr]
    assert actions == {"a100": "reboot", "a800": "reboot", "h100": "reset", "h200": "reset"}


def test_a_board_is_found_by_its_whole_name_and_a_site_by_its_model() -> None:
    profiles = load_profiles()
    assert profiles.find("NVIDIA H200") is profiles.find("H200")
    for no_profile in ("NVIDIA H200 NVL", "NVIDIA H100 PCIe", "NVIDIA L40S", "", "200"):
        assert profiles.find(no_profile) is None


def test_a_folder_of_ones_own_adds_and_replaces(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        H200.replace("[NVIDIA H200]", "[NVIDIA H200, NVIDIA H200 NVL]").replace("links: 18", "links: 6")
    )
    profiles = load_profiles(tmp_path).models
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
        ("gemm:", "xids: {reset: [48, 79], monitor: [79], source: ours}\ngemm:", "names 79 under two actions"),
        ("[NVIDIA H200]", "[]", "has no names"),
    ],
)
def test_a_wrong_profile_is_refused_with_file_and_line(tmp_path: Path, before: str, after: str, words: str) -> None:
    assert before in H200
    (tmp_path / "mine.yaml").write_text(H200.replace(before, after, 1))
    with pytest.raises(ValueError, match=r"mine\.yaml:\d+: ") as caught:
        load_profiles(tmp_path)
    assert words in str(caught.value)


def test_limits_of_nodes_and_xids_of_ones_own_win(tmp_path: Path) -> None:
    for name, before, after in (
        ("node.yaml", "flaps_fail: 5", "flaps_fail: 2"),
        ("xids.yaml", "number: 79", "number: 9079"),
    ):
        text = (FOLDER / name).read_text()
        assert before in text
        (tmp_path / name).write_text(text.replace(before, after))
    board = load_profiles(tmp_path).board("NVIDIA H200", 8)
    assert (board.limits.flaps_fail, board.xid(79)) == (2, None)
    assert Board().limits.flaps_fail == 5
    (tmp_path / "xids.yaml").write_text(
        "source: ours\nxids: [{number: 1, action: reset, means: a}, {number: 1, action: reset, means: b}]"
    )
    with pytest.raises(ValueError, match=r"xids\.yaml:\d+: xids has the number 1 twice"):
        load_profiles(tmp_path)


def test_a_node_without_gpus_has_no_board() -> None:
    assert (Board().count, Board().profile) == (0, None)
    assert Site(gpus=GpuExpectation(count=0)).gpus.count == 0
