"""Lines against sequence length, on a logarithmic axis, each with its name at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from harness.base.lengths import format_length
from harness.report.drawing.looks import INK, MUTED, PAPER, Look
from harness.report.drawing.sheet import Page, text_inches, wrapped

_CEILING = (0, (4, 2))
_STEP = 0.155  # inches between lines of text


@dataclass(frozen=True, kw_only=True, slots=True)
class PlottedValue:
    """A value at a length, from where to where its whisker reaches, and what it shows on hover."""

    seq_len: int
    value: float
    tip: str
    ends: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesLine:
    """One series. `lost`: lengths without a value, with the status that explains each."""

    name: str
    look: Look
    spots: Sequence[PlottedValue]
    strong: bool = False
    lost: Sequence[tuple[int, str]] = field(default_factory=tuple)


@dataclass(frozen=True, kw_only=True, slots=True)
class LineEnd:
    """Where a line ends, and the name that is written there."""

    name: str
    colour: str
    x: float
    y: float
    strong: bool = False


def paint_lines(page: Page, lines: Sequence[SeriesLine], unit: str, ceiling: Mapping[int, float]) -> None:
    """All lines in one panel, on a scale from 0 (logarithmic where values span over 1 : 30); `ceiling` by length."""
    form = page.form
    drawn = [line for line in lines if line.spots]
    values = [end for line in drawn for spot in line.spots for end in (spot.value, *(spot.ends or ()))]
    values += ceiling.values()
    widest = max(text_inches(line.name, form.small, bold=line.strong) for line in drawn) + 0.14
    names = min((0.42 if form.narrow else 0.34) * form.width, widest)
    left = 0.12 + max(text_inches(f"{value:,.0f}" if value >= 10 else "0.00", form.small) for value in values) + 0.08
    texts = sum(len(_wrapped(line, names, form.small)) for line in drawn) + bool(ceiling)
    height = max(1.8 if form.narrow else 2.5, _STEP * texts)
    ax = page.panel(0.26, left, page.right - left - names, height, below=0.38)
    lengths = sorted({x for line in lines for x in _lengths(line)})
    _axes(ax, values, lengths, 4 if form.narrow else 8)
    ax.annotate(unit, (0, 1), (8.6 - left * 72, 9), xycoords="axes fraction", textcoords="offset points",
                fontsize=form.small, color=MUTED)  # fmt: skip
    ax.set_xlabel("tokens of a sequence", fontsize=form.small, labelpad=2)
    ends = [
        LineEnd(
            name=line.name,
            colour=line.look.colour,
            strong=line.strong,
            x=line.spots[-1].seq_len,
            y=line.spots[-1].value,
        )
        for line in drawn
    ]
    if ceiling:
        xs = sorted(ceiling)
        [dashed] = ax.plot(xs, [ceiling[x] for x in xs], color=MUTED, linewidth=1.1, linestyle=_CEILING, zorder=1.5)
        page.tip(dashed, "ceiling")
        ends.append(LineEnd(name="ceiling", colour=MUTED, x=xs[-1], y=ceiling[xs[-1]]))
    for line in sorted(drawn, key=lambda line: line.strong):
        _draw(page, ax, line)
    _lost(page, ax, lines)
    write_names(ax, ends, names, height, form.small)


def _axes(ax: Axes, values: Sequence[float], lengths: Sequence[int], most: int) -> None:
    low, high = min(values), max(values)
    if low > 0 and high > 30 * low:
        ax.set_yscale("log")
        ax.set_ylim(low / 1.5, high * 1.5)
    else:
        ax.set_ylim(0, high * 1.08 or 1.0)
        ax.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.set_xscale("log", base=2)
    kept = sorted(lengths)
    while len(kept) > most:
        kept = kept[::-1][::2][::-1]  # the longest stays
    ax.set_xticks(kept, [format_length(length).upper() for length in kept])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(min(lengths) / 1.15, max(lengths) * 1.06)


def _draw(page: Page, ax: Axes, line: SeriesLine) -> None:
    [drawn] = ax.plot(
        [spot.seq_len for spot in line.spots], [spot.value for spot in line.spots], color=line.look.colour,
        linestyle=line.look.dashes, marker=line.look.marker, markersize=5, markeredgecolor=PAPER, markeredgewidth=0.6,
        linewidth=2.0 if line.strong else 1.4, zorder=4 if line.strong else 3, clip_on=False,
    )  # fmt: skip
    page.tip(drawn, *(spot.tip for spot in line.spots))
    whiskers = [[(spot.seq_len, end) for end in spot.ends] for spot in line.spots if spot.ends]
    ax.add_collection(LineCollection(whiskers, colors=line.look.colour, linewidths=1.0, zorder=2.5), autolim=False)


def write_names(ax: Axes, ends: Sequence[LineEnd], inches: float, height: float, size: float) -> None:
    """Names right of a panel of this height, `inches` wide at most, beside the ends of their lines, moved apart where
    they would overlap, each joined to its end."""
    to_axes = ax.transScale + ax.transLimits
    wanted = sorted(((to_axes.transform((end.x, end.y)), end) for end in ends), key=lambda one: -one[0][1])
    texts = [_wrapped(end, inches, size) for _, end in wanted]
    middles = _apart([at[1] * height for at, _ in wanted], [_STEP * len(text) for text in texts], height)
    joints = []
    for ((x, y), end), text, middle in zip(wanted, texts, middles, strict=True):
        for place, words in enumerate(text):
            at = middle + _STEP * ((len(text) - 1) / 2 - place)
            ax.annotate(
                words, (1, at / height), (9, 0), xycoords="axes fraction", textcoords="offset points", va="center",
                fontsize=size, annotation_clip=False, color=end.colour if end.strong else INK,
                fontweight="bold" if end.strong else "normal",
            )  # fmt: skip
        joints.append([(x, y), (1.02, middle / height)])
    ax.add_collection(
        LineCollection(
            joints, colors=[end.colour for _, end in wanted], linewidths=0.7, transform=ax.transAxes, clip_on=False,
            zorder=2,
        ),
        autolim=False,
    )  # fmt: skip


def _apart(wanted: Sequence[float], sizes: Sequence[float], height: float) -> list[float]:
    """Middles near the `wanted` ones, sorted from the top down, that do not overlap and stay beside the panel."""
    top, middles = height + 0.1, []
    for at, size in zip(wanted, sizes, strict=True):
        middles.append(min(top, at + size / 2) - size / 2)
        top = middles[-1] - size / 2
    floor = -0.1
    for place in range(len(middles) - 1, -1, -1):  # up again where the last ones fell below it
        middles[place] = max(middles[place], floor + sizes[place] / 2)
        floor = middles[place] + sizes[place] / 2
    return middles


def _lost(page: Page, ax: Axes, lines: Sequence[SeriesLine]) -> None:
    """At the foot of a length what ended without a value there: the status, with the names on hover."""
    ended: dict[tuple[int, str], list[str]] = {}
    for line in lines:
        for seq_len, status in line.lost:
            ended.setdefault((seq_len, status), []).append(line.name)
    rows: dict[int, int] = {}
    for (seq_len, status), names in sorted(ended.items()):
        rows[seq_len] = rows.get(seq_len, 0) + 1
        text = status if len(names) == 1 else f"{len(names)} {status}"
        shown = ax.annotate(
            text, (seq_len, 0), (0, 2 + 10 * (rows[seq_len] - 1)), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center", va="bottom", fontsize=page.form.small - 1, color=MUTED,
        )  # fmt: skip
        page.tip(shown, f"{', '.join(names)}: {status}")


def _wrapped(named: SeriesLine | LineEnd, inches: float, size: float) -> list[str]:
    return wrapped(named.name, inches - 0.12, size, bold=named.strong)


def _lengths(line: SeriesLine) -> list[int]:
    return [*(spot.seq_len for spot in line.spots), *(seq_len for seq_len, _ in line.lost)]
