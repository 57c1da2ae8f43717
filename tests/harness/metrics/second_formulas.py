"""The figures of a record computed a second time, from docs/reference.md and docs/attention.md: what results.csv must
hold.

Written apart from `harness.metrics` and `engine.attention`, of which it imports nothing but the peaks of hardware: two
programs that agree are harder to get wrong than one. Visible pairs of a mask are counted row by row, or in blocks.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from engine.settings import TrialSettings
from engine.shape import ModelShape
from harness.metrics.hardware import hardware_for
from harness.records.record import Record

Positions = NDArray[np.int64]

Figure = float | int | None

# Columns of results.csv that are computed here again.
COLUMNS: tuple[str, ...] = (
    "dp_size", "nodes", "samples", "rounds", "step_seconds_median", "step_seconds_iqr", "step_seconds_low",
    "step_seconds_high", "forward_seconds_median", "tokens_per_gpu_per_second", "tokens_per_gpu_per_second_low",
    "tokens_per_gpu_per_second_high", "tflops_per_gpu", "mfu", "mfu_ceiling", "hfu", "peak_memory_gib",
    "peak_reserved_gib", "peak_rss_gib", "sent_gib_per_gpu", "loss", "grad_norm", "tflops_ceiling", "peak_tflops",
)  # fmt: skip

_TERA = 10**12
_STUDENT_975 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}  # by degrees of freedom
_NORMAL_975 = 1.959963984540054
ROUNDS_TAKEN_ALL = 5  # up to so many rounds the interval is that of every combination, and is computed again


def figures_of(record: Record) -> dict[str, Figure]:
    """Every figure of COLUMNS, None where the record has none. Raises ValueError for a mask without a second count.

    Intervals of more than ROUNDS_TAKEN_ALL rounds rest on random draws and are left out.
    """
    settings, measured = record.settings, record.measurement
    ranks = settings.world_size
    found: dict[str, Figure] = dict.fromkeys(COLUMNS)
    found["dp_size"] = max(1, ranks // (settings.cp_size * settings.tp_size))
    found["nodes"] = len(set(record.hosts)) * settings.emulate_nodes or None
    if record.status != "ok" or measured is None:
        return found

    step = float(np.median(measured.step_seconds))
    rounds = [part.step_seconds for part in record.rounds if part.step_seconds] or [measured.step_seconds]
    tokens = settings.seq_len * _sequences(settings)
    forward, attention = _forward_flops(settings), _attention_flops(settings)
    # What tflops_per_gpu counts: for attention alone as kernels are quoted, else the model's own work.
    model = 3.0 * forward - _without_weight_gradients(settings)
    quoted = 3.5 * attention if settings.task == "attention" else model
    found |= {
        "samples": len(measured.step_seconds),
        "rounds": len(rounds),
        "step_seconds_median": step,
        "step_seconds_iqr": _middle_half(measured.step_seconds),
        "forward_seconds_median": float(np.median(measured.forward_seconds)) if measured.forward_seconds else None,
        "tokens_per_gpu_per_second": tokens / step / ranks,
        "tflops_per_gpu": quoted / step / ranks / _TERA,
        "peak_memory_gib": _gib(measured.peak_allocated_bytes),
        "peak_reserved_gib": _gib(measured.peak_reserved_bytes),
        "peak_rss_gib": _gib(measured.peak_rss_bytes),
        "sent_gib_per_gpu": _gib(measured.sent_bytes) if _counts_bytes(record) else None,
        "loss": measured.loss[-1] if measured.loss else None,
        "grad_norm": measured.grad_norm[-1] if measured.grad_norm else None,
    }
    if len(rounds) > 2 and (ends := _interval(rounds)):
        low, high = ends
        found |= {
            "step_seconds_low": low,
            "step_seconds_high": high,
            "tokens_per_gpu_per_second_low": tokens / high / ranks,
            "tokens_per_gpu_per_second_high": tokens / low / ranks,
        }

    hardware = hardware_for(record.gpu or measured.device) if settings.dtype == "bf16" else None
    if hardware is None:
        return found
    peak = hardware.peak_bf16_tflops
    per_peak = step * ranks * _TERA * peak
    found["peak_tflops"] = peak
    found["mfu"] = model / per_peak
    found["hfu"] = (model + 0.5 * attention + _repeated_flops(settings)) / per_peak
    if settings.task == "linear" or (settings.task == "attention" and settings.cp_size == 1):
        return found  # the kernel itself
    speeds = hardware.kernel_ceilings.get(measured.chosen.get("kernel", ""))
    of_hardware = hardware.gemm_tflops if settings.linear_dtype == "same" else None  # measured in bf16
    gemm = _own_gemm_speed(settings.model, measured.extra.get("gemm_tflops")) or of_hardware
    products = model - 3.0 * attention
    if (gemm or not products) and (speeds or not attention):
        fastest = products / gemm / _TERA if gemm else 0.0
        if speeds and attention:
            fastest += attention * (1.0 / speeds["forward"] + 2.5 / speeds["backward"]) / _TERA
        found["mfu_ceiling"] = model / fastest / _TERA / peak
        found["tflops_ceiling"] = quoted / fastest / _TERA
    return found


def _sequences(settings: TrialSettings) -> int:
    """Sequences of a step of all replicas."""
    replicas = max(1, settings.world_size // (settings.cp_size * settings.tp_size))
    return settings.batch_size * replicas * (settings.gradient_accumulation if settings.task == "train" else 1)


_FORMED, _MLP = ("q", "k", "v"), ("gate", "up", "down")


def _share(model: ModelShape, letters: str) -> float:
    """Of the layers, those with one of these letters in the pattern."""
    of_layer = itertools.islice(itertools.cycle(model.layer_pattern), model.layers)
    return sum(letter in letters for letter in of_layer) / model.layers


def _layer_weights(model: ModelShape) -> tuple[float, float]:
    """Weights of one layer in matrix products, on average: of queries, keys, values and output, or of a linear layer's
    mixer; of one matrix of the MLP."""
    attention = _formed_weights(model) + model.hidden * model.heads * (model.value_dim or model.head_dim)
    values, per_head = model.linear_heads * model.linear_value_dim, 2 if model.linear == "gated_delta_net" else 1
    keys = model.linear_key_heads * model.linear_key_dim
    mixer = model.hidden * (2 * keys + 3 * values + per_head * model.linear_heads)  # q and k; v, gate and output
    linear = _share(model, "lL")
    return (1 - linear) * attention + linear * mixer, _share(model, "lwf") * model.hidden * model.ffn


def _adapter_weights(settings: TrialSettings, of: Sequence[str] = (*_FORMED, "output", *_MLP)) -> int:
    """Of the adapters of one layer's matrices: two of rank x inputs and rank x outputs for each."""
    model, lora = settings.model, settings.lora
    if lora is None:
        return 0
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    sides = {
        "q": model.hidden + queries, "k": model.hidden + keys, "v": model.hidden + keys,
        "output": model.hidden + queries, "gate": model.hidden + model.ffn, "up": model.hidden + model.ffn,
        "down": model.hidden + model.ffn,
    }  # fmt: skip
    return sum(lora.rank * sides[name] for name in lora.targets if name in of)


