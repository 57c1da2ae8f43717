"""A context on a DeviceMesh, and the gradients of `shard` and `unshard` against one process."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from engine import ContextParallel, burst_attention
from engine.attention.masks import Causal
from engine.attention.reference import dense_attention
from tests.ranks import run_on_ranks
from tests.slow import combinations, slow


def contexts_on_meshes() -> dict[str, object]:
    """(ranks of the group, CP rank, CP size) by how the mesh was given; the error where it cannot be."""
    whole = init_device_mesh("cpu", (4,))
    larger = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    others = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found: dict[str, object] = {}
    for name, mesh in {"one": whole, "named": larger, "part": larger["cp"], "other part": others["tp"]}.items():
        cp = ContextParallel(mesh)
        assert cp.group is not None
        found[name] = (dist.get_process_group_ranks(cp.group), cp.rank, cp.size)
    try:
        ContextParallel(others)
    except ValueError as error:
        found["error"] = str(error)
    q = torch.randn(1, 16, 2, 8, generator=torch.Generator().manual_seed(0))
    cp = ContextParallel(larger)
    out = cp.unshard(burst_attention(*[cp.shard(q)] * 3, cp=cp))
    found["attention"] = torch.allclose(out, dense_attention(q, q, q, Causal())[0], atol=1e-5)
    return found


def test_a_context_takes_a_mesh_of_one_dimension_or_its_dimension_cp() -> None:
    for rank, found in enumerate(run_on_ranks(4, contexts_on_meshes)):
        pair = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert found["one"] == ([0, 1, 2, 3], rank, 4)
        assert found["named"] == found["part"] == found["other part"] == (pair, rank % 2, 2)
        assert found["error"] == (
            "the mesh has several dimensions (dp, tp) and none is named cp; pass mesh['NAME'] of the dimension that "
            "shares a sequence"
        )
        assert found["attention"]


@pytest.mark.parametrize(
    ("variables", "words"),
    [({"WORLD_SIZE": "4", "RANK": "1"}, "one of 4 ranks"), ({"WORLD_SIZE": "2"}, "one of 2 ranks")],
)
def test_a_context_of_several_ranks_without_a_process_group_is_refused_with_the_line_to_add(
    variables, words, monkeypatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words) as found:
        ContextParallel()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    assert f'call torch.distributed.init_process_group("{backend}") before' in str(found.value)
    assert ContextParallel.single().size == 1


@pytest.mark.parametrize("launched", ["", "1"])
def test_a_single_rank_needs_no_process_group(launched, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", launched)
    assert ContextParallel().size == 1


def gradients(layout: str, gradient: str, dim: int, dtype: torch.dtype) -> float:
    """Largest difference of the gradient of this rank's tokens, of a loss of the whole, to the one-process gradient.

    With `sum` rank r's loss is r + 1 times another weighting of the whole, and the truth is of the sum of all losses;
    with `same` every rank has rank 0's loss.
    """
    cp = ContextParallel(layout=layout)
    shape = [3, 3, 5]
    shape[dim] = 24
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    weights = torch.randn([cp.size, *shape], generator=generator, dtype=torch.float64).to(dtype)

    def loss(tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return (rank + 1) * (tensor.square() * weights[rank]).sum()

    alone = whole.clone().requires_grad_()
    ranks = range(cp.size) if gradient == "sum" else [0]
    (truth,) = torch.autograd.grad(sum(loss(alone, rank) for rank in ranks), alone)
    local = cp.shard(whole, dim).clone().requires_grad_()
    again = cp.unshard(local, dim, gradient=gradient)
    assert torch.equal(again, whole)
    (found,) = torch.autograd.grad(loss(again, cp.rank if gradient == "sum" else 0), local)
    assert found.dtype == dtype
    return (found - cp.shard(truth, dim)).abs().max().item() / truth.abs().max().item()


def in_unequal_groups(_: str) -> str:
    dist.new_group([0])  # of which the other rank is no member
    cp = ContextParallel()
    assert copy.deepcopy({"cp": cp})["cp"] is cp  # a copy of a model attends over the same ranks
    q = cp.shard(torch.randn(1, 16, 2, 8), dim=1)
    try:
        burst_attention(q, q, q, cp=cp)
    except ValueError as error:
        return str(error)
    return "ran"


def after_the_end(_: str) -> list[str]:
    cp = ContextParallel()
    q = torch.randn(1, 8, 2, 8)
    burst_attention(q, q, q, cp=cp)
    dist.destroy_process_group()
    said = []
    for call in (lambda: burst_attention(q, q, q, cp=cp), lambda: cp.unshard(q)):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_context_whose_process_group_was_destroyed_is_told() -> None:
    for said in run_on_ranks(2, after_the_end, ""):
        assert len(said) == 2
        assert all(one.startswith("torch.distributed was ended since this ContextParallel was made") for one in said)


def test_ranks_that_are_in_unequal_numbers_of_groups_are_told_and_do_not_wait_for_each_other() -> None:
    for said in run_on_ranks(2, in_unequal_groups, ""):
        assert "are in 1 to 2 process groups, so torch would name a group of theirs differently on each" in said


def test_a_context_that_is_pickled_says_what_to_save_instead() -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled.* save the model's state_dict\(\)"):
        pickle.dumps({"cp": ContextParallel.single()})


@combinations({"layout": ["zigzag", "contiguous", "striped"], "gradient": ["sum", "same"]})
def test_unshard_gives_each_rank_the_one_process_gradient_of_its_tokens(layout, gradient) -> None:
    for dim in (0, 1, -1) if layout == "zigzag" else (1,):
        assert max(run_on_ranks(3, gradients, layout, gradient, dim, torch.float64)) < 1e-12


def test_gradients_in_bf16_are_as_near_as_the_dtype_allows() -> None:
    assert max(run_on_ranks(2, gradients, "zigzag", "sum", 1, torch.bfloat16)) < 1e-2


def whole_model() -> tuple[float, bool]:
    """Through shard, attention and unshard: largest difference of the whole tensor's gradient, summed over ranks, to
    that of one process, and whether this rank's part is 0 at other ranks' tokens."""
    cp = ContextParallel()
    whole = torch.randn(1, 24, 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = torch.randn(whole.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x, alone = (whole.clone().requires_grad_() for _ in range(2))
    out = cp.unshard(burst_attention(*[cp.shard(x).sin()] * 3, cp=cp), gradient="same")
    (out * weight).sum().backward()
    (dense_attention(*[alone.sin()] * 3, Causal())[0] * weight).sum().backward()
    assert x.grad is not None
    assert alone.grad is not None
    others = torch.ones(24, dtype=torch.bool)
    others[cp.positions(24)] = False
    nothing = not x.grad[:, others].any()
    summed = x.grad.clone()
    if cp.size > 1:
        dist.all_reduce(summed)
    return (summed - alone.grad).abs().max().item(), nothing


@pytest.mark.parametrize("world_size", [1, 2, *slow(4)])
def test_the_gradient_of_a_sharded_tensor_is_the_sum_over_ranks(world_size) -> None:
    for error, nothing in run_on_ranks(world_size, whole_model):
        assert error < 1e-12
        assert nothing


def test_an_unknown_gradient_of_unshard_is_refused() -> None:
    cp = ContextParallel.single()
    x = torch.zeros(1, 4, 2)
    with pytest.raises(ValueError, match="gradient 'mean' is unknown; choose sum or same"):
        cp.unshard(x, gradient="mean")


def second_derivative() -> str:
    cp = ContextParallel()
    x = torch.ones(1, 4, requires_grad=True)
    try:
        torch.autograd.grad(cp.unshard(x).square().sum(), x, create_graph=True)
    except ValueError as error:
        return str(error)
    return ""


def test_a_second_derivative_of_unshard_is_refused() -> None:
    assert all("unshard has no second derivative" in words for words in run_on_ranks(2, second_derivative))
