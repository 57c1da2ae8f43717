"""What our records and the sheets say of a claim: a verdict, the numbers behind it, and the records as evidence.

Each check is found by its name in results/paper/claims.yaml, whose words it fills. A set-up is the claim's own where
model, GPUs and length are at least the claimed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.settings import ModelShape
from harness.base.lengths import format_length
from harness.predict.published import MEMORY, SPEED, Published, only, published_rows
from harness.records.record import RecordPlace
from harness.report.results import Row
from harness.report.tables.ideal import share_of_ideal
from harness.report.variants import OWN_METHOD, on_cpu
from harness.reproduce.comparison import Verdict
from harness.reproduce.computed import FP32, backward_bytes, shape
from harness.reproduce.figure_points import gpu_text

ENOUGH = 0.95  # of a claimed gain or speed, as single samples are published without a spread
ABOUT = 0.02  # between a claimed "about 25%" and a share of bytes
HIDDEN = 0.90  # share of the ideal from which communication counts as hidden on one node
SHEETS = {"7b": (32, 2097152), "14b": (32, 1048576)}  # GPUs and tokens of the headline rows
BASELINES = ("Megatron", "Deepspeed-Ulysses", "LoongTrain-Ring", "LoongTrain-USP")
OURS_IN_SHEETS = "Burst-Ring"
HEADLINE = "main_exp"

Rows = Sequence[tuple[Row, RecordPlace]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The outcome of a check. `numbers` fill the words; `records` are files of trials, most telling first."""

    verdict: Verdict
    numbers: Mapping[str, object] = field(default_factory=dict)
    records: Sequence[RecordPlace] = ()
    row: Row | None = None  # the trial that a verdict from records rests on
    tokens: int | None = None  # claimed, where the claim's number is a length


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimedNumber:
    """What is claimed: the number, and the set-up where it is stated."""

    value: float | None
    model: str = ""
    gpus: int | None = None
    seq_len: int | None = None


def sheet_row(metric: str, model: str, method: str = OURS_IN_SHEETS) -> Published:
    """A row of the end-to-end figure at 32 GPUs."""
    gpus, seq_len = SHEETS[model]
    rows = [row for row in published_rows() if row.experiment == "e2e_main" and row.figure.startswith(HEADLINE)]
    return only(rows, metric=metric, model=model, gpus=gpus, seq_len=seq_len, method=method)


def sheet_best(metric: str, model: str) -> Published:
    """The fastest baseline of the same figure, or the one that needs the least memory, of those with a number."""
    rows = [sheet_row(metric, model, method) for method in BASELINES]
    best = max if metric == SPEED else min
    return best((row for row in rows if row.value is not None), key=lambda row: row.number)


def sheet_speedup(model: str) -> float:
    """Speed of the bar labelled BurstEngine over that of the fastest baseline."""
    return sheet_row(SPEED, model).number / sheet_best(SPEED, model).number


def sheet_saving(model: str) -> float:
    """Memory that the bar labelled BurstEngine saves beside the most frugal baseline."""
    return 1 - sheet_row(MEMORY, model).number / sheet_best(MEMORY, model).number


def speedup(claimed: ClaimedNumber, rows: Rows) -> Evidence:
    """Training with burst beside the fastest baseline at the longest sequence that both trained on, in one run."""
    numbers: dict[str, Any] = {"sheet_7b": sheet_speedup("7b"), "sheet_14b": sheet_speedup("14b")}
    points = _side_by_side(rows, SPEED)
    if not points:
        return Evidence(verdict="not run", numbers=numbers)
    mine, other = _telling(points, claimed, lambda row: row[SPEED], max)
    ours = mine[SPEED] / other[SPEED]
    numbers |= {"ours": ours, "other": other["method"], **about(mine)}
    records = records_of(rows, [mine, other])
    if not _is_setup(mine, claimed):
        return Evidence(verdict="not comparable", numbers=numbers, records=records)
    verdict: Verdict = "reproduced" if ours >= ENOUGH * (claimed.value or 1.0) else "partly"
    if verdict == "partly" and ours <= 1:
        verdict, numbers["said"] = "not", "burst is at {ours:.2f}x the speed of {other}".format(**numbers)
    return Evidence(verdict=verdict, numbers=numbers, records=records, row=mine)