def _without_weight_gradients(settings: TrialSettings) -> float:
    """FLOPs of frozen matrices' own gradients, which are not formed."""
    model = settings.model
    if settings.lora is None or settings.task != "train":
        return 0.0
    projections, matrix = _layer_weights(model)
    layer = projections + (3 if model.gated else 2) * matrix
    return 2.0 * settings.seq_len * _sequences(settings) * (model.layers * layer + model.hidden * model.vocab)


def _recurrence(model: ModelShape) -> int:
    """Multiply-adds of a linear layer for one token: the state of every value head is written and read, and read again
    by the delta rule."""
    passes = 3 if model.linear == "gated_delta_net" else 2
    return passes * model.linear_heads * model.linear_key_dim * model.linear_value_dim


def _formed_weights(model: ModelShape) -> int:
    """Weights of one layer that form queries, keys and values."""
    if not model.kv_latent:
        gates = model.heads if model.attention_gate else 0
        return model.hidden * (model.heads + gates + 2 * model.kv_heads) * model.head_dim
    queries = model.hidden * model.heads * model.head_dim
    if model.q_latent:
        queries = model.q_latent * (model.hidden + model.heads * model.head_dim)
    own = model.head_dim - model.rope_dim + model.value_dim  # of a head, from the latent
    return queries + model.hidden * (model.kv_latent + model.rope_dim) + model.kv_latent * model.heads * own


