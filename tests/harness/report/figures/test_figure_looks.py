"""How series are told apart: colours under simulated colour vision deficiencies looks of many series."""

from __future__ import annotations

import itertools
import math

import pytest
from matplotlib.colors import to_rgb

from engine.settings import Checkpoint
from harness.report.drawing.looks import MAX_SERIES, OF_PAGE, PALETTE, SPARE, looks_of, method_colour
from harness.report.drawing.points import laid_out
from harness.report.results import METHOD_ORDER, UPSTREAM, rows_of
from harness.report.variants import series_of
from tests.harness.synthetic_records import gpu_sweep, record

Colour = tuple[float, float, float]

# Machado, Oliveira, Fernandes: A Physiologically-based Model for Simulation of Color Vision Deficiency (2009), the
# matrices of severity 1, for linear RGB.
VISIONS: dict[str, tuple[Colour, Colour, Colour]] = {
    "normal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881),
    ),
}  # fmt: skip
# CIEDE2000, of light colours and of dark ones, whose lines have their names beside them. 1 is the least difference that
# a careful observer sees; below about 5, colours pass for shades of one.
APART = (10.0, 8.0)
SERIES = {name: pair for name, pair in PALETTE.items() if name not in OF_PAGE}


def lab(colour: Colour, vision: str = "normal") -> Colour:
    """CIE L*, a*, b* (D65) of an sRGB colour as it appears to this vision."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    seen = [min(1.0, max(0.0, sum(f * part for f, part in zip(line, linear, strict=True)))) for line in VISIONS[vision]]
    xyz = (
        (0.4124564 * seen[0] + 0.3575761 * seen[1] + 0.1804375 * seen[2]) / 0.95047,
        0.2126729 * seen[0] + 0.7151522 * seen[1] + 0.0721750 * seen[2],
        (0.0193339 * seen[0] + 0.1191920 * seen[1] + 0.9503041 * seen[2]) / 1.08883,
    )
    x, y, z = (math.cbrt(t) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in xyz)
    return (116 * y - 16, 500 * (x - y), 200 * (y - z))


def ciede2000(one: Colour, other: Colour) -> float:
    """Colour difference of two L*a*b* values. Source: Sharma, Wu, Dalal (2005), equations 2 to 22."""
    (light1, a1, b1), (light2, a2, b2) = one, other
    mean = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    g = 0.5 * (1 - math.sqrt(mean**7 / (mean**7 + 25**7)))
    c1, c2 = math.hypot((1 + g) * a1, b1), math.hypot((1 + g) * a2, b2)
    h1, h2 = (math.degrees(math.atan2(b, (1 + g) * a)) % 360 for a, b in ((a1, b1), (a2, b2)))
    turn = 0.0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    hue = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2))
    light, chroma = (light1 + light2) / 2, (c1 + c2) / 2
    if c1 * c2 == 0:
        h = h1 + h2
    elif abs(h1 - h2) <= 180:
        h = (h1 + h2) / 2
    else:
        h = (h1 + h2 + (360 if h1 + h2 < 360 else -360)) / 2
    t = (
        1 - 0.17 * math.cos(math.radians(h - 30)) + 0.24 * math.cos(math.radians(2 * h))
        + 0.32 * math.cos(math.radians(3 * h + 6)) - 0.20 * math.cos(math.radians(4 * h - 63))
    )  # fmt: skip
    s_light = 1 + 0.015 * (light - 50) ** 2 / math.sqrt(20 + (light - 50) ** 2)
    s_chroma, s_hue = 1 + 0.045 * chroma, 1 + 0.015 * chroma * t
    rotation = (
        -2
        * math.sqrt(chroma**7 / (chroma**7 + 25**7))
        * math.sin(math.radians(60 * math.exp(-(((h - 275) / 25) ** 2))))
    )
    parts = ((light2 - light1) / s_light, (c2 - c1) / s_chroma, hue / s_hue)
    return math.sqrt(sum(part**2 for part in parts) + rotation * parts[1] * parts[2])


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [
        ((50.0, 2.6772, -79.7751), (50.0, 0.0, -82.7485), 2.0425),
        ((50.0, 2.4900, -0.0010), (50.0, -2.4900, 0.0009), 7.1792),
        ((50.0, 2.5, 0.0), (73.0, 25.0, -18.0), 27.1492),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
    ],
)
def test_the_difference_formula_gives_its_authors_test_values(one: Colour, other: Colour, difference: float) -> None:
    assert ciede2000(one, other) == pytest.approx(difference, abs=1e-4)


@pytest.mark.parametrize("shade", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
def test_every_two_colours_are_told_apart_by_every_reader(vision: str, shade: int) -> None:
    colours = {name: lab(to_rgb(pair[shade]), vision) for name, pair in SERIES.items()}
    close = {
        (one, other): round(difference, 1)
        for (one, a), (other, b) in itertools.combinations(colours.items(), 2)
        if (difference := ciede2000(a, b)) < APART[shade]
    }
    assert not close


@pytest.mark.parametrize("shade", [0, 1], ids=["light", "dark"])
def test_every_colour_is_seen_on_its_ground(shade: int) -> None:
    ground = lab(to_rgb(PALETTE["ground"][shade]))[0]
    for name in (*SERIES, "ink", "muted"):
        assert abs(lab(to_rgb(PALETTE[name][shade]))[0] - ground) > 20, name
    assert len({pair[0] for pair in PALETTE.values()}) == len(PALETTE)  # a light colour names its variable


def test_the_old_colours_of_loongtrain_would_not_have_passed() -> None:
    """The simulation finds what it is for: two colours that readers with deuteranopia took for one."""
    assert ciede2000(lab(to_rgb("#e69f00"), "deuteranopia"), lab(to_rgb("#c9b800"), "deuteranopia")) < 5


def test_a_method_keeps_its_colour_whatever_else_is_drawn() -> None:
    assert len({method_colour(method) for method in METHOD_ORDER}) == len(METHOD_ORDER)
    assert method_colour("ulysses_upstream") == method_colour("ulysses")
    assert method_colour("megatron_lm_upstream") == method_colour("megatron_cp")  # whose native baseline it is
    assert method_colour("something_new") == method_colour("something_new")
    assert method_colour("ink") in SPARE


@pytest.mark.parametrize("count", [2, 7, MAX_SERIES])
def test_no_two_lines_of_a_figure_look_alike(count: int) -> None:
    """Of one method, of methods without a colour of their own, and of a system beside its native baseline."""
    one = rows_of([record(checkpoint=Checkpoint(tail=place / count)) for place in range(count)])
    unknown = rows_of([record() for _ in range(count)])
    for place, row in enumerate(unknown):
        row["method"] = f"plugin_{place}"
    mixed = rows_of([record(method=method) for method in ("burst", "ulysses") for _ in range(count // 2)])
    for place, row in enumerate(mixed):
        row["method"] += UPSTREAM if place % 2 else ""
        row["lm_head_fusion"] = f"variant {place // 2}"
    for rows in (one, unknown, mixed):
        looks = looks_of(series_of(rows))
        lines = {(look.colour, look.marker, str(look.dashes)) for look in looks.values()}
        assert len(looks) == len(series_of(rows)) == len(lines)


def test_variants_of_one_method_are_separate_series_of_one_colour() -> None:
    rows = [row for row in rows_of(gpu_sweep()) if row["task"] == "train"]
    assert [name for name, _ in series_of(rows)] == [
        "burst, kernel cudnn", "burst, kernel fa4", "megatron_cp", "ulysses",
    ]  # fmt: skip
    looks = looks_of(series_of(rows))
    assert looks["burst, kernel cudnn"].colour == looks["burst, kernel fa4"].colour
    assert looks["burst, kernel cudnn"].alpha != looks["burst, kernel fa4"].alpha


def test_steps_rounds_and_seeds_are_no_part_of_a_name() -> None:
    rows = rows_of([record(seed=seed) for seed in range(3)])
    for row, steps in zip(rows, (3, 5, 7), strict=True):
        row["steps.measured"] = steps
    assert list(laid_out(rows).looks) == ["burst"]