def memory(claimed: ClaimedNumber, rows: Rows) -> Evidence:
    """Peak memory of burst beside the most frugal baseline, both with settings as published, in one run."""
    numbers: dict[str, Any] = {"sheet_7b": sheet_saving("7b"), "sheet_14b": sheet_saving("14b")}
    points = [
        point for point in _side_by_side(rows, MEMORY)
        if point[OWN_METHOD][0].get("settings") == "as_published"
    ]  # fmt: skip
    if not points:
        return Evidence(verdict="not run", numbers=numbers)
    mine, other = _telling(points, claimed, lambda row: row[MEMORY], min)
    ours = 1 - mine[MEMORY] / other[MEMORY]
    numbers |= {"ours": ours, "other": other["method"], **about(mine)}
    records = records_of(rows, [mine, other])
    if ours <= 0:
        return Evidence(verdict="not", numbers=numbers, records=records, row=mine)
    enough = ours >= ENOUGH * (claimed.value or 0.0) and _is_setup(mine, claimed)
    return Evidence(verdict="reproduced" if enough else "partly", numbers=numbers, records=records, row=mine)


def backward_bytes_of(claimed: ClaimedNumber, rows: Rows) -> Evidence:
    """The formula for bytes of both sides, and bytes that trials counted with either ring at one size."""
    model = shape("7b")
    bf16, fp32 = backward_bytes(model).saved, backward_bytes(model, FP32).saved
    counted, records = "", []
    sent = [row for row, _ in rows if row["task"] == "attention" and row["sent_gib_per_gpu"] and _ring(row)]
    for mine in sorted(sent, key=lambda row: -row["seq_len"]):
        theirs = [row for row in sent if _side(row) == "key_value" and _relayed(row) and _same_call(row, mine)]
        if _side(mine) == "query" and _relayed(mine) and theirs:
            share = 1 - mine["sent_gib_per_gpu"] / theirs[0]["sent_gib_per_gpu"]
            counted = (
                f" Trials on {mine['world_size']} GPUs at {format_length(mine['seq_len'])} tokens counted {share:.1%} "
                "fewer bytes, forward included."
            )
            records = records_of(rows, [mine, theirs[0]])
            break
    close = abs(bf16 - (claimed.value or 0.0)) <= ABOUT
    numbers = {"bf16": bf16, "fp32": fp32, "counted": counted}
    return Evidence(verdict="reproduced" if close else "not", numbers=numbers, records=records)


def longest(claimed: ClaimedNumber, rows: Rows) -> Evidence:
    """The longest sequence that a model of at least that size took a step on."""
    wanted = claimed.value or 0.0
    least = 0.9 * shape(claimed.model).parameters if claimed.model else 0.9 * shape("7b").parameters
    trained = [
        row for row, _ in rows
        if row["task"] == "train" and row["status"] == "ok" and not on_cpu(row) and _shape(row).parameters >= least
    ]  # fmt: skip
    if not trained:
        return Evidence(verdict="not run")
    row = max(trained, key=lambda one: (one["mask"] == "causal" and one["seq_len"] >= wanted, one["seq_len"]))
    numbers = {**about(row), "tokens": row["seq_len"], "mask": row["mask"]}
    whole = row["seq_len"] >= wanted and row["mask"] == "causal"
    verdict: Verdict = "reproduced" if whole else "partly"
    records = records_of(rows, [row])
    return Evidence(verdict=verdict, numbers=numbers, records=records, row=row, tokens=int(wanted))


