"""Colours, and the SVG that carries them into a page: one colour per method everywhere, in a light and a dark shade.

Variants of a method differ by paleness, dashes and markers. Light hues are near those of Okabe and Ito (Color Universal
Design, 2008). In both shades any two differ by a CIEDE2000 distance that a test computes, for readers with normal
vision and under simulated protanopia and deuteranopia.

An SVG that matplotlib wrote is made fit for pages: colours follow light and dark, values show on hover, text is text.
Styles become attributes, so that a page may forbid inline styles; colours of the palette become CSS variables with the
light colour as what holds without them.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.report.results import UPSTREAM, Row

# Names of CSS variables with their light and dark values. The first four are the page's own.
INK, MUTED, GRID, PAPER = "#1b1f24", "#5b6470", "#dfe3e8", "#ffffff"
PALETTE: dict[str, tuple[str, str]] = {
    "ink": (INK, "#e4e7eb"), "muted": (MUTED, "#a2abb6"), "line": (GRID, "#30353c"), "ground": (PAPER, "#15181c"),
    "burst": ("#b74d00", "#ff974c"),
    "ring": ("#5ebff5", "#8fdcff"),
    "megatron_cp": ("#00518f", "#3882f0"),
    "megatron_tp": ("#d27fae", "#f2a9d0"),
    "ulysses": ("#1d9b6c", "#2fbf8a"),
    "loongtrain_double_ring": ("#c98200", "#c27421"),
    "loongtrain_usp": ("#d4c000", "#e9e63c"),
    "torch_cp": ("#666675", "#8c8c9c"),
    "flash_1gpu": ("#292623", "#f0f4fd"),
    "spare_1": ("#713920", "#a5644a"),
    "spare_2": ("#736bd0", "#b3a8ff"),
    "spare_3": ("#85c8a9", "#a1dfc7"),
    "spare_4": ("#9e0051", "#e0458c"),
}  # fmt: skip
OF_PAGE = ("ink", "muted", "line", "ground")
SPARE = tuple(light for name, (light, _) in PALETTE.items() if name.startswith("spare"))
# Systems with the colour of a method of another name: of their native baseline, where they have one.
NATIVE_BASELINE = {
    "megatron_lm": "megatron_cp", "deepspeed": "ulysses", "torchtitan": "torch_cp", "trl": "megatron_tp",
    "transformers": "loongtrain_double_ring", "transformers_bf16": "loongtrain_usp",
    "flash_linear_attention": "spare_2",
}  # fmt: skip
MAX_SERIES = 12  # told apart in one figure
MARKERS = ("o", "s", "D", "^", "v", "<", ">", "p")
DASHES: tuple[str | tuple[int, tuple[int, ...]], ...] = ("-", (0, (5, 2)), (0, (2, 2)), (0, (7, 2, 2, 2)), (0, (1, 1)))
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"
_SVG, _LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_VARIABLES = {light: f"var(--{name}, {light})" for name, (light, _) in PALETTE.items()}
_LONG = re.compile(r"-?\d+\.\d{3,}")
ElementTree.register_namespace("", _SVG)
ElementTree.register_namespace("xlink", _LINK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Appearance of one series. Series of one colour differ by `variant`: markers and dashes of lines, paleness of bars
    (whose names stand beside them)."""

    colour: str
    variant: int = 0

    @property
    def marker(self) -> str:
        return MARKERS[self.variant % len(MARKERS)]

    @property
    def dashes(self) -> str | tuple[int, tuple[int, ...]]:
        return DASHES[self.variant % len(DASHES)]

    @property
    def alpha(self) -> float:
        """Of a bar's face."""
        return (1.0, 0.6, 0.8, 0.4)[self.variant % 4]


def method_colour(method: str) -> str:
    """The light colour of a method in every figure; an upstream system shares its native baseline's."""
    base = method.removesuffix(UPSTREAM)
    base = NATIVE_BASELINE.get(base, base)
    return (
        PALETTE[base][0] if base in PALETTE and base not in OF_PAGE else SPARE[zlib.crc32(base.encode()) % len(SPARE)]
    )


