"""Every native method, found as the harness finds it: dense attention's numbers, its bytes, its refusals, its plan.

A package in `baselines/` that defines METHOD is a case of each test here, without an edit of any test; the last one
proves it. Claims about one system are in test_native_attention.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import baselines
from engine.attention.comm_volume import least_inter_node_bytes
from engine.attention.geometry.layout import layout_named
from engine.attention.masks import parse_mask
from engine.attention.problem import Problem
from engine.measurement import Measurement
from engine.settings import TrialSettings
from engine.shape import ModelShape
from harness.machine.this_machine import Machine
from harness.metrics.throughput import metrics_of
from harness.plan.matrix import plan
from harness.plan.unsupported import unsupported_reason
from harness.records.record import Record
from harness.spec.experiment import load_experiment
from harness.spec.methods import all_methods, method_module, method_named
from tests.baselines.attention_runs import SHAPE, AttentionRun, run_all, run_attention, settings_for
from tests.ranks import run_on_ranks
from tests.slow import slow

# Tensor parallelism divides a model, not its attention: test_tensor_parallel.py. One rank: test_flash_attn.py.
NATIVE = [
    name
    for name, method in all_methods().items()
    if hasattr(method, "attention") and not hasattr(method, "tensor_parallel") and getattr(method, "most_cp", 2) > 1
]
ODD_HEADS = ModelShape(name="odd", layers=1, hidden=24, ffn=32, heads=3, kv_heads=3, head_dim=8, vocab=256)
FEW_KV_HEADS = replace(SHAPE, name="few", kv_heads=2)
LAPTOP = Machine(hostname="laptop", device="cpu", cores=2, memory_gib=8)
WORLDS = [4, *slow(2, 1)]  # four: fewer KV heads than ranks are repeated
# Settings that a method may run with, or refuse because it fixes them or has no use for them.
VARIANTS: list[dict[str, Any]] = [
    {},
    *({"layout": layout} for layout in ("contiguous", "zigzag", "striped", "split_zigzag")),
    *({"schedule": schedule} for schedule in ("ring", "double_ring", "all_gather", "ulysses", "usp", "usp_transposed")),
    {"schedule": "all_gather", "layout": "contiguous"},
    *({"schedule": "all_gather", "mask": mask} for mask in ("full", "sliding_window:9", "documents:7,17,8")),
    *({"grad_comm_dtype": dtype} for dtype in ("fp32", "input_across", "input_after_first", "input")),
    {"model": FEW_KV_HEADS},
    *({"backward": backward} for backward in ("query", "key_value")),
    *({"exchange": exchange} for exchange in ("relay", "direct")),
    *({"mask": mask} for mask in ("full", "sliding_window:9", "documents:7,17,8")),
    {"seq_len": 30},
    {"model": ODD_HEADS},
]


def accepted(name: str, world_size: int) -> list[TrialSettings]:
    """The variants that a plan would run."""
    variants = [settings_for(name, world_size, **changes) for changes in VARIANTS]
    return [settings for settings in variants if unsupported_reason(settings, LAPTOP) is None]


@cache
def runs(name: str, world_size: int) -> dict[TrialSettings, list[AttentionRun]]:
    """One run of each accepted variant, on every rank."""
    trials = accepted(name, world_size)
    per_rank = run_on_ranks(world_size, run_all, method_module(name), trials)
    return dict(zip(trials, map(list, zip(*per_rank, strict=True)), strict=True))


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", NATIVE)
def test_whatever_a_plan_accepts_equals_dense_float64(name: str, world_size: int) -> None:
    wrong = {each: [run.error for run in ranks] for each, ranks in runs(name, world_size).items()}
    assert {each: errors for each, errors in wrong.items() if not max(errors) < 1e-10} == {}


@pytest.mark.parametrize("name", NATIVE)
def test_attention_kept_for_recomputation_equals_dense_float64(name: str) -> None:
    for run in run_on_ranks(4, run_attention, method_module(name), settings_for(name, 4), True):
        assert run.error < 1e-10


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", NATIVE)
def test_the_bytes_of_a_method_are_those_its_plan_computes(name: str, world_size: int) -> None:
    for settings, ranks in runs(name, world_size).items():
        for run in ranks:
            assert run.computed_sent_bytes in (None, run.sent_bytes), settings
            assert world_size > 1 or run.sent_bytes == 0


@pytest.mark.parametrize("name", NATIVE)
def test_no_method_that_counts_its_bytes_sends_fewer_between_nodes_than_are_needed(name: str) -> None:
    settings = settings_for(name, 4)
    ranks = run_on_ranks(4, run_attention, method_module(name), settings, False, 2)
    far = [run.computed_far_bytes for run in ranks]
    if None in far:
        assert far == [None] * 4  # a transport of its own: reports form no bound
        return
    least = least_inter_node_bytes(
        Problem(
            cp_size=4, node_size=2, heads=settings.model.heads, kv_heads=settings.model.kv_heads,
            mask=parse_mask(settings.mask), layout=layout_named(ranks[0].resolved["layout"]), seq_len=settings.seq_len,
            batch=2, head_dim=settings.model.head_dim, input_bytes=8,
        )
    )  # fmt: skip
    needed = min(each.total for each in least.values())
    assert 0 < needed <= least[ranks[0].resolved["schedule"]].total <= max(far[0] + far[1], far[2] + far[3])


@pytest.mark.parametrize("name", NATIVE)
def test_a_method_that_counts_no_bytes_leaves_their_cell_empty(name: str) -> None:
    for settings, ranks in runs(name, 4).items():
        sent = [run.sent_bytes for run in ranks]
        cell = metrics_of(record_of(settings, sent)).sent_gib_per_gpu
        assert cell is None or cell == max(sent) / 2**30 > 0, settings


def record_of(settings: TrialSettings, sent_bytes: list[int]) -> Record:
    return Record(
        trial_id="trial", experiment="question", title="A question", settings=settings, system="a system",
        status="ok", reason="", measurement=Measurement(step_seconds=[1.0], sent_bytes=sent_bytes),
    )  # fmt: skip


@pytest.mark.parametrize("name", NATIVE)
def test_a_method_runs_on_several_ranks_of_which_each_holds_a_shard(name: str) -> None:
    assert settings_for(name, 4) in accepted(name, 4)


@pytest.mark.parametrize("name", NATIVE)
def test_a_refusal_is_one_sentence_that_the_plan_repeats(name: str) -> None:
    method, refused = method_named(name), {}
    for changes in [*VARIANTS, {"tp_size": 2, "world_size": 8}]:
        settings = settings_for(name, 4, **changes)
        if reason := method.refuse(settings):
            refused[str(changes)] = reason
            assert re.fullmatch(r"[^\n]+; [^\n]+[^.\n]", reason), "found and expected; next step"
            assert unsupported_reason(settings, LAPTOP) == reason
    assert "{'seq_len': 30}" in refused, "a sequence that does not split is refused"


def test_a_plan_holds_every_method(tmp_path: Path) -> None:
    question = tmp_path / "question.yaml"
    sweep = f"sweep: {{method: [{', '.join(all_methods())}], cp_size: [1, 2, 4]}}\n"
    question.write_text(f"task: attention\nmodel: tiny\n{sweep}fixed: {{seq_len: 1k, dtype: fp32}}\n", encoding="utf-8")
    trials = plan(load_experiment(question), LAPTOP)
    assert [trial.settings.method for trial in trials] == [name for name in all_methods() for _ in range(3)]


@pytest.mark.parametrize("name", all_methods())
def test_a_method_is_named_after_its_package(name: str) -> None:
    method, module = method_named(name), method_module(name)
    assert method.name == name
    assert method.system
    assert method.source
    assert module.rpartition(".")[2] == name.removesuffix("_upstream")


ADDED = {
    "added_ring": """
