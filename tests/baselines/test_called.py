"""Attention functions that the engine's worker calls in a system's interpreter: layouts, requests, refusals, and how
that interpreter is started. test_upstream_run.py runs them."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import baselines
import engine
from baselines.called import InWorker, ShardParts, head_ranks
from baselines.called_attention import ENTERED, CalledMethod, forget_shapes
from baselines.enter import link_packages, main, worker_of
from baselines.install.places import InstallPlace, beside_torch
from baselines.programs.program_parts import load
from baselines.stand_ins import FOLDER
from engine.attention.geometry.layout import Layout, Zigzag
from engine.attention.masks import Causal
from engine.attention.reference import dense_gradients
from engine.measurement import relative_errors
from engine.method import in_worker
from engine.settings import TrialSettings
from engine.shape import ModelShape
from harness.launch.launcher import tells_start
from harness.spec.methods import method_named

SHAPE = ModelShape(name="some", layers=1, hidden=256, ffn=64, heads=32, kv_heads=8, head_dim=8, vocab=64)
CALLED = ("loongtrain_upstream", "ring_flash_attn_upstream", "transformer_engine_upstream", "yunchang_upstream")


def settings(method: str, **changes: Any) -> TrialSettings:
    values: dict[str, Any] = {"task": "attention", "model": SHAPE, "seq_len": 1024, "cp_size": 4}
    return TrialSettings(method=method, **values | changes)


def adapter(name: str) -> InWorker:
    found = method_named(name)
    assert isinstance(found, InWorker)
    return found


def positions(layout: Layout, seq_len: int, ranks: int) -> list[list[int]]:
    return [[at for run in layout.segments(seq_len, ranks, rank) for at in run.positions()] for rank in range(ranks)]


@pytest.mark.parametrize("schedule", ["ring", "usp", "ulysses"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_yunchangs_ranks_hold_the_tokens_that_its_call_says(schedule: str, ranks: int) -> None:
    trial = settings("yunchang_upstream", schedule=schedule, cp_size=ranks)
    method = adapter("yunchang_upstream")
    request = method.request(trial, Path("/source"))
    call = load(str(request["call"]))
    held = positions(method.shards(trial), trial.seq_len, ranks)
    assert held == [call.positions(request, rank, ranks) for rank in range(ranks)]
    assert sorted(itertools.chain(*held)) == list(range(trial.seq_len))


def test_parts_of_a_shard_follow_one_another_and_a_group_of_one_has_the_whole_shard() -> None:
    assert positions(ShardParts(Zigzag(), 2), 16, 4) == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert positions(ShardParts(Zigzag(), 1), 16, 4) == positions(Zigzag(), 16, 4)
    assert ShardParts(Zigzag(), 4).chunks(8) == 16


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schedule": "ulysses"}, 4),
        ({"schedule": "ring"}, 1),
        ({"schedule": "usp"}, 2),  # one node: two groups
        ({"schedule": "usp", "cp_size": 8}, 4),
        ({"schedule": "usp", "cp_size": 2}, 2),
        ({"schedule": "usp", "cp_size": 8, "emulate_nodes": 4}, 2),
        ({"schedule": "usp", "cp_size": 4, "emulate_nodes": 2}, 2),
    ],
)
def test_the_ranks_that_exchange_heads_follow_from_schedule_and_nodes(changes: dict[str, Any], expected: int) -> None:
    trial = settings("yunchang_upstream", **changes)
    assert head_ranks(trial, trial.schedule) == expected


@pytest.mark.parametrize(
    ("method", "changes", "expected", "arrangement"),
    [
        ("transformer_engine_upstream", {}, {"comm_type": "p2p", "head_ranks": 1}, "p2p"),
        ("transformer_engine_upstream", {"schedule": "all_gather"}, {"comm_type": "all_gather"}, "all_gather"),
        ("transformer_engine_upstream", {"schedule": "ulysses"}, {"comm_type": "a2a"}, "a2a"),
        (
            "transformer_engine_upstream",
            {"schedule": "usp", "emulate_nodes": 2, "cp_size": 8},
            {"comm_type": "a2a+p2p", "head_ranks": 4},
            "a2a 4 + p2p 2",
        ),
        ("yunchang_upstream", {"schedule": "ulysses"}, {"head_ranks": 4}, "ulysses 4 x ring 1"),
        ("yunchang_upstream", {}, {"head_ranks": 2}, "ulysses 2 x ring 2"),
        ("loongtrain_upstream", {}, {"window": 2, "source": "/source"}, "windows of 2 ranks"),
        ("loongtrain_upstream", {"cp_size": 8, "emulate_nodes": 2}, {"window": 4}, "windows of 4 ranks"),
        ("ring_flash_attn_upstream", {"schedule": "ring"}, {"heads": 32, "kv_heads": 8}, "zigzag ring"),
    ],
)  # fmt: skip
def test_a_trial_is_asked_of_a_system_in_its_own_words(
    method: str, changes: dict[str, Any], expected: dict[str, Any], arrangement: str
) -> None:
    trial, found = settings(method, **changes), adapter(method)
    assert found.refuse(trial) is None
    assert expected.items() <= found.request(trial, Path("/source")).items()
    assert found.arrangement(trial) == arrangement


@pytest.mark.parametrize(
    ("method", "changes", "expected"),
    [
        ("ring_flash_attn_upstream", {"schedule": "ulysses"}, "runs schedule auto or ring, found ulysses"),
        ("ring_flash_attn_upstream", {"kernel": "cudnn"}, "runs kernel auto or fa4 or fa2, found cudnn"),
        ("transformer_engine_upstream", {"kernel": "fa4"}, "runs kernel auto or cudnn, found fa4"),
        (
            "transformer_engine_upstream",
            {"schedule": "ulysses", "cp_size": 16},
            "found 8 KV heads of model some and 16",
        ),
        ("yunchang_upstream", {"schedule": "double_ring"}, "auto or usp or ulysses or ring, found double_ring"),
        ("yunchang_upstream", {"schedule": "ulysses", "cp_size": 16}, "found 8 KV heads of model some and 16 ranks"),
        ("yunchang_upstream", {"world_size": 8}, "runs one sequence, found world_size 8"),
        ("yunchang_upstream", {"seq_len": 1020}, "does not split into 2 x cp_size = 8 equal zigzag chunks"),
        ("loongtrain_upstream", {"schedule": "ring"}, "runs schedule auto or double_ring, found ring"),
        ("loongtrain_upstream", {"task": "train"}, "runs task attention, found train"),
    ],
)
def test_what_a_system_cannot_run_is_refused(method: str, changes: dict[str, Any], expected: str) -> None:
    assert expected in str(adapter(method).refuse(settings(method, **changes)))


def test_the_groups_of_two_levels_are_consecutive_ranks_and_those_across_them() -> None:
    call = load(str(Path(baselines.__path__[0]) / "transformer_engine" / "call.py"))
    assert call.two_levels([0, 1, 2, 3, 4, 5], 3) == ([[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]])


@pytest.mark.parametrize("name", CALLED)
def test_the_worker_gets_the_method_with_its_layout_and_the_plan_does_not(name: str) -> None:
    found = in_worker(adapter(name))
    assert isinstance(found, CalledMethod)
    assert found.name == name
    held = positions(found.layout(settings(name)), 1024, 4)
    assert sorted(itertools.chain(*held)) == list(range(1024))
    assert not hasattr(adapter(name), "layout")  # plans take a method with a layout for a native one
    assert in_worker(method_named("burst")) is method_named("burst")


def test_a_rank_refuses_a_system_that_its_host_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = adapter(CALLED[0]).command(tmp_path)
    assert tells_start(command)
    monkeypatch.setattr(InstallPlace, "not_installed_reason", lambda *_: "it is not installed")
    monkeypatch.setenv("RANK", "1")
    assert main(command[3:]) == 1
    assert "it is not installed" in (tmp_path / "errors" / "rank1.json").read_text()


def test_modules_of_systems_are_imported_without_what_reads_pins() -> None:
    """The interpreters of systems have torch and numpy alone."""
    program = (
        "import importlib, sys\n"
        "sys.modules['yaml'] = sys.modules['cluster'] = None\n"
        f"for name in {[name.removesuffix('_upstream') for name in CALLED]}:\n"
        "    importlib.import_module('baselines.' + name).METHOD.in_worker()\n"
    )
    path = os.pathsep.join(each for each in sys.path if each)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240, env={**os.environ, "PYTHONPATH": path})


def shaped(a: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(a * 2 + 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_trial_meets_functions_of_torch_script_as_a_process_of_its_own_would(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.jit.script(shaped)
    monkeypatch.setattr(sys.modules[__name__], "compiled", compiled, raising=False)
    for _ in range(3):
        compiled(torch.ones(3))
    assert len(compiled.get_debug_state().execution_plans) == 1
    forget_shapes()
    with pytest.raises(RuntimeError, match="optimized_plan"):  # none is made yet
        compiled.get_debug_state()


@pytest.fixture
def place(tmp_path: Path) -> InstallPlace:
    """A place for ring-flash-attention where nothing is installed."""
    pin = Path(baselines.__path__[0]) / "ring_flash_attn" / "pin.yaml"
    (tmp_path / "ring_flash_attn").mkdir()
    (tmp_path / "ring_flash_attn" / "pin.yaml").write_text(pin.read_text("utf-8"))
    return InstallPlace(system="ring_flash_attn", flavour="current", base=tmp_path)


def test_the_worker_is_started_with_two_packages_of_ours_and_told_what_is_installed(
    place: InstallPlace, tmp_path: Path
) -> None:
    place.folder.mkdir(parents=True)
    worker = worker_of(place, tmp_path / "trial")
    assert worker.command == (str(place.python), "-P", "-m", "engine.worker", str(tmp_path / "trial"))
    links, stand_ins = worker.environment["PYTHONPATH"].split(os.pathsep)
    assert sorted(each.name for each in Path(links).iterdir()) == ["baselines", "engine"]
    assert stand_ins == str(FOLDER / "flash_attn")
    told = json.loads(worker.environment[ENTERED])
    assert told["ran"]["pin"] == place.pinned.digest
    assert told["ran"]["command"] == ["UPSTREAM/env/bin/python", "-P", "-m", "engine.worker", "TRIAL_DIR"]
    assert told["source"] == str(place.source)


def test_links_that_lead_elsewhere_are_made_anew(tmp_path: Path) -> None:
    (tmp_path / "engine").symlink_to(tmp_path / "gone")
    (tmp_path / "baselines").symlink_to(tmp_path)
    link_packages(tmp_path)
    for package in (engine, baselines):
        assert (tmp_path / package.__name__).samefile(package.__path__[0])


def test_a_rank_on_a_host_without_the_system_refuses_its_trial(
    place: InstallPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOME_SYSTEMS", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    assert main(["tests.baselines.installed_elsewhere", str(tmp_path)]) == 1
    left = json.loads((tmp_path / "errors" / "rank1.json").read_text())
    assert left["kind"] == "refused"
    assert (
        "ring-flash-attention is not installed; install it: burst setup baselines install ring_flash_attn"
        in left["reason"]
    )
    assert main([]) == 2
    assert "usage: python -m baselines.enter MODULE TRIAL_DIR" in capsys.readouterr().err


def test_flash_attention_4_beside_torch_takes_the_place_of_flash_attn_2(place: InstallPlace) -> None:
    borrowed = place.folder / "borrowed" / "flash_attn"
    assert place.stand_ins == ["flash_attn"]
    assert not place.has_flash_attention_4
    (borrowed / "cute").mkdir(parents=True)  # a folder without modules of its own, as that release installs it
    assert place.stand_ins == ["flash_attn"]
    assert place.has_flash_attention_4
    (borrowed / "__init__.py").touch()  # flash-attn 2 as well
    assert place.stand_ins == []
    assert beside_torch(["numpy", "flash-attn"]) == [
        "numpy", "flash-attn", "flash-attn-4", "nvidia-cutlass-dsl-libs-cu13",
    ]  # fmt: skip


# What the release 4.0.0b36 has in flash_attn/cute/interface.py: these names, orders of arguments and results. Dense
# attention in the place of its kernels, for the CPU.
CUTE = """
import torch

