"""What a wrong tensor looks like: rules from the shape of an error to the mistake that usually makes it.

A rule sees the result, the truth and which rows are wrong, and answers with a sentence or with nothing. The first that
answers is the likely cause; it is a hint, and no verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from conform.cases import ConformCase

_ALIKE = 0.02  # of the ratio that a constant ratio may be from ranks, or from their inverse


def row_norms(tensor: Tensor) -> Tensor:
    """Of a token's head, or of a matrix's row; of a vector the size of each element."""
    return tensor.norm(dim=-1) if tensor.ndim > 1 else tensor.abs().reshape(-1)


def likely_cause(
    case: ConformCase,
    name: str,
    result: Tensor,
    truth: Tensor,
    wrong: Tensor,
    of_row: float,
    held: Sequence[Sequence[int]],
) -> str:
    """One clause. `wrong` marks rows, `of_row` bounds the error of one, `held` are the positions of each rank."""
    if not bool(result.isfinite().all()):
        return "NaN or infinity: a row that sees no key in some part, or memory that was not written"
    if not bool(result.any()):
        return "all 0: the gradient is not returned" if name not in ("out", "loss") else "all 0"
    return (
        _scaled(name, result, truth, of_row, len(held))
        or (_of_rows(case, result, truth, wrong, of_row, held) if truth.ndim == 4 else "")
        or _of_heads(case, name, wrong, truth)
        or "no simple pattern: an input, a tile or the order of tokens"
    )


def _scaled(name: str, result: Tensor, truth: Tensor, of_row: float, ranks: int) -> str:
    """Everything is the truth times one number."""
    square = float(truth.square().sum())
    if square == 0:
        return ""
    ratio = float((result * truth).sum()) / square
    if abs(ratio - 1) < _ALIKE**2:
        return ""
    left = result - ratio * truth
    if truth.numel() > 1 and not bool((row_norms(left) <= max(abs(ratio), 1.0) * of_row * 2).all()):
        return ""
    if ranks > 1 and abs(ratio / ranks - 1) < _ALIKE:
        return f"{ratio:.4g} times the truth, as many as ranks: added up where a mean is due, or counted by each rank"
    if ranks > 1 and abs(ratio * ranks - 1) < _ALIKE:
        return f"{ratio:.4g} times the truth, one over the ranks: averaged where a sum is due"
    if name == "loss":
        return f"{ratio:.4g} times the truth: labels lost or counted twice, means of ranks averaged, or tokens unseen"
    return f"{ratio:.5g} times the truth everywhere: a factor, such as the scale or a count of labels"


def _of_rows(
    case: ConformCase, result: Tensor, truth: Tensor, wrong: Tensor, of_row: float, held: Sequence[Sequence[int]]
) -> str:
    """Where in batch, sequence and ranks the wrong tokens are."""
    problem = case.problem
    if problem.batch > 1 and not bool(wrong[0].any()):
        return "right in the first sequence of the batch: state or boundaries of one row used for all"
    tokens = wrong.any(dim=0).any(dim=-1).nonzero().flatten().tolist()
    if _permuted(result, truth, of_row):
        return "the right rows in another order: gather does not undo shard"
    holders = {rank for rank, own in enumerate(held) for token in tokens if token in own}
    starts = list(accumulate(problem.documents, initial=0))[:-1]
    if len(starts) > 1 and set(tokens) <= set(starts):
        return "only first tokens of documents: a boundary is off by one"
    if len(starts) > 1 and tokens[0] > 0 and tokens[0] in starts:
        return f"right up to token {tokens[0]}, where a document starts: boundaries of documents are lost or moved"
    if len(holders) == 1 and len(held) > 1:
        return f"only tokens of rank {min(holders)}: its positions, its part of the mask, or what it receives"
    if problem.window is not None and tokens[0] in (problem.window, problem.window + 1):
        return "right up to the token that the window first cuts: the window is lost or off by one"
    edges = {token for own in held for token in own if token and token - 1 not in own}
    if tokens[0] in edges:
        return f"right up to token {tokens[0]}, where a rank's part begins: positions, or what other ranks send"
    return ""


def _permuted(result: Tensor, truth: Tensor, of_row: float) -> bool:
    if float((result - truth).norm(dim=-1).max()) < 1e-3 * float(truth.norm(dim=-1).max()):
        return False  # rounding
    mine, true = (each.flatten(2).norm(dim=-1).sort(dim=1).values for each in (result, truth))
    return torch.allclose(mine, true, rtol=1e-6, atol=of_row)


def _of_heads(case: ConformCase, name: str, wrong: Tensor, truth: Tensor) -> str:
    if truth.ndim != 4 and name != "dsinks":
        return ""
    heads = (wrong.flatten(0, -2).any(dim=0) if wrong.ndim > 1 else wrong).nonzero().flatten().tolist()
    count = truth.shape[2] if truth.ndim == 4 else truth.shape[0]
    if len(heads) < count:
        listed = ", ".join(map(str, heads[:8]))
        return f"only heads {listed} of {count}: which query heads share a KV head, or which rank has which heads"
    return ""
