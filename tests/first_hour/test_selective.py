"""Selective prediction in plain numbers first: what share of errors is left at what coverage, and always a curve."""

import pytest
import torch

import dubito
from dubito.cli import main


def predictions(n: int = 200) -> dubito.Table:
    """Certain images are right; of the fifth that is uncertain, all are wrong."""
    label = torch.zeros(n, dtype=torch.long)
    sure = torch.arange(n) % 5 != 0
    logit = torch.where(sure[:, None], torch.tensor([5.0, 0.0]), torch.tensor([0.0, 0.1]))
    logit[:, 0] += torch.arange(n) * 1e-4 * sure  # no ties among certain ones
    return dubito.Table(logit=logit, label=label)


@pytest.mark.parametrize(
    "result",
    [
        lambda table: dubito.protocols.rejection_study(table, resamples=50),
        lambda table: dubito.evaluate({"entropy": dubito.Entropy()}, table, resamples=50),
        lambda table: dubito.compare(table, resamples=50),
    ],
    ids=["reject", "evaluate", "compare"],
)
def test_errors_at_a_coverage_come_first(result):
    text = str(result(predictions()))
    # 40 of 200 are wrong: 20 %. Of the 180 that are accepted at 90 %, 20 are: 11.1 %. At 80 %, none is.
    for coverage, errors in (("100 %", "20.0 %"), ("90 %", "11.1 %"), ("80 %", "0.0 %")):
        line = next(line for line in text.splitlines() if line.startswith(f"at {coverage} coverage"))
        assert f"{errors} errors" in line
    assert text.index("at 80 % coverage") < text.index("AUROC")


def test_the_page_has_the_curve_and_the_numbers_also_without_an_ensemble(tmp_path):
    page = dubito.protocols.rejection_study(predictions(), resamples=50).to_html(tmp_path / "reject.html")
    text = page.read_text()
    assert text.count("<svg") >= 3  # accuracy, NLL and calibration error
    assert "At 80 % coverage: 0.0 % errors" in text.replace("\N{NO-BREAK SPACE}", " ")


def test_the_command_writes_that_page(tmp_path):
    module = dubito.wrap(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)))
    draw = torch.Generator().manual_seed(0)
    x, label = torch.rand(60, 3, 2, 2, generator=draw), torch.randint(2, (60,), generator=draw)
    dubito.extract(module, x, tmp_path / "cache", labels=label)
    html = str(tmp_path / "page.html")
    assert main(["reject", str(tmp_path / "cache"), "--html", html, "--resamples", "50", "--quiet"]) == 0
    assert "<svg" in (tmp_path / "page.html").read_text()