def _dense(q, k, v, scale, causal):
    group = q.shape[2] // k.shape[2]
    k, v = (each.repeat_interleave(group, 2).float() for each in (k, v))
    scores = torch.einsum("bqnd,bsnd->bnqs", q.float(), k) * scale
    if causal:
        rows, columns = scores.shape[-2:]
        scores = scores.masked_fill(~torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows), -torch.inf)
    return scores, k, v

def _flash_attn_fwd(q, k, v, qv=None, *, softmax_scale=None, causal=False, return_lse=False):
    assert return_lse
    scores, _, v = _dense(q, k, v, softmax_scale or q.shape[-1] ** -0.5, causal)
    lse = scores.logsumexp(-1)
    return torch.einsum("bnqs,bsnd->bqnd", (scores - lse[..., None]).exp(), v).to(q.dtype), lse, None, None, None

WRITTEN = []

def _flash_attn_bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, *, dq=None, dk=None, dv=None):
    assert lse.is_contiguous()
    scale = softmax_scale or q.shape[-1] ** -0.5
    scores, wide_k, wide_v = _dense(q, k, v, scale, causal)
    p = (scores - lse[..., None]).exp()
    delta = torch.einsum("bqnd,bqnd->bnq", dout.float(), out.float())
    ds = p * (torch.einsum("bqnd,bsnd->bnqs", dout.float(), wide_v) - delta[..., None]) * scale
    found = [
        torch.einsum("bnqs,bsnd->bqnd", ds, wide_k),
        *(
            torch.einsum("bnqs,bqnd->bsnd", a, b.float()).unflatten(2, (k.shape[2], -1)).sum(3)
            for a, b in ((ds, q), (p, dout))
        ),
    ]
    given = [torch.empty_like(each) if buffer is None else buffer for each, buffer in zip((q, k, v), (dq, dk, dv))]
    WRITTEN.append(dq is not None)
    for buffer, gradient in zip(given, found):
        buffer.copy_(gradient)
    return tuple(given)
