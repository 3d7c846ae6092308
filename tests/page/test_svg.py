"""Drawings are where the numbers say, scale with their box, and carry a description."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from dubito.page.svg import Axis, Line, Span, bars, histogram, lines, palette


def parsed(drawing: str) -> ElementTree.Element:
    return ElementTree.fromstring(drawing)  # noqa: S314 (our own drawing)


def heights(drawing: str, name: str) -> list[float]:
    """Of every bin, from the outline."""
    path = next(p for p in parsed(drawing).iter("path") if p.get("class") == name)
    return [130 - float(y) for y in re.findall(r"L\S+ (\S+?)(?=L|Z)", path.get("d"))[:-1:2]]


def test_histogram():
    in_distribution, ood = np.repeat([0.0, 1.0], [30, 10]), np.repeat([1.0, 2.0], [10, 10])
    drawing = histogram(in_distribution, ood)
    inside, outside = heights(drawing, "in"), heights(drawing, "out")
    assert len(inside) == len(outside) == 36
    # Each has an area of one: 3/4 and 1/4 of the one, halves of the other; the highest bin is 122 high.
    assert [inside[0], inside[18], inside[35]] == pytest.approx([122, 122 / 3, 0], abs=0.1)
    assert [outside[0], outside[18], outside[35]] == pytest.approx([0, 122 * 2 / 3, 122 * 2 / 3], abs=0.1)
    assert "Histogram of 40 in-distribution and 20 out-of-distribution images" in drawing
    assert re.findall(r">([\d.]+)</text>", drawing) == ["0.0", "0.5", "1.0", "1.5", "2.0"]


def test_histogram_of_powers_and_of_one_value():
    drawing = histogram(np.array([0.0, 1e-8]), np.array([1e-4, 1.0]), log=True)  # zero counts as 1e-16
    assert re.findall(r"<tspan[^>]*>([^<]+)<", drawing) == ["\N{MINUS SIGN}15", "\N{MINUS SIGN}10", "\N{MINUS SIGN}5"]
    assert parsed(histogram(np.zeros(3), np.zeros(2))).tag == "svg"


def test_bars():
    drawing = parsed(bars({"a": (-10.0, -12.0, -8.0), "<b>": (30.0, 25.0, 35.0)}, Axis(-12.0, 40.0)))
    (negative, positive), (zero,) = drawing.iter("rect"), [
        line for line in drawing.iter("line") if line.get("class") == "axis"
    ]  # fmt: skip
    assert negative.get("class") == "bar negative"
    # Both begin at zero, and their lengths are as 10 to 30.
    start = float(zero.get("x1"))
    assert float(positive.get("x")) == start
    assert float(negative.get("x")) + float(negative.get("width")) == pytest.approx(start, abs=0.11)
    assert float(positive.get("width")) == pytest.approx(3 * float(negative.get("width")), abs=0.3)
    whiskers = [line for line in drawing.iter("line") if line.get("class") == "whisker"]
    assert float(whiskers[1].get("x1")) < start + float(positive.get("width")) < float(whiskers[1].get("x2"))
    assert drawing.get("aria-label") == "a \N{MINUS SIGN}10.0, <b> 30.0"


def test_powers_of_ten_on_logarithmic_axes_are_a_straight_line():
    sizes, values = [1.0, 10.0, 100.0], [0.1, 0.01, 0.001]
    measured = Line(sizes, values, intervals=[(0.05, 0.2), (0.01, 0.01), (0.001, 0.001)])
    axes = {"x": Axis.over(sizes, log=True), "y": Axis.over([0.2, *values], log=True, whole=True)}
    drawing = parsed(lines([Line(sizes, values, dashed=True), measured], **axes, x_ticks=sizes, label="MI & more"))
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in drawing.iter("circle")]
    assert dots[1] == pytest.approx([(a + b) / 2 for a, b in zip(dots[0], dots[2], strict=True)], abs=0.1)
    assert dots[0][1] < dots[2][1]  # larger is higher up
    whiskers = [line for line in drawing.iter("line") if line.get("class") == "whisker"]
    assert float(whiskers[0].get("y2")) < dots[0][1] < float(whiskers[0].get("y1"))
    assert [path.get("class") for path in drawing.iter("path")] == ["line dashed", "line"]
    assert drawing.get("aria-label") == "MI & more"
    grid = [line for line in drawing.iter("line") if line.get("class") == "grid"]
    assert len(grid) == 4  # 1, 0.1, 0.01 and 0.001


def test_lines_are_where_the_numbers_say():
    drawn = [
        Line([0.5, 1.0], [1.0, 0.0], name="original", dashed=True),
        Line([0.5, 1.0], [0.0, 0.5], name="<2x2>", colour="#23788f"),
    ]
    drawing = parsed(lines(drawn, x=Axis(0.0, 1.0), y=Axis(0.0, 1.0), x_ticks=(0.0, 1.0), label="t"))
    paths = {path[0].text: path for path in drawing.iter("path")}
    # The panel is 252 x 158 below a margin of 8 and right of one of 40: half of it, and all of it.
    assert paths["original"].get("d") == "M166.0 8.0L292.0 166.0"
    assert paths["<2x2>"].get("d") == "M166.0 166.0L292.0 87.0"
    assert paths["<2x2>"].get("style") == "stroke: #23788f"


def test_round_ticks_and_spans():
    spans = [Span(0.0, 2000.0, "<1>", name="a & b", kind="first"), Span(3000.0, 4000.0, "2")]
    drawing = parsed(lines([], x=Axis(0.0, 4000.0), y=Axis(0.0, 1.0), label="t", spans=spans))
    ticks = [text for text in drawing.iter("text") if text.get("text-anchor") == "middle"]
    assert [(text.text, text.get("x")) for text in ticks][1::2] == [("1,000", "103.0"), ("3,000", "229.0")]
    first, second = drawing.iter("g")
    # 252 pixels right of a margin of 40: half of them, and the last quarter.
    assert [(one.find("rect").get("x"), one.find("rect").get("width")) for one in (first, second)] == [
        ("40.0", "126.0"),
        ("229.0", "63.0"),
    ]
    assert (first.find("title").text, first.find("text").text, first.get("class")) == ("a & b", "<1>", "span first")
    assert second.find("text").get("text-anchor") == "end"  # there is no room to its right


def test_equal_values_have_room():
    axis = Axis.over([0.3, 0.3])
    assert (axis.low, axis.high, axis.share(0.3)) == pytest.approx((-0.2, 0.8, 0.5))
    assert "nan" not in lines([Line([1.0], [0.3])], x=Axis(0.0, 1.0), y=axis, x_ticks=(), label="t")


@pytest.mark.parametrize(
    ("axis", "texts"),
    [
        (Axis(0.0, 1.0), ["0.0", "0.5", "1.0"]),
        (Axis(-0.11, 0.1), ["\N{MINUS SIGN}0.1", "0.0", "0.1"]),
        (Axis(0.0, 4000.0), ["0", "1,000", "2,000", "3,000", "4,000"]),
        (Axis(0.301, 0.304), ["0.301", "0.302", "0.303", "0.304"]),
    ],
)
def test_ticks_are_round_numbers(axis, texts):
    assert [text for _, text in axis.ticks()] == texts


def test_a_palette_has_a_colour_per_name():
    assert palette(["a"]) == {"a": "#23788f"}
    assert len(set(palette(list("abcdefg")).values())) == 7
