"""The BurstAttention library's call gives dense attention's answers and refuses what it cannot take."""

from __future__ import annotations

import inspect
import itertools
import sys
import types
from importlib.machinery import ModuleSpec

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from engine import ContextParallel
from engine.attention.masks import Causal, Full
from engine.attention.reference import dense_gradients
from engine.burst_attn import OpBurstAttn, burst_attn_func, torch_group
from tests.engine.attention.parity.test_parity import problem
from tests.ranks import run_on_ranks

ORDER = (
    "q",
    "k",
    "v",
    "softmax_scale",
    "flash",
    "causal",
    "optimize_bwd_comm",
    "deterministic",
    "process_group",
    "double_group",
)


def test_arguments_are_in_the_librarys_order() -> None:
    assert tuple(inspect.signature(burst_attn_func).parameters)[:10] == ORDER
    assert OpBurstAttn.apply is burst_attn_func


def errors_of_every_call() -> dict[str, float]:
    """Largest difference of out, dq, dk and dv from dense float64, by call."""
    world = dist.get_world_size()
    cp = ContextParallel(layout="zigzag", node_size=world)
    whole = problem(24 * world, 4, 2, batch=2)
    mesh = init_device_mesh("cpu", (world,))
    groups = {"default": None, "torch": dist.group.WORLD, "mesh": mesh}
    errors = {}
    for causal, scale in itertools.product((False, True), (None, 0.2)):
        expected = dense_gradients(*whole, Causal() if causal else Full(), scale)
        for name, optimize in itertools.product(groups, (True, False)):
            q, k, v, dout = (cp.shard(t, 1).clone().requires_grad_() for t in whole)
            out = OpBurstAttn.apply(q, k, v, scale, "cuda", causal, optimize, False, groups[name])
            found = (out, *torch.autograd.grad(out, (q, k, v), dout))
            errors[f"{name} causal={causal} scale={scale} optimize={optimize}"] = max(
                (f - cp.shard(e, 1)).abs().max().item() for f, e in zip(found, expected, strict=True)
            )
    return errors


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_call_equals_dense_float64(world_size) -> None:
    for errors in run_on_ranks(world_size, errors_of_every_call):
        assert len(errors) == 24
        assert {call: error for call, error in errors.items() if not error < 1e-10} == {}


def test_without_torch_distributed_one_process_holds_the_whole_sequence() -> None:
    q, k, v, dout = problem(10, 4, 2)
    out, lse = burst_attn_func(q, k, v, causal=True, flash=None, return_lse=True)
    expected, expected_lse, *_ = dense_gradients(q, k, v, dout, Causal(), return_lse=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def double_ring() -> tuple[float, list[str]]:
    """(error with two nodes of two, what was refused)."""
    rank = dist.get_rank()
    nodes, columns = ([dist.new_group(ranks) for ranks in rows] for rows in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    intra, inter = nodes[rank // 2], columns[rank % 2]
    whole = problem(32, 4, 4, batch=1)
    cp = ContextParallel(layout="zigzag", node_size=4)
    q, k, v, dout = (cp.shard(t, 1) for t in whole)
    q.requires_grad_()
    out = burst_attn_func(q, k, v, causal=True, double_group=(intra, inter))
    [dq] = torch.autograd.grad(out, (q,), dout)
    expected, expected_dq, *_ = dense_gradients(*whole, Causal())
    error = max((f - cp.shard(e, 1)).abs().max().item() for f, e in ((out, expected), (dq, expected_dq)))
    refused = []
    for wrong in ((inter, intra), (intra,), (intra, None)):
        try:
            burst_attn_func(q, k, v, double_group=wrong)
        except ValueError as reason:
            refused.append(str(reason))
    assert torch.equal(burst_attn_func(q, k, v, causal=True, double_group=(None, None)), burst_attn_func(
        q, k, v, causal=True))  # fmt: skip
    return error, refused


def test_double_group_runs_the_double_ring_of_its_nodes() -> None:
    for error, refused in run_on_ranks(4, double_ring):
        assert error < 1e-10
        assert "pass consecutive ranks inside a node" in refused[0]
        assert "has 1 entries" in refused[1]
        assert "one group and one None" in refused[2]


def contexts_made() -> int:
    """How many contexts 5 calls made."""
    from engine import burst_attn

    burst_attn._context.cache_clear()
    q, k, v, _ = problem(8, 2, 2, batch=1)
    for _ in range(5):
        burst_attn_func(q, k, v)
    return burst_attn._context.cache_info().misses


def test_communicators_are_made_once_per_group() -> None:
    assert run_on_ranks(2, contexts_made) == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"flash": "cudnn"}, "flash 'cudnn' is unknown; choose 'cuda', 'triton' or None"),
        ({"process_group": 3}, "process_group is a int, which names no ranks"),
        ({"double_group": 3}, "double_group is a int; pass"),
    ],
)
def test_problems_it_cannot_run_are_refused(arguments, words) -> None:
    q, k, v, _ = problem(8, 2, 2)
    with pytest.raises(ValueError, match=words):
        burst_attn_func(q, k, v, **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the Triton kernel runs")
def test_the_triton_kernel_is_refused_without_a_gpu() -> None:
    q, k, v, _ = problem(8, 2, 2)
    with pytest.raises(ValueError, match="flex"):
        burst_attn_func(q, k, v, flash="triton")


def bmtrain_object() -> object:
    """An object whose type says it comes from BMTrain."""
    return type("NCCLCommunicator", (), {"__module__": "bmtrain.nccl"})()


def test_a_bmtrain_communicator_names_the_line_that_installs_bmtrain(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "bmtrain", None)
    q, k, v, _ = problem(8, 2, 2)
    with pytest.raises(ValueError, match="pip install bmtrain"):
        burst_attn_func(q, k, v, process_group=bmtrain_object())


def bmtrain_groups(rank_of_theirs: int) -> bool | str:
    """Whether all ranks were found, or why it refused."""
    nccl = types.ModuleType("bmtrain.nccl")
    nccl.commRank = lambda communicator: dist.get_rank() if rank_of_theirs < 0 else rank_of_theirs
    nccl.commCount = lambda communicator: 2
    package = types.ModuleType("bmtrain")
    package.__spec__ = ModuleSpec("bmtrain", None)  # without one, import machinery takes it for broken
    sys.modules |= {"bmtrain": package, "bmtrain.nccl": nccl}
    try:
        return torch_group(bmtrain_object()) is dist.group.WORLD
    except ValueError as reason:
        return str(reason)


def test_a_bmtrain_communicator_over_the_same_ranks_is_those_ranks() -> None:
    assert run_on_ranks(2, bmtrain_groups, -1) == [True, True]
    assert "pass their torch process group" in run_on_ranks(2, bmtrain_groups, 7)[0]
