"""Terminals of 60, 80 and 100 columns: no table loses the column that names its rows, and no line is too long."""

import csv
import io
import json
import re
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import dubito
from dubito.cli import app, main
from tests.cli.conftest import write_images
from tests.evaluate.tiles import QUICK
from tests.evaluate.tiles import data as tiles

WIDTHS = (60, 80, 100)
NAMES = [f"holiday in the mountains/{number:03d}.jpg" for number in range(120)]


def table(seed: int = 0, shift: float = 0.0) -> dubito.Table:
    draw = torch.Generator().manual_seed(seed)
    label = torch.arange(120) % 3
    feature = 2 * torch.eye(3, 6)[label] + torch.randn(120, 6, generator=draw) + shift
    return dubito.Table(
        feature=feature.relu(),
        logit=2 * feature[:, :3],
        label=label,
        id=NAMES,
        classes=["ant, emmet", "bumble bee", "Arabian camel, dromedary"],
        name=f"cache/{seed}",
    )


def printed(result: object, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(result)
    return file.getvalue()


RESULTS = {
    "evaluate": lambda: dubito.evaluate(["entropy", "margin"], table(), ood=table(1, 2.0), resamples=20),
    "compare": lambda: dubito.compare(table(), ood={"elsewhere": table(1, 2.0)}, resamples=20),
    "guard run": lambda: dubito.Guard.fit(None, table(), risk=0.3).decide(table(1)).limited(5),
    "label issues": lambda: dubito.find_label_issues(
        table().extended(label=(torch.arange(120) + (torch.arange(120) < 10)) % 3), least=0.1
    ),
    "diagnose": lambda: dubito.diagnose(table(), {"a": table(1, 2.0), "b": table(2, 1.0)}, draws=1, resamples=20),
    "reject": lambda: dubito.protocols.rejection_study(tiles(), **QUICK),
}


@pytest.fixture(scope="module", params=RESULTS)
def result(request):
    return RESULTS[request.param]()


@pytest.mark.parametrize("width", WIDTHS)
def test_every_block_of_columns_names_its_rows_and_no_number_is_lost(result, width):
    _, *rows = result.lines()
    assert rows
    text = printed(result, width)
    assert max(map(len, text.splitlines())) <= width
    for block in re.split("─+", text)[1:]:
        assert all(row[0].split()[0][:10] in block for row in rows), block
    assert all(number in text for row in rows for cell in row for number in re.findall(r"-?\d+\.\d+", cell))


def test_scores_on_a_narrow_terminal(tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    dubito.extract(dubito.wrap(module), torch.randn(6, 3, 2, 2), to=tmp_path / "cache", progress=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    for width in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["score", str(tmp_path / "cache")]) == 0
        lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
        assert max(map(len, lines)) <= width
        headings = [line for line, below in pairwise(lines) if "─" in below]
        assert headings
        assert all(line.startswith(" image") for line in headings)
    assert main(["--json", "score", str(tmp_path / "cache")]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == 6


def test_broken_files_are_reported_once(tmp_path, capsys):
    write_images(tmp_path / "images", 3)
    (tmp_path / "images" / "torn.png").write_bytes(b"\x89PNG\r\n\x1a\n torn")
    called = ["extract", "timm:test_resnet", str(tmp_path / "images"), "--to", str(tmp_path / "cache")]
    assert main([*called, "--weights", "none", "--workers", "0"]) == 0
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("torn.png") == 1
    called = ["report", "timm:test_resnet", str(tmp_path / "images"), "--to", str(tmp_path / "report.html")]
    assert main([*called, "--weights", "none", "--workers", "0"]) == 0
    shown = capsys.readouterr()
    assert (shown.out + shown.err).count("torn.png") == 1


def test_a_gap_that_may_be_noise_includes_zero():
    # Three errors, which the entropy finds and the energy does not: a gap of 1, and too few to distinguish any scores.
    logit = torch.tensor([[4.0, 0.0]] * 97 + [[50.0, 49.9]] * 3)
    plain = dubito.Table(logit=logit, label=torch.tensor([0] * 97 + [1] * 3))
    result = dubito.compare(plain, scores=["entropy", "energy"], resamples=50)
    gap = result["error_auroc"].scores["energy"].gap_to_best
    assert gap.value == 1
    assert gap.low <= 0
    assert result.cell("error_auroc_gap_to_best", gap).startswith("= ")


def test_a_file_without_label_issues_has_a_header(tmp_path):
    plain = dubito.Table(feature=np.eye(4).repeat(5, 0), logit=np.eye(4).repeat(5, 0), label=np.arange(4).repeat(5))
    issues = dubito.find_label_issues(plain)
    assert not len(issues)
    with issues.to_csv(tmp_path / "issues.csv").open(newline="") as file:
        assert {"id", "label", "suggested"} <= set(next(csv.reader(file)))


COMMANDS = [
    *([one.name] for one in app.registered_commands),
    *([group.name, one.name] for group in app.registered_groups for one in group.typer_instance.registered_commands),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_help_is_cut_at_80_columns(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--quiet" in shown
    assert "…" not in shown


def test_a_terminal_of_ascii_shows_what_it_can_and_names_of_files_as_they_are(monkeypatch):
    bytes_out = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(bytes_out, encoding="ascii"))
    assert main(["extract", "--help"]) == 0
    sys.stdout.write("µs \udcff.png\n")  # a file name of one byte that is not UTF-8
    sys.stdout.flush()
    assert bytes_out.getvalue().endswith(b"?s \xff.png\n")
    assert b"Usage: dubito extract" in bytes_out.getvalue()
