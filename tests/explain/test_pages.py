"""The pages of a diagnosis and of an ensemble: valid, escaped, self-contained, and drawings where the numbers say."""

import re
from pathlib import Path

import pytest
import torch

from dubito.explain.collapse import diagnose_ensemble
from dubito.explain.diagnosis import diagnose
from dubito.page.render import minus
from dubito.scores import Neighbours
from dubito.table import Table
from tests.page.test_render import Reader

EVIL = "<b>cats</b> & co"


def table(n: int, seed: int, scale: float) -> Table:
    draw = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % 3
    feature = scale * torch.eye(3, 5)[label] + torch.randn(n, 5, generator=draw)
    return Table(feature=feature, logit=2 * feature[:, :3], label=label)


@pytest.fixture(scope="module")
def result():
    ood = {EVIL: table(40, 2, 0.0), "dogs": table(30, 3, 2.0)}
    linear = torch.nn.Linear(5, 3)
    train = table(60, 0, 5.0)
    return diagnose(
        table(50, 1, 5.0), ood, train=train, density=Neighbours(k=3), classifier=linear, draws=2, resamples=30
    )


def test_page(result, tmp_path: Path):
    page = result.to_html(tmp_path / "deep" / "why.html")
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
    overlap = result["dogs"].causes["overlap"]
    assert f"<b>{100 * overlap.value:.1f}</b><small>[{100 * overlap.low:.1f}, {100 * overlap.high:.1f}]</small>" in text


def test_page_says_what_the_diagnosis_says(result, tmp_path: Path):
    words = " ".join(Reader(result.to_html(tmp_path / "a.html").read_text(encoding="utf-8")).text)
    plain = words.replace("\N{MINUS SIGN}", "-")
    for sentence in result.findings_by_set()["dogs"]:
        for part in sentence.split("`")[::2]:  # names of scores stand in tags of their own
            assert part in plain
    assert result.findings_by_set()["mean"][0] in plain
    assert "50 images" in words
    assert result.fitted_on in words


def test_one_set_has_its_verdict_once(tmp_path: Path):
    single = diagnose(table(50, 1, 5.0), {"cats": table(40, 2, 0.0)}, density=Neighbours(k=3), resamples=20)
    text = single.to_html(tmp_path / "a.html").read_text(encoding="utf-8")
    assert "Why does confidence fail on cats?" in text
    assert text.count(single.findings_by_set()["cats"][0]) == 1
    assert text.count("<svg") == 1 + 4  # without a classifier, there are neither lengths nor cosines


def test_notes_stand_on_the_page(tmp_path: Path):
    same = table(20, 0, 1.0)
    with pytest.warns(UserWarning, match="by their features"):
        result = diagnose(same, {"twin": same}, train=table(20, 1, 1.0), density=Neighbours(k=3), resamples=20)
    text = result.to_html(tmp_path / "a.html").read_text(encoding="utf-8")
    assert '<p class="note">20 of 20 images of twin' in text


EVIL_MEMBERS = "<b>cats & co"


def ensemble(seed: int, noise: float, members: int = 6, name: str = "mine") -> Table:
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(30, 1, 4, generator=draw) + noise * torch.randn(30, members, 4, generator=draw)
    return Table(members_logit=logits, name=name)


def test_ensemble_page(tmp_path: Path):
    result = diagnose_ensemble(ensemble(0, 1.0), ood=ensemble(1, 3.0, name=EVIL_MEMBERS), resamples=20)
    text = result.to_html(tmp_path / "deep" / "page.html").read_text(encoding="utf-8")
    reader = Reader(text)
    assert reader.open == []
    assert EVIL_MEMBERS not in text
    assert "&lt;b&gt;cats &amp; co" in text
    assert "default-src 'none'" in text
    assert "svg .line.dashed {" in text
    assert not re.search(r"<script|https?://|url\(|@import", text)
    assert text.count("<svg") == 1 + 3  # the fall, and a histogram for 6 x 1, 3 x 2 and 2 x 3
    assert len(reader.all("tr")) == 1 + 3
    words = " ".join(reader.text)
    for sentence in result.findings():
        assert minus(sentence) in words
    assert text.count(f"AUROC {100 * result.ensembles[0].levels[2].auroc.value:.1f} %") >= 1


def test_ensemble_page_of_several_sizes(tmp_path: Path):
    result = diagnose_ensemble({1: ensemble(0, 2.0), 8: ensemble(0, 1.0)}, resamples=20)
    text = result.to_html(tmp_path / "a.html").read_text(encoding="utf-8")
    assert "Do larger models disagree less?" in text
    assert text.count("<svg") == 1 + 2
    assert "models of 8" in text


@pytest.mark.parametrize("members", [1, 3])
def test_ensemble_page_without_anything_to_draw(members, tmp_path: Path):
    logits = ensemble(0, 1.0, 3).whole("members_logit")
    same = Table(members_logit=logits[:, :members].repeat(1, 3 // members, 1))
    text = diagnose_ensemble(same, resamples=5).to_html(tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<svg" not in text
    assert ("the same model" in text) is (members == 1)
