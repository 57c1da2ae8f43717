"""How series are told apart: colours under simulated colour vision deficiencies and in grey, looks of many series."""

from __future__ import annotations

import itertools
import math

import pytest
from matplotlib.colors import to_rgb

from engine.settings import Checkpoint
from harness.report.drawing.looks import COLOURS, MAX_SERIES, SPARE, UPSTREAM, Look, looks_of, method_colour
from harness.report.drawing.points import laid_out
from harness.report.results import METHOD_ORDER, rows_of
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
APART = (
    10.0  # CIEDE2000; 1 is the least difference a careful observer sees, below about 5 colours pass for shades of one
)
GREY_APART = 2.0  # of CIE lightness, from 0 to 100; hatches and markers tell series apart besides


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


@pytest.mark.parametrize("vision", VISIONS)
def test_every_two_colours_are_told_apart_by_every_reader(vision: str) -> None:
    colours = {**COLOURS, **{f"spare {place}": colour for place, colour in enumerate(SPARE)}}
    close = {
        (one, other): round(difference, 1)
        for (one, a), (other, b) in itertools.combinations(colours.items(), 2)
        if (difference := ciede2000(lab(to_rgb(a), vision), lab(to_rgb(b), vision))) < APART
    }
    assert not close


def test_colours_of_methods_differ_in_lightness_for_a_print_in_grey() -> None:
    lightness = sorted(lab(to_rgb(colour))[0] for colour in COLOURS.values())
    assert min(b - a for a, b in itertools.pairwise(lightness)) >= GREY_APART
    assert lightness[-1] < 80  # and none is lost on white paper


def test_the_old_colours_of_loongtrain_would_not_have_passed() -> None:
    """The simulation finds what it is for: two colours that readers with deuteranopia took for one."""
    assert ciede2000(lab(to_rgb("#e69f00"), "deuteranopia"), lab(to_rgb("#c9b800"), "deuteranopia")) < 5


def test_a_method_keeps_its_colour_whatever_else_is_drawn() -> None:
    assert len({method_colour(method) for method in METHOD_ORDER}) == len(METHOD_ORDER)
    assert method_colour("ulysses_upstream") == method_colour("ulysses")
    assert method_colour("megatron_lm_upstream") == method_colour("megatron_cp")  # whose native form it is
    assert method_colour("something_new") == method_colour("something_new")


def bar_of(look: Look) -> tuple[object, ...]:
    return tuple(look.bar.values())


def line_of(look: Look) -> tuple[object, ...]:
    return tuple(str(value) for value in look.line.values())


@pytest.mark.parametrize("vision", VISIONS)
def test_variants_of_one_method_differ_in_hatch_or_clearly_in_lightness(vision: str) -> None:
    looks = [Look(colour=COLOURS["burst"], variant=variant) for variant in range(MAX_SERIES)]
    for one, other in itertools.combinations(looks, 2):
        if one.hatch == other.hatch:
            assert ciede2000(lab(one.fill, vision), lab(other.fill, vision)) >= APART, (one, other)


@pytest.mark.parametrize("count", [2, 7, 12, MAX_SERIES])
def test_no_two_series_of_a_figure_look_alike(count: int) -> None:
    """Of one method, of methods without a colour of their own, and of a system beside its native form."""
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
        assert len(looks) == len(series_of(rows)) == len({bar_of(look) for look in looks.values()})
        assert len({line_of(look) for look in looks.values()}) == len(looks)


def test_an_upstream_system_differs_visibly_from_its_native_form() -> None:
    native = Look(colour=COLOURS["ulysses"])
    for variant in range(MAX_SERIES):
        upstream = Look(colour=COLOURS["ulysses"], variant=variant, upstream=True)
        for vision in VISIONS:
            assert ciede2000(lab(native.fill, vision), lab(upstream.fill, vision)) >= APART
        assert upstream.bar["linewidth"] > native.bar["linewidth"]
        assert upstream.line["markerfacecolor"] == "white" != native.line["markerfacecolor"]


def test_variants_of_one_method_are_separate_series() -> None:
    rows = [row for row in rows_of(gpu_sweep()) if row["task"] == "train"]
    assert [name for name, _ in series_of(rows)] == [
        "burst, kernel cudnn", "burst, kernel fa4", "megatron_cp", "ulysses",
    ]  # fmt: skip
    looks = looks_of(series_of(rows))
    assert len({bar_of(look) for look in looks.values()}) == 4
    assert looks["burst, kernel cudnn"].colour == looks["burst, kernel fa4"].colour
    assert looks["burst, kernel cudnn"].hatch
    assert looks["megatron_cp"].hatch == looks["ulysses"].hatch


def test_steps_rounds_and_seeds_are_no_part_of_a_name() -> None:
    rows = rows_of([record(seed=seed) for seed in range(3)])
    for row, steps in zip(rows, (3, 5, 7), strict=True):
        row["steps.measured"] = steps
    assert list(laid_out(rows).looks) == ["burst"]