def _forward_flops(settings: TrialSettings) -> float:
    """Two per weight and token, and those of attention."""
    model = settings.model
    tokens = settings.seq_len * _sequences(settings)
    head = 2.0 * tokens * model.hidden * model.vocab
    if settings.task == "attention":
        return _attention_flops(settings)
    if settings.task == "lm_head":
        return head
    if settings.task == "linear":
        return 2.0 * tokens * _recurrence(model)
    projections, matrix = _layer_weights(model)
    weights = projections + (3 if model.gated else 2) * matrix + _adapter_weights(settings)
    weights += _share(model, "lL") * _recurrence(model)
    return 2.0 * tokens * weights * model.layers + head + _attention_flops(settings)


def _attention_flops(settings: TrialSettings, rows: int | None = None) -> float:
    """QK^T and PV, two each per pair, head and dimension, of the first `rows` queries (all) in all layers."""
    if settings.task in ("lm_head", "linear"):
        return 0.0
    model, rows = settings.model, settings.seq_len if rows is None else rows
    pairs = float(visible_pairs(settings.mask, settings.seq_len, rows))
    if settings.task == "train":
        inside = pairs
        if model.window:  # a query and the window - 1 tokens before it
            inside = sum(min(model.window, query + 1) for query in range(rows))
        windowed, linear = _share(model, "wW") if model.window else 0.0, _share(model, "lL")
        pairs = model.layers * (windowed * inside + (1 - windowed - linear) * pairs)
    return 2.0 * pairs * model.heads * (model.head_dim + (model.value_dim or model.head_dim)) * _sequences(settings)


