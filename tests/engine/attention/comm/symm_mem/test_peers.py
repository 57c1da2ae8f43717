"""Who may copy into whose GPU memory: decided by which GPUs ranks have, not by what they call them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from engine.attention.comm.symm_mem.channel import copy_engine_unsupported_reason
from engine.attention.comm.symm_mem.peers import PeerFacts, agreed_unsupported_reason, copies_unsupported_reason, report
from tests.ranks import run_on_ranks

UUIDS = ("a", "b", "c", "d")


def all_seen() -> list[PeerFacts]:
    """Four ranks that see all GPUs of a host, where all reach all."""
    return [
        PeerFacts(uuid=uuid, ordinal=ordinal, reaches=frozenset(UUIDS) - {uuid}) for ordinal, uuid in enumerate(UUIDS)
    ]


def test_ranks_whose_gpus_reach_each_other_may_copy() -> None:
    assert copies_unsupported_reason(all_seen(), 4) is None


def test_one_visible_gpu_each_leaves_the_neighbours_to_nvml() -> None:
    alone = [PeerFacts(uuid=uuid, ordinal=0) for uuid in UUIDS]
    assert "ranks 0 and 1 have GPUs that do not, or cannot be asked; choose direct" in copies_unsupported_reason(
        alone, 4
    )
    assert copies_unsupported_reason(alone, 1) is None  # nodes of one rank copy nothing


def test_gpus_of_one_ordinal_are_refused_unless_torch_allows_overlapping_devices() -> None:
    hidden = [replace(each, ordinal=0) for each in all_seen()]
    assert "ranks 0 and 1 both call theirs cuda:0" in copies_unsupported_reason(hidden, 4)
    assert copies_unsupported_reason([replace(each, overlaps=True) for each in hidden], 4) is None


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 0), (2, 3), (3, 0)])
def test_a_pair_that_reaches_each_other_one_way_at_most_is_named(one, other) -> None:
    reports = all_seen()
    reports[one] = replace(reports[one], reaches=reports[one].reaches - {UUIDS[other]})
    assert f"ranks {min(one, other)} and {max(one, other)} have GPUs" in copies_unsupported_reason(reports, 4)
    same_node = one // 2 == other // 2
    assert (copies_unsupported_reason(reports, 2) is not None) == same_node


def test_a_gpu_that_two_ranks_share_is_no_place_to_copy_to() -> None:
    reports = all_seen()
    reports[3] = replace(reports[3], uuid="a")
    assert "ranks 0 and 3 share one; give each a GPU of its own" in copies_unsupported_reason(reports, 4)


def agreed() -> str | None:
    """What all ranks find where the last one alone lacks the driver."""
    mine = all_seen()[dist.get_rank()]
    last = dist.get_rank() + 1 == dist.get_world_size()
    return agreed_unsupported_reason(
        dist.group.WORLD, PeerFacts(unsupported_reason="no driver; choose direct") if last else mine, 3
    )


def test_all_ranks_find_the_same_reason_when_one_rank_cannot() -> None:
    assert run_on_ranks(3, agreed) == ["rank 2: no driver; choose direct"] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA GPUs")
def test_a_gpu_is_known_by_its_uuid_and_does_not_reach_itself() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    mine = report(device, copy_engine_unsupported_reason(device))
    assert mine.unsupported_reason is None
    assert mine.uuid
    assert mine.uuid not in mine.reaches
