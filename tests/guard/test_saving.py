import errno
import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock

import dubito
from dubito.errors import ArtefactError, DiskFullError, DubitoWarning, ModelError, TableError
from dubito.guard import Guard, PredictionSets
from dubito.models.wrap import WrappedClassifier
from dubito.scores.softmax import ScoreOfLogits, max_logit
from dubito.scores.temperature import Temperature
from dubito.storage import RemotePath, sizes_in
from dubito.storage.files import _digest

from .world import blobs, inputs, labelled, network

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> WrappedClassifier:
    return network()


@pytest.fixture(scope="module")
def saved(model: WrappedClassifier, tmp_path_factory: pytest.TempPathFactory) -> tuple[Guard, Path]:
    folder = tmp_path_factory.mktemp("saved")
    table = labelled(dubito.extract(model, inputs(400), folder / "cache", workers=0, progress=False))
    guard = Guard.fit(model, table, 0.2)
    return guard, guard.save(folder / "guard")


def test_what_is_read_back_decides_the_same(saved: tuple[Guard, Path], model: WrappedClassifier) -> None:
    guard, path = saved
    again = Guard.load(path, model)
    x = inputs(30, seed=3)
    one, other = guard(x), again(x)
    assert [verdict.to_dict() for verdict in one] == [verdict.to_dict() for verdict in other]
    assert str(again) == str(guard)
    assert again.to_dict() == guard.to_dict()


def test_several_scores_and_class_wise_sets_come_back(tmp_path: Path) -> None:
    table = blobs(900)
    table = table.rows((table.label != 3) | (torch.arange(900) % 4 == 0))
    with pytest.warns(DubitoWarning, match="class-wise.* 1 of 4 classes have fewer"):
        guard = Guard.fit(None, table, coverage=0.5, sets=PredictionSets(0.99, "lac", class_wise=True))
    guard.selection.combination = type(guard.selection.combination)({"max_probability": 0.4, "density": 1.1}, {})
    guard.selection.scores["max_probability"] = dubito.MaxProbability()
    guard.selection.reference_quantiles["max_probability"] = torch.linspace(-1, 0, 9).double()
    again = Guard.load(guard.save(tmp_path / "guard"))
    assert torch.equal(again.decide(table).uncertainty, guard.decide(table).uncertainty)
    assert again.decide(table).sets == guard.decide(table).sets


def test_another_model_is_refused(saved: tuple[Guard, Path]) -> None:
    with pytest.raises(ModelError, match=r"belongs to another model than tiny: its weights differ .* says nothing"):
        Guard.load(saved[1], network(seed=3))


def test_a_model_with_other_activations_is_refused(saved: tuple[Guard, Path], model: WrappedClassifier) -> None:
    other = network()
    other.module[1] = torch.nn.GELU()
    with pytest.raises(ModelError, match="its operations differ"):
        Guard.load(saved[1], other)
    assert Guard.load(saved[1], network()).model is not None  # the same weights, made again