def _repeated_flops(settings: TrialSettings) -> float:
    """FLOPs of forward work that backward does again: activation checkpointing, and tiles that keep their input."""
    if settings.task != "train":
        return 0.0
    model, checkpoint = settings.model, settings.checkpoint
    per_weight = 2.0 * settings.seq_len * _sequences(settings)
    projections, matrix = _layer_weights(model)
    matrices, plain = 3 if model.gated else 2, model.plain_mlp and settings.lora is None
    whole = model.layers if checkpoint.every == 0 else min(model.layers, checkpoint.whole_layers)
    again = model.layers - whole
    repeated = 0.0
    if again:
        # Each of these layers once for its activations, and some again for the inputs that are not kept.
        runs = again + _layers_replayed(again, checkpoint.every, checkpoint.replay)
        ends = model.norms == "before" and (plain or settings.mlp_tiles == 1 or settings.lora is not None)
        layer = projections + matrices * matrix + _adapter_weights(settings) + _share(model, "lL") * _recurrence(model)
        # What ends a layer is needed by nothing in its backward: the MLP's last matrix, or the output's without an MLP.
        bare = _share(model, "L") * model.linear_heads * model.linear_value_dim
        bare += _share(model, "WF") * model.heads * (model.value_dim or model.head_dim)
        repeated += per_weight * (runs * layer - (again * matrix if ends else 0) - again * model.hidden * bare)
        head = _attention_flops(settings, settings.seq_len - _kept_rows(settings)) / model.layers
        repeated += head * (runs if checkpoint.replay == "bisect" else again)
    tokens = settings.batch_size * (settings.seq_len // settings.cp_size)
    not_kept = tokens - round(checkpoint.mlp * tokens)
    frozen = model.norms == "before" and settings.lora is not None
    first = (matrices - 1 if plain or frozen else matrices) * matrix + _adapter_weights(settings, _MLP)
    repeated += per_weight * whole * first * not_kept / tokens
    formed = (1 - _share(model, "lL")) * _formed_weights(model) + _adapter_weights(settings, _FORMED)
    if settings.projection_tiles > 1 and not (model.plain_projection and settings.lora is None):
        repeated += per_weight * model.layers * formed
    elif model.qk_norm and (settings.projection_tiles > 1 or settings.head_groups > 1):
        among = model.layers if settings.projection_tiles > 1 else again  # groups: those that are computed again alone
        of_layer = itertools.islice(itertools.cycle(model.layer_pattern), among)
        attending = sum(letter not in "lL" for letter in of_layer)
        repeated += per_weight * attending * model.hidden * (model.heads + model.kv_heads) * model.head_dim
    if settings.head_groups > 1 and checkpoint.tail < 1:  # all heads once more, in layers whose attention is run again
        letters = list(itertools.islice(itertools.cycle(model.layer_pattern), again))
        in_groups = [letters[start : start + checkpoint.every] for start in range(0, again, max(1, checkpoint.every))]
        runs_attention = [group[-1] for group in in_groups] if checkpoint.replay == "hold" else letters
        attending = sum(letter not in "lL" for letter in runs_attention)
        repeated += per_weight * attending * model.hidden * (model.heads + 2 * model.kv_heads) * model.head_dim
    return repeated


def _kept_rows(settings: TrialSettings) -> int:
    """Queries at the sequence's end whose attention outputs are kept: `checkpoint.tail` in whole chunks."""
    unit = 1
    if settings.cp_size > 1:
        if settings.seq_len % (2 * settings.cp_size) == 0:
            unit = 2 * settings.cp_size
        elif settings.seq_len % settings.cp_size == 0:
            unit = settings.cp_size
    return round(settings.checkpoint.tail * settings.seq_len / unit) * unit


def _own_gemm_speed(model: ModelShape, measured: Mapping[str, Mapping[str, float]] | None) -> float | None:
    """TFLOP/s of the model's products one after another, where the trial measured each of them in each direction
    (`extra.gemm_tflops`); all directions of a product take equally many FLOPs."""
    width, matrix = model.hidden * model.head_dim, model.hidden * model.ffn
    linear = model.layers * _share(model, "lL")
    attention = model.layers - linear
    mlps = model.layers * _share(model, "lwf")
    mixer = linear * model.hidden  # of each product of a mixer
    weights = {
        "query": attention * width * model.heads * (2 if model.attention_gate else 1),
        "key_value": attention * width * model.kv_heads * 2,
        "out": attention * width * model.heads,
        "linear_query_key": 2 * mixer * model.linear_key_heads * model.linear_key_dim,
        "linear_value_gate": 2 * mixer * model.linear_heads * model.linear_value_dim,
        "linear_out": mixer * model.linear_heads * model.linear_value_dim,
        "gate_up" if model.gated else "up": mlps * matrix * (2 if model.gated else 1),
        "down": mlps * matrix,
        "lm_head": model.hidden * model.vocab,
    }
    weights = {product: count for product, count in weights.items() if count}
    seconds = 0.0
    for product, count in weights.items():
        for direction in ("forward", "dgrad", "wgrad"):
            speed = (measured or {}).get(product, {}).get(direction)
            if not speed:
                return None
            seconds += count / speed
    return 3 * sum(weights.values()) / seconds


def _layers_replayed(layers: int, every: int, replay: str) -> int:
    """Layers run in backward only for the inputs of later layers, by going through the backward pass of each group."""
    replayed = 0
    for start in range(0, layers, every):
        count = min(every, layers - start)
        if replay == "hold":
            replayed += count - 1
            continue
        saved = {0}
        for wanted in range(count - 1, 0, -1):
            nearest = max(place for place in saved if place <= wanted)
            replayed += wanted - nearest
            while nearest < wanted:  # what the run passes and saves: halfway, halfway from there, ...
                nearest = (nearest + wanted + 1) // 2
                saved.add(nearest)
            saved = {place for place in saved if place < wanted}
    return replayed


def _middle_half(seconds: Sequence[float]) -> float | None:
    if len(seconds) < 2:
        return None
    low, high = np.quantile(seconds, [0.25, 0.75])
    return float(high - low)


def _interval(rounds: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """95% interval of the median step from every combination of rounds, widened for few of them (docs/reference.md)."""
    count = len(rounds)
    if count > ROUNDS_TAKEN_ALL:
        return None
    median = float(np.median(np.concatenate(rounds)))
    drawn = [np.median(np.concatenate(some)) for some in itertools.product(rounds, repeat=count)]
    low, high = np.quantile(np.log(np.array(drawn) / median), [0.025, 0.975])
    wider = _STUDENT_975[count - 1] / _NORMAL_975 * math.sqrt(count / (count - 1))
    return median * math.exp(wider * min(low, 0.0)), median * math.exp(wider * max(high, 0.0))


def _counts_bytes(record: Record) -> bool:
    """Whether `sent_bytes` says anything: a method with transports of its own leaves zeros where it did send."""
    measured = record.measurement
    if measured is None or record.settings.task == "lm_head":
        return False
    if record.settings.cp_size == 1 or any(measured.sent_bytes):
        return True
    return measured.extra.get("computed_sent_bytes") == [0] * len(measured.sent_bytes)


def _gib(ranks: Sequence[int]) -> float | None:
    return max(ranks) / 2**30 if ranks else None


_ROWS_AT_ONCE = 1 << 20
_MOST_ROWS = 1 << 28  # beyond, counting takes minutes
_MOST_BLOCKS = 1 << 16
_UNITS = {"k": 1 << 10, "M": 1 << 20}


@lru_cache(maxsize=256)
def visible_pairs(mask: str, seq_len: int, rows: int) -> int:
    """Pairs that the first `rows` queries of `seq_len` tokens see.

    Raises ValueError for a mask it does not know, and for one of too many rows or blocks to be counted.
    """
    name, *arguments = mask.split(":")
    if name == "full":
        return rows * seq_len
    if name == "causal":
        return rows * (rows + 1) // 2
    if rows > _MOST_ROWS:
        raise ValueError(f"mask {mask[:60]!r} of {rows} rows has no second count, which takes up to {_MOST_ROWS} rows")
    if name == "sliding_window":
        left, right, first = (*map(_tokens, arguments), 0, 0)[:3]
        return _summed(rows, lambda query: _window_row(query, seq_len, left, right, first))
    if name == "documents":
        lengths = arguments[0].removesuffix(",...").split(",")
        ends = np.cumsum([_tokens(length) for length in lengths])
        causal = len(arguments) == 1
        return _summed(rows, lambda query: _document_row(query, seq_len, ends, causal))
    if name == "block_sparse":
        return _block_sparse(arguments[1], _tokens(arguments[0]), "causal" in arguments[2:], seq_len, rows)
    raise ValueError(f"mask {mask[:60]!r} has no second count")


def _tokens(text: str) -> int:
    return int(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else int(text)


def _summed(rows: int, keys_of: Callable[[Positions], Positions]) -> int:
    """The sum of `keys_of(queries)` over all queries, some at a time."""
    return sum(
        int(keys_of(np.arange(start, min(start + _ROWS_AT_ONCE, rows), dtype=np.int64)).sum())
        for start in range(0, rows, _ROWS_AT_ONCE)
    )


def _window_row(query: Positions, seq_len: int, left: int, right: int, first: int) -> Positions:
    """Keys of each query: its window, and of the `first` tokens those that lie before it; a global query sees all keys,
    where `right` is 0 those up to itself."""
    start = np.maximum(query - left, 0)
    stop = np.minimum(query + right, seq_len - 1) + 1
    keys = stop - start + np.minimum(first, start)
    return np.where(query < first, query + 1 if right == 0 else seq_len, keys)


def _document_row(query: Positions, seq_len: int, ends: Positions, causal: bool) -> Positions:
    """Keys of each query: its document, which the end of the sequence may cut; with `causal` up to the query."""
    period, place = np.divmod(query, ends[-1])
    index = np.searchsorted(ends, place, side="right")
    stop = np.minimum(period * ends[-1] + ends[index], seq_len)
    start = period * ends[-1] + np.concatenate(([0], ends))[index]
    return (query + 1 if causal else stop) - start


def _block_sparse(pattern: str, size: int, causal: bool, seq_len: int, rows: int) -> int:
    """Blocks seen times their sizes; with `causal` whole earlier blocks, and the triangle of a block with itself."""
    blocks = -(-seq_len // size)
    if blocks > _MOST_BLOCKS:
        raise ValueError(f"a mask of {blocks} blocks has no second count, which takes up to {_MOST_BLOCKS} blocks")
    sizes = np.full(blocks, size, dtype=np.int64)
    sizes[-1] = seq_len - (blocks - 1) * size
    columns = np.arange(blocks)
    total = 0
    for block in range(-(-rows // size)):
        queries = min(size, rows - block * size, int(sizes[block]))
        seen = _seen(pattern, block, columns)
        if causal:
            total += queries * int(sizes[:block][seen[:block]].sum())
            total += queries * (queries + 1) // 2 if seen[block] else 0
        else:
            total += queries * int(sizes[seen].sum())
    return total


def _seen(pattern: str, block: int, columns: Positions) -> NDArray[np.bool_]:
    """Which blocks of keys a block of queries sees."""
    if match := re.fullmatch(r"strided-(\d+)", pattern):
        stride = int(match[1])
        return (abs(columns - block) < stride) | (columns % stride == stride - 1)
    if match := re.fullmatch(r"local_global-(\d+)-(\d+)", pattern):
        reach, everywhere = int(match[1]), int(match[2])
        return (abs(columns - block) <= reach) | (columns < everywhere) | (block < everywhere)
    if re.fullmatch(r"[01]+(/[01]+)*", pattern):
        return np.array([one == "1" for one in pattern.split("/")[block]])
    raise ValueError(f"block pattern {pattern[:60]!r} has no second count")
