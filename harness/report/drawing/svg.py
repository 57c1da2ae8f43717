"""An SVG that matplotlib wrote, made fit for pages: colours that follow light and dark, values on hover, text as text.

Styles become attributes, so that a page may forbid inline styles; colours of the palette become CSS variables with the
light colour as what holds without them.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence

from harness.report.drawing.looks import PALETTE, standalone_css

FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"
_SVG, _LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_VARIABLES = {light: f"var(--{name}, {light})" for name, (light, _) in PALETTE.items()}
_LONG = re.compile(r"-?\d+\.\d{3,}")
ElementTree.register_namespace("", _SVG)
ElementTree.register_namespace("xlink", _LINK)


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
