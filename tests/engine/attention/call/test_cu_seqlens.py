"""Packed documents given as cu_seqlens are the mask Documents, in every form of the call; wrong values are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine import ContextParallel, burst_attention, prepare_attention
from engine.attention import plan
from engine.attention.masks import Causal, Documents, parse_mask
from tests.ranks import run_on_ranks

BOUNDS = (0, 5, 5, 6, 19, 32)  # one document is empty
MASK = Documents((5, 1, 13, 13))
TOKENS = 32


def shards(cp: ContextParallel, layout: str = "BSHD") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, TOKENS, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)]
    parts = [cp.shard(t) for t in whole]
    return [(part[0] if layout == "THD" else part).clone().requires_grad_() for part in parts]


def results(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each.reshape(-1) for each in (out.detach(), *torch.autograd.grad(out.square().sum(), inputs))]


def wrong_forms(compiles: bool) -> list[str]:
    """Forms of a call whose output or gradients are not the bits of the mask."""
    cp = ContextParallel()
    inputs = shards(cp)
    expected = results(burst_attention(*inputs, mask=MASK, cp=cp), inputs)
    tensor = torch.tensor(BOUNDS, dtype=torch.int32)
    prepared = prepare_attention(*inputs[:2], cu_seqlens=BOUNDS, max_seqlen=13, cp=cp)
    other = prepare_attention(*inputs[:2], cp=cp)

    def direct(q, k, v):
        return burst_attention(q, k, v, cu_seqlens=tensor, max_seqlen=20, cp=cp)

    def as_numbers(q, k, v):
        return burst_attention(q, k, v, cu_seqlens=BOUNDS, cp=cp)

    def replaced(q, k, v):
        return other(q, k, v, cu_seqlens=tensor, max_seqlen=13)

    forms = {"direct": direct, "as numbers": as_numbers, "prepared": prepared, "replaced": replaced}
    if compiles:
        for name, form in tuple(forms.items()):
            forms[name + " compiled"] = torch.compile(form, backend="aot_eager", fullgraph=True)
    found = {name: results(form(*inputs), inputs) for name, form in forms.items()}
    packed = shards(cp, "THD")
    out = burst_attention(*packed, cu_seqlens=tensor, tensor_layout="THD", cp=cp)
    found["THD"] = results(out, packed)
    assert out.shape == packed[0].shape
    return [name for name, each in found.items() if not all(map(torch.equal, each, expected))]


@pytest.mark.parametrize(("ranks", "compiles"), [(1, True), (2, False)])
def test_boundaries_in_a_tensor_or_as_numbers_give_the_bits_of_the_mask(ranks: int, compiles: bool) -> None:
    assert run_on_ranks(ranks, wrong_forms, compiles) == [[]] * ranks


WRONG = [
    ({"cu_seqlens": [1, 32]}, "cu_seqlens starts with 1; it has to start with 0"),
    ({"cu_seqlens": [0, 20, 10, 32]}, "cu_seqlens has 10 after 20; give positions that do not descend"),
    ({"cu_seqlens": [0, 16]}, "1 documents hold 16 tokens and the sequence has 32; give lengths"),
    ({"cu_seqlens": [0]}, "cu_seqlens is without a document; give whole numbers"),
    ({"cu_seqlens": torch.tensor([[0, 32]])}, r"cu_seqlens is of shape \(1, 2\); give whole numbers"),
    ({"cu_seqlens": torch.tensor([0.0, 32.0])}, "cu_seqlens is of float64; give whole numbers"),
    ({"cu_seqlens": np.array([0.0, 5.0, 32.0])}, "cu_seqlens is of float64; give whole numbers"),  # as ints, known
    ({"cu_seqlens": [0, 5.0, 32]}, "cu_seqlens is of float64; give whole numbers"),
    ({"cu_seqlens": [[0, 1], [32]]}, "cu_seqlens is without a document; give whole numbers"),
    ({"cu_seqlens": 32}, r"cu_seqlens is of shape \(\); give whole numbers"),
    ({"cu_seqlens": ["0", "32"]}, "cu_seqlens is of <U2; give whole numbers"),
    ({"cu_seqlens": [0, None, 32]}, "cu_seqlens is of object; give whole numbers"),
    ({"cu_seqlens": []}, "cu_seqlens is without a document; give whole numbers"),
    ({"cu_seqlens": [0, 0]}, "cu_seqlens ends with 0; it has to end with the sequence's length"),
    ({"cu_seqlens": [-3, 32]}, "cu_seqlens starts with -3; it has to start with 0"),
    ({"cu_seqlens": [0, 16, 64]}, "2 documents hold 64 tokens and the sequence has 32; give lengths"),
    ({"cu_seqlens": torch.tensor([0, 32], device="meta")}, "cu_seqlens is a tensor without values of its own; give a"),
    ({"cu_seqlens": torch.tensor([0, 32]).to_sparse()}, "cu_seqlens is a tensor without values of its own; give a"),
    ({"cu_seqlens": [0, 32], "max_seqlen": 32.0}, "max_seqlen is 32.0; give a whole number of tokens, or None"),
    ({"cu_seqlens": [0, 32], "max_seqlen": torch.tensor([20, 12])}, r"max_seqlen is tensor.*; give a whole number"),
    ({"cu_seqlens": [0, 32], "max_seqlen": "32"}, "max_seqlen is '32'; give a whole number of tokens, or None"),
    ({"cu_seqlens": [0, 32], "mask": Causal()}, "cu_seqlens is given beside mask causal; pass one of them"),
    ({"max_seqlen": 8}, "max_seqlen 8 is given without cu_seqlens; pass both, or neither"),
    ({"cu_seqlens": [0, 20, 32], "max_seqlen": 12}, "max_seqlen is 12 and a document has 20 tokens; give the length"),
]


@pytest.mark.parametrize(("given", "words"), WRONG, ids=lambda each: str(each)[:40])
def test_boundaries_that_no_documents_have_are_refused_in_a_sentence(given, words) -> None:
    inputs = shards(ContextParallel.single())
    with pytest.raises(ValueError, match=words):
        burst_attention(*inputs, **given)
    with pytest.raises(ValueError, match=words):
        prepare_attention(*inputs[:2], **given)
    if "mask" not in given:
        with pytest.raises(ValueError, match=words):
            prepare_attention(*inputs[:2])(*inputs, **given)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_boundaries_of_any_whole_numbers_are_taken(dtype) -> None:
    inputs = shards(ContextParallel.single())
    expected = burst_attention(*inputs, mask=MASK)
    given = torch.tensor(BOUNDS, dtype=dtype)
    for bounds in (given, given.numpy(), [each for each in given]):
        assert torch.equal(burst_attention(*inputs, cu_seqlens=bounds, max_seqlen=given[4] - given[3]), expected)
    with pytest.raises(ValueError, match="cu_seqlens is of float64"):
        burst_attention(*inputs, cu_seqlens=list(map(float, BOUNDS)))  # equal to whole numbers that are known


def test_wrong_shapes_beside_boundaries_are_refused_in_a_sentence() -> None:
    q, k, v = shards(ContextParallel.single())
    rows = [each.detach().reshape(2, TOKENS // 2, *each.shape[2:]) for each in (q, k, v)]
    words = 'hold 32 tokens, those of all 2 sequences of the batch, and each has 16; give .* with tensor_layout="THD"'
    with pytest.raises(ValueError, match=words):
        burst_attention(*rows, cu_seqlens=BOUNDS)
    assert burst_attention(*rows, cu_seqlens=[0, 5, 16]).shape == rows[0].shape  # which both rows share
    with pytest.raises(ValueError, match=r"THD needs \[tokens, heads, head_dim\], found q \(1, 32, 4, 8\)"):
        burst_attention(q, k, v, cu_seqlens=BOUNDS, tensor_layout="THD")
    with pytest.raises(ValueError, match=r'q \(32, 4, 8\).* give tensor_layout="THD" for'):
        burst_attention(q[0], k[0], v[0], cu_seqlens=BOUNDS)
    with pytest.raises(
        ValueError, match=r"q \(1, 32, 4, 8\) and k \(1, 16, 2, 8\) differ in batch, tokens or head_dim"
    ):
        burst_attention(q[0], k[0, :16], v[0, :16], cu_seqlens=BOUNDS, tensor_layout="THD")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lengths": (1.5, 2.5)}, r"document lengths \(1.5, 2.5\) are not all whole numbers; give tokens per document"),
        ({"lengths": "ab"}, "document lengths ab are not all whole numbers; give"),
        ({"lengths": 32}, "document lengths 32 are not all whole numbers; give"),
        ({"lengths": (None,)}, "are not all whole numbers; give"),
        ({"lengths": (0, 32)}, r"document lengths \[0, 32\] are not all positive; give"),
        ({"lengths": (-3, 35)}, r"document lengths \[-3, 35\] are not all positive; give"),
        ({"lengths": ()}, r"document lengths \[\] are not all positive; give"),
        ({"lengths": (32,), "left": 1.5}, "documents have left 1.5; give a whole number from 0"),
        ({"lengths": (32,), "causal": "false"}, "documents have causal 'false'; give True or False"),
        ({"lengths": (32,), "repeat": 1}, "documents have repeat 1; give True or False"),
        ({"lengths": (32,), "spans": (2, 9)}, r"document spans \(2, 9\) are not all two positions; give"),
        ({"lengths": (32,), "spans": ((2.0, 9.5),)}, "are not all two positions; give"),
        ({"lengths": (32,), "spans": ((2, 3, 4),)}, "are not all two positions; give"),
    ],
)
def test_lengths_that_no_documents_have_are_refused_in_a_sentence(given, words) -> None:
    with pytest.raises(ValueError, match=words):
        Documents(**given)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("documents:0,32", "are not all positive; give tokens per document"),
        ("documents:0,...", "are not all positive; give tokens per document"),
        ("documents:16,32", "2 documents hold 48 tokens and the sequence has 32; give lengths that sum to it"),
        ("documents:16k", "1 documents hold 16384 tokens and the sequence has 32; give lengths that sum to it"),
        ("documents:32:spans-3-2", r"span \(3, 2\) is empty"),
        *(
            (f"documents:{text}", "is unknown; write full")
            for text in ("", ",", "-3,35", "1.5", "16,16,", "16 16", " 32")
        ),
    ],
)
def test_settings_that_no_documents_have_are_refused_in_a_sentence(setting, words) -> None:
    with pytest.raises(ValueError, match=words):
        burst_attention(*shards(ContextParallel.single()), mask=parse_mask(setting))


def refused_where_ranks_differ() -> str:
    cp = ContextParallel()
    inputs = shards(cp)
    with pytest.raises(ValueError, match="mask") as found:
        burst_attention(*inputs, cu_seqlens=(0, 10 + cp.rank, TOKENS), cp=cp)
    return str(found.value)


def test_ranks_with_other_boundaries_are_refused_on_all() -> None:
    sentences = run_on_ranks(2, refused_where_ranks_differ)
    assert all("documents:10,22" in each and "documents:11,21" in each for each in sentences)


def test_a_tensor_is_read_once_until_it_is_written_to(monkeypatch) -> None:
    reads = []
    of = Documents.from_cu_seqlens
    monkeypatch.setattr(plan.Documents, "from_cu_seqlens", lambda bounds: reads.append(bounds) or of(bounds))
    bounds, inputs = torch.tensor(BOUNDS), shards(ContextParallel.single())
    first = [burst_attention(*inputs, cu_seqlens=bounds) for _ in range(3)][-1]
    assert len(reads) == 1
    bounds[3] = 18
    assert not torch.equal(burst_attention(*inputs, cu_seqlens=bounds), first)
    assert len(reads) == 2


def test_what_is_written_without_a_new_version_is_read_too() -> None:
    inputs = shards(ContextParallel.single())
    bounds = torch.tensor(BOUNDS)
    written = {
        "numpy": lambda: bounds.numpy().__setitem__(3, 7),
        "data": lambda: bounds.data.__setitem__(3, 9),
        "a tensor that shares its memory": lambda: torch.from_numpy(bounds.numpy()).__setitem__(3, 11),
    }
    for who, write in written.items():
        burst_attention(*inputs, cu_seqlens=bounds)
        write()
        found = burst_attention(*inputs, cu_seqlens=bounds)
        assert torch.equal(found, burst_attention(*inputs, cu_seqlens=bounds.tolist())), who


def test_boundaries_of_inference_mode_that_no_documents_have_are_refused_in_a_sentence() -> None:
    inputs = shards(ContextParallel.single())
    with torch.inference_mode():
        for bounds, words in ((torch.tensor([BOUNDS]), "of shape"), (torch.tensor(BOUNDS).double(), "of float64")):
            with pytest.raises(ValueError, match=f"cu_seqlens is {words}"):
                burst_attention(*inputs, cu_seqlens=bounds)


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        (((3, 12),), r"span \(3, 12\) is empty, not inside one document"),
        (((1, 4), (3, 5)), r"span \(3, 5\) is empty, not inside one document, or begins in the one before"),
        (((4, 4),), "is empty"),
        (((-2, 3),), "not inside one document"),
        (((20, 33),), "not inside one document"),
    ],
)
def test_spans_outside_documents_are_refused(spans, words) -> None:
    with pytest.raises(ValueError, match=words):
        Documents((10, 22), spans=spans)
    with pytest.raises(ValueError, match="spans, which are for causal documents"):
        Documents((10, 22), causal=False, spans=((0, 5),))
    with pytest.raises(ValueError, match="left -1; give a whole number"):
        Documents((10, 22), left=-1)
