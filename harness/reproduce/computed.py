"""What needs no measurement: shares of FLOPs, memory of logits and of attention outputs, bytes of the backward pass.

Each number is counted as every other number here (`harness.metrics.flops`, `harness.spec.models`) and put beside the
published one, so that a difference shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache

from engine.settings import BYTES_OF, TrialSettings
from engine.shape import ModelShape
from harness.metrics.flops import work_of
from harness.metrics.throughput import GIB
from harness.predict.published import Published
from harness.reproduce.figures import PaperFigure
from harness.reproduce.points import FigurePoint, model_text, published_points
from harness.spec.models import named_model

BF16, FP32 = BYTES_OF["bf16"], BYTES_OF["fp32"]


@cache
def shape(name: str) -> ModelShape:
    """The shipped model of that name, as published or as ours. Raises UsageError for one that no file describes."""
    return named_model(model_text(name))


def settings_of(model: ModelShape, seq_len: int, mask: str = "causal", task: str = "train") -> TrialSettings:
    """One sequence on one rank: what FLOPs are counted of. Rows about several ranks count the same FLOPs."""
    return TrialSettings(task=task, method="burst", model=model, seq_len=seq_len, mask=mask)  # type: ignore[arg-type]


def attention_share(row: Published) -> float:
    """Attention without a mask over all model FLOPs, at one length."""
    work = work_of(settings_of(shape(row.model), _tokens(row), "full"))
    return work.attention / work.forward


def logits(row: Published) -> float:
    """GiB of the logits of a whole sequence in bf16, one copy."""
    return _tokens(row) * shape(row.model).vocab * BF16 / GIB


def attention_outputs(row: Published) -> float:
    """GiB of the attention outputs of all layers in bf16, of the whole sequence or of its half."""
    model = shape(row.model)
    share = 0.5 if "half" in row.method else 1.0
    return share * model.layers * _tokens(row) * model.heads * model.head_dim * BF16 / GIB


FORMULAS: Mapping[str, Callable[[Published], float]] = {
    "attention_share": attention_share,
    "logits": logits,
    "attention_outputs": attention_outputs,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputedNumber:
    """A published number beside the computed one."""

    row: Published
    computed: float

    @property
    def same(self) -> bool:
        """Whether the computed number, rounded to the digits that are published, is the published one."""
        return self.rounded == Decimal(self.row.text)

    @property
    def rounded(self) -> Decimal:
        """The computed number with as many decimals as the published one has."""
        exponent = Decimal(self.row.text).as_tuple().exponent
        assert isinstance(exponent, int), self.row.text
        return Decimal(repr(self.computed)).quantize(Decimal(1).scaleb(min(0, exponent)))


def digits_of(figure: PaperFigure) -> list[ComputedNumber]:
    """Every published number of a computed figure beside ours; none of a figure that is measured."""
    if not figure.computed:
        return []
    formula = FORMULAS[figure.computed]
    return [ComputedNumber(row=row, computed=formula(row)) for row in figure.rows() if row.value is not None]


def computed_entries(figure: PaperFigure) -> list[FigurePoint]:
    """The points of a computed figure: those that are published, with the numbers of its formula."""
    if not figure.computed:
        return []
    formula = FORMULAS[figure.computed]
    return [
        replace(point, origin="computed", values={row.metric: formula(row)}, note="")
        for point, row in published_points(figure)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardBytes:
    """Bytes per token and hop that the backward of a ring sends, of one rank, by the side that circulates."""

    key_value: int  # K, V and their gradients
    query: int  # Q, dO, dQ, and a row of LSE and of delta

    @property
    def saved(self) -> float:
        return 1 - self.query / self.key_value


def backward_bytes(model: ModelShape, gradient: int = BF16) -> BackwardBytes:
    """Of one layer; inputs in bf16, `gradient` bytes per element of a gradient that crosses a link.

    Without the rows of LSE and delta the query side sends three tensors where the key side sends four: a quarter less.
    """
    query, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return BackwardBytes(
        key_value=2 * keys * (BF16 + gradient),
        query=2 * query * BF16 + query * gradient + 2 * model.heads * FP32,
    )


def _tokens(row: Published) -> int:
    assert row.seq_len is not None, row
    return row.seq_len
