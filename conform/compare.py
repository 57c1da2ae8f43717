"""Is an answer right, and if not, where does it begin to be wrong and what does that look like?

The tolerance of a tensor is the error that the dtype itself makes: the same problem on one process in that dtype beside
float64, times FACTOR. These measures have to hold: the norm of the difference over that of the truth, and the largest
difference of one row (a token's head, a row of a matrix) over the size that rows usually have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from conform import reference
from conform.answer import RankAnswer, changed_token, company, rewritten
from conform.cases import ConformCase
from conform.causes import likely_cause, row_norms
from conform.target import CaseProblem

# Times the dtype's own error. In bfloat16 that error is large, so the factor is small; in the others there is room for
# another order of sums, and a mistake is larger by orders of magnitude.
FACTOR = {"fp64": 64.0, "fp32": 64.0, "bf16": 4.0}
_EPS = {"fp64": 2.0**-52, "fp32": 2.0**-23, "bf16": 2.0**-7}
_LEAST = {"fp64": 2.0, "fp32": 2.0, "bf16": 0.25}  # eps that the own error counts as at least: it is small by chance
_ENOUGH = 256  # elements over which rounding averages out
_NOTHING = 1e-3  # of the largest gradient's size: one below it is 0 but for rounding, as where a query sees one key


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A wrong tensor. Places are None where they do not apply."""

    tensor: str
    error: float  # norm of the difference over that of the truth
    bound: float
    token: int | None = None  # the first wrong one, in positions of the whole sequence
    row: int | None = None  # of the batch, or of a matrix
    rank: int | None = None  # which holds the token, or whose answer differs
    head: int | None = None
    ulps: float | None = None  # the difference at that place in units in the last place of the dtype
    found: float | None = None
    expected: float | None = None
    cause: str = ""

    def sentence(self) -> str:
        """What is wrong, and where it begins."""
        if math.isnan(self.error):
            return f"{self.tensor}: {self.cause}"
        parts = [f"{name} {value}" for name, value in self._place()]
        at = f", first at {', '.join(parts)}" if parts else ""
        size = "" if self.ulps is None else f" by {self.ulps:.3g} ulp ({self.found:.6g} for {self.expected:.6g})"
        text = f"{self.tensor} differs by {self.error:.2e}, expected at most {self.bound:.1e}{at}{size}"
        return f"{text}; {self.cause}" if self.cause else text

    def _place(self) -> list[tuple[str, int]]:
        named = {"token": self.token, "rank": self.rank, "head": self.head, "row": self.row}
        return [(name, value) for name, value in named.items() if value is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The truth of one result, and the same in the target's dtype on one process."""

    truth: Mapping[str, Tensor]
    own: Mapping[str, Tensor]


@lru_cache(maxsize=256)
def expected(case: ConformCase) -> list[Expected]:
    """What each result of an answer has to be, in order."""
    return _training(case) if case.kind == "training" else _calls(case)


def _calls(case: ConformCase) -> list[Expected]:
    problem, way = case.problem, case.way
    first, second = reference.call_tensors(problem, 2)
    if way == "strided":
        first["dout"] = first["dout"][..., :1].expand_as(first["dout"])

    def of(tensors: Mapping[str, Tensor]) -> Expected:
        return _in_both_dtypes(problem, partial(reference.call_truth, problem, tensors))

    if way == "crossed":
        return [of(first), of(second)]
    if way == "leak":
        loud = of(rewritten(first, changed_token(problem)))
        return [of(first), Expected(truth={"out": loud.truth["out"]}, own={"out": loud.own["out"]})]
    return [of(first)] * (2 if way == "repeated" else 1)


def _training(case: ConformCase) -> list[Expected]:
    problem, way = case.problem, case.way
    state = reference.weights(problem)

    def of(data: Sequence[Mapping[str, Tensor]]) -> Expected:
        return _in_both_dtypes(problem, partial(reference.training_truth, problem, state, data))

    if way == "rewritten":
        return [of(data) for data in company(problem)]
    step = of(reference.batches(problem))
    loss = Expected(truth={"loss": step.truth["loss"]}, own={"loss": step.own["loss"]})
    return {"evaluated": [loss, step, loss], "models": [step, step], "same": [step, step]}.get(way, [step])


def _in_both_dtypes(problem: CaseProblem, compute: Callable[[torch.dtype], Mapping[str, Tensor]]) -> Expected:
    """What `compute` gives in float64 and in the problem's dtype. The error of float64 itself has no truth: it is that
    of float32, scaled down."""
    truth = compute(torch.float64)
    found = compute(torch.float32 if problem.dtype == "fp64" else problem.torch_dtype)
    own = {name: each.detach().double() for name, each in found.items()}
    if problem.dtype == "fp64":
        shrink = _EPS["fp64"] / _EPS["fp32"]
        own = {name: truth[name] + (each - truth[name]) * shrink for name, each in own.items()}
    return Expected(truth=truth, own=own)


def _rounding(problem: CaseProblem) -> str:
    """The dtype that rounds the results: under autocast that of the products."""
    return "bf16" if problem.autocast else problem.dtype


def _holder(held: Sequence[Sequence[int]], token: int | None) -> int | None:
    """The rank that holds a token; None where that is not known."""
    return next((rank for rank, own in enumerate(held) if token in own), None)


def compare(case: ConformCase, answers: Sequence[RankAnswer]) -> list[Difference]:
    """What is wrong with the answers of all ranks, in order of rank; empty where nothing is. The first difference is
    the one to look at."""
    held = [answer.held for answer in answers]
    tokens = _token_ids(case) if case.kind == "training" else None
    if tokens is not None:
        held = [[tokens[each] for each in ids if each in tokens] for ids in held]
    found: list[Difference] = []
    for number, want in enumerate(expected(case)):
        if case.way == "leak" and number == 1:
            found += _leaked(case, answers[0].results, want, held)
            continue
        result = answers[0].results[number]
        wrong = _judged(case, result, want, held, tokens)
        found += wrong
        if not wrong:
            found += _others(case, answers, number)
    if case.way in ("repeated", "same") and not found:
        found += _not_repeated(answers[0].results)
    for rank, answer in enumerate(answers):
        for name in answer.changed:
            found.append(_said(name, "the call overwrote this input", rank))
        if answer.sent and answer.sent["counted"] > answer.sent["claimed"]:
            text = f"sent {answer.sent['counted']:,} bytes, expected at most the {answer.sent['claimed']:,} claimed"
            found.append(_said("bytes", text, rank))
    return found


def _said(tensor: str, text: str, rank: int | None = None) -> Difference:
    """A difference that has no size."""
    named = text if rank is None else f"rank {rank}: {text}"
    return Difference(tensor=tensor, error=math.nan, bound=0.0, rank=rank, cause=named)


def _judged(
    case: ConformCase,
    result: Mapping[str, Tensor],
    want: Expected,
    held: Sequence[Sequence[int]],
    tokens: Mapping[int, int] | None,
) -> list[Difference]:
    found = []
    if absent := [name for name in want.truth if name not in result]:
        text = f"absent from what gather returned ({len(absent)} of {len(want.truth)}, such as {absent[0]})"
        found.append(_said(absent[0], text))
    sizes = [_usual(each) for name, each in want.truth.items() if name not in ("loss", "out")]
    largest = max(sizes, default=0.0)
    for name, truth in want.truth.items():
        if name in result:
            wrong = _difference(case, name, result[name], truth, want.own[name], largest, held, tokens)
            if wrong is not None:
                found.append(wrong)
    return found


def _usual(tensor: Tensor) -> float:
    """Root mean square of the elements."""
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0


def bounds(problem: CaseProblem, truth: Tensor, own: Tensor, largest: float = 0.0) -> tuple[float, float, float]:
    """(relative bound of the norm, absolute bound of a row, the norm that errors are relative to). `largest` is the
    usual element of the largest gradient."""
    dtype = _rounding(problem)
    least = _LEAST[dtype] * _EPS[dtype]
    usual = _usual(truth)
    if usual <= _NOTHING * largest:
        usual = largest
    usual = max(usual, 1e-300)
    size = usual * math.sqrt(truth.numel())
    off = own.double() - truth
    of_norm = FACTOR[dtype] * max(float(off.norm()) / size, least)
    width = math.sqrt(truth.shape[-1]) if truth.ndim > 1 else 1.0
    of_row = FACTOR[dtype] * max(float(row_norms(off).max()), least * max(float(row_norms(truth).max()), usual * width))
    return of_norm, of_row, size


def _difference(
    case: ConformCase,
    name: str,
    result: Tensor,
    truth: Tensor,
    own: Tensor,
    largest: float,
    held: Sequence[Sequence[int]],
    tokens: Mapping[int, int] | None,
) -> Difference | None:
    problem = case.problem
    if result.shape != truth.shape:
        return _said(
            name, f"is {list(result.shape)} where {list(truth.shape)} was expected; gather has to return it whole"
        )
    of_norm, of_row, size = bounds(problem, truth, own, 0.0 if name in ("loss", "out") else largest)
    off = result.double() - truth
    error = float(off.norm()) / size
    rows = row_norms(off)
    if error <= of_norm and bool((rows <= of_row).all()) and not _has_factor(problem, result, truth, own):
        return None
    wrong = ~(rows <= of_row)  # NaN is wrong
    if not bool(wrong.any()):
        wrong = rows >= rows.max()
    place = _first(wrong, name, tokens)
    index = tuple(place)
    row_found, row_truth = (
        (each.double()[index] if each.ndim else each.double()).reshape(-1) for each in (result, truth)
    )
    at = int((row_found - row_truth).abs().nan_to_num(nan=math.inf).argmax())
    there, true = float(row_found[at]), float(row_truth[at])
    peak = float(row_truth.abs().max()) or _usual(truth) or 1.0
    ulp = _EPS[_rounding(problem)] * 2.0 ** math.floor(math.log2(peak))
    token, head, row = _names(name, place, problem, truth, tokens)
    return Difference(
        tensor=name,
        error=error if math.isfinite(error) else math.inf,
        bound=of_norm,
        token=token,
        row=row,
        rank=_holder(held, token),
        head=head,
        ulps=abs(there - true) / ulp if math.isfinite(there) else math.inf,
        found=there,
        expected=true,
        cause=likely_cause(case, name, result.double(), truth, wrong, of_row, held),
    )


def _has_factor(problem: CaseProblem, result: Tensor, truth: Tensor, own: Tensor) -> bool:
    """A tensor in bfloat16 that is the truth times a factor near 1: rounding has no direction, and would hide it."""
    square = float(truth.square().sum())
    if _rounding(problem) != "bf16" or truth.numel() < _ENOUGH or not square:
        return False
    found, usual = (abs(float((each.double() * truth).sum()) / square - 1) for each in (result, own))
    return found > max(FACTOR["bf16"] * usual, _EPS["bf16"])


def _first(wrong: Tensor, name: str, tokens: Mapping[int, int] | None) -> list[int]:
    """Index of the first wrong row: by token where rows have one."""
    places: list[list[int]] = wrong.nonzero().tolist()
    if wrong.ndim == 3:  # batch, token, head
        return min(places, key=lambda place: (place[1], place[0], place[2]))
    if tokens is not None and name == "model.embed_tokens.weight":
        return min(places, key=lambda place: tokens.get(place[0], 1 << 30))
    return places[0] if places[0] else [0]


def _names(
    name: str, place: Sequence[int], problem: CaseProblem, truth: Tensor, tokens: Mapping[int, int] | None
) -> tuple[int | None, int | None, int | None]:
    """(token, head, row) of a place, None where they do not apply."""
    if truth.ndim == 4:
        return place[1], place[2], place[0] if problem.batch > 1 else None
    if name == "dsinks":
        return None, place[0], None
    if name == "loss":
        return None, None, None
    if name == "model.embed_tokens.weight" and tokens is not None and place[0] in tokens:
        return tokens[place[0]], None, place[0]
    if any(f".{each}_proj." in name for each in "qkv"):
        return None, place[0] // problem.head_dim, place[0]
    return None, None, place[0]


def _token_ids(case: ConformCase) -> dict[int, int] | None:
    """Position by token id, where no token of the step occurs twice."""
    batches = reference.batches(case.problem)
    ids = batches[0]["input_ids"].flatten().tolist()
    if len(batches) > 1 or case.problem.batch > 1 or len(set(ids)) < len(ids) or case.problem.tied:
        return None
    return {each: position for position, each in enumerate(ids)}


def _others(case: ConformCase, answers: Sequence[RankAnswer], number: int) -> list[Difference]:
    """Ranks whose results are not those of rank 0, to a rounding."""
    problem = case.problem
    first = answers[0].results[number]
    close = 4 * _EPS[_rounding(problem)]
    for rank, answer in enumerate(answers[1:], 1):
        for name, each in answer.results[number].items():
            if name not in first or each.shape != first[name].shape:
                return [_said(name, "has another shape than on rank 0, or is absent there", rank)]
            if not torch.allclose(each, first[name], rtol=close, atol=close * _usual(first[name]), equal_nan=True):
                return [_said(name, "is not what rank 0 returned; the result has to be the same on every rank", rank)]
    return []


def _not_repeated(results: Sequence[Mapping[str, Tensor]]) -> list[Difference]:
    first, second = results
    return [
        _said(
            name, f"has other bits in a second run, in {int((each != second[name]).sum())} of {each.numel()} elements"
        )
        for name, each in first.items()
        if not torch.equal(each, second[name])
    ]


def _leaked(
    case: ConformCase, results: Sequence[Mapping[str, Tensor]], loud: Expected, held: Sequence[Sequence[int]]
) -> list[Difference]:
    """Output that changed though it may not see the token that changed; and where it may, the wrong output."""
    problem, token = case.problem, changed_token(case.problem)
    quiet_out, loud_out = results[0]["out"], results[1]["out"]
    ends = torch.tensor(problem.documents or (problem.tokens,)).cumsum(0)
    document_S: Tensor = torch.searchsorted(ends, torch.arange(problem.tokens), right=True)
    earlier_S: Tensor = (torch.arange(problem.tokens) < token) & (problem.mask == "causal")
    blind_S: Tensor = document_S.ne(document_S[token]) | earlier_S
    moved_BSN = (loud_out - quiet_out).norm(dim=-1)
    reached = moved_BSN[:, blind_S] > _EPS[problem.dtype] * float(quiet_out.norm(dim=-1).max())
    if bool(reached.any()):
        positions = blind_S.nonzero().flatten()[reached.any(dim=0).any(dim=-1)]
        first = int(positions[0])
        other = "another document" if document_S[first] != document_S[token] else "a later token"
        error = float(moved_BSN[:, first].max())
        return [Difference(
            tensor="out", error=error, bound=0.0, token=first, rank=_holder(held, first),
            cause=f"token {first} sees {other}: its output changed with token {token}",
        )]  # fmt: skip
    return _judged(case, results[1], loud, held, None)
