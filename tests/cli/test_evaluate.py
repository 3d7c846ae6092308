"""`dubito evaluate`: the same numbers as dubito.evaluate, shown or as JSON."""

from pathlib import Path

import pytest

import dubito
from dubito.cli._console import Screen
from dubito.cli._scores import choose_scores
from dubito.scores import make_score
from dubito.table import Provenance

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
    ).to_dict()
    for one in (found, expected):
        del one["microseconds"]  # measured, so never twice the same
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
    asked = "For another one: --score density, with --set density.covariance=full or what you like."
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
    assert set(found["scores"]["entropy"]) == {"aurc"}
    answer = run("evaluate", labelled, "-s", "entropy", "--metric", "arc", "--resamples", 5)
    assert answer.code == 1
    assert "aurc" in answer.err


@pytest.fixture(scope="module")
def ensembles(run: Run, images: Path, weights: Path, labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The labelled images with tiles and views."""
    folder = tmp_path_factory.mktemp("ensembles") / "cache"
    labels = labelled.parent / "labels.csv"
    options = ("--labels", labels, "--weights", weights, "--workers", 0, "--grids", "2,3", "--views", "--keep-logits")
    answer = run("extract", MODEL, images, "--to", folder, *options)
    assert answer.code == 0, answer.err
    return folder


OF_MEMBERS = (
    "mutual_information",
    "weighted_mutual_information",
    "expected_entropy",
    "variation_ratio",
    "predictive_entropy",
)


def test_scores_of_members_where_there_are_any(run: Run, labelled: Path, ensembles: Path) -> None:
    plain = run("evaluate", labelled, "--resamples", 5, "--json").json
    assert not any(name.startswith(OF_MEMBERS) for name in plain["scores"])
    assert not any("members" in note for note in plain["notes"])
    found = run("evaluate", ensembles, "--resamples", 5, "--json").json
    both = {f"{name}:{of}" for name in OF_MEMBERS for of in ("views", "tiles_3")}  # of tiles, the finest grid
    assert both == {name for name in found["scores"] if name.startswith(OF_MEMBERS)}


def test_one_ensemble_by_choice(run: Run, labelled: Path, ensembles: Path) -> None:
    options = ("-s", "mutual_information", "--set", "mutual_information.of=tiles_2", "--resamples", 5, "--seed", 1)
    found = run("evaluate", ensembles, *options, "--json").json
    table = dubito.open(ensembles)
    score = make_score("mutual_information", of="tiles_2")
    expected = dubito.evaluate({"mutual_information": score}, table, resamples=5, seed=1).to_dict()
    assert found["scores"].keys() == {"mutual_information"}
    for metric in ("error_auroc", "aurc"):
        assert found["scores"]["mutual_information"][metric] == expected["scores"]["mutual_information"][metric]
    answer = run("evaluate", labelled, "-s", "mutual_information", "--resamples", 5)
    assert answer.code == 1
    assert "mutual_information.score needs column 'members'" in answer.err
    assert "dubito.probes.Members(models)" in answer.err


def test_temperature_and_pooled_weights_of_members(run: Run, ensembles: Path) -> None:
    options = ("-s", "temperature", "--set", "temperature.score_of=mutual_information:tiles_3", "--resamples", 5)
    answer = run("evaluate", ensembles, "--fit", ensembles, *options, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["scores"].keys() == {"temperature"}
    name = "weighted_mutual_information"
    options = ("-s", name, "--set", f"{name}.over=pooled", "--set", f"{name}.of=views", "--resamples", 5)
    assert run("evaluate", ensembles, "--fit", ensembles, *options).code == 0
    answer = run("evaluate", ensembles, *options)
    assert answer.code == 1
    assert "weighted_mutual_information learns from views_logit" in answer.err


def test_scores_of_members_are_kept_and_used_again(run: Run, ensembles: Path, tmp_path: Path) -> None:
    kept = ("score", ensembles, "-s", "mutual_information", "--json")
    first = run(*kept, "--save", tmp_path / "kept").json
    assert set(first["scores"]) == {"mutual_information:views", "mutual_information:tiles_3"}
    again = run("score", ensembles, "--load", tmp_path / "kept", "--json").json
    assert sorted(again["scores"]) == ["mutual_information_tiles_3", "mutual_information_views"]


def test_scores_of_noisy_copies_where_there_are_any(run: Run, labelled: Path, images: Path, weights: Path) -> None:
    plain = run("evaluate", labelled, "--resamples", 5, "--json").json
    assert {"last_layer_gradient", "grad_norm"} < set(plain["scores"])
    assert not {"regrad", "predicted_gradient", "perturbation_variance"} & set(plain["scores"])
    assert not any("noise" in note or "gradient" in note for note in plain["notes"])
    folder, labels = labelled.parent / "noisy", labelled.parent / "labels.csv"
    model = dubito.load(MODEL, weights=weights)
    dubito.extract(model, images, folder, labels=labels, probes=[dubito.probes.Members.noise(2)], workers=0)
    found = run("evaluate", folder, "--resamples", 5, "--json").json
    assert {"perturbation_variance", "mutual_information"} < set(found["scores"])
    assert not any("noise" in note for note in found["notes"])


def test_a_truncated_gradient_is_left_out_unless_asked_for() -> None:
    probe = {"settings": {"last": 1}, "notes": {"layers": ["fc"], "depth": [2], "of": 3}}
    table = dubito.Table(
        logit=[[1.0, 0.0]], feature=[[1.0]], gradient=[[1.0]], provenance=Provenance(probes={"gradient": probe})
    )
    screen = Screen(quiet=True)
    chosen = choose_scores([], {}, table, None, None, screen)
    assert "regrad" not in chosen
    assert any("regrad.score: column 'gradient' of table in memory has 1 of 3 layers" in note for note in screen.notes)
    kept = choose_scores(["regrad"], {"regrad": {"layers": "kept"}}, table, None, None, screen)["regrad"]
    assert kept.score(table).tolist() == [1.0]
    with pytest.raises(dubito.DubitoError, match="has 1 of 3 layers"):
        choose_scores(["regrad"], {}, table, None, None, screen)