def scaling(claimed: ClaimedNumber, rows: Rows) -> Evidence:
    """Utilisation from few GPUs to many at equal tokens per GPU: the widest span of one model in one run."""
    sheet = [row for row in published_rows() if row.experiment == "cp_scaling" and row.metric == "mfu_corrected"]
    numbers: dict[str, Any] = {"sheet_first": only(sheet, gpus=1).number, "sheet_last": only(sheet, gpus=64).number}
    lines: dict[tuple[Any, ...], dict[int, Row]] = {}
    for row, _ in rows:
        if (
            row["task"] == "train"
            and row["method"] == OWN_METHOD
            and row["mfu"]
            and row["cp_size"] == row["world_size"]
        ):
            per_gpu = row["seq_len"] // row["world_size"]
            key = (row["run"], row["model"], row["mask"], row["kernel"], row.get("settings"), per_gpu)
            lines.setdefault(key, {}).setdefault(row["world_size"], row)
    lines = {key: line for key, line in lines.items() if len(line) > 1}
    if not lines:
        return Evidence(verdict="not run", numbers=numbers)
    key = max(lines, key=lambda one: (max(lines[one]), len(lines[one]), one[-1]))
    few, many = lines[key][min(lines[key])], lines[key][max(lines[key])]
    numbers |= {
        "first": few["mfu"], "last": many["mfu"], "few": few["world_size"], "many": many["world_size"],
        **about(many), "per_gpu": format_length(key[-1]),
    }  # fmt: skip
    verdict: Verdict = "not"
    if many["mfu"] >= ENOUGH * few["mfu"]:
        verdict = "reproduced" if many["world_size"] >= (claimed.value or 0) else "partly"
    return Evidence(verdict=verdict, numbers=numbers, records=records_of(rows, [few, many]), row=many)


def overlap(claimed: ClaimedNumber, rows: Rows) -> Evidence:
    """The ring beside the same work without transfers (one GPU's time over the number of GPUs) at its longest length.

    The whole problem on one GPU may have been timed in another run on the same kind of GPU.
    """
    attention = [row for row, _ in rows if row["task"] == "attention" and row["status"] == "ok" and not on_cpu(row)]
    found: list[tuple[float, Row]] = []
    for row in attention:
        if row["method"] == OWN_METHOD and _ring(row) and row["mask"] == "causal":
            share = share_of_ideal(row, attention) or _share_of_other_run(row, attention)
            if share is not None:
                found.append((share, row))
    if not found:
        return Evidence(verdict="not run")
    share, row = max(found, key=lambda one: (real_nodes(one[1]), one[1]["seq_len"], one[0]))
    numbers = {"share": share, "lost": 1 / share - 1, "nodes": real_nodes(row), **about(row)}
    verdict: Verdict = "not"
    if share >= HIDDEN:
        verdict = "reproduced" if real_nodes(row) > 1 else "partly"
    return Evidence(verdict=verdict, numbers=numbers, records=records_of(rows, [row]), row=row)


def unmeasured(claimed: ClaimedNumber, rows: Rows) -> Evidence:
    """A claim about a baseline of which no record is ours: tensor parallelism with FlashAttention."""
    return Evidence(verdict="not run")


CHECKS: Mapping[str, Callable[[ClaimedNumber, Rows], Evidence]] = {
    "speedup": speedup, "memory": memory, "backward_bytes": backward_bytes_of, "longest": longest, "scaling": scaling,
    "overlap": overlap, "unmeasured": unmeasured,
}  # fmt: skip


# What has to be equal for trials of one run to differ in the method alone; its own switches may differ.
_EQUAL = ("run", "experiment", "model", "seq_len", "world_size", "cp_size", "mask", "dtype", "batch_size", "settings")

Point = Mapping[str, Sequence[Row]]  # trials by method


def _side_by_side(rows: Rows, column: str) -> list[Point]:
    """Training trials with a value of `column` at one set-up of one run, where burst and another method have one."""
    points: dict[tuple[object, ...], dict[str, list[Row]]] = {}
    for row, _ in rows:
        if row["task"] == "train" and not on_cpu(row) and row[column]:
            key = (*(row.get(name) for name in _EQUAL), row.get("chosen_kernel"))
            points.setdefault(key, {}).setdefault(row["method"], []).append(row)
    return [point for point in points.values() if OWN_METHOD in point and len(point) > 1]


def _telling(
    points: Sequence[Point], claimed: ClaimedNumber, value: Callable[[Row], float], best: Callable[..., Row]
) -> tuple[Row, Row]:
    """Of the point nearest to the claim (its set-up, then its model, then the longest): the best trial of burst, and
    the best of the others."""
    point = max(points, key=lambda one: _nearness(one[OWN_METHOD][0], claimed))
    others = [row for method, found in point.items() if method != OWN_METHOD for row in found]
    return best(point[OWN_METHOD], key=value), best(others, key=value)


