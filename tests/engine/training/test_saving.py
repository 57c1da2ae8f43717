"""What cannot be saved or loaded ends every rank with one reason, and costs no checkpoint that was there."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.engine.training.training_runs import begin, config, order
from tests.ranks import run_on_ranks


def outcomes(folder: str) -> dict[str, Any]:
    """Sentences of a save that one rank has no room for and of a load that finds too little, then a save that works."""
    run = Path(folder, "run")
    training = begin(run, order(config(cp_size=2)))
    checkpoints, directory = training.checkpoints, run / "checkpoints"
    checkpoints.save(1)
    found: dict[str, Any] = {}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, size in (("no room", 512), ("room for a part", 1000)):
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))  # of any one file
        try:
            checkpoints.save(2)
        except OSError as error:
            found[name] = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found["left"] = sorted(path.name for path in directory.iterdir())

    whole = checkpoints._optimizer_state
    checkpoints._optimizer_state = lambda: {"state": whole()["state"] | {"more": {"exp_avg": 0}}}  # type: ignore[method-assign]
    try:
        checkpoints.restore()
    except OSError as error:
        found["too little"] = str(error)
    checkpoints._optimizer_state = whole  # type: ignore[method-assign]

    checkpoints.save(2)
    found["restored"] = checkpoints.restore()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("saving"))
    return run_on_ranks(2, outcomes, folder)


def test_a_rank_without_room_to_save_ends_all_ranks_and_leaves_the_earlier_checkpoint(ranks) -> None:
    for rank in ranks:
        reason = "the state after step 2 cannot be saved: on rank 1, [Errno 27] File too large"
        assert rank["no room"] == rank["room for a part"] == reason
        assert rank["left"] == ["latest", "step-00000001"]


def test_a_checkpoint_that_holds_too_little_is_an_error_with_its_reason(ranks) -> None:
    for rank in ranks:
        assert rank["too little"].startswith("checkpoint step-00000001 cannot be loaded: on rank 0, ")
        assert "optimizer.more.exp_avg" in rank["too little"]


def test_a_run_saves_again_once_there_is_room(ranks) -> None:
    assert [rank["restored"] for rank in ranks] == [(2, [])] * 2
