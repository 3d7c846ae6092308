"""Errors of the first hour name what is wrong, and a remedy that works where the user is."""

import contextlib
import io
import re

import pytest
import torch
from PIL import Image
from torch import nn

import dubito
from dubito.cli import main
from dubito.errors import ArtefactError, CacheError, GuardError, ModelError, TableError, ValueRangeError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A cache with labels and one without, and a guard."""
    folder, draw = tmp_path_factory.mktemp("world"), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = dubito.wrap(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), name="tiny", classes=["ant", "bee", "cat"])
    inputs, labels = torch.randn(40, 3, 2, 2, generator=draw), [number % 3 for number in range(40)]
    dubito.extract(model, inputs, to=folder / "plain", progress=False)
    table = dubito.extract(model, inputs, to=folder / "labelled", labels=labels, progress=False)
    guard = dubito.Guard.fit(model, table, coverage=0.5, confidence=0.6, scores=["entropy"], sets=False, novel=0.0)
    guard.save(folder / "guard")
    return folder


def test_a_folder_of_another_kind_is_recognised(world):
    with pytest.raises(ArtefactError, match=r"no guard in '.*plain': that is a cache\. Save one with Guard\.save"):
        dubito.Guard.load(world / "plain")
    with pytest.raises(CacheError, match=r"no cache in '.*guard': that is a guard\. Make one"):
        dubito.open(world / "guard")
    with pytest.raises(ArtefactError, match=r"no guard in '.*nothing': there is no such folder"):
        dubito.Guard.load(world / "nothing")


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_folder_or_table_is_refused_in_words(world):
    model = dubito.wrap(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))
    with pytest.raises(GuardError, match=r"path must be the folder of a guard; got WrappedClassifier\. The folder"):
        dubito.Guard.load(model, world / "guard")
    with pytest.raises(TableError, match=r"train: table must be a table; got the path \"cache\"\. Open it"):
        dubito.train("cache")
    with pytest.raises(TableError, match=r"map: table must be a table; got the path \"cache\"\. Open it"):
        dubito.draw_map("cache")
    with pytest.raises(TableError, match=r"SafeIndex\.load: folder must be the path of an index; got Table"):
        dubito.SafeIndex.load(dubito.open(world / "plain"))


@pytest.mark.parametrize(
    ("value", "hint"), [(10.0, "10 % is 0.1."), (0.0, None), (1.5, "1.5 % is 0.015."), (1e3, None)]
)
def test_a_share_in_per_cent_is_recognised(world, value, hint):
    with pytest.raises(ValueRangeError, match=r"risk must be a number in \(0, 1\)") as raised:
        dubito.Guard.fit(None, dubito.open(world / "labelled"), risk=value)
    assert (" % is " in str(raised.value)) == (hint is not None)
    assert str(raised.value).endswith(hint or f"got {value}.")


def test_a_device_is_tried_before_weights_are_read(tmp_path):
    with pytest.raises(ModelError, match="device: 'gpu' cannot be used here"):
        dubito.load("timm:test_resnet", weights=tmp_path / "not-there.pt", device="gpu")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("guard fit {plain} --to g", "dubito guard fit needs column 'label'; .* by `dubito label CACHE LABELS`, or"),
        ("reject {plain}", "dubito reject needs column 'label'"),
        ("label-issues {plain}", "dubito label-issues needs column 'label'"),
        ("score {plain} -s regrad", "error: regrad needs column 'gradient'; .*`dubito extract ... --probe gradient`"),
        ("score {plain} -s mutual_information", r"several models \(in Python: dubito.extract\(..., probes=\[dubito"),
        ("ensemble {plain}", "dubito ensemble needs column .*, or pass the caches of several models"),
        ("evaluate {plain}", "Add labels with `dubito label {plain} LABELS`, or pass .* --ood CACHE"),
        ("compare {plain}", r"errors are unknown. Add labels \(`dubito label CACHE LABELS`\), or give OOD"),
        ("guard fit {labelled} --risk 10 --to g", "--risk must be a number in .* 10 % is 0.1"),
        ("guard run {plain} {plain}", "no guard in '.*': that is a cache. Save one with `dubito guard fit`"),
        ("guard run {plain} {guard}", "GUARD and IMAGES are swapped"),
        ("list scores entrpy", "no name contains 'entrpy'. Did you mean entropy"),
        ("label {plain} {plain}.csv", r"CSV file '.*\.csv' must be a file; there is none"),
        ("report timm:test_resnet /nope", "error: IMAGES must be an existing folder or file; '/nope' does not exist"),
    ],
)
def test_the_command_line_speaks_of_commands_and_options(world, call, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {name: world / name for name in ("plain", "labelled", "guard")}
    _, err = run(*call.format(**places).split())
    assert re.search(says.format(**places), err), err


def test_targets_are_read_before_a_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(dubito, "load", None)
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    places = (str(tmp_path), "--to", str(tmp_path / "cache"), "--targets", str(tmp_path / "t.npy"))
    code, err = run("extract", "timm:test_resnet", *places)
    assert (code, "t.npy' must be an .npy or .npz file" in err) == (1, True), err


def run(*arguments: str) -> tuple[int, str]:
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = main(arguments)
    return code, err.getvalue()
