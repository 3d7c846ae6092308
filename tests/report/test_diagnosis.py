"""The page of a diagnosis: valid, escaped, self-contained, and its drawings where the numbers say."""

import re
from pathlib import Path

import pytest
import torch

from dubito.explain.diagnosis import diagnose
from dubito.report.diagnosis import write_diagnosis_page
from dubito.scores import Neighbours
from dubito.table import Table

from .test_page import Reader

EVIL = "<b>cats</b> & co"


def table(n: int, seed: int, scale: float) -> Table:
    draw = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % 3
    feature = scale * torch.eye(3, 5)[label] + torch.randn(n, 5, generator=draw)
    return Table(feature=feature, logit=2 * feature[:, :3], label=label)


@pytest.fixture(scope="module")
def found():
    ood = {EVIL: table(40, 2, 0.0), "dogs": table(30, 3, 2.0)}
    linear = torch.nn.Linear(5, 3)
    train = table(60, 0, 5.0)
    return diagnose(
        table(50, 1, 5.0), ood, train=train, density=Neighbours(k=3), classifier=linear, draws=2, resamples=30
    )


def test_page(found, tmp_path: Path):
    page = write_diagnosis_page(found, tmp_path / "deep" / "why.html")
    text = page.read_text(encoding="utf-8")
    reader = Reader(text)
    assert reader.open == []
    assert "Why does confidence fail on 2 sets of out-of-distribution images?" in text
    assert EVIL not in text
    assert "&lt;b&gt;cats&lt;/b&gt; &amp; co" in text
    assert "default-src 'none'" in text
    assert not re.search(r"<script|https?://|url\(|@import", text)
    # Three bars for either set and the mean; six histograms for either set.
    assert text.count("<svg") == 3 + 2 * 6
    assert len(reader.all("tr")) == 1 + 3
    overlap = found["dogs"].causes["overlap"]
    assert f"<b>{100 * overlap.value:.1f}</b><small>[{100 * overlap.low:.1f}, {100 * overlap.high:.1f}]</small>" in text


def test_page_says_what_the_diagnosis_says(found, tmp_path: Path):
    words = " ".join(Reader(write_diagnosis_page(found, tmp_path / "a.html").read_text(encoding="utf-8")).text)
    plain = words.replace("\N{MINUS SIGN}", "-")
    for sentence in found.findings_by_set()["dogs"]:
        for part in sentence.split("`")[::2]:  # names of scores stand in tags of their own
            assert part in plain
    assert found.findings_by_set()["mean"][0] in plain
    assert "50 images" in words
    assert found.fitted_on in words


def test_one_set_has_its_verdict_once(tmp_path: Path):
    single = diagnose(table(50, 1, 5.0), {"cats": table(40, 2, 0.0)}, density=Neighbours(k=3), resamples=20)
    text = write_diagnosis_page(single, tmp_path / "a.html").read_text(encoding="utf-8")
    assert "Why does confidence fail on cats?" in text
    assert text.count(single.findings_by_set()["cats"][0]) == 1
    assert text.count("<svg") == 1 + 4  # without a classifier, there are neither lengths nor cosines


def test_notes_stand_on_the_page(tmp_path: Path):
    same = table(20, 0, 1.0)
    with pytest.warns(UserWarning, match="by their features"):
        found = diagnose(same, {"twin": same}, train=table(20, 1, 1.0), density=Neighbours(k=3), resamples=20)
    text = write_diagnosis_page(found, tmp_path / "a.html").read_text(encoding="utf-8")
    assert '<p class="note">20 of 20 images of twin' in text
