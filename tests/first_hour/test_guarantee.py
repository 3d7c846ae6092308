"""A guarantee is stated with its scope, not repeated where it does not hold, checked where labels are, and movable."""

import csv
import json

import pytest
import torch
from PIL import Image

import dubito
from dubito.cli import main
from dubito.errors import DubitoWarning, GuardError

CLASSES = ["ant", "bee", "cat"]
NOT_LIKE = "These images are not like those: the guarantee says nothing about them."

pytestmark = pytest.mark.usefixtures("one_thread")


def model():
    layer = torch.nn.Linear(12, 3, bias=False)
    layer.weight.data = 2 * torch.eye(3, 12)
    return dubito.wrap(torch.nn.Sequential(torch.nn.Flatten(), layer), classes=CLASSES, transform=dubito.Preprocess(2))


def inputs(n, seed, distance=2.5):
    draw = torch.Generator().manual_seed(seed)
    label = torch.randint(3, (n,), generator=draw)
    return (distance * torch.eye(3, 12)[label] + torch.randn(n, 12, generator=draw)).view(n, 3, 2, 2), label


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    """Calibration images, others like them, and others that are not."""
    folder = tmp_path_factory.mktemp("caches")
    sets = {"val": inputs(500, 0), "new": inputs(300, 1), "faint": inputs(300, 2, distance=0.5)}
    for name, (x, y) in sets.items():
        dubito.extract(model(), x, to=folder / name, labels=y.tolist(), label_space="model", workers=0, progress=False)
    assert main(["guard", "fit", str(folder / "val"), "--risk", "0.1", "--to", str(folder / "guard"), "--quiet"]) == 0
    return folder


def run(capsys, *arguments):
    capsys.readouterr()
    assert main(["guard", "run", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_images_unlike_the_calibration_images_are_reported(caches, capsys):
    scope = "that it was calibrated on, at most 10 % of those accepted are wrong (confidence 95 %)."
    alike = run(capsys, caches / "guard", caches / "new")
    assert scope in alike
    assert NOT_LIKE not in alike
    unlike = run(capsys, caches / "guard", caches / "faint")
    assert f"{scope}\n{NOT_LIKE}\n" in unlike
    shift = json.loads(run(capsys, caches / "guard", caches / "faint", "--json"))["shift"]
    assert shift["detected"]
    assert [test["name"] for test in shift["tests"]] == ["acceptance", "density", "classes"]
    assert shift["tests"][0]["rejected"]


def test_labels_show_whether_it_is_kept(caches, capsys):
    assert "Kept: " in run(capsys, caches / "guard", caches / "new")
    guard = dubito.Guard.load(caches / "guard")
    new = dubito.open(caches / "new")
    kept = guard.check(new)
    decisions = guard.decide(new)
    wrong = decisions.predicted[:, 0] != new.label
    assert (kept.status, kept.count) == ("kept", int(wrong[decisions.accept].sum()))
    assert kept.observed.low < kept.observed.value < kept.observed.high < 0.1
    assert guard.check(new.rows(slice(0, 20))).status == "too few to tell"
    broken = guard.check(new.extended(label=(new.label + 1) % 3))
    assert broken.status == "broken"
    assert str(broken).splitlines()[-1].startswith("Broken: ")


def test_another_risk_without_a_refit(caches, tmp_path):
    guard = dubito.Guard.load(caches / "guard")
    table = dubito.open(caches / "val")
    stricter = guard.with_risk(0.07, confidence=0.9)
    assert stricter.threshold == dubito.Guard.fit(None, table, 0.07, 0.9).threshold
    assert stricter.threshold.accepted < guard.threshold.accepted
    assert dubito.Guard.load(stricter.save(tmp_path / "guard")).guarantee == stricter.guarantee


def test_an_infeasible_risk_says_which_one_is_feasible(caches, capsys):
    guard = dubito.Guard.load(caches / "guard")
    feasible = r"risk=\S+ is feasible at confidence 0.95\. A risk of 0.004 would take about"
    with pytest.raises(GuardError, match=feasible) as error:
        guard.with_risk(0.004)
    feasible = float(str(error.value).partition("risk=")[2].split()[0])
    assert guard.with_risk(feasible).threshold.accepted > 0
    with pytest.raises(GuardError):
        guard.with_risk(feasible - 0.001)
    assert main(["guard", "fit", str(caches / "val"), "--risk", "0.004", "--to", str(caches / "none")]) == 1
    assert f"With these images, --risk {feasible:g} is feasible" in capsys.readouterr().err


def test_files_that_cannot_be_read_have_a_row(caches, tmp_path):
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (8, 8), (200, 20, 20)).save(tmp_path / "photos" / "a.png")
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no image")
    guard = dubito.Guard.load(caches / "guard", model())
    with pytest.warns(DubitoWarning, match="could not be decoded"):
        decisions = guard(tmp_path / "photos")
    with decisions.to_csv(tmp_path / "verdicts.csv").open(newline="") as file:
        good, broken = csv.DictReader(file)
    assert (good["id"], good["accept"]) == ("a.png", str(bool(decisions.accept[0])))
    assert (broken["id"], broken["accept"]) == ("broken.jpg", "")
    assert broken["reason"]
