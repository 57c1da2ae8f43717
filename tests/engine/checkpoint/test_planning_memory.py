"""The memory model beside what the allocator said in the committed records of today's engine."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from engine.checkpoint.planning.memory import GIB, MemoryModel, memory_of
from engine.checkpoint.planning.memory_settings import memory_settings_of
from engine.checkpoint.planning.plan import RESERVED_WITHIN
from engine.models.decoder import rotary_of
from engine.rope import DEFAULT_BASE
from engine.settings import Checkpoint, TrialSettings, from_json
from engine.shape import ModelShape
from harness.metrics.hardware import hardware_for
from harness.plan.own_records import allocates_as_today, gradients_in_place, held_then
from harness.spec.models import named_model
from tests.published import stored_records


@cache
def trained() -> list[tuple[str, TrialSettings, dict[str, Any], bool, float]]:
    """Training records on GPUs by the engine of today: name, settings and measurement, whether gradients took the
    place of activations, and bytes that its rank held and does not hold today."""
    found = []
    for run, stored in stored_records():
        record = stored.data
        settings = from_json(TrialSettings, record["settings"])
        if settings.task != "train" or settings.method.endswith("_upstream"):
            continue
        if not allocates_as_today(settings, record["started_at"]):
            continue
        if run.startswith("h") and record["status"] == "ok" and record["measurement"]["peak_allocated_bytes"]:
            in_place = gradients_in_place(settings, record["started_at"])
            copied = held_then(settings, record["started_at"])
            found.append((stored.trial, settings, record["measurement"], in_place, copied))
    return found


def test_allocated_and_reserved_memory_are_those_of_every_record_of_todays_engine() -> None:
    assert len(trained()) >= 14
    assert {settings.checkpoint.every for _, settings, *_ in trained()} >= {0, 1}
    assert sum(in_place for *_, in_place, _ in trained()) >= 50
    for name, settings, measured, in_place, copied in trained():
        memory = memory_of(settings)
        memory = replace(memory, allocated=memory.allocated + copied, reserved=memory.reserved + copied)
        assert memory.allocated == pytest.approx(max(measured["peak_allocated_bytes"]), rel=0.03), name
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


MAMBA = named_model("mamba_1b")


def moments_of(whole: int, model: ModelShape = MAMBA, **changes: Any) -> dict[str, float]:
    trial = TrialSettings(task="train", method="burst", model=model, seq_len=1 << 16, dtype="bf16", **changes)
    trial = replace(trial, checkpoint=Checkpoint(every=1, whole_layers=whole))
    return MemoryModel(trial).by_moment(memory_settings_of(trial))


@pytest.mark.parametrize("pattern", ["lllf", "lLfF"])
def test_layers_kept_whole_are_counted_where_they_stand(pattern: str) -> None:
    """Of `lllf` every fourth layer has attention, the last one among them; capitals have no MLP."""
    model = replace(MAMBA, layer_pattern=pattern)
    # Per token, in bf16, beyond a layer's input, which either keeps: the MLP's input and its first products; then
    # queries, keys and values, of which attention's output and LSE were kept anyway; or the mixer's tensors.
    values, keys = model.linear_heads * model.linear_value_dim, model.linear_key_heads * model.linear_key_dim
    repeated = model.linear_heads * model.linear_key_dim
    mixer = model.hidden + 2 * (2 * keys + values) + 7 * values + 2 * repeated
    of_mlp, tokens = model.hidden + 2 * model.ffn, 1 << 16
    of_attention = (model.heads + 2 * model.kv_heads) * model.head_dim
    for whole in range(model.layers - 1):
        grown = moments_of(whole + 1, model)["LM head"] - moments_of(whole, model)["LM head"]
        kind = pattern[-1 - whole % len(pattern)]
        elements = (mixer if kind in "lL" else of_attention) + (of_mlp if kind in "lf" else 0)
        assert grown == 2.0 * tokens * elements, whole


def test_moments_of_a_model_of_two_kinds_name_the_kind() -> None:
    one = moments_of(1)
    assert "backward of the last attention layer" in one
    assert "backward of the last linear layer kept whole" not in one
    assert max(one, key=one.__getitem__) == "backward of the last linear layer computed again"
    assert "backward of the last linear layer kept whole" in moments_of(2)
    assert "backward of the last linear layer without MLP" in moments_of(
        0, replace(MAMBA, layer_pattern="fL", linear_heads=8)
    )


def test_before_the_first_layer_no_other_one_is_gathered_ahead() -> None:
    model = named_model("1b")
    moments = moments_of(model.layers - 2, model, world_size=8, sharding="full")
    layer, tokens = model.largest_layer, 1 << 16
    kept = 2.0 * tokens * (model.hidden + model.heads * model.head_dim) + 4 * tokens * model.heads
    grown = moments["backward of the second layer computed again"] - moments["backward of the first layer"]
    assert grown == pytest.approx(kept + 2 * layer - 4 * layer / 8)
    alone = moments_of(model.layers - 1, model, world_size=8, sharding="full")
    assert alone["backward of the last layer computed again"] == alone["backward of the first layer"]


@pytest.mark.parametrize(("name", "count"), [("1b", 1), ("gemma3_4b", 2)])
def test_ropes_tables_are_there_all_the_time(name: str, count: int) -> None:
    """A gigabyte of two million tokens with heads of 128; layers with a window may have tables of their own."""
    model = named_model(name)
    tables = rotary_of(model, False, torch.arange(1 << 16), torch.float32, 1 << 16)
    without = replace(model, rope=False, rope_base=DEFAULT_BASE, rope_base_window=0.0, rope_scaling="none")
    turned, unturned = (moments_of(0, each) for each in (model, without))
    of_tables = count * sum(table.nbytes for table in tables)
    assert of_tables == count * 4 * (1 << 16) * model.head_dim
    for moment, held in turned.items():
        assert held - unturned[moment] == of_tables, moment


@pytest.mark.parametrize(("ranks", "of_head"), [(1, 2 + 2 + 4), (2, 2 + 2 + 4 + 4)])
def test_one_rank_holds_the_heads_reduced_gradient_once(ranks: int, of_head: int) -> None:
    """Bytes of an element in the LM head: of the weight, of its gradient as computed, and of that in fp32."""
    model, changes = named_model("1b"), {"world_size": ranks, "optimizer_offload": True, "head_tiles": 1 << 16}
    wider = replace(model, vocab=2 * model.vocab)
    narrow, wide = (moments_of(0, each, **changes)["LM head"] for each in (model, wider))
    sharded = 2 * 4 / ranks  # of embedding and LM head
    logits = 2 * model.vocab
    assert wide - narrow - logits == pytest.approx((sharded + of_head) * model.vocab * model.hidden, rel=1e-3)
