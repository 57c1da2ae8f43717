"""Checks of what the abstract of arXiv 2509.19836 says of the parts of BurstEngine, without a number of its own.

A part counts as reproduced where our records show its effect on GPUs; where a formula shows it, the records are those
that ran by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from engine.attention.geometry.layout import layout_named
from engine.attention.masks import imbalance, parse_mask
from harness.base.lengths import format_length
from harness.predict.published import MEMORY, SPEED, only, published_rows
from harness.report.results import Row
from harness.report.variants import OWN_METHOD, on_cpu
from harness.reproduce.checks import ClaimedNumber, Evidence, Rows, about, real_nodes, records_of
from harness.reproduce.comparison import Verdict

_STEP = "step_seconds_median"
_BALANCED = 1.02  # the busiest rank's work over the mean
# Masks, tokens and ranks of the sparse figure.
_MASKS, _TOKENS, _RANKS = ("causal", "sliding_window:8191"), 262144, 8


def _ablation(metric: str, switches: str) -> float:
    """A number of the ablation of 14B on 32 GPUs."""
    rows = [row for row in published_rows() if row.experiment == "ablation" and row.model == "14b" and row.gpus == 32]
    return only(rows, metric=metric, method=f"Burst-Baseline{switches}").number


def _on_gpus(rows: Rows, task: str) -> list[Row]:
    return [row for row, _ in rows if row["task"] == task and row["status"] == "ok" and not on_cpu(row)]


def _grouped(rows: Iterable[Row], keys: Iterable[str]) -> list[list[Row]]:
    """Rows that agree in all keys, the longest sequence first."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    keys = tuple(keys)
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in keys), []).append(row)
    return sorted(groups.values(), key=lambda group: -group[0]["seq_len"])


def topology(claimed: ClaimedNumber, rows: Rows) -> Evidence:
    """The double ring beside the flat ring over nodes, in one run at its longest length."""
    numbers: dict[str, Any] = {"sheet": _ablation(SPEED, " w. bwd_opt & double") / _ablation(SPEED, " w. bwd_opt")}
    rings = [row for row in _on_gpus(rows, "attention") if (row["nodes"] or 1) > 1 or row["emulate_nodes"] > 1]
    keys = ("run", "seq_len", "cp_size", "mask", "dtype", "model.heads", "model.kv_heads", "emulate_nodes")
    for group in _grouped(rings, keys):
        best = {
            schedule: min(found, key=lambda row: row[_STEP])
            for schedule in ("ring", "double_ring")
            if (found := [row for row in group if row.get("chosen_schedule") == schedule])
        }
        if len(best) == 2:
            flat, double = best["ring"], best["double_ring"]
            numbers |= {"faster": flat[_STEP] / double[_STEP], **about(double)}
            numbers["nodes"] = max(double["emulate_nodes"], double["nodes"] or 1)
            verdict: Verdict = "not"
            if numbers["faster"] > 1:
                verdict = "reproduced" if real_nodes(double) > 1 else "partly"
            records = records_of(rows, [double, flat])
            return Evidence(verdict=verdict, numbers=numbers, records=records, row=double)
    return Evidence(verdict="not run", numbers=numbers)


def kept_outputs(claimed: ClaimedNumber, rows: Rows) -> Evidence:
    """Training with half of the attention outputs kept, beside all and none of them, in one run."""
    cumulative = " w. bwd_opt & double & sl_loss"
    numbers: dict[str, Any] = {
        "sheet_half": _ablation(MEMORY, f"{cumulative} & sl_ckpt"),
        "sheet_whole": _ablation(MEMORY, f"{cumulative} & whole_ckpt"),
    }
    trained = [row for row in _on_gpus(rows, "train") if row["method"] == OWN_METHOD and row["checkpoint.every"] == 1]
    keys = ("run", "model", "seq_len", "world_size", "mask", "checkpoint.offload", "mlp_tiles", "projection_tiles")
    for group in _grouped(trained, keys):
        by_tail = {row["checkpoint.tail"]: row for row in group}
        if {0.0, 0.5, 1.0} <= by_tail.keys():
            none, half, whole = (by_tail[tail] for tail in (0.0, 0.5, 1.0))
            numbers |= {
                "half": half[MEMORY], "whole": whole[MEMORY], "half_step": half[_STEP], "none_step": none[_STEP],
                "whole_step": whole[_STEP], **about(half),
            }  # fmt: skip
            shown = half[MEMORY] < whole[MEMORY] and half[_STEP] < none[_STEP]
            verdict: Verdict = "reproduced" if shown else "not"
            return Evidence(verdict=verdict, numbers=numbers, records=records_of(rows, [half, whole, none]))
    return Evidence(verdict="not run", numbers=numbers)


