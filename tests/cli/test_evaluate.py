"""`dubito evaluate`: the same numbers as dubito.evaluate, shown or as JSON."""

from pathlib import Path

import pytest

import dubito

from .conftest import MODEL, Run, write_images


@pytest.fixture(scope="module")
def ood(run: Run, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ood")
    write_images(folder / "images", 6, seed=7)
    command = ("extract", MODEL, folder / "images", "--to", folder / "cache", "--weights", weights, "--workers", 0)
    assert run(*command).code == 0
    return folder / "cache"


def test_json_is_that_of_the_library(run: Run, labelled: Path, ood: Path) -> None:
    options = ("-s", "entropy", "--resamples", 20, "--seed", 3, "--ood", ood)
    found = run("evaluate", labelled, *options, "--json").json
    table = dubito.open(labelled)
    expected = dubito.evaluate(
        {"entropy": dubito.Entropy()}, table, ood=dubito.open(ood), resamples=20, seed=3
    ).to_json()
    for one in (found, expected):
        del one["scores"]["entropy"]["microseconds"]  # measured, so never twice the same
    assert found == {**expected, "notes": []}
    assert found["model"]["accuracy"]["value"] == pytest.approx(8 / 12)


def test_table_names_metrics_and_scores(run: Run, labelled: Path) -> None:
    answer = run("evaluate", labelled, "--fit", labelled, "--set", "neighbours.k=2", "--resamples", 5)
    assert answer.code == 0, answer.err
    for text in ("12 images", "accuracy", "0.667", "error AUROC", "AURC", "µs / image", "entropy", "neighbours"):
        assert text in answer.out


def test_density_is_one_that_suits_the_images_unless_it_is_asked_for(run: Run, labelled: Path, monkeypatch) -> None:
    """Full covariances of wide features take minutes, so nobody gets them without a word."""
    options = ("evaluate", labelled, "--fit", labelled, "--resamples", 5, "--metric", "error_auroc", "--json")
    made: list[dubito.Density] = []
    fit = dubito.Density.fit
    monkeypatch.setattr(dubito.Density, "fit", lambda score, table: (made.append(score), fit(score, table))[1])
    notes = run(*options).json["notes"]
    # Twelve images of 96 features: less than 5 a feature, and no ten a class.
    assert (made[0].covariance, made[0].start, made[0].components) == ("diagonal", "free", 1)
    said = "density: 1 Gaussian, diagonal covariances of 96 features, by EM, 0.0 MB, to suit 12 images of "
    asked = "For other ones ask for it: --score density, with --set density.covariance=full or what you like."
    assert any(note.startswith(said) and note.endswith(asked) for note in notes)
    for more in (("--score", "density"), ("--set", "density.regularisation=0.1")):
        notes = run(*options, *more).json["notes"]
        assert (made[-1].covariance, made[-1].start) == ("full", "class")
        assert not any(note.startswith("density:") for note in notes)


def test_help_tells_which_density_is_taken(run: Run) -> None:
    text = " ".join(run("evaluate", "--help").out.replace("│", " ").split())
    assert "Without --score, density takes the covariances that these images allow in seconds" in text


def test_without_labels_there_is_nothing_to_evaluate(run: Run, cache: Path, ood: Path) -> None:
    answer = run("evaluate", cache)
    assert answer.code == 1
    assert "has no labels and no --ood CACHE came" in answer.err
    assert run("evaluate", cache, "--ood", ood, "-s", "entropy", "--resamples", 5).code == 0


def test_foreign_images_must_be_of_the_same_model(run: Run, images: Path, labelled: Path, tmp_path: Path) -> None:
    other = ("extract", MODEL, images, "--to", tmp_path / "other", "--weights", "none", "--workers", 0)
    assert run(*other).code == 0
    answer = run("evaluate", labelled, "--ood", tmp_path / "other")
    assert answer.code == 1
    assert answer.err.startswith("error: --ood: ")


def test_metrics_by_choice(run: Run, labelled: Path) -> None:
    found = run("evaluate", labelled, "-s", "entropy", "--metric", "aurc", "--resamples", 5, "--json").json
    assert set(found["scores"]["entropy"]) == {"aurc", "microseconds"}
    answer = run("evaluate", labelled, "-s", "entropy", "--metric", "arc", "--resamples", 5)
    assert answer.code == 1
    assert "aurc" in answer.err