def changed(**entries: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda result: result | entries


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(format=9), "must be of format 5; got 9"),
        (changed(parts="parts-1-00000000"), "is not the part that guard.json was written with"),
        (changed(parts=None), "refers to None, which is not one of its parts"),
        (changed(parts="../elsewhere"), "refers to '../elsewhere', which is not one of its parts"),
        (changed(threshold={"value": float("inf"), "accepted": 1, "errors": 0, "of": 1}), "cannot be read"),
        (changed(guarantee={"kind": "risk", "level": 2.0, "confidence": 0.95}), "cannot be read"),
        (changed(weights={"other": 1.0}), "lacks the score 'other'"),
        (changed(weights={}), "lacks the score 'any'"),
        (changed(weights={"../../x": 1.0}, scores=["../../x"], roles={}), "cannot be read"),
        (changed(sets={"coverage": 0.9}), "cannot be read"),
        (lambda result: {key: value for key, value in result.items() if key != "roles"}, "cannot be read"),
        (lambda _: [], "must be of format 5; got list"),
    ],
)
def test_a_damaged_description_is_reported(
    saved: tuple[Guard, Path], tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    path = saved[0].save(tmp_path / "guard")
    forge(path, change)
    with pytest.raises(ArtefactError, match=message):
        Guard.load(path)


def forge(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the description of a guard, and seal it again."""
    after = change(json.loads((path / "guard.json").read_text()))
    if isinstance(after, dict):
        entries = {key: value for key, value in after.items() if key != "digest"}
        after = entries | {"digest": _digest(entries)}
    (path / "guard.json").write_text(json.dumps(after))


@pytest.fixture(scope="module")
def of_all_kinds() -> Guard:
    """With thresholds of classes, costs, a missed class and clusters."""
    costs = 1.0 - np.eye(4)
    costs[2] *= 3
    sets = PredictionSets(0.8, clusters=2)
    return Guard.fit(None, blobs(3000), 0.5, 0.8, per="class", costs=costs, missed={1: 0.2}, sets=sets, novel=0.0)


def put(*keys: Any, to: Any = None) -> Callable[[Any], Any]:
    """Replace one value deep inside, or remove it."""

    def change(result: Any) -> Any:
        inner = result
        for key in keys[:-1]:
            inner = inner[key]
        if to is None:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = to
        return result

    return change


def both(*changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """One after the other."""
    return lambda result: changes[1](changes[0](result))


RARE = {"label": 1, "level": 0.2, "name": "1"}
NEVER = {"label": 1, "value": 0.0, "missed": 0, "of": 9}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("groups"), "thresholds of groups"),
        (put("groups", to=[]), "thresholds of groups"),
        (put("groups", 3), "groups of the calibration images"),
        (lambda result: result | {"groups": result["groups"][::-1]}, "its groups"),
        (put("groups", 0, "group", to="x"), "its groups"),
        (put("groups", 0, "reason", to="because"), "a threshold of a group"),
        (put("groups", 0, "errors", to=9999), "counts of a group"),
        (put("groups", 0, "of", to=1), "counts of a group"),
        (put("guarantee", "per"), "thresholds of groups"),
        (put("guarantee", "kind", to="x"), "kind"),
        (put("guarantee", "kind", to="risk"), "its costs"),
        (put("guarantee", "kind", to="coverage"), "goes with a risk"),
        (put("guarantee", "largest", to=5.0), "its costs"),
        (put("guarantee", "two_costs", to=True), "its costs"),
        (put("guarantee", "missed"), "thresholds of missed classes"),
        (put("guarantee", "missed", 0, "level", to=1.5), "missed must be a number in"),
        (put("guarantee", "missed", 0, "label", to=2), "thresholds of missed classes"),
        (put("missed"), "thresholds of missed classes"),
        (put("missed", 0, "label", to=2), "thresholds of missed classes"),
        (put("missed", 0, "value", to=0.3), "a threshold of a missed class"),
        (put("missed", 0, "missed", to=9999), "a threshold of a missed class"),
        (
            lambda result: put("guarantee", "missed", 0, "label", to=7)(put("missed", 0, "label", to=7)(result)),
            "missed",
        ),
        (put("threshold", "of", to=0), "counts of the threshold"),
        (put("threshold", "of", to=1), "counts of the threshold"),
        (put("classes", to=["a", "b"]), "classes"),
        (put("sets", "thresholds", to=[]), "prediction sets"),
        (put("sets", "clusters"), "4 quantiles for 1 part"),
        (put("sets", "classes", to=3), "4 quantiles for 3 part"),
        (put("sets", "per", to="site"), "one kind of parts"),
        (put("sets", "method", to="x"), "method"),
    ],
)
def test_entries_that_do_not_agree_are_refused(
    of_all_kinds: Guard, tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    path = of_all_kinds.save(tmp_path / "guard")
    assert Guard.load(path).to_dict() == of_all_kinds.to_dict()
    forge(path, change)
    with pytest.raises(ArtefactError, match=f"cannot be read.*{message}"):
        Guard.load(path)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("group", np.full(2700, 4), "groups of the calibration images"),
        ("group", np.full(2700, -1), "groups of the calibration images"),
        ("group", None, "thresholds of groups"),
        ("loss", np.full(2700, 4.0), "costs of the calibration images"),
        ("loss", None, "its costs"),
        ("wrong", None, "its labels"),
        ("uncertainty", np.full(2700, np.nan), "is NaN"),
    ],
)
def test_calibration_images_that_do_not_agree_are_refused(
    of_all_kinds: Guard, tmp_path: Path, name: str, values: Any, message: str
) -> None:
    forged = replace(of_all_kinds, calibration=replace(of_all_kinds.calibration, **{name: values}))
    with pytest.raises(ArtefactError, match=f"cannot be read.*{message}"):
        Guard.load(forged.save(tmp_path / "guard"))


def test_a_table_with_other_classes_is_refused(of_all_kinds: Guard) -> None:
    with pytest.raises(TableError, match="it has 5 classes, not 4"):
        of_all_kinds.decide(blobs(10, c=5))
    of_one = Guard.fit(None, blobs(1000), 0.5, 0.8, missed={3: 0.2}, sets=False, scores=["entropy"], novel=0.0)
    with pytest.raises(TableError, match="it has 3 classes, and not class 3"):
        of_one.decide(blobs(10, c=3))


def test_a_changed_threshold_is_noticed(saved: tuple[Guard, Path], tmp_path: Path) -> None:
    path = saved[0].save(tmp_path / "guard")
    described = json.loads((path / "guard.json").read_text())
    described["threshold"]["value"] *= 2
    (path / "guard.json").write_text(json.dumps(described))
    with pytest.raises(ArtefactError, match=r"guard.json was changed after it was written"):
        Guard.load(path)


def test_a_score_of_another_guard_is_noticed(tmp_path: Path) -> None:
    """As after a copy that was broken off between two files: each of them is whole, but they are of two guards."""
    one, other = (
        Guard.fit(None, blobs(300, seed=seed), coverage=0.7, scores=["neighbours"]).save(tmp_path / str(seed))
        for seed in (0, 1)
    )
    file = next(one.glob("parts-*/*_neighbours/state.safetensors"))
    file.write_bytes(next(other.glob("parts-*/*_neighbours/state.safetensors")).read_bytes())
    with pytest.raises(ArtefactError, match=r"parts-.* is not the part .* damaged or replaced"):
        Guard.load(one)


def test_nothing_is_unpickled(saved: tuple[Guard, Path], tmp_path: Path) -> None:
    """A file that would leave a mark if it were ever unpickled, in place of each that is read."""

    class Mark:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    for name in ("guard.json", "state.safetensors", "score.json"):
        path = saved[0].save(tmp_path / "guard")
        next(path.rglob(name)).write_bytes(pickle.dumps(Mark()))
        with pytest.raises(ArtefactError, match=r"cannot be read|is not the part that guard.json was written with"):
            Guard.load(path)
    assert not (tmp_path / "executed").exists()


def test_saving_again_replaces_all(saved: tuple[Guard, Path], tmp_path: Path) -> None:
    path = saved[0].save(tmp_path / "guard")
    (path / "parts.part").mkdir()
    (path / "parts.part" / "state.safetensors.part").write_bytes(b"left behind")
    other = Guard.fit(None, blobs(300), coverage=0.7, scores=["margin"])
    for _ in range(2):  # the same once more is no change
        assert Guard.load(other.save(path)).threshold == other.threshold
        assert len([one for one in path.iterdir() if one.name != ".lock"]) == 2  # guard.json and its own parts


def test_a_save_that_fails_leaves_the_guard_before(
    saved: tuple[Guard, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved[0].save(tmp_path / "guard")
    other = Guard.fit(None, blobs(300), coverage=0.7, scores=["neighbours"])

    def full(file: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for where in ("dubito.guard.selection.write_file", "dubito.scores.registry.write_file"):
        with monkeypatch.context() as patch:
            patch.setattr(where, full)
            with pytest.raises(
                DiskFullError, match=r"no space left for the guard .* so is what was saved there before"
            ):
                other.save(path)
        assert Guard.load(path).to_dict() == saved[0].to_dict()
        assert len([one for one in path.iterdir() if one.name != ".lock"]) == 2


def test_a_folder_of_other_things_is_refused(saved: tuple[Guard, Path], tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "cat.jpg").touch()
    with pytest.raises(ArtefactError, match=r"it holds other things \(cat.jpg\) and no guard. Choose a new or empty"):
        saved[0].save(photos)
    assert [one.name for one in photos.iterdir()] == ["cat.jpg"]
    (photos / "guard.json").write_text("{}")  # somebody else's
    with pytest.raises(ArtefactError, match=r"it holds other things \(cat.jpg, guard.json\) and no guard"):
        saved[0].save(photos)
    path = saved[0].save(tmp_path / "guard")
    (path / "README.md").write_text("Ours since May.")
    saved[0].save(path)  # a guard is replaced, and notes beside it stay
    assert (path / "README.md").exists()
    (path / "README.md").unlink()
    (path / "guard.json").write_text("damaged")
    assert Guard.load(saved[0].save(path)).to_dict() == saved[0].to_dict()


def test_one_writer_at_a_time(saved: tuple[Guard, Path], tmp_path: Path) -> None:
    path = saved[0].save(tmp_path / "guard")
    with FileLock(path / ".lock"), pytest.raises(ArtefactError, match="another process is writing into"):
        saved[0].save(path)


def test_scores_that_could_not_be_read_back_are_not_saved(tmp_path: Path) -> None:
    @dataclass
    class Mine(ScoreOfLogits):
        name = "mine"
        kind = "both"
        of_logits = staticmethod(max_logit)

    for score in (Mine(), Temperature(Mine())):
        guard = Guard.fit(None, blobs(300), coverage=0.7, scores={"a": score})
        with pytest.raises(ArtefactError, match=r"\(Mine\) cannot be saved: it is not one of dubito's own"):
            guard.save(tmp_path / "guard")
    assert not (tmp_path / "guard").exists()


def test_missing_and_broken_files_are_reported(saved: tuple[Guard, Path], tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"no guard in .*: guard.json is not there"):
        Guard.load(tmp_path)
    path = saved[0].save(tmp_path / "guard")
    next(path.glob("parts-*/state.safetensors")).write_bytes(b"short")
    with pytest.raises(ArtefactError, match=r"is not the part that guard.json was written with"):
        Guard.load(path)
    shutil.rmtree(next(path.glob("parts-*")))
    with pytest.raises(ArtefactError, match="it is missing, damaged or replaced"):
        Guard.load(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtefactError, match="cannot be"):
        saved[0].save(tmp_path / "file")


def test_a_guard_in_a_store_decides_the_same(
    saved: tuple[Guard, Path], model: WrappedClassifier, bucket: str, tmp_path: Path
) -> None:
    guard, _ = saved
    assert str(guard.save(f"{bucket}/guard")) == f"{bucket}/guard"
    assert not Path("s3:").exists()
    loaded = Guard.load(f"{bucket}/guard", model)
    assert loaded.fingerprint == guard.fingerprint
    assert loaded(inputs(8)).accept.tolist() == guard(inputs(8)).accept.tolist()
    guard.with_risk(0.4).save(f"{bucket}/guard")  # replaces it, and leaves no part of the old one behind
    parts = [name for name in sizes_in(RemotePath(f"{bucket}/guard")) if name.startswith("parts")]
    assert len(parts) == 1
    assert Guard.load(f"{bucket}/guard").guarantee.level == 0.4
    RemotePath(f"{bucket}/guard/{parts[0]}").remove()
    shutil.rmtree(tmp_path / "copies")
    with pytest.raises(ArtefactError, match=r"guard in 's3://bucket/guard': parts-.* is missing, damaged or replaced"):
        Guard.load(f"{bucket}/guard")
    with pytest.raises(ArtefactError, match=r"no guard in 's3://bucket/none': there is no such folder"):
        Guard.load(f"{bucket}/none")