from baselines.ring_baseline import KeyValueRing


class AddedRing(KeyValueRing):
    name, system, source, sharding = "added_ring", "A ring", "a paper", "striped"


METHOD = AddedRing()
""",
    # Exchanges by itself, and counts nothing.
    "added_gather": """
from baselines.ring_baseline import fixed_settings_unsupported_reason
from engine.attention.geometry.layout import split_unsupported_reason
from engine.method import EngineCommand


class AddedGather(EngineCommand):
    name, system, source = "added_gather", "An all-gather", "a paper"

    def refuse(self, settings):
        if settings.tp_size > 1:
            return f"tp_size is {settings.tp_size}; set tp_size to 1"
        fixed = {"layout": "contiguous", "schedule": None, "backward": None, "exchange": None}
        return fixed_settings_unsupported_reason(settings, fixed) or split_unsupported_reason(
            "contiguous", settings.seq_len, settings.cp_size
        )

    def layout(self, settings):
        return "contiguous"

    def attention(self, cp, settings):
        import torch
        from torch import distributed

        from engine.attention.masks import parse_mask
        from engine.attention.reference import dense_attention

        def own(whole, dim=1):
            return whole.chunk(cp.size, dim)[cp.rank]

        class Whole(torch.autograd.Function):
            @staticmethod
            def forward(ctx, shard):
                parts = [torch.empty_like(shard) for _ in range(cp.size)]
                distributed.all_gather(parts, shard)
                return torch.cat(parts, dim=1)

            @staticmethod
            def backward(ctx, gradient):
                gradient = gradient.contiguous()
                distributed.all_reduce(gradient)
                return own(gradient)

        class Gathered:
            def __call__(self, *shards, saved=None):
                out, lse = dense_attention(*map(Whole.apply, shards), parse_mask(settings.mask))
                return own(out), own(lse, 2)

            def keep(self, out, lse, tail):
                return None

            def resolved(self):
                return {}

        return Gathered()


METHOD = AddedGather()
""",
    "added_wrong": """
from baselines.ring_baseline import KeyValueRing


class AddedWrong(KeyValueRing):
    name, system, source, sharding = "added_wrong", "A wrong scale", "a paper", "zigzag"

    def attention(self, cp, settings):
        attend = super().attention(cp, settings)

        class Wrong:
            keep, resolved = attend.keep, attend.resolved

            def __call__(self, q, *others, **options):
                return attend(2 * q, *others, **options)

        return Wrong()


METHOD = AddedWrong()
""",
}


@pytest.mark.slow  # this file once more, for three more methods
def test_a_contributed_package_is_tested_without_an_edit_of_any_test(tmp_path: Path) -> None:
    folder = tmp_path / "baselines"
    shutil.copytree(Path(baselines.__file__).parent, folder, ignore=shutil.ignore_patterns("upstream"))
    for name, source in ADDED.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(source, encoding="utf-8")
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", Path(__file__), "-k", "added_", "-rA", "-n0", "-o", "pythonpath="],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}, cwd=root, capture_output=True, text=True,
    )  # fmt: skip
    outcomes = re.findall(r"^(PASSED|FAILED) \S*::test_(\w+)\[(\w+)", done.stdout, re.MULTILINE)
    failed = {(name, test) for outcome, test, name in outcomes if outcome == "FAILED"}
    assert failed == {
        ("added_wrong", "whatever_a_plan_accepts_equals_dense_float64"),
        ("added_wrong", "attention_kept_for_recomputation_equals_dense_float64"),
    }, done.stdout[-4000:]
    assert {name for _, _, name in outcomes} == set(ADDED)
    assert len({test for _, test, _ in outcomes}) == 8
