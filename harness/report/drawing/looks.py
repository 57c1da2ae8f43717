"""One colour per method everywhere; variants of a method by lightness and hatch, or by marker and dashes.

Hues are near those of Okabe and Ito (Color Universal Design, 2008), moved until any two differ by a CIEDE2000 distance
above 10, for readers with normal vision and under simulated protanopia and deuteranopia. A test computes that.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from harness.report.results import UPSTREAM, Row
from harness.report.variants import method_name

INK, MUTED, GRID = "#1b1f24", "#5b6470", "#dfe3e8"

COLOURS = {
    "burst": "#b74d00",
    "ring": "#5ebff5",
    "megatron_cp": "#00518f",
    "megatron_tp": "#d27fae",
    "ulysses": "#1d9b6c",
    "loongtrain_double_ring": "#c98200",
    "loongtrain_usp": "#d4c000",
    "torch_cp": "#666675",
    "flash_1gpu": "#292623",
}
SPARE = ("#713920", "#736bd0", "#85c8a9", "#9e0051")
# Systems with the colour of a method of another name: of their native form; TRL, which splits no sequence, has none.
NATIVE_FORM = {"megatron_lm": "megatron_cp", "deepspeed": "ulysses", "torchtitan": "torch_cp", "trl": "megatron_tp"}

MAX_SERIES = 24  # told apart in one figure
_PLAIN, _PALE, _DARK = 0.0, 0.62, -0.42  # share of white, or of black, mixed into a fill
_HATCHES = ("", "////", "xxxx", "----", "\\\\\\\\", "||||", "++++", "//--")  # no dots: an SVG writes each circle out
_FIRST = (
    (_PLAIN, ""), (_PALE, "////"), (_DARK, ""), (_PALE, "xxxx"), (_PLAIN, "\\\\\\\\"), (_PALE, "----"),
    (_DARK, "||||"), (_PALE, ""), (_DARK, "////"), (_PALE, "++++"),
)  # fmt: skip
_FILLS = (*_FIRST, *(one for one in itertools.product((_PLAIN, _PALE, _DARK), _HATCHES) if one not in _FIRST))
_MARKERS = ("o", "s", "D", "^", "v", "<", ">", "p")
_DASHES: tuple[str | tuple[int, tuple[int, ...]], ...] = ("-", (0, (5, 2)), (0, (2, 2)), (0, (7, 2, 2, 2)), (0, (1, 1)))
_UPSTREAM_SHADES = {_PLAIN: 0.85, _PALE: 0.62, _DARK: 0.4}
_LINE_SHADES = (0.0, -0.45, 0.4)
assert len(_FILLS) >= MAX_SERIES


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Appearance of one series. `variant` counts the variants of a figure: bars show it by lightness and hatch, lines
    by lightness and dashes, beside a marker.

    An upstream system has its native form's colour, in pale bars with an outline, and on lines in hollow markers.
    """

    colour: str
    variant: int = 0
    marker: int = 0
    upstream: bool = False

    @property
    def hatch(self) -> str:
        return _FILLS[self.variant % len(_FILLS)][1]

    @property
    def fill(self) -> tuple[float, float, float]:
        """Colour of a bar's face."""
        shade = _FILLS[self.variant % len(_FILLS)][0]
        return mixed(self.colour, _UPSTREAM_SHADES[shade] if self.upstream else shade)

    @property
    def bar(self) -> dict[str, Any]:
        """Properties of a bar. Hatches are drawn in the colour of the edge: white on dark faces, else the series'."""
        pale = self.upstream or _FILLS[self.variant % len(_FILLS)][0] == _PALE
        outlined = self.upstream or (pale and not self.hatch)
        return {
            "facecolor": self.fill, "hatch": self.hatch, "edgecolor": self.colour if pale else "white",
            "linewidth": 1.2 if self.upstream else 0.5 if outlined else 0.0,
        }  # fmt: skip

    @property
    def line(self) -> dict[str, Any]:
        """Properties of a line with markers. Their white edge shows markers below others."""
        colour = mixed(self.colour, _LINE_SHADES[self.variant % len(_LINE_SHADES)])
        return {
            "color": colour, "linestyle": _DASHES[self.variant % len(_DASHES)], "linewidth": 1.5,
            "marker": _MARKERS[self.marker % len(_MARKERS)], "markersize": 6,
            "markerfacecolor": "white" if self.upstream else colour,
            "markeredgecolor": colour if self.upstream else "white", "markeredgewidth": 1.1 if self.upstream else 0.7,
        }  # fmt: skip

    @property
    def point(self) -> dict[str, Any]:
        """Properties of a point on its own."""
        return {**self.line, "linestyle": "none", "markersize": 7.5}


def mixed(colour: str, share: float) -> tuple[float, float, float]:
    """The colour with this share of white mixed in, or with a share of black where it is negative."""
    goal = 1.0 if share > 0 else 0.0
    r, g, b = (part + (goal - part) * abs(share) for part in to_rgb(colour))
    return (r, g, b)


def method_colour(method: str) -> str:
    """The colour of a method in every figure; an upstream system shares its native form's."""
    base = method.removesuffix(UPSTREAM)
    base = NATIVE_FORM.get(base, base)
    return COLOURS.get(base) or SPARE[zlib.crc32(base.encode()) % len(SPARE)]


def looks_of(series: Sequence[tuple[str, list[Row]]]) -> dict[str, Look]:
    """A look for each named series: the method's colour, and a variant for a choice of settings, alike for all methods.

    Where a method ran several things, or several methods share a colour, each of these is a variant too. The variant
    with the most trials is the plain one, since most bars show it. No two series have the same look.
    """
    methods: dict[str, list[str]] = {}  # by colour
    ran: dict[str, list[str]] = {}  # names of each method with what it ran
    trials: dict[tuple[str, int, int], int] = {}
    variants: dict[str, tuple[str, int, int]] = {}
    for name, rows in series:
        method = rows[0]["method"]
        sharing = methods.setdefault(method_colour(method), [])
        if method not in sharing:
            sharing.append(method)
        named = max((method_name(row) for row in rows), key=len)  # a row that ran nothing has the method's name alone
        if named not in ran.setdefault(method, []):
            ran[method].append(named)
        variants[name] = (name.removeprefix(named), ran[method].index(named), sharing.index(method))
        trials[variants[name]] = trials.get(variants[name], 0) + len(rows)
    order = sorted(trials, key=lambda variant: -trials[variant])
    looks: dict[str, Look] = {}
    for place, (name, rows) in enumerate(series):
        look = Look(
            colour=method_colour(rows[0]["method"]),
            variant=order.index(variants[name]),
            marker=place % len(_MARKERS),
            upstream=rows[0]["method"].endswith(UPSTREAM),
        )
        taken = [other.line for other in looks.values()]
        while look.line in taken:  # dashes and lightness repeat after 15 variants
            look = replace(look, marker=look.marker + 1)
        looks[name] = look
    return looks


def bar_key(name: str, look: Look) -> Patch:
    """Legend entry of a series of bars."""
    return Patch(label=name, **look.bar)


def line_key(name: str, look: Look, *, joined: bool = True) -> Line2D:
    """Legend entry of a series of points, joined by lines or not."""
    return Line2D([], [], label=name, **(look.line if joined else look.point))
