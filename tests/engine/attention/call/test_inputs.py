"""What attention and its context refuse, before any rank waits for another."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from engine import ContextParallel, burst_attention, prepare_attention
from engine.attention.algorithms.saved import save_suffix
from engine.attention.comm.p2p import BrokenContext, PeerLost
from engine.attention.masks import Causal
from engine.attention.resolve import choose_layout
from engine.linear.convolution import with_earlier
from engine.linear.order import to_consecutive
from engine.linear.scan import StateScan
from tests.plans import plan_attention
from tests.ranks import run_on_ranks

Q = torch.zeros(1, 8, 4, 16)


@pytest.mark.parametrize(
    ("q", "k", "words"),
    [
        (Q[:, :0], Q[:, :0], "is empty"),
        (Q[:0], Q[:0], "is empty"),
        (Q, Q[:, :, :0], "is empty"),
        (Q.long(), Q.long(), "pass a floating-point dtype"),
        (Q, Q.to("meta"), "move them to one device"),
        (Q, Q.double(), "pass one dtype"),
    ],
)
def test_tensors_that_no_kernel_could_take_are_refused(q, k, words) -> None:
    with pytest.raises(ValueError, match=words):
        burst_attention(q, k, k)


BHSD = torch.zeros(2, 4, 16, 8)  # 4 heads, 16 tokens


@pytest.mark.parametrize(
    ("q", "k", "words"),
    [
        (BHSD, BHSD, r"4 tokens with 16 heads.*give tensor_layout=\"BHSD\".*or tensor_layout=\"BSHD\""),
        (BHSD, BHSD[:, :2], r"give tensor_layout=\"BHSD\" where heads come before tokens"),
        (BHSD[0], BHSD[0], r"give tensor_layout=\"THD\" for \[tokens, heads, head_dim\]"),
        (torch.zeros(1, 8, 4, 512), None, r"head_dim 512.*no GPU kernel"),
        (Q, torch.zeros(1, 8, 4), r"\[batch, tokens, heads, head_dim\]"),
    ],
)
@pytest.mark.parametrize("call", ["burst_attention", "prepare_attention"])
def test_tensors_that_look_transposed_are_refused_with_the_layouts_to_name(call, q, k, words) -> None:
    k = q if k is None else k
    with pytest.raises(ValueError, match=words):
        burst_attention(q, k, k) if call == "burst_attention" else prepare_attention(q, k)


def test_a_layout_that_is_named_is_taken_as_it_is() -> None:
    for layout, q in (("BSHD", BHSD), ("BHSD", BHSD), ("BHSD", BHSD.transpose(1, 2)), ("THD", BHSD[0])):
        out, lse = burst_attention(q, q, q, tensor_layout=layout, return_lse=True)
        assert out.shape == q.shape
        batch, tokens, heads = {"BSHD": (0, 1, 2), "BHSD": (0, 2, 1), "THD": (None, 0, 1)}[layout]
        assert lse.shape == (*(() if batch is None else (q.shape[0],)), q.shape[heads], q.shape[tokens])
    wide = torch.zeros(1, 8, 4, 512)
    assert burst_attention(wide, wide, wide, tensor_layout="BSHD").shape == wide.shape


@pytest.mark.parametrize(
    ("layout", "shape", "words"),
    [
        ("SBHD", (1, 8, 4, 16), "tensor_layout 'SBHD' is unknown; choose BSHD, BHSD or THD"),
        ("THD", (1, 8, 4, 16), r"tensor_layout THD needs \[tokens, heads, head_dim\], found q \(1, 8, 4, 16\)"),
        ("BHSD", (8, 4, 16), r"tensor_layout BHSD needs \[batch, heads, tokens, head_dim\], found q \(8, 4, 16\)"),
    ],
)
def test_tensors_that_a_named_layout_does_not_fit_are_refused(layout, shape, words) -> None:
    q = torch.zeros(shape)
    with pytest.raises(ValueError, match=words):
        burst_attention(q, q, q, tensor_layout=layout)
    with pytest.raises(ValueError, match=words):
        prepare_attention(q, q, tensor_layout=layout)


def test_results_in_another_layout_than_named_are_not_saved() -> None:
    out, lse = burst_attention(BHSD, BHSD, BHSD, tensor_layout="BHSD", return_lse=True)
    with pytest.raises(ValueError, match="give the tensor_layout of the call"):
        save_suffix(out, lse, ContextParallel.single(), 0.5)


@pytest.mark.parametrize("scale", [0, -0.5, math.inf, math.nan])
def test_a_scale_that_shows_hidden_keys_is_refused(scale) -> None:
    with pytest.raises(ValueError, match="finite factor above 0"):
        burst_attention(Q, Q, Q, scale=scale)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_sparse_tensor_is_refused_after_dense_ones_of_its_shape(which) -> None:
    prepared = prepare_attention(Q, Q)
    tensors = [Q, Q, Q]
    for call in (burst_attention, prepared):
        call(*tensors)  # plans are kept by shape
    tensors[which] = Q.to_sparse()
    for call in (burst_attention, prepared):
        with pytest.raises(ValueError, match=r"q, k, v are torch.*sparse_coo.*; pass dense tensors"):
            call(*tensors)


def one_of_two() -> ContextParallel:
    """A context that takes itself for one of two ranks, until it sends something."""
    found = copy.copy(ContextParallel.single())
    found.size = 2
    return found


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: burst_attention(Q, Q, Q, cp=0.5), r"cp is a float; pass a ContextParallel"),
        (lambda: prepare_attention(Q, Q, cp="auto"), r"cp is a str; pass a ContextParallel"),
        (lambda: burst_attention(Q, Q, Q, scale="auto"), "scale is 'auto'; give a finite factor above 0"),
        (lambda: burst_attention(Q, Q, Q, scale=torch.tensor(0.5)), r"scale is tensor\(0.5000\); give a finite factor"),
        (lambda: burst_attention(Q.numpy(), Q, Q), "q, k, v are ndarray, Tensor, Tensor; pass torch tensors"),
        (lambda: burst_attention(Q, Q, None), "q, k, v are Tensor, Tensor, NoneType; pass torch tensors"),
        (lambda: prepare_attention([Q], Q), "q, k, v are list, Tensor, Tensor; pass torch tensors"),
        (lambda: burst_attention(Q.to_sparse(), Q, Q), "q, k, v are torch.sparse_coo, .*; pass dense tensors"),
        (lambda: burst_attention(Q, Q, Q, saved=Q), "saved is a Tensor; pass what save_suffix returned"),
        (lambda: ContextParallel([0, 1]), "group is a list; pass a process group"),
        (lambda: ContextParallel.single().positions(-8), "seq_len -8 is no length"),
        (lambda: ContextParallel.single().shard(Q, dim=4), "dim 4 is none of the 4 dimensions"),
        (lambda: ContextParallel.single().shard(Q, dim=1.0), "dim 1.0 is none of the 4 dimensions"),
        (lambda: one_of_two().unshard(Q, dim=9), "dim 9 is none of the 4 dimensions"),
        (lambda: one_of_two().unshard(torch.zeros(())), "dim 1 is none of the 0 dimensions"),
        (lambda: one_of_two().unshard([1, 2]), "tensor is list; pass a torch tensor of this rank's tokens"),
        (lambda: ContextParallel.single().shard([1, 2], dim=0), "tensor is list; pass a torch tensor"),
        (lambda: ContextParallel.single().positions("4k"), "seq_len '4k' is no length; give the number of tokens"),
        (lambda: choose_layout(Causal(), 64, 0), "seq_len 64 and cp_size 0 are not both counts above 0"),
        (lambda: choose_layout(Causal(), "64", 2), "seq_len '64' and cp_size 2 are not both counts above 0"),
    ],
)
def test_arguments_of_another_kind_are_refused_with_the_one_to_pass(call, words) -> None:
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("mask", ["causal", Causal, torch.ones(16, 16).tril().bool()])
def test_an_argument_that_is_no_mask_is_refused(mask) -> None:
    with pytest.raises(ValueError, match=r"such as burst.Causal\(\)") as refused:
        burst_attention(Q, Q, Q, mask=mask)
    assert "\n" not in str(refused.value)
    with pytest.raises(ValueError, match=r"such as burst.Causal\(\)"):
        choose_layout(mask, 64, 2)


@pytest.mark.parametrize("parts", [0, -1, 3])
def test_parts_that_do_not_divide_the_heads_are_refused(parts) -> None:
    words = f"num_head_chunks {parts} does not divide the 4 KV heads" if parts > 0 else f"num_head_chunks is {parts};"
    with pytest.raises(ValueError, match=words):
        burst_attention(Q, Q, Q, schedule="ulysses", num_head_chunks=parts)


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    q = torch.randn(1, 8, 4, 16, requires_grad=True)
    with pytest.raises(ValueError, match="no second derivative"):
        torch.autograd.grad(burst_attention(q, q, q).sum(), q, create_graph=True)


def refusals() -> list[str]:
    """Why this rank was refused: the copy engine it lacks, lengths that do not split, a group that it is not in."""
    node, nodes = ContextParallel(), ContextParallel(node_size=1)
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]

    def plan(cp: ContextParallel, schedule: str) -> object:
        return plan_attention(Q, Q, mask=Causal(), cp=cp, schedule=schedule, exchange="copy_engine")

    found = []
    for refused in (
        lambda: plan(node, "ulysses"),
        lambda: plan(nodes, "ulysses"),
        lambda: plan(nodes, "usp_transposed"),
        lambda: node.positions(10),
        lambda: node.unshard(torch.zeros(1, 5)),
        lambda: ContextParallel(group=groups[1 - dist.get_rank()]),
    ):
        try:
            found.append(f"not refused: {refused()}")
        except ValueError as reason:
            found.append(str(reason))
    return found


def warnings_without_cp() -> list[list[str]]:
    """Of calls without `cp`: before a context of several ranks, after, once more, and by name."""
    attend = functools.partial(burst_attention, Q, Q, Q)
    found = []
    for call in (attend, ContextParallel, attend, attend, lambda: attend(cp=ContextParallel.single())):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            kept = call()
        found.append([str(each.message) for each in said])
        if isinstance(kept, ContextParallel):
            context = kept
    assert context.size == 2
    return found


def test_a_call_without_cp_beside_a_context_of_several_ranks_warns_once() -> None:
    for found in run_on_ranks(2, warnings_without_cp):
        assert [len(words) for words in found] == [0, 0, 1, 0, 0]
        assert "this process has a context of 2 ranks; pass cp for shards" in found[2][0]


def refusals_of_sinks(prepared: bool) -> str:
    cp = ContextParallel()
    sinks_N = torch.zeros(4) if cp.rank else None
    try:
        if prepared:
            prepare_attention(Q, Q, cp=cp)(Q, Q, Q, sinks_N=sinks_N)
        else:
            burst_attention(Q, Q, Q, cp=cp, sinks_N=sinks_N)
    except (ValueError, PeerLost, BrokenContext) as error:
        return str(error)
    return "not refused"


def test_sinks_on_some_ranks_alone_are_refused() -> None:
    for found in run_on_ranks(2, refusals_of_sinks, False):
        assert found.startswith("ranks do not agree on this call: rank 0 has ")
        assert "sinks" in found


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs the copy engine runs")
def test_a_context_refuses_what_it_cannot_do_on_every_rank() -> None:
    for rank, found in enumerate(run_on_ranks(2, refusals)):
        assert [words.split("; ")[0] for words in found] == [
            "exchange copy_engine needs CUDA GPUs, found cpu",
            "exchange copy_engine needs CUDA GPUs, found cpu",
            "exchange copy_engine needs CUDA GPUs, found cpu",
            "seq_len 10 does not split into 2 x cp_size = 4 equal zigzag chunks",
            "seq_len 10 does not split into 2 x cp_size = 4 equal zigzag chunks",
            f"rank {rank} is not in the group it was given",
        ]


def calls_with_tensors_that_are_not_sent() -> tuple[dict[str, str], bool]:
    """What calls with wrapped and transformed tensors raise, and whether the last plain one has a result."""
    cp, plain = ContextParallel(), torch.ones(1, 8, 2, 8)
    mesh = init_device_mesh("cpu", (2,))
    prepared = prepare_attention(plain, plain, cp=cp, kernel="reference")
    calls = {
        "call": lambda q: burst_attention(q, plain, plain, cp=cp, kernel="reference"),
        "prepared": lambda q: prepared(q, plain, plain),
        "unshard": cp.unshard,
    }

    def dual(call):
        with forward_ad.dual_level():
            return call(forward_ad.make_dual(plain, plain))

    ways = {
        "DTensor": lambda call: call(DTensor.from_local(plain, mesh, [Replicate()])),
        "AsyncCollectiveTensor": lambda call: call(all_reduce(plain, "sum", mesh.get_group())),
        "grad": lambda call: torch.func.grad(lambda q: call(q).sum())(plain),
        "vmap": lambda call: torch.func.vmap(call)(plain[None]),
        "jvp": lambda call: torch.func.jvp(call, (plain,), (plain,)),
        "tangent": dual,
    }
    found = {}
    for (way, run), (name, call) in itertools.product(ways.items(), calls.items()):
        try:
            run(call)
            found[f"{way}, {name}"] = "nothing"
        except (ValueError, RuntimeError) as error:
            found[f"{way}, {name}"] = f"{type(error).__name__}: {error}"
    return found, all(call(plain).isfinite().all() for call in calls.values())


def test_tensors_that_cannot_be_sent_are_refused_on_several_ranks_before_any_message() -> None:
    for found, works in run_on_ranks(2, calls_with_tensors_that_are_not_sent):
        for case, words in found.items():
            wrapper = case.split(",")[0] if "Tensor" in case else None
            expected = f"{wrapper} is a tensor around others" if wrapper else "a tensor is in a transform of torch.func"
            assert words.startswith(f"ValueError: {expected}"), (case, words)
        assert works


def batched_backwards() -> tuple[dict[str, str], bool]:
    """What backwards of a batch of gradients raise, and whether the gradients of one are there afterwards."""
    cp = ContextParallel()
    q = torch.randn(1, 8, 2, 4, dtype=torch.float64, requires_grad=True)
    calls = {
        "attention": lambda q: burst_attention(q, q, q, cp=cp),
        "LSE": lambda q: burst_attention(q, q, q, cp=cp, return_lse=True)[1],
        "ulysses": lambda q: burst_attention(q, q, q, cp=cp, schedule="ulysses"),
        "unshard": cp.unshard,
        "the short convolution": lambda q: with_earlier(q.flatten(2), 3, cp),
        "the scan of states": lambda q: StateScan(cp)(*2 * (q[:, :4].transpose(1, 2),)),
        "the order of tokens": lambda q: to_consecutive(q.flatten(2), cp),
    }
    ways = {
        "is_grads_batched": lambda out: torch.autograd.grad(
            out, q, torch.ones(3, *out.shape, dtype=out.dtype), is_grads_batched=True, retain_graph=True
        ),
        "vmap": lambda out: torch.func.vmap(lambda gradient: torch.autograd.grad(out, q, gradient, retain_graph=True))(
            torch.ones(3, *out.shape, dtype=out.dtype)
        ),
    }
    found, finite = {}, []
    for (name, call), (way, run) in itertools.product(calls.items(), ways.items()):
        try:
            run(out := call(q))
            found[f"{name}, {way}"] = "nothing"
        except (ValueError, RuntimeError) as error:
            found[f"{name}, {way}"] = f"{type(error).__name__}: {error}"
        finite.append(torch.autograd.grad(out.sum(), q)[0].isfinite().all().item())
    return found, all(finite)


def test_a_batch_of_gradients_is_refused_on_several_ranks_before_any_message() -> None:
    for found, works in run_on_ranks(2, batched_backwards):
        for case, words in found.items():
            name = case.split(",")[0]
            operation = name if name.startswith("the ") or name == "unshard" else "attention"
            assert words.startswith(f"ValueError: the gradient of {operation} is in a batch of is_grads_batched"), case
        assert works


def test_one_rank_differentiates_forwards() -> None:
    q = torch.randn(1, 8, 2, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with forward_ad.dual_level():
        out = burst_attention(forward_ad.make_dual(q, torch.ones_like(q)), q, q, kernel="reference")
        found = forward_ad.unpack_dual(out).tangent
    step = 1e-6
    ahead, behind = (burst_attention(q + sign * step, q, q, kernel="reference") for sign in (1, -1))
    assert (found - (ahead - behind) / (2 * step)).abs().max() < 1e-8