def fused_head(claimed: ClaimedNumber, rows: Rows) -> Evidence:
    """The fused LM head beside the plain one, at the longest sequence that both ran on."""
    numbers: dict[str, Any] = {
        "sheet_plain": _ablation(MEMORY, " w. bwd_opt & double"),
        "sheet_fused": _ablation(MEMORY, " w. bwd_opt & double & sl_loss"),
    }
    for group in _grouped(_on_gpus(rows, "lm_head"), ("run", "model", "seq_len", "dtype")):
        fused = [row for row in group if row["lm_head_fusion"] and row.get("loss_kernel") in (None, "own")]
        plain = [row for row in group if not row["lm_head_fusion"]]
        if fused and plain:
            numbers |= {
                "fused": fused[0][MEMORY], "plain": plain[0][MEMORY],
                "ratio": fused[0][_STEP] / plain[0][_STEP], **about(fused[0]),
            }  # fmt: skip
            verdict: Verdict = "reproduced" if fused[0][MEMORY] < plain[0][MEMORY] else "not"
            return Evidence(verdict=verdict, numbers=numbers, records=records_of(rows, [fused[0], plain[0]]))
    return Evidence(verdict="not run", numbers=numbers)


def balance(claimed: ClaimedNumber, rows: Rows) -> Evidence:
    """Work of the busiest rank over the mean, by mask and layout; counted, so no measurement is needed."""
    worst = {
        layout: max(imbalance(parse_mask(mask), layout_named(layout), _TOKENS, _RANKS) for mask in _MASKS)
        for layout in ("contiguous", "zigzag", "striped")
    }
    ran = [row for row in _on_gpus(rows, "attention") if row["cp_size"] > 1 and row.get("chosen_imbalance")]
    by_mask = {row["mask"].partition(":")[0]: row for row in sorted(ran, key=lambda row: row["seq_len"])}
    best = min(worst, key=lambda layout: worst[layout])
    numbers = {
        "best": best, "imbalance": worst[best], "contiguous": worst["contiguous"], "ranks": _RANKS,
        "tokens": format_length(_TOKENS),
    }  # fmt: skip
    verdict: Verdict = "reproduced" if worst[best] <= _BALANCED < worst["contiguous"] else "not"
    return Evidence(verdict=verdict, numbers=numbers, records=records_of(rows, list(by_mask.values())))


def falling_utilisation(claimed: ClaimedNumber, rows: Rows) -> Evidence:
    """MFU of a compared method from its shortest to its longest sequence, on equally many GPUs of one run."""
    trained = [row for row in _on_gpus(rows, "train") if row["method"] != OWN_METHOD and row["mfu"]]
    keys = ("run", "method", "model", "world_size", "chosen_kernel", "mask", "gpu")
    lines = [group for group in _grouped(trained, keys) if len({row["seq_len"] for row in group}) > 1]
    lines = [group for group in lines if group[0]["world_size"] > 1]
    if not lines:
        return Evidence(verdict="not run", numbers={"said": "No record of ours follows a baseline by length"})
    line = max(lines, key=lambda group: (max(row["seq_len"] for row in group), str(group[0]["method"])))
    short, long = (chosen(line, key=lambda row: row["seq_len"]) for chosen in (min, max))
    rises = "rises" if long["mfu"] > short["mfu"] else "falls"
    from_, to = (f"{row['mfu']:.1%} at {format_length(row['seq_len'])}" for row in (short, long))
    said = f"Utilisation of {long['method']} {rises} from {from_} to {to} tokens on {about(long)['machine']}"
    beyond = long["seq_len"] > 1 << 20 and real_nodes(long) > 1
    verdict: Verdict = "not comparable" if not beyond else "reproduced" if rises == "falls" else "not"
    return Evidence(verdict=verdict, numbers={"said": said}, records=records_of(rows, [short, long]))


PARTS: Mapping[str, Callable[[ClaimedNumber, Rows], Evidence]] = {
    "topology": topology, "kept_outputs": kept_outputs, "fused_head": fused_head, "balance": balance,
    "falling_utilisation": falling_utilisation,
}  # fmt: skip
