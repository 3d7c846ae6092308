"""The page and the figure of a rejection study: valid, self-contained, and lines where the numbers say."""

import re
from pathlib import Path

import pytest
import torch
from tests.page.test_render import Reader

from dubito.errors import ValueRangeError
from dubito.evaluate.rejection import rejection_study
from dubito.metrics import MemberStream
from dubito.page.render import minus
from dubito.report.rejection import rejection_figure
from dubito.table import Table

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
    text = study.to_html(tmp_path / "deep" / "reject.html").read_text(encoding="utf-8")
    reader = Reader(text)
    assert reader.open == []
    assert EVIL not in text
    assert "Which images should &lt;b&gt;cats&lt;/b&gt; &amp; co reject?" in text
    assert not re.search(r"<script|https?://|url\(|@import", text)
    # Three uncertainties at two temperatures, three metrics by bucket and by acceptance; one row per ranking.
    assert text.count("<svg") == 3 * 2 * 3 * 2
    assert len(reader.all("tr")) == 1 + len(study.results)
    assert text.count('class="line dashed"') == text.count("<svg")
    assert text.count('class="line" style="stroke: #') == 2 * text.count("<svg")
    assert '<th scope="col" class=word>ensemble</th>' in text  # names to the left, numbers to the right
    assert ".results.compact" in text
    aurc = study.of("tiles_3", "mutual_information", 2.0).figures["aurc"]
    assert f"<b>{aurc.value:.3f}</b><small>[{aurc.low:.3f}, {aurc.high:.3f}]</small>" in text
    words = " ".join(reader.text)
    for sentence in study.findings():
        assert minus(sentence) in words


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
    with pytest.raises(ValueRangeError, match="uncertainty must be one of entropy, mutual_information, weighted_"):
        rejection_figure(study, "pooled_sum")
    with pytest.raises(ValueRangeError, match="kind must be one of bucket, acceptance; got 'both'"):
        rejection_figure(study, "mutual_information", kind="both")