def looks_of(series: Sequence[tuple[str, list[Row]]]) -> dict[str, Look]:
    """A look for each named series: no two of one figure have the same, up to 40 of one colour."""
    looks: dict[str, Look] = {}
    used: dict[str, int] = {}
    for name, rows in series:
        colour = method_colour(rows[0]["method"])
        looks[name] = Look(colour=colour, variant=used.get(colour, 0))
        used[colour] = looks[name].variant + 1
    return looks


def palette_css() -> str:
    """The variables that figures inside a page take their colours from, but for those that the page has itself."""
    return _css({name: pair for name, pair in PALETTE.items() if name not in OF_PAGE}, ":root")


def standalone_css() -> str:
    """All variables, for an SVG file that brings its own."""
    return _css(PALETTE, "svg")


def _css(palette: dict[str, tuple[str, str]], selector: str) -> str:
    light, dark = (";".join(f"--{name}:{pair[shade]}" for name, pair in palette.items()) for shade in (0, 1))
    return f"{selector}{{{light}}}@media(prefers-color-scheme:dark){{{selector}{{{dark}}}}}"


def finished(svg: bytes, tips: Mapping[str, Sequence[str]], label: str, *, standalone: bool) -> bytes:
    """The SVG with a `<title>` in each mark of `tips`, by the id of its group: one for the group, or one for each of
    its markers. `standalone`: a file that brings its variables; else a page's, with nothing that acts outside it."""
    root = ElementTree.fromstring(svg)  # noqa: S314 - matplotlib wrote it just now
    for name in ("metadata", "defs"):  # the second holds a style for every element of the page
        if (first := root.find(f"{{{_SVG}}}{name}")) is not None:
            root.remove(first)
    width, height = (float(root.attrib[side].removesuffix("pt")) / 0.75 for side in ("width", "height"))
    root.attrib |= {
        "width": f"{width:.0f}", "height": f"{height:.0f}", "role": "img", "aria-label": label,
        "font-family": FONTS, "stroke-linejoin": "round",
    }  # fmt: skip
    for element in root.iter():
        _as_attributes(element)
        if (key := element.attrib.get("id", "")) in tips:
            _add_titles(element, tips[key])
        if not element.tag.endswith(("clipPath", "pattern", "path")):
            element.attrib.pop("id", None)
        for name in ("d", "x", "y", "width", "height", "transform", "viewBox"):
            if name in element.attrib and element is not root:
                element.attrib[name] = _LONG.sub(lambda match: f"{float(match[0]):.2f}", element.attrib[name])
        element.text = element.text if element.text and element.text.strip() else None
        element.tail = "\n" if element.tail else None
    if standalone:
        style = ElementTree.Element(f"{{{_SVG}}}style")
        style.text = standalone_css()
        root.insert(0, style)
    return ElementTree.tostring(root, encoding="utf-8") + b"\n"


def _as_attributes(element: ElementTree.Element) -> None:
    """Each property of the element's style as an attribute of its own."""
    for declaration in element.attrib.pop("style", "").split(";"):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        if name == "font":
            *weight, size, _family = value.split(" ", 2 if value[:1].isdigit() and "px" not in value.split()[0] else 1)
            element.attrib["font-size"] = size.removesuffix("px")
            if weight:
                element.attrib["font-weight"] = weight[0]
        elif name:
            element.attrib[name] = _VARIABLES.get(value, value)


def _add_titles(group: ElementTree.Element, texts: Sequence[str]) -> None:
    marks = [group] if len(texts) == 1 else list(group.iter(f"{{{_SVG}}}use"))
    for mark, text in zip(marks, texts, strict=True):
        title = ElementTree.Element(f"{{{_SVG}}}title")
        title.text = text
        mark.insert(0, title)
