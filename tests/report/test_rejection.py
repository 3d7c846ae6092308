"""The page and the figure of a rejection study: valid, self-contained, and lines where the numbers say."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from dubito.errors import ValueRangeError
from dubito.evaluate.rejection import rejection_study
from dubito.metrics import MemberStream
from dubito.report._lines import curves, palette
from dubito.report.rejection import rejection_figure, write_rejection_page
from dubito.table import Table

from .test_page import Reader

EVIL = "<b>cats</b> & co"


@pytest.fixture(scope="module")
def study():
    draw = torch.Generator().manual_seed(0)
    label = torch.arange(60) % 3
    logit = 2 * torch.eye(3)[label] + torch.randn(60, 3, generator=draw)
    members = {}
    for k in (2, 3):
        z = logit[:, None] + torch.randn(60, k * k, 3, generator=draw)
        stream = MemberStream()
        stream.add(z)
        members |= {f"tiles_{k}": stream.summary(), f"tiles_{k}_loss": stream.loss(label), f"tiles_{k}_logit": z}
    table = Table(name=EVIL, logit=logit, label=label, **members)
    return rejection_study(table, temperatures=(1.0, 2.0), resamples=20)


def test_page(study, tmp_path: Path):
    text = write_rejection_page(study, tmp_path / "deep" / "reject.html").read_text(encoding="utf-8")
    reader = Reader(text)
    assert reader.open == []
    assert EVIL not in text
    assert "Which images should &lt;b&gt;cats&lt;/b&gt; &amp; co refuse?" in text
    assert not re.search(r"<script|https?://|url\(|@import", text)
    # Three uncertainties at two temperatures, three metrics by bucket and by acceptance; one row an order.
    assert text.count("<svg") == 3 * 2 * 3 * 2
    assert len(reader.all("tr")) == 1 + len(study.results)
    assert text.count('class="curve reference"') == text.count("<svg")
    assert text.count('class="curve"') == 2 * text.count("<svg")
    assert "<th scope='col' class='word'>ensemble</th>" in text  # names to the left, numbers to the right
    assert ".results.left" in text
    aurc = study.of("tiles_3", "mutual_information", 2.0).figures["aurc"]
    assert f"<b>{aurc.value:.3f}</b><small>[{aurc.low:.3f}, {aurc.high:.3f}]</small>" in text
    words = " ".join(reader.text)
    for sentence in study.findings():
        assert sentence in words


def test_lines_are_where_the_numbers_say():
    drawn = curves(
        [0.5, 1.0], {"original": [1.0, 0.0], "2x2": [0.0, 0.5]}, reference="original", span=(0.0, 1.0), told="t"
    )
    paths = {path[0].text: path for path in ElementTree.fromstring(drawn).iter("path")}  # noqa: S314 (our own)
    # The panel is 262 x 158 below a margin of 8 and right of one of 38: half of it, and all of it.
    assert paths["original"].get("d") == "M169.0 8.0L300.0 166.0"
    assert paths["2x2"].get("d") == "M169.0 166.0L300.0 87.0"
    assert paths["original"].get("class") == "curve reference"
    assert paths["2x2"].get("stroke") == palette(["2x2"])["2x2"]


def test_a_flat_curve_has_room():
    assert "nan" not in curves([1.0], {"a": [0.3]}, reference="a", span=(0.3, 0.3), told="t")


def test_figure(study):
    figure = rejection_figure(study, "mutual_information", kind="bucket")
    assert len(figure.axes) == 2 * 3
    dashed, *solid = figure.axes[3].lines  # the second temperature's accuracy
    assert dashed.get_linestyle() == "--"
    assert [line.get_label() for line in solid] == ["2x2", "3x3"]
    expected = study.of("tiles_3", "mutual_information", 2.0).curves["bucket"]["accuracy"]
    assert solid[1].get_ydata().tolist() == pytest.approx(list(expected))
    assert "2 members" not in figure.axes[0].get_title()


def test_unknown_choices(study):
    with pytest.raises(ValueRangeError, match="uncertainty must be one of the study's, mutual_information, weighted_"):
        rejection_figure(study, "pooled_sum")
    with pytest.raises(ValueRangeError, match="kind must be 'acceptance' or 'bucket'; got 'both'"):
        rejection_figure(study, "mutual_information", kind="both")
