"""The memory model beside what the allocator said in the committed records of today's engine."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from engine.checkpoint.planning.memory import GIB, memory_of
from engine.checkpoint.planning.plan import ALLOCATED_WITHIN, RESERVED_WITHIN
from engine.settings import TrialSettings, from_json
from harness.metrics.hardware import hardware_for
from harness.plan.own_records import TODAY, gradients_in_place
from tests.published import stored_records


@cache
def trained() -> list[tuple[str, TrialSettings, dict[str, Any], bool]]:
    """Training records on GPUs by the engine of today: name, settings and measurement, and whether gradients took the
    place of activations."""
    found = []
    for run, stored in stored_records():
        record = stored.data
        settings = from_json(TrialSettings, record["settings"])
        # What started earlier saved more: layers had not learned to form the product of SwiGLU again.
        if record["started_at"] < TODAY or settings.task != "train" or settings.method.endswith("_upstream"):
            continue
        if run.startswith("h") and record["status"] == "ok" and record["measurement"]["peak_allocated_bytes"]:
            in_place = gradients_in_place(settings, record["started_at"])
            found.append((stored.trial, settings, record["measurement"], in_place))
    return found


def test_allocated_and_reserved_memory_are_those_of_every_record_of_todays_engine() -> None:
    assert len(trained()) >= 14
    assert {settings.checkpoint.every for _, settings, *_ in trained()} >= {0, 1}
    assert sum(in_place for *_, in_place in trained()) >= 50
    for name, settings, measured, in_place in trained():
        memory = memory_of(settings)
        assert memory.allocated == pytest.approx(max(measured["peak_allocated_bytes"]), rel=ALLOCATED_WITHIN), name
        assert memory.host == pytest.approx(max(measured["peak_rss_bytes"]), rel=0.3), name
        reserved, gpu = max(measured["peak_reserved_bytes"]), hardware_for(measured["device"])
        assert gpu is not None
        if not in_place:  # at most all gradients more
            gradients = 4 * settings.trained_parameters / settings.world_size
            assert min(memory.reserved, gpu.memory_gib * GIB) / (1 + RESERVED_WITHIN) < reserved, name
            assert reserved < (1 + RESERVED_WITHIN) * (memory.reserved + gradients), name
            continue
        most = gpu.memory_gib * GIB  # an allocator that asks for more frees its cached blocks first
        assert min(memory.reserved, most) == pytest.approx(reserved, rel=RESERVED_WITHIN), name
        if memory.reserved > most:
            assert measured["extra"]["allocation_retries"], name
