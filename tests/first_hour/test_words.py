"""One word, one meaning: `label` is the true class, `predicted` the class that the model predicts, everywhere."""

import csv
from dataclasses import fields, is_dataclass

import pytest
import torch

import dubito
from dubito.cli import main
from dubito.report import Map
from dubito.result import Result

CLASSES = ["ant", "bee", "cat"]


@pytest.fixture(scope="module")
def table():
    draw = torch.Generator().manual_seed(0)
    label = torch.arange(120) % 3
    feature = 3 * torch.eye(3, 5)[label] + torch.randn(120, 5, generator=draw)
    return dubito.Table(feature=feature, logit=feature[:, :3], label=label, classes=CLASSES)


def header(path):
    with path.open(newline="") as file:
        return next(csv.reader(file))


def test_scores_on_the_command_line(tmp_path):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    model, inputs = dubito.wrap(module, classes=CLASSES), torch.randn(6, 3, 2, 2)
    dubito.extract(model, inputs, to=tmp_path / "cache", labels=[0, 1, 2, 0, 1, 2], progress=False)
    assert main(["score", str(tmp_path / "cache"), "-s", "entropy", "--to", str(tmp_path / "scores.csv")]) == 0
    columns = ["id", "predicted", "predicted_class", "probability", "label", "entropy"]
    assert header(tmp_path / "scores.csv") == columns


def test_verdicts(table, tmp_path):
    decisions = dubito.Guard.fit(None, table, risk=0.3).decide(table)
    written = header(decisions.to_csv(tmp_path / "verdicts.csv"))
    assert {"predicted", "predicted_class"} <= set(written)
    assert decisions[0].label == int(table.label[0])  # the truth, which the guard does not use
    assert decisions.predicted[:, 0].tolist() == table.logit.argmax(1).tolist()
    assert decisions[0].predicted_class == CLASSES[decisions[0].predicted]
    assert decisions.to_dict()["verdicts"][0]["predicted"] == decisions[0].predicted


def test_maps(table):
    drawn = Map.of(table.rows(slice(0, 30)), dubito.Entropy())
    assert list(drawn.class_names) == ["label", "predicted"]
    assert {"label", "predicted"} <= set(drawn.records()[0])


def test_no_result_has_another_word():
    kinds = [Result]
    for kind in kinds:
        kinds += kind.__subclasses__()
    names = {f"{kind.__name__}.{one.name}" for kind in kinds if is_dataclass(kind) for one in fields(kind)}
    assert len(names) > 100
    assert not {name for name in names if name.partition(".")[2] in ("prediction", "class_name", "pred", "answer")}