def _nearness(row: Row, claimed: ClaimedNumber) -> tuple[bool, bool, int, int]:
    return (_is_setup(row, claimed), row["model"] == claimed.model, row["seq_len"], row["world_size"])


def _is_setup(row: Row, claimed: ClaimedNumber) -> bool:
    """Whether a trial has the claim's set-up: more than a million tokens on 32 GPUs where nothing else is stated."""
    return (
        row["seq_len"] >= (claimed.seq_len or 1 << 20)
        and row["world_size"] >= (claimed.gpus or 32)
        and (not claimed.model or row["model"] == claimed.model)
    )


def too_far(evidence: Evidence, claimed: ClaimedNumber, factors: Mapping[str, float]) -> str:
    """One sentence why a trial's set-up is too small for a verdict on the claim; empty where it is not, or where the
    verdict rests on no trial."""
    row = evidence.row
    if row is None:
        return ""
    length, gpus = evidence.tokens or claimed.seq_len or 1 << 20, claimed.gpus or 32
    short = []
    if row["seq_len"] * factors["seq_len"] < length:
        short.append(f"{format_length(row['seq_len'])} tokens for {format_length(length)}")
    if claimed.model and _shape(row).parameters * factors["model"] < shape(claimed.model).parameters:
        short.append(f"{row['model']} for {claimed.model}")
    if row["world_size"] * factors["gpus"] < gpus:
        short.append(f"{row['world_size']} GPUs for {gpus}")
    if not short:
        return ""
    return f"That is too far from the claimed set-up for a verdict: {', '.join(short)}."


def factors_in_words(factors: Mapping[str, float]) -> str:
    """How small a set-up may be beside the claimed one."""
    return (
        f"a sequence at most {factors['seq_len']:g} times shorter, a model at most {factors['model']:g} times smaller "
        f"and at most {factors['gpus']:g} times fewer GPUs"
    )


def about(row: Row) -> dict[str, object]:
    """Length, model and machine of a trial, as the words of a verdict name them."""
    return {
        "tokens": format_length(row["seq_len"]),
        "model": row["model"],
        "machine": f"{row['world_size']} × {gpu_text(str(row['gpu']))}",
    }


def _shape(row: Row) -> ModelShape:
    """The model of a row, which may be none that a file describes."""
    fields = {key.removeprefix("model."): value for key, value in row.items() if key.startswith("model.")}
    return ModelShape(name=row["model"], **fields)


def _ring(row: Row) -> bool:
    return row.get("chosen_schedule") in ("ring", "double_ring") and row["cp_size"] > 1


def _side(row: Row) -> str | None:
    return row.get("chosen_backward")


def _relayed(row: Row) -> bool:
    return row.get("chosen_exchange") == "relay"


def _same_call(one: Row, other: Row) -> bool:
    keys = ("seq_len", "cp_size", "mask", "dtype", "batch_size", "emulate_nodes", "grad_comm_dtype", "model.heads",
            "model.kv_heads", "model.head_dim")  # fmt: skip
    return all(one[key] == other[key] for key in keys)


def _share_of_other_run(row: Row, rows: Sequence[Row]) -> float | None:
    keys = ("seq_len", "mask", "dtype", "gpu", "model.heads", "model.kv_heads", "model.head_dim", "batch_size")
    alone = [one for one in rows if one["world_size"] == 1 and all(one[key] == row[key] for key in keys)
             and one.get("chosen_kernel") == row.get("chosen_kernel")]  # fmt: skip
    if not alone:
        return None
    fastest = min(one["step_seconds_median"] for one in alone)
    return float(fastest / row["world_size"] / row["step_seconds_median"])


def real_nodes(row: Row) -> int:
    """Hosts of a trial, of which emulated nodes are none."""
    return (row["nodes"] or 1) // max(1, row["emulate_nodes"])


def records_of(rows: Rows, wanted: Sequence[Row]) -> list[RecordPlace]:
    """Places of the records of these rows."""
    return [place for one in wanted for row, place in rows if row is one]
