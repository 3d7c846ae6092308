import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dubito
from dubito.apps.guard import Guard, PredictionSets
from dubito.apps.guard.saved import sealed
from dubito.errors import ArtefactError, DubitoWarning, ModelError
from dubito.models.wrap import WrappedClassifier

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
    assert [verdict.to_json() for verdict in one] == [verdict.to_json() for verdict in other]
    assert str(again) == str(guard)
    assert again.to_json() == guard.to_json()


def test_several_scores_and_class_wise_sets_come_back(tmp_path: Path) -> None:
    table = blobs(900)
    table = table.rows((table.label != 3) | (torch.arange(900) % 4 == 0))
    with pytest.warns(DubitoWarning, match="class-wise.* 1 of 4 classes have fewer"):
        guard = Guard.fit(None, table, coverage=0.5, sets=PredictionSets(0.99, "lac", class_wise=True))
    guard.combination = type(guard.combination)({"max_probability": 0.4, "density": 1.1}, {})
    guard.scores["max_probability"] = dubito.MaxProbability()
    guard.grids["max_probability"] = torch.linspace(-1, 0, 9).double()
    again = Guard.load(guard.save(tmp_path / "guard"))
    assert torch.equal(again.decide(table).uncertainty, guard.decide(table).uncertainty)
    assert again.decide(table).sets == guard.decide(table).sets


def test_another_model_is_refused(saved: tuple[Guard, Path]) -> None:
    with pytest.raises(ModelError, match=r"was fitted for another model than tiny: its weights differ .* says nothing"):
        Guard.load(saved[1], network(seed=3))


def test_a_model_with_other_activations_is_refused(saved: tuple[Guard, Path], model: WrappedClassifier) -> None:
    other = network()
    other.module[1] = torch.nn.GELU()
    with pytest.raises(ModelError, match="its operations differ"):
        Guard.load(saved[1], other)
    assert Guard.load(saved[1], network()).model is not None  # the same weights, made again


def changed(**entries: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda found: found | entries


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(format=9), "must be of format 1; 9 came"),
        (
            changed(files={"state.safetensors": "0"}),
            "state.safetensors is not the file that guard.json was written with",
        ),
        (changed(files=None), "state.safetensors is not the file that guard.json was written with"),
        (changed(threshold={"value": float("inf"), "accepted": 1, "errors": 0, "of": 1}), "cannot be restored"),
        (changed(promise={"kind": "risk", "level": 2.0, "confidence": 0.95}), "cannot be restored"),
        (changed(weights={"other": 1.0}), "lacks the score 'other'"),
        (changed(weights={}), "lacks the score 'any'"),
        (changed(scores={"density": "../../elsewhere"}), "names a score's folder"),
        (lambda found: {key: value for key, value in found.items() if key != "roles"}, "cannot be restored"),
        (lambda _: [], "must be of format 1; list came"),
    ],
)
def test_a_damaged_description_is_told(
    saved: tuple[Guard, Path], tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    path = saved[0].save(tmp_path / "guard")
    described = json.loads((path / "guard.json").read_text())
    after = change(described)
    (path / "guard.json").write_text(json.dumps(sealed(after) if isinstance(after, dict) else after))
    with pytest.raises(ArtefactError, match=message):
        Guard.load(path)


def test_a_changed_threshold_is_noticed(saved: tuple[Guard, Path], tmp_path: Path) -> None:
    path = saved[0].save(tmp_path / "guard")
    described = json.loads((path / "guard.json").read_text())
    described["threshold"]["value"] *= 2
    (path / "guard.json").write_text(json.dumps(described))
    with pytest.raises(ArtefactError, match=r"guard.json was changed after it was written"):
        Guard.load(path)


def test_a_score_of_another_guard_is_noticed(tmp_path: Path) -> None:
    """As after a save that was broken off between two files: each of them is whole, but they are of two guards."""
    one, other = (
        Guard.fit(None, blobs(300, seed=seed), coverage=0.7, scores=["neighbours"]).save(tmp_path / str(seed))
        for seed in (0, 1)
    )
    file = next((one / "scores").glob("*_neighbours/state.safetensors"))
    file.write_bytes(next((other / "scores").glob("*_neighbours/state.safetensors")).read_bytes())
    with pytest.raises(
        ArtefactError, match=r"neighbours/state.safetensors is not the file .* or saving was broken off"
    ):
        Guard.load(one)


def test_nothing_is_unpickled(saved: tuple[Guard, Path], tmp_path: Path) -> None:
    """A file that would leave a mark if it were ever unpickled, in place of each that is read."""

    class Mark:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "executed",))

    for name in ("guard.json", "state.safetensors"):
        path = saved[0].save(tmp_path / "guard")
        (path / name).write_bytes(pickle.dumps(Mark()))
        with pytest.raises(ArtefactError, match="cannot be read"):
            Guard.load(path)
    assert not (tmp_path / "executed").exists()


def test_saving_again_replaces_all(saved: tuple[Guard, Path], tmp_path: Path) -> None:
    path = saved[0].save(tmp_path / "guard")
    (next((path / "scores").iterdir()) / "state.safetensors.part").write_bytes(b"left behind")
    other = Guard.fit(None, blobs(300), coverage=0.7, scores=["margin"])
    assert Guard.load(other.save(path)).threshold == other.threshold


def test_missing_and_broken_files_are_told(saved: tuple[Guard, Path], tmp_path: Path) -> None:
    with pytest.raises(ArtefactError, match=r"no guard in .*: guard.json is not there"):
        Guard.load(tmp_path)
    path = saved[0].save(tmp_path / "guard")
    (path / "state.safetensors").write_bytes(b"short")
    with pytest.raises(ArtefactError, match="cannot be read"):
        Guard.load(path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtefactError, match="cannot be"):
        saved[0].save(tmp_path / "file")
