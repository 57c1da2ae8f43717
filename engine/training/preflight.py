"""Checks of a training run before a rank starts: its settings against its data, weights or checkpoints.

No torch: the program that starts the ranks checks first, and writes nothing when a check fails. The ranks check again,
since a file may have changed in between.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from engine.combinations import vocabulary_unsupported_reason
from engine.data import is_built, open_tokens
from engine.data.sequences import PackedSequences, TokenSpan, TrainingData, spans, training_sequences
from engine.data.store import StoreHeader, TokenStore, sha256_of_parts
from engine.data.tokenizers import vocabulary_of_file
from engine.shape import ModelShape
from engine.training.config import Order, TrainingConfig
from engine.training.files import checkpoints_directory, read_metrics
from engine.training.manifest import checkpoints, difference, is_complete, read_manifest


def check_start(order: Order) -> tuple[dict[str, object], str]:
    """Raises ValueError when a run cannot start with its data, or not from the weights of `init_from`.

    The store of a text that has none is built here, once for all ranks. Returns the facts of the run that its
    checkpoints hold, and a sentence where one step takes more than all data; else an empty one.
    """
    data = training_data(order.config)
    if needs_weights(order):
        check_weights(order.config, data.store.header)
    wanted, settings = order.config.sequences_per_step, order.config.settings
    note = ""
    if wanted > data.sequences:
        note = (
            f"a step takes {wanted} {'packed rows' if settings.packs else 'sequences'}, but {settings.data} holds "
            f"{data.sequences} to train on, so each step reads some twice or more; give more text, or lower "
            "batch_size, gradient_accumulation or the number of replicas"
        )
    return facts_of(order, data.store.header, data.held_out), note


def needs_weights(order: Order) -> bool:
    """Whether this start reads the weights of `init_from`. Checkpoints of adapters do not hold the model they adapt."""
    return bool(order.config.init_from) and (not order.resume or order.config.settings.lora is not None)


def check_resume(config: TrainingConfig, facts: dict[str, object], run: Path) -> int:
    """The step that the run resumes after, judged by manifests and sizes; 0 where all checkpoints are broken.

    Raises ValueError when it can resume from none, and for metrics that the first rank could not carry on.
    """
    read_metrics(run)
    found = checkpoints(checkpoints_directory(run))
    if not found:
        raise no_checkpoint(f"{checkpoints_directory(run).name}/ holds none")
    for path in found:
        try:
            manifest = read_manifest(path)
        except ValueError:
            continue  # the ranks pass over it and rename it
        if is_complete(path, manifest):
            check_facts(path, manifest.facts, facts)
            check_steps(config, manifest.step)
            return manifest.step
    return 0


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The run's tokens. Rows of packed documents are formed once, here: a million documents take seconds."""

    store: TokenStore
    training: TrainingData
    sequences: int  # of one epoch; packed rows where documents are packed
    held_out: TokenSpan
    held_out_rows: PackedSequences | None = None  # of `held_out`, where rows are packed and evaluated


def training_data(config: TrainingConfig) -> RunData:
    """Raises ValueError for data that cannot be read, ids that the model has no embedding for, and too few tokens."""
    settings = config.settings
    store = open_tokens(settings.data)
    store.check_tokens()
    if unsupported_reason := vocabulary_unsupported_reason(settings, store.vocabulary):
        raise ValueError(unsupported_reason)
    training, held_out = spans(store.header, built=is_built(settings.data))
    sequences = training_sequences(store, training, settings)
    if settings.packs:
        rows = _held_out_rows(config, store, held_out) if config.evaluate.every else None
        count = len(cast(PackedSequences, sequences).packing)
        return RunData(store=store, training=sequences, sequences=count, held_out=held_out, held_out_rows=rows)
    count = training.sequences(settings.seq_len)
    if not count:
        raise ValueError(
            f"seq_len is {settings.seq_len}, but of the {store.header.count} tokens of {settings.data} "
            f"{held_out.stop - held_out.start} are held out, and the {training.stop - training.start} to train on hold "
            f"no such sequence, which takes {settings.seq_len + 1}; give more text or a shorter seq_len"
        )
    wanted, there = config.evaluate.sequences, held_out.sequences(settings.seq_len)
    if config.evaluate.every and there < wanted:
        raise ValueError(
            f"evaluate.sequences is {wanted}, but the {held_out.stop - held_out.start} held-out tokens of "
            f"{settings.data} hold {there} sequences of {settings.seq_len} tokens, and {wanted} take "
            f"{wanted * settings.seq_len + 1}; evaluate fewer, or none with evaluate.every 0, or build a store with a "
            "larger `burst train data --validation`"
        )
    return RunData(store=store, training=sequences, sequences=count, held_out=held_out)


