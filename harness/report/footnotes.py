"""What short names of series leave out, in one list: releases, builds, kernels, and how attention was exchanged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from harness.base.lengths import format_length
from harness.report.results import ONE_RANK, TENSOR_PARALLEL, UPSTREAM, Row
from harness.report.variants import method_name, system_name, unsaid_settings, varying_settings

KERNELS = {
    "fa4": "FlashAttention-4", "fa3": "FlashAttention-3", "fa2": "FlashAttention-2", "cudnn": "cuDNN",
    "flex": "FlexAttention", "cpu": "torch on the CPU", "reference": "the reference in torch",
}  # fmt: skip
_PACKAGES = {"transformer-engine": "TransformerEngine"}
_BUILD = "extra_upstream.builds."


def footnotes_of(rows: Sequence[Row]) -> list[str]:
    """A sentence for each name among the measured rows that leaves something out, in their order, such as
    `Megatron-LM: megatron-core 0.19.2, TransformerEngine 2.12.0 compiled -O1, attention by cuDNN.`

    Where a method did several things under one name, each stands with the lengths at which it did. Last come the
    attention kernels, and what holds where names say nothing else.
    """
    measured = [row for row in rows if row["status"] == "ok"]
    found: dict[str, dict[str, list[int]]] = {}  # lengths by what was left out, by name
    for row in measured:
        if told := ", ".join(_left_out(row)):
            found.setdefault(_name(row), {}).setdefault(told, []).append(row["seq_len"])
    lines = [f"{name}: {_by_length(told)}." for name, told in found.items()]
    lines += _of_kernels(measured)
    for name, words in unsaid_settings(measured).items():
        lines.append(f"{name or 'All'}, where a name does not say otherwise: {words}.")
    return lines


def kernel_in_words(kernel: str | None) -> str:
    """The name of an attention kernel as its authors write it; empty where it is not known. Where torch chooses, its
    first choice, said to be that."""
    if not kernel or kernel.startswith("unknown"):
        return ""
    asked = first_kernel(kernel)
    return KERNELS.get(asked, asked) + ("" if asked == kernel else " as torch's first choice")


def first_kernel(kernel: str) -> str:
    """The kernel that runs, and of torch's order of choice (`torch: cudnn, else flash`) the first."""
    return kernel.removeprefix("torch: ").partition(", else ")[0]


def _name(row: Row) -> str:
    return system_name(row) if row["method"].endswith(UPSTREAM) else method_name(row)


def _left_out(row: Row) -> list[str]:
    if row["method"].endswith(UPSTREAM):
        release, builds = str(row.get("extra_upstream.release") or ""), _builds(row)
        rebuilt = any(name == release.partition(" ")[0] for name in builds)
        return [
            *([release] if release and not rebuilt else []),
            *(f"{_PACKAGES.get(name, name)} {words}" for name, words in builds.items()),
        ]
    if row["ran"] in (None, ONE_RANK, TENSOR_PARALLEL):
        return []
    schedule, *rest = row["ran"].split(", ")
    parts = [] if schedule.replace(" ", "_") in (row.get("chosen_schedule"), row["method"]) else [schedule]
    for part in rest:
        parts.append(f"backward sends the {part}" if part.endswith(" side") else f"heads exchanged by {part}")
    return [part for part in parts if part != "heads exchanged by none"]


def _builds(row: Row) -> dict[str, str]:
    """Packages that are another build than their authors', by the shortest name of each: `2.12.0 compiled -O1`."""
    found: dict[str, str] = {}
    for column in sorted((name for name in row if name.startswith(_BUILD) and row[name]), key=len):
        words = str(row[column]).partition(" (archive")[0].replace(", another build:", "")
        if words not in found.values():
            found[column.removeprefix(_BUILD)] = words
    return found


def _of_kernels(measured: Sequence[Row]) -> list[str]:
    """Which kernel computed the attention of which names, unless names say it."""
    if "kernel" in varying_settings(measured):
        return []
    names: dict[str, dict[str, None]] = {}  # by kernel
    for row in measured:
        if row["task"] != "lm_head" and (kernel := kernel_in_words(row.get("chosen_kernel"))):
            names.setdefault(kernel, {})[_name(row)] = None
    everybody = {_name(row) for row in measured if row["task"] != "lm_head"}
    return [
        f"Attention kernel{'' if set(found) == everybody else f' of {_listed(found)}'}: {kernel}."
        for kernel, found in names.items()
    ]


def _listed(names: Mapping[str, None]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _by_length(told: Mapping[str, Iterable[int]]) -> str:
    if len(told) == 1:
        return next(iter(told))
    return "; ".join(f"{text} ({_span(lengths)})" for text, lengths in told.items())


def _span(lengths: Iterable[int]) -> str:
    found = sorted(set(lengths))
    return " to ".join(dict.fromkeys((format_length(found[0]), format_length(found[-1])))) + " tokens"
