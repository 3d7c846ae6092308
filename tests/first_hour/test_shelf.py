"""A head on the shelf changes no result until it is named, and a training shows whether its head is worth naming."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dubito
from dubito.cli import main
from dubito.guard import Guard


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images of a tiny model, with some right and some wrong labels; the shelf is empty."""
    monkeypatch.setenv("DUBITO_HEADS", str(tmp_path / "shelf"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    model = dubito.wrap(net, transform=dubito.Preprocess((16, 16)), name="tiny")
    images = np.random.default_rng(0).integers(0, 256, (120, 16, 16, 3), dtype=np.uint8)
    dubito.extract(model, images, to=tmp_path / "cache", labels=np.arange(120) % 3)
    return tmp_path / "cache"


def test_a_head_on_the_shelf_changes_nothing_until_it_is_named(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = dubito.open(cache)

    def results() -> tuple[list[str], str, str]:
        compared = dubito.compare(table, resamples=20)
        guard = Guard.fit(None, table, coverage=0.5, scores=None)
        assert main(["search", "build", str(cache), "--to", str(tmp_path / "index")]) == 0
        return sorted(compared.ranking), str(guard), capsys.readouterr().out

    before = results()
    quick = dubito.heads.Recipe(rows=200, batch=20)
    dubito.train(table, tmp_path / "shelf" / "mine", recipe=quick, width=8, depth=1, progress=False)
    assert results() == before
    why = dubito.compare(table, resamples=20).left_out["head"]
    assert why == "a head of your own is used only if you name it; 'mine/seed-1' fits this model"
    named = dubito.compare(table, scores=["entropy", dubito.UncertaintyHead.from_pretrained("mine")], resamples=20)
    assert "head" in named.ranking


def test_a_training_advises_against_a_head_that_is_worse_than_the_softmax() -> None:
    """Features say nothing; the logits know which predictions are wrong."""
    draw = torch.Generator().manual_seed(0)
    label = torch.randint(3, (400,), generator=draw)
    wrong = torch.rand(400, generator=draw) < 0.3
    logit = torch.where(wrong, 0.5, 4.0)[:, None] * torch.eye(3)[(label + wrong) % 3]
    logit += 0.1 * torch.randn(400, 3, generator=draw)
    loss = nn.functional.cross_entropy(logit, label, reduction="none")
    table = dubito.Table(feature=torch.randn(400, 6, generator=draw), logit=logit, label=label, loss=loss)
    quick = dubito.heads.Recipe(rows=400, batch=20)
    training = dubito.train(table, held_out=0.5, recipe=quick, width=8, depth=1, progress=False)
    errors = training.beside["error_auroc"]
    assert errors["head"].gap_to_best.surely
    assert errors["max_probability"].value.value > 0.95
    (sentence,) = [one for one in str(training).splitlines() if "error AUROC" in one]
    assert sentence.startswith("Held-out error AUROC: ")
    assert "head 0." in sentence
    assert sentence.endswith("The head is worse: to find wrong predictions, use max_probability instead.")