def _held_out_rows(config: TrainingConfig, store: TokenStore, held_out: TokenSpan) -> PackedSequences:
    """Raises ValueError when too few documents are held out."""
    settings, wanted = config.settings, config.evaluate.sequences
    rows: PackedSequences | None = None
    with contextlib.suppress(ValueError):  # no document at all
        rows = PackedSequences(store, held_out, settings)
    there = 0 if rows is None else len(rows.packing)
    if rows is None or there < wanted:
        raise ValueError(
            f"evaluate.sequences is {wanted}, but the {held_out.stop - held_out.start} held-out tokens of "
            f"{settings.data} fill {there} packed rows of {settings.seq_len} tokens; evaluate fewer, or none with "
            "evaluate.every 0, or build a store with a larger `burst train data --validation`"
        )
    return rows


def check_weights(config: TrainingConfig, header: StoreHeader) -> None:
    """Raises ValueError when `init_from` is no whole model, one of another shape, or one of another tokenizer."""
    from engine.hf import hugging_face_shape

    directory = Path(config.init_from)
    check_shape(directory, hugging_face_shape(directory), config.settings.model)
    tokenizer = directory / "tokenizer.json"
    vocabulary = vocabulary_of_file(tokenizer)
    if vocabulary is not None and vocabulary != header.vocabulary:
        raise ValueError(
            f"init_from {directory} has a tokenizer of {vocabulary} tokens, but {config.settings.data} holds tokens of "
            f"tokenizer {header.tokenizer}, which has {header.vocabulary}; build a store with "
            f"`burst train data --tokenizer {tokenizer}`"
        )


def check_shape(directory: Path, found: ModelShape, wanted: ModelShape) -> None:
    """Raises ValueError when the weights in `directory` are of another shape than the model."""
    if replace(found, name=wanted.name) == wanted:
        return
    names = [name for name in wanted.__dataclass_fields__ if name not in ("name", "note")]
    name = next(name for name in names if getattr(found, name) != getattr(wanted, name))
    raise ValueError(
        f"init_from {directory} holds a model with {name} {getattr(found, name)}, but model {wanted.name} has "
        f"{getattr(wanted, name)}; choose the model file of that shape"
    )


def facts_of(order: Order, header: StoreHeader, held_out: TokenSpan) -> dict[str, object]:
    """Facts that a run must share with the checkpoint it resumes from.

    Held-out tokens are counted here, because the header of a text without a store of its own lacks them. None stands
    for no tokens, because 0 was once written for such texts, of which 1% was held out.
    """
    settings = order.config.settings
    weights = sorted(Path(order.config.init_from).glob("*.safetensors"))
    return order.facts | {
        **({"documents of sha256": header.documents_sha256} if settings.packs else {}),
        **({} if settings.lora is None else {"init_from of sha256": sha256_of_parts(weights)}),
        "data of sha256": header.sha256,
        "tokenizer": header.tokenizer,
        "tokenizer of sha256": header.tokenizer_sha256,
        "tokens": header.count,
        "validation tokens": held_out.stop - held_out.start or None,
    }


def check_facts(checkpoint: Path, made: dict[str, object], now: dict[str, object]) -> None:
    """Raises ValueError when the facts of a checkpoint differ from those of the run that resumes from it."""
    if found := difference(made, now):
        again = "give those files again" if "sha256" in found else "set that value again"
        raise ValueError(
            f"checkpoint {checkpoint.name} cannot be resumed from: {found}; {again}, or start anew without --resume"
        )


def check_steps(config: TrainingConfig, done: int) -> None:
    """Raises ValueError when more steps are done than the run has."""
    if done > config.steps:
        raise ValueError(f"steps is {config.steps}, but {done} steps of this run are done; give at least as many")


def no_checkpoint(found: str) -> ValueError:
    """The error of a run without a usable checkpoint; `found` describes the directory."""
    return ValueError(f"there is no checkpoint to resume from ({found}); start anew without --resume")
