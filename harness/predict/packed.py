"""What the rows of a trial on packed documents hold, read from its data before it runs: so that a plan counts the
documents that a record will count, and not one document a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from engine.attention.geometry.balanced import Balanced
from engine.attention.masks import Documents, DocumentsOfBatch
from engine.attention.problem import Problem
from engine.checkpoint.planning.memory_settings import MemorySettings, with_memory_settings
from engine.data import open_tokens
from engine.data.sequences import PackedSequences, TokenSpan
from engine.settings import Checkpoint, TrialSettings
from harness.metrics.flops import StepFlops, tokens_per_step, work_of, work_on_documents

_LOOKED_AT = 64  # micro-batches at most, of which a typical one is taken


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    """What the measured steps of a trial take."""

    tokens: float  # of documents in a step, over all ranks
    pairs: float  # that attention inside them shows, on average over the model's layers
    documents: Documents  # of a micro-batch with about the mean number of pairs

    def applied(self, problem: Problem) -> Problem:
        """Attention of one layer on such a micro-batch, whose documents a layout that depends on them deals anew."""
        assert isinstance(problem.mask, DocumentsOfBatch), problem.mask
        mask, layout = replace(self.documents, left=problem.mask.left), problem.layout
        if isinstance(layout, Balanced) and problem.cp_size > 1:
            layout = mask.dealt(layout)
        return replace(problem, mask=mask, layout=layout)


def packed_rows(settings: TrialSettings) -> PackedRows | None:
    """None for a trial whose rows are not packed, and where its data cannot be read: each row then counts as one
    document, the most work that it can bring."""
    if settings.task != "train" or not settings.packs:
        return None
    # Rows do not depend on what a sweep of methods varies, nor on the planner's choices: data are read once for all.
    plain = with_memory_settings(settings, MemorySettings(checkpoint=Checkpoint()))
    return _packed_rows(
        replace(plain, method="burst", layout="auto", schedule="auto", kernel="auto", memory="", planned="")
    )


@lru_cache(maxsize=64)
def _packed_rows(settings: TrialSettings) -> PackedRows | None:
    try:
        store = open_tokens(settings.data)
        sequences = PackedSequences(store, TokenSpan(start=0, stop=store.header.count), settings)
    except (ValueError, OSError):
        return None
    steps = settings.steps
    counts = sequences.of_steps(steps.warmup, steps.measured)
    micro_batches = settings.gradient_accumulation * settings.dp_size
    first = steps.warmup * micro_batches
    numbers = range(first, first + min(_LOOKED_AT, steps.measured * micro_batches))
    pairs = {number: sequences.counts(sequences.of_micro_batch(number)).pairs for number in numbers}
    mean = counts.pairs / steps.measured / micro_batches
    typical = min(numbers, key=lambda number: abs(pairs[number] - mean))
    return PackedRows(
        tokens=counts.tokens / steps.measured,
        pairs=counts.pairs / steps.measured,
        documents=sequences.documents(typical),
    )


def step_work(settings: TrialSettings) -> StepFlops:
    """`work_of` a trial; of one on packed documents, of those that its data hold."""
    work, rows = work_of(settings), packed_rows(settings)
    return work if rows is None else work_on_documents(work, settings, rows.tokens, rows.pairs)


def step_tokens(settings: TrialSettings) -> float:
    """Tokens of a step, without padding."""
    rows = packed_rows(settings)
    return tokens_per_step(settings) if rows is None else rows.tokens