"""

OVER = """
import sys, torch
import flash_attn
from flash_attn import flash_attn_interface as calls
assert flash_attn.KERNEL == "fa4", flash_attn.KERNEL
calls._on_fa4 = lambda q: True  # as if q were on a GPU
inputs = torch.load(sys.argv[1])
q, k, v, dout = (inputs[name] for name in ("q", "k", "v", "dout"))
out, lse, *_ = calls._flash_attn_forward(q, k, v, 0.0, q.shape[-1] ** -0.5, causal=True)
lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # as rings keep it
whole = [torch.empty_like(each) for each in (q, k, v)]
wider = [torch.empty(each.shape[0], 2 * each.shape[1], *each.shape[2:], dtype=each.dtype) for each in (q, k, v)]
parts = [each[:, : each.shape[1] // 2] for each in wider]  # of a batch of two: not contiguous
for into in (whole, parts):
    calls._flash_attn_backward(dout, q, k, v, out, lse, *into, 0.0, None, True)
from flash_attn.cute.interface import WRITTEN
assert WRITTEN == [True, False], WRITTEN
assert all(torch.equal(a, b) for a, b in zip(whole, parts))
torch.save({"out": out, "lse": lse, "dq": whole[0], "dk": whole[1], "dv": whole[2]}, sys.argv[2])
"""


def test_calls_of_flash_attn_2_become_calls_of_flash_attention_4(tmp_path: Path) -> None:
    cute = tmp_path / "beside" / "flash_attn" / "cute"
    cute.mkdir(parents=True)
    (cute / "__init__.py").touch()
    (cute / "interface.py").write_text(CUTE)
    generator = torch.Generator().manual_seed(0)
    inputs = {
        name: torch.randn(2, 16, heads, 8, generator=generator)
        for name, heads in (("q", 4), ("k", 2), ("v", 2), ("dout", 4))
    }
    torch.save(inputs, tmp_path / "inputs.pt")
    path = os.pathsep.join([str(FOLDER / "flash_attn"), str(tmp_path / "beside"), *filter(None, sys.path)])
    command = [sys.executable, "-c", OVER, str(tmp_path / "inputs.pt"), str(tmp_path / "found.pt")]
    subprocess.run(command, check=True, timeout=240, env={**os.environ, "PYTHONPATH": path})
    found = torch.load(tmp_path / "found.pt")
    truths = dense_gradients(*inputs.values(), Causal(), return_lse=True)
    for name, truth in zip(("out", "lse", "dq", "dk", "dv"), truths, strict=True):
        torch.testing.assert_close(found[name].double(), truth, rtol=0, atol=1e-5)


@pytest.mark.gpu
def test_the_stand_in_computes_by_flash_attention_4_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flash_attn.cute", reason="FlashAttention-4 is not installed")
    for name in [name for name in sys.modules if name == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(FOLDER / "flash_attn"))
    calls = importlib.import_module("flash_attn.flash_attn_interface")
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, 512, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2, 4))
    out, lse, *_ = calls._flash_attn_forward(q, k, v, causal=True)
    gradients = [torch.empty_like(each) for each in (q, k, v)]
    calls._flash_attn_backward(dout, q, k, v, out, lse, *gradients, causal=True)
    truth, truth_lse, *wanted = dense_gradients(q, k, v, dout, Causal(), return_lse=True)
    torch.testing.assert_close(lse.double(), truth_lse, rtol=0, atol=1e-3)
    assert max(relative_errors((out, *gradients), (truth, *wanted))) < 1e-2
