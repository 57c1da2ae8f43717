"""What our records and the sheets say of a claim: a verdict, the numbers behind it, and the trials as evidence.

Each check is found by its name in results/paper/claims.yaml, whose words it fills. Most of them compare trials of ours:
`ComparableTrials` says which may be compared and what they differ in, and the check takes its numbers from the first
such group. A set-up is the claim's own where model, GPUs and length are at least the claimed ones. A part of the engine
that the abstract names without a number counts as reproduced where records show its effect on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from engine.attention.geometry.layout import layout_named
from engine.attention.masks import imbalance, parse_mask
from engine.reader import Meta
from engine.shape import ModelShape
from harness.base.lengths import format_length
from harness.predict.published import MEMORY, SPEED, Published, only, published_rows
from harness.report.results import Row
from harness.report.tables.ideal import share_of_ideal
from harness.report.variants import OWN_METHOD, on_cpu
from harness.reproduce.comparison import Verdict
from harness.reproduce.computed import FP32, backward_bytes, shape
from harness.reproduce.points import gpu_text

ENOUGH = 0.95  # of a claimed gain or speed, as single samples are published without a spread
ABOUT = 0.02  # between a claimed "about 25%" and a share of bytes
HIDDEN = 0.90  # share of the ideal from which communication counts as hidden on one node
BALANCED = 1.02  # the busiest rank's work over the mean
MILLION, MANY = 1 << 20, 32  # tokens and GPUs of a claim that states none
SHEETS = {"7b": (32, 2 * MILLION), "14b": (32, MILLION)}  # GPUs and tokens of the headline rows
BASELINES = ("Megatron", "Deepspeed-Ulysses", "LoongTrain-Ring", "LoongTrain-USP")
OURS_IN_SHEETS = "Burst-Ring"
HEADLINE = "main_exp"
CUMULATIVE = " w. bwd_opt & double & sl_loss"  # switches of the ablation before its last step
_STEP = "step_seconds_median"


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimedNumber:
    """What is claimed: the number, and the set-up where it is stated."""

    value: float | None = None
    model: str = ""
    gpus: int | None = None
    seq_len: int | None = None


Factor = Annotated[float, Meta(ge=1, description="a factor of at least 1")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """How many times smaller than the claimed set-up a trial's may be for a verdict from records."""

    seq_len: Factor
    model: Factor
    gpus: Factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The outcome of a check. `numbers` fill the words; `trials` are rows of ours, most telling first."""

    verdict: Verdict
    numbers: Mapping[str, object] = field(default_factory=dict)
    trials: Sequence[Row] = ()
    row: Row | None = None  # the trial that a verdict from records rests on
    tokens: int | None = None  # claimed, where the claim's number is a length


def graded(whole: bool, part: bool = False) -> Verdict:
    """The verdict where records bear on a claim: they show all of it, a part, or nothing."""
    return "reproduced" if whole else "partly" if part else "not"


# Trials that are compared.


def _measured(rows: Sequence[Row], task: str, *, gpus: bool = True) -> list[Row]:
    """The trials of a task that are ok; with `gpus` none of those on a CPU."""
    return [row for row in rows if row["task"] == task and row["status"] == "ok" and not (gpus and on_cpu(row))]


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparableTrials:
    """Trials of one task that agree in `equal`, columns or what follows from them, and differ in a column."""

    task: str
    differ: str
    needs: tuple[object, ...] = ()  # values of it that a group must have; where there are none, two of any
    equal: tuple[str | Callable[[Row], object], ...]
    where: Callable[[Row], bool]
    gpus: bool = True  # trials on a CPU are left out

    def groups(self, rows: Sequence[Row]) -> list[dict[object, list[Row]]]:
        """Groups of trials that are ok, each by the value that they differ in; the longest sequence first."""
        found: dict[tuple[object, ...], dict[object, list[Row]]] = {}
        for row in filter(self.where, _measured(rows, self.task, gpus=self.gpus)):
            key = tuple(row.get(of) if isinstance(of, str) else of(row) for of in self.equal)
            found.setdefault(key, {}).setdefault(row.get(self.differ), []).append(row)
        whole = [group for group in found.values() if set(self.needs) <= group.keys() and len(group) > 1]
        return sorted(whole, key=lambda group: -next(iter(group.values()))[0]["seq_len"])

    def lines(self, rows: Sequence[Row]) -> list[list[Row]]:
        """The first trial of each value in each group, from the smallest value to the largest."""
        groups = ([trials[0] for trials in group.values()] for group in self.groups(rows))
        return [sorted(line, key=lambda row: row[self.differ]) for line in groups]


# What has to be equal for training trials to differ in the method alone; its own switches may differ.
_ONE_SET_UP = (
    "run", "experiment", "model", "seq_len", "world_size", "cp_size", "mask", "dtype", "batch_size", "settings",
    "chosen_kernel",
)  # fmt: skip
_ONE_CALL = (
    "seq_len", "cp_size", "mask", "dtype", "batch_size", "emulate_nodes", "grad_comm_dtype", "model.heads",
    "model.kv_heads", "model.head_dim",
)  # fmt: skip


def _methods(column: str) -> ComparableTrials:
    """Training by burst beside other methods, with a value in this column."""
    return ComparableTrials(
        task="train", differ="method", needs=(OWN_METHOD,), equal=_ONE_SET_UP, where=lambda row: bool(row[column])
    )


SPEEDS, PEAKS = _methods(SPEED), _methods(MEMORY)
SIDES = ComparableTrials(
    task="attention", differ="chosen_backward", needs=("query", "key_value"), equal=_ONE_CALL, gpus=False,
    where=lambda row: bool(row["sent_gib_per_gpu"]) and _ring(row) and row.get("chosen_exchange") == "relay",
)  # fmt: skip
GPUS = ComparableTrials(
    task="train", differ="world_size",
    equal=("run", "model", "mask", "kernel", "settings", lambda row: _per_gpu(row)),
    where=lambda row: row["method"] == OWN_METHOD and bool(row["mfu"]) and row["cp_size"] == row["world_size"],
)  # fmt: skip
RINGS = ComparableTrials(
    task="attention", differ="chosen_schedule", needs=("ring", "double_ring"),
    equal=("run", "seq_len", "cp_size", "mask", "dtype", "model.heads", "model.kv_heads", "emulate_nodes"),
    where=lambda row: (row["nodes"] or 1) > 1 or row["emulate_nodes"] > 1,
)  # fmt: skip
TAILS = ComparableTrials(
    task="train", differ="checkpoint.tail", needs=(0.0, 0.5, 1.0),
    equal=("run", "model", "seq_len", "world_size", "mask", "checkpoint.offload", "mlp_tiles", "projection_tiles"),
    where=lambda row: row["method"] == OWN_METHOD and row["checkpoint.every"] == 1,
)  # fmt: skip
HEADS = ComparableTrials(
    task="lm_head", differ="lm_head_fusion", needs=(True, False), equal=("run", "model", "seq_len", "dtype"),
    where=lambda row: not row["lm_head_fusion"] or row.get("loss_kernel") in (None, "own"),
)  # fmt: skip
LENGTHS = ComparableTrials(
    task="train", differ="seq_len", equal=("run", "method", "model", "world_size", "chosen_kernel", "mask", "gpu"),
    where=lambda row: row["method"] != OWN_METHOD and bool(row["mfu"]) and row["world_size"] > 1,
)  # fmt: skip


# Claims with a number.


def speedup(claimed: ClaimedNumber, rows: Sequence[Row]) -> Evidence:
    """Training with burst beside the fastest baseline at the longest sequence that both trained on, in one run."""
    numbers: dict[str, Any] = {"sheet_7b": sheet_speedup("7b"), "sheet_14b": sheet_speedup("14b")}
    groups = SPEEDS.groups(rows)
    if not groups:
        return Evidence(verdict="not run", numbers=numbers)
    mine, other = _best_of_both(groups, claimed, SPEED, max)
    ours = mine[SPEED] / other[SPEED]
    numbers |= {"ours": ours, "other": other["method"], **about(mine)}
    if not _is_setup(mine, claimed):
        return Evidence(verdict="not comparable", numbers=numbers, trials=[mine, other])
    verdict = graded(ours >= ENOUGH * (claimed.value or 1.0), ours > 1)
    if verdict == "not":
        numbers["said"] = "burst is at {ours:.2f}x the speed of {other}".format(**numbers)
    return Evidence(verdict=verdict, numbers=numbers, trials=[mine, other], row=mine)


def memory(claimed: ClaimedNumber, rows: Sequence[Row]) -> Evidence:
    """Peak memory of burst beside the most frugal baseline, both with settings as published, in one run."""
    numbers: dict[str, Any] = {"sheet_7b": sheet_saving("7b"), "sheet_14b": sheet_saving("14b")}
    groups = PEAKS.groups([row for row in rows if row.get("settings") == "as_published"])
    if not groups:
        return Evidence(verdict="not run", numbers=numbers)
    mine, other = _best_of_both(groups, claimed, MEMORY, min)
    ours = 1 - mine[MEMORY] / other[MEMORY]
    numbers |= {"ours": ours, "other": other["method"], **about(mine)}
    enough = ours >= ENOUGH * (claimed.value or 0.0) and _is_setup(mine, claimed)
    verdict = graded(enough and ours > 0, ours > 0)
    return Evidence(verdict=verdict, numbers=numbers, trials=[mine, other], row=mine)


def backward_bytes_of(claimed: ClaimedNumber, rows: Sequence[Row]) -> Evidence:
    """The formula for bytes of both sides, and bytes that trials counted with either ring at one size."""
    model = shape("7b")
    bf16, fp32 = backward_bytes(model).saved, backward_bytes(model, FP32).saved
    counted, trials = "", []
    for group in SIDES.groups(rows)[:1]:
        mine, theirs = group["query"][0], group["key_value"][0]
        share = 1 - mine["sent_gib_per_gpu"] / theirs["sent_gib_per_gpu"]
        counted = (
            f" Trials on {mine['world_size']} GPUs at {format_length(mine['seq_len'])} tokens counted {share:.1%} "
            "fewer bytes, forward included."
        )
        trials = [mine, theirs]
    close = abs(bf16 - (claimed.value or 0.0)) <= ABOUT
    return Evidence(verdict=graded(close), numbers={"bf16": bf16, "fp32": fp32, "counted": counted}, trials=trials)


def longest(claimed: ClaimedNumber, rows: Sequence[Row]) -> Evidence:
    """The longest sequence that a model of at least that size took a step on."""
    wanted, least = claimed.value or 0.0, 0.9 * shape(claimed.model or "7b").parameters
    trained = [row for row in _measured(rows, "train") if _shape(row).parameters >= least]
    if not trained:
        return Evidence(verdict="not run")

    def whole(row: Row) -> bool:
        return row["mask"] == "causal" and row["seq_len"] >= wanted

    row = max(trained, key=lambda one: (whole(one), one["seq_len"]))
    numbers = {**about(row), "tokens": row["seq_len"], "mask": row["mask"]}
    return Evidence(verdict=graded(whole(row), True), numbers=numbers, trials=[row], row=row, tokens=int(wanted))


def scaling(claimed: ClaimedNumber, rows: Sequence[Row]) -> Evidence:
    """Utilisation from few GPUs to many at equal tokens per GPU: the widest span of one model in one run."""
    sheet = [row for row in published_rows() if row.experiment == "cp_scaling" and row.metric == "mfu_corrected"]
    numbers: dict[str, Any] = {"sheet_first": only(sheet, gpus=1).number, "sheet_last": only(sheet, gpus=64).number}
    lines = GPUS.lines(rows)
    if not lines:
        return Evidence(verdict="not run", numbers=numbers)
    line = max(lines, key=lambda one: (one[-1]["world_size"], len(one), _per_gpu(one[-1])))
    few, many = line[0], line[-1]
    numbers |= {
        "first": few["mfu"], "last": many["mfu"], "few": few["world_size"], "many": many["world_size"],
        **about(many), "per_gpu": format_length(_per_gpu(many)),
    }  # fmt: skip
    held = many["mfu"] >= ENOUGH * few["mfu"]
    verdict = graded(held and many["world_size"] >= (claimed.value or 0), held)
    return Evidence(verdict=verdict, numbers=numbers, trials=[few, many], row=many)


def overlap(claimed: ClaimedNumber, rows: Sequence[Row]) -> Evidence:
    """The ring beside the same work without transfers (one GPU's time over the number of GPUs) at its longest length.

    The whole problem on one GPU may have been timed in another run on the same kind of GPU.
    """
    attention = _measured(rows, "attention")
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
    verdict = graded(share >= HIDDEN and real_nodes(row) > 1, share >= HIDDEN)
    return Evidence(verdict=verdict, numbers=numbers, trials=[row], row=row)


def unmeasured(claimed: ClaimedNumber, rows: Sequence[Row]) -> Evidence:
    """A claim about a baseline of which no record is ours: tensor parallelism with FlashAttention."""
    return Evidence(verdict="not run")


# Parts of the engine that the abstract names without a number.


def topology(claimed: ClaimedNumber, rows: Sequence[Row]) -> Evidence:
    """The double ring beside the flat ring over nodes, in one run at its longest length."""
    numbers: dict[str, Any] = {"sheet": ablation(SPEED, " w. bwd_opt & double") / ablation(SPEED, " w. bwd_opt")}
    for group in RINGS.groups(rows)[:1]:
        flat, double = (min(group[name], key=lambda row: row[_STEP]) for name in ("ring", "double_ring"))
        numbers |= {"faster": flat[_STEP] / double[_STEP], **about(double)}
        numbers["nodes"] = max(double["emulate_nodes"], double["nodes"] or 1)
        faster = flat[_STEP] > double[_STEP]
        verdict = graded(faster and real_nodes(double) > 1, faster)
        return Evidence(verdict=verdict, numbers=numbers, trials=[double, flat], row=double)
    return Evidence(verdict="not run", numbers=numbers)


def kept_outputs(claimed: ClaimedNumber, rows: Sequence[Row]) -> Evidence:
    """Training with half of the attention outputs kept, beside all and none of them, in one run."""
    numbers: dict[str, Any] = {
        "sheet_half": ablation(MEMORY, f"{CUMULATIVE} & sl_ckpt"),
        "sheet_whole": ablation(MEMORY, f"{CUMULATIVE} & whole_ckpt"),
    }
    for group in TAILS.groups(rows)[:1]:
        none, half, whole = (group[tail][-1] for tail in TAILS.needs)
        numbers |= {
            "half": half[MEMORY], "whole": whole[MEMORY], "half_step": half[_STEP], "none_step": none[_STEP],
            "whole_step": whole[_STEP], **about(half),
        }  # fmt: skip
        shown = half[MEMORY] < whole[MEMORY] and half[_STEP] < none[_STEP]
        return Evidence(verdict=graded(shown), numbers=numbers, trials=[half, whole, none])
    return Evidence(verdict="not run", numbers=numbers)


def fused_head(claimed: ClaimedNumber, rows: Sequence[Row]) -> Evidence:
    """The fused LM head beside the plain one, at the longest sequence that both ran on."""
    numbers: dict[str, Any] = {
        "sheet_plain": ablation(MEMORY, " w. bwd_opt & double"),
        "sheet_fused": ablation(MEMORY, CUMULATIVE),
    }
    for group in HEADS.groups(rows)[:1]:
        fused, plain = group[True][0], group[False][0]
        numbers |= {
            "fused": fused[MEMORY], "plain": plain[MEMORY], "ratio": fused[_STEP] / plain[_STEP], **about(fused)
        }  # fmt: skip
        return Evidence(verdict=graded(fused[MEMORY] < plain[MEMORY]), numbers=numbers, trials=[fused, plain])
    return Evidence(verdict="not run", numbers=numbers)


def balance(claimed: ClaimedNumber, rows: Sequence[Row]) -> Evidence:
    """Work of the busiest rank over the mean, by mask and layout of the figure of sparse masks; counted, so no
    measurement is needed. The records are those that ran by it."""
    masks, tokens, ranks = ("causal", "sliding_window:8191"), 262144, 8
    worst = {
        layout: max(imbalance(parse_mask(mask), layout_named(layout), tokens, ranks) for mask in masks)
        for layout in ("contiguous", "zigzag", "striped")
    }
    ran = [row for row in _measured(rows, "attention") if row["cp_size"] > 1 and row.get("chosen_imbalance")]
    by_mask = {row["mask"].partition(":")[0]: row for row in sorted(ran, key=lambda row: row["seq_len"])}
    best = min(worst, key=lambda layout: worst[layout])
    numbers = {
        "best": best, "imbalance": worst[best], "contiguous": worst["contiguous"], "ranks": ranks,
        "tokens": format_length(tokens),
    }  # fmt: skip
    shown = worst[best] <= BALANCED < worst["contiguous"]
    return Evidence(verdict=graded(shown), numbers=numbers, trials=list(by_mask.values()))


def falling_utilisation(claimed: ClaimedNumber, rows: Sequence[Row]) -> Evidence:
    """MFU of a compared method from its shortest to its longest sequence, on equally many GPUs of one run."""
    lines = LENGTHS.lines(rows)
    if not lines:
        return Evidence(verdict="not run", numbers={"said": "No record of ours follows a baseline by length"})
    line = max(lines, key=lambda one: (one[-1]["seq_len"], str(one[-1]["method"])))
    short, long = line[0], line[-1]
    rises = "rises" if long["mfu"] > short["mfu"] else "falls"
    from_, to = (f"{row['mfu']:.1%} at {format_length(row['seq_len'])}" for row in (short, long))
    said = f"Utilisation of {long['method']} {rises} from {from_} to {to} tokens on {about(long)['machine']}"
    beyond = long["seq_len"] > MILLION and real_nodes(long) > 1
    verdict: Verdict = graded(rises == "falls") if beyond else "not comparable"
    return Evidence(verdict=verdict, numbers={"said": said}, trials=[short, long])


CHECKS: Mapping[str, Callable[[ClaimedNumber, Sequence[Row]], Evidence]] = {
    "speedup": speedup, "memory": memory, "backward_bytes": backward_bytes_of, "longest": longest, "scaling": scaling,
    "overlap": overlap, "unmeasured": unmeasured, "topology": topology, "kept_outputs": kept_outputs,
    "fused_head": fused_head, "balance": balance, "falling_utilisation": falling_utilisation,
}  # fmt: skip


# How far a trial's set-up is from the claimed one.


def _best_of_both(
    groups: Sequence[Mapping[object, Sequence[Row]]], claimed: ClaimedNumber, column: str, best: Callable[..., Row]
) -> tuple[Row, Row]:
    """Of the group nearest to the claim (its set-up, then its model, then the longest): the best trial of burst, and
    the best of the others."""

    def nearness(row: Row) -> tuple[bool, bool, int, int]:
        return _is_setup(row, claimed), row["model"] == claimed.model, row["seq_len"], row["world_size"]

    group = max(groups, key=lambda one: nearness(one[OWN_METHOD][0]))
    others = [row for method, found in group.items() if method != OWN_METHOD for row in found]
    return best(group[OWN_METHOD], key=lambda row: row[column]), best(others, key=lambda row: row[column])


def _is_setup(row: Row, claimed: ClaimedNumber) -> bool:
    """Whether a trial has the claim's set-up: more than a million tokens on 32 GPUs where nothing else is stated."""
    return (
        row["seq_len"] >= (claimed.seq_len or MILLION)
        and row["world_size"] >= (claimed.gpus or MANY)
        and (not claimed.model or row["model"] == claimed.model)
    )


def too_far(evidence: Evidence, claimed: ClaimedNumber, factors: Factors) -> str:
    """One sentence why a trial's set-up is too small for a verdict on the claim; empty where it is not, or where the
    verdict rests on no trial."""
    row = evidence.row
    if row is None:
        return ""
    length, gpus = evidence.tokens or claimed.seq_len or MILLION, claimed.gpus or MANY
    short = []
    if row["seq_len"] * factors.seq_len < length:
        short.append(f"{format_length(row['seq_len'])} tokens for {format_length(length)}")
    if claimed.model and _shape(row).parameters * factors.model < shape(claimed.model).parameters:
        short.append(f"{row['model']} for {claimed.model}")
    if row["world_size"] * factors.gpus < gpus:
        short.append(f"{row['world_size']} GPUs for {gpus}")
    return f"That is too far from the claimed set-up for a verdict: {', '.join(short)}." if short else ""


# Numbers of the sheets.


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


def ablation(metric: str, switches: str) -> float:
    """A number of the ablation of 14B on 32 GPUs."""
    rows = [row for row in published_rows() if row.experiment == "ablation" and row.model == "14b" and row.gpus == 32]
    return only(rows, metric=metric, method=f"Burst-Baseline{switches}").number


# What a row says.


def about(row: Row) -> dict[str, object]:
    """Length, model and machine of a trial, as the words of a verdict name them."""
    return {
        "tokens": format_length(row["seq_len"]),
        "model": row["model"],
        "machine": f"{row['world_size']} × {gpu_text(str(row['gpu']))}",
    }


def real_nodes(row: Row) -> int:
    """Hosts of a trial, of which emulated nodes are none."""
    return (row["nodes"] or 1) // max(1, row["emulate_nodes"])


def _per_gpu(row: Row) -> int:
    return row["seq_len"] // row["world_size"]


def _ring(row: Row) -> bool:
    return row.get("chosen_schedule") in ("ring", "double_ring") and row["cp_size"] > 1


def _shape(row: Row) -> ModelShape:
    """The model of a row, which may be none that a file describes."""
    fields = {key.removeprefix("model."): value for key, value in row.items() if key.startswith("model.")}
    return ModelShape(name=row["model"], **fields)


def _share_of_other_run(row: Row, rows: Sequence[Row]) -> float | None:
    keys = ("seq_len", "mask", "dtype", "gpu", "model.heads", "model.kv_heads", "model.head_dim", "batch_size",
            "chosen_kernel")  # fmt: skip
    alone = [one for one in rows if one["world_size"] == 1 and all(one.get(key) == row.get(key) for key in keys)]
    if not alone:
        return None
    fastest = min(one[_STEP] for one in alone)
    return float(fastest / row["world_size"] / row[_STEP])
