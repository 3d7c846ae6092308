"""Commands on .npz files of arrays, without any model."""

from pathlib import Path

import numpy as np
import pytest

from .conftest import Run

QUICK = ("--resamples", 20)


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, paths = tmp_path_factory.mktemp("arrays"), {}
    for seed, name in enumerate(("val", "test", "ood")):
        draw = np.random.default_rng(seed)
        feature = np.abs(draw.normal(size=(300, 6))) + 3 * (name == "ood")
        label = feature[:, :3].argmax(1)
        paths[name] = folder / f"{name}.npz"
        np.savez(paths[name], logit=9 * (feature[:, :3] + draw.normal(size=(300, 3))), feature=feature, label=label)
    return paths


def test_score_evaluate_and_compare(run: Run, arrays: dict[str, Path], tmp_path: Path) -> None:
    to = tmp_path / "scores.csv"
    assert run("score", arrays["test"], "-s", "neighbours", "--learn-from", arrays["val"], "--to", to).code == 0
    assert to.read_text().splitlines()[1].startswith("000000,")
    assert run("evaluate", arrays["test"], "-s", "entropy", *QUICK, "--json").json["rows"] == 300
    options = ("--ood", arrays["ood"], "--learn-from", arrays["val"], *QUICK)
    compared = run("compare", arrays["test"], *options, "--json").json
    assert [one["about"] for one in compared["questions"]] == ["errors", "errors", "ood.npz"]


def test_calibrate(run: Run, arrays: dict[str, Path], tmp_path: Path) -> None:
    answer = run("calibrate", arrays["val"], "-m", "temperature", *QUICK, "--to", tmp_path / "cal")
    assert answer.code == 0, answer.err
    scored = run("score", arrays["test"], "-s", "entropy", "--calibration", tmp_path / "cal", "--json")
    assert scored.json["rows"] == 300


def test_a_guard_is_fitted_and_run(run: Run, arrays: dict[str, Path], tmp_path: Path) -> None:
    fitted = run("guard", "fit", arrays["val"], "--risk", 0.6, "--to", tmp_path / "guard")
    assert fitted.code == 0, fitted.err
    decided = run("guard", "run", tmp_path / "guard", arrays["test"], "--csv", tmp_path / "verdicts.csv")
    assert decided.code == 0, decided.err
    assert len((tmp_path / "verdicts.csv").read_text().splitlines()) == 301
    np.savez(tmp_path / "images.npz", images=np.zeros((2, 8, 8, 3), np.uint8))
    assert "does not name its model" in run("guard", "run", tmp_path / "guard", tmp_path / "images.npz").err


def test_misspelt_arrays_and_images_are_no_cache(run: Run, arrays: dict[str, Path], tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", logits=np.zeros((3, 2)))
    assert "the array 'logits' must be called 'logit'. Rename it." in run("score", tmp_path / "x.npz").err
    np.savez(tmp_path / "y.npz", images=np.zeros((2, 8, 8, 3), np.uint8))
    assert f"`dubito extract MODEL {tmp_path / 'y.npz'} --to cache`" in run("score", tmp_path / "y.npz").err
