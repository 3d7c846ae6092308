"""The page of an ensemble: valid, escaped, self-contained; curves where the numbers say."""

import re
from pathlib import Path

import pytest
import torch

from dubito.explain.collapse import diagnose_ensemble
from dubito.report.ensemble import write_ensemble_page
from dubito.report.page import minus
from dubito.table import Table

from .test_page import Reader

EVIL = "<b>cats & co"


def table(seed: int, noise: float, members: int = 6, name: str = "mine") -> Table:
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(30, 1, 4, generator=draw) + noise * torch.randn(30, members, 4, generator=draw)
    return Table(members_logit=logits, name=name)


def test_page(tmp_path: Path):
    found = diagnose_ensemble(table(0, 1.0), ood=table(1, 3.0, name=EVIL), resamples=20)
    text = write_ensemble_page(found, tmp_path / "deep" / "page.html").read_text(encoding="utf-8")
    reader = Reader(text)
    assert reader.open == []
    assert EVIL not in text
    assert "&lt;b&gt;cats &amp; co" in text
    assert "default-src 'none'" in text
    assert "svg .line.dashed {" in text
    assert not re.search(r"<script|https?://|url\(|@import", text)
    assert text.count("<svg") == 1 + 3  # the fall, and a histogram for 6 x 1, 3 x 2 and 2 x 3
    assert len(reader.all("tr")) == 1 + 3
    words = " ".join(reader.text)
    for sentence in found.findings():
        assert minus(sentence) in words
    assert text.count(f"AUROC {100 * found.ensembles[0].levels[2].auroc.value:.1f} %") >= 1


def test_page_of_several_sizes(tmp_path: Path):
    found = diagnose_ensemble({1: table(0, 2.0), 8: table(0, 1.0)}, resamples=20)
    text = write_ensemble_page(found, tmp_path / "a.html").read_text(encoding="utf-8")
    assert "Do larger models disagree less?" in text
    assert text.count("<svg") == 1 + 2
    assert "models of 8" in text


@pytest.mark.parametrize("members", [1, 3])
def test_page_without_anything_to_draw(members, tmp_path: Path):
    logits = table(0, 1.0, 3).whole("members_logit")
    same = Table(members_logit=logits[:, :members].repeat(1, 3 // members, 1))
    text = write_ensemble_page(diagnose_ensemble(same, resamples=5), tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<svg" not in text
    assert ("the same model" in text) is (members == 1)
