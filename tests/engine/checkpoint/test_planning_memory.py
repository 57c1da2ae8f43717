"""The memory model beside what the allocator said in the committed records of today's engine."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from engine.checkpoint.planning.memory import GIB, MemoryModel, memory_of
from engine.checkpoint.planning.memory_settings import memory_settings_of
from engine.checkpoint.planning.plan import ALLOCATED_WITHIN, RESERVED_WITHIN
from engine.settings import Checkpoint, TrialSettings, from_json
from harness.metrics.hardware import hardware_for
from harness.plan.own_records import TODAY, gradients_in_place
from harness.spec.models import MODELS_DIR, load_model
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


MAMBA = load_model(MODELS_DIR / "mamba_1b.yaml")


def at_lm_head(whole: int, **changes: Any) -> tuple[float, dict[str, float]]:
    trial = TrialSettings(task="train", method="burst", model=MAMBA, seq_len=1 << 16, dtype="bf16", **changes)
    trial = replace(trial, checkpoint=Checkpoint(every=1, whole_layers=whole))
    moments = MemoryModel(trial).by_moment(memory_settings_of(trial))
    return moments["LM head"], moments


def test_layers_kept_whole_are_counted_where_they_stand() -> None:
    """Of `mamba_1b` every fourth layer has attention, the last one among them."""
    grown = [at_lm_head(whole + 1)[0] - at_lm_head(whole)[0] for whole in range(MAMBA.layers - 1)]
    attention, linear = set(grown[0::4]), set(grown[1::4]) | set(grown[2::4]) | set(grown[3::4])
    assert len(attention) == len(linear) == 1
    # Per token, in bf16, beyond a layer's input, which either keeps: the MLP's input and its first products; then
    # queries, keys and values, of which attention's output and LSE were kept anyway; or the mixer's tensors.
    values, keys = MAMBA.linear_heads * MAMBA.linear_value_dim, MAMBA.linear_key_heads * MAMBA.linear_key_dim
    repeated = MAMBA.linear_heads * MAMBA.linear_key_dim
    mixer = MAMBA.hidden + 2 * (2 * keys + values) + 7 * values + 2 * repeated
    of_both, tokens = MAMBA.hidden + 2 * MAMBA.ffn, 1 << 16
    of_attention = (MAMBA.heads + 2 * MAMBA.kv_heads) * MAMBA.head_dim
    assert attention == {2.0 * tokens * (of_both + of_attention)}
    assert linear == {2.0 * tokens * (of_both + mixer)}


def test_moments_of_a_model_of_two_kinds_name_the_kind() -> None:
    _, one = at_lm_head(1)
    assert "backward of the last attention layer" in one
    assert "backward of the last linear layer kept whole" not in one
    assert max(one, key=one.__getitem__) == "backward of the last linear layer computed again"
    _, two = at_lm_head(2)
    assert "backward of the last linear layer kept whole" in two
