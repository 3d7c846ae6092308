"""`dubito evaluate`, `dubito compare` and `dubito reject`: the same numbers as the library, shown or as JSON."""

import csv
from pathlib import Path

import pytest
import torch

import dubito
from dubito.cli._console import Assignments, Screen
from dubito.cli.score import ScoreOptions
from dubito.evaluate.rejection import rejection_study
from dubito.probes.tiles import Tiles
from dubito.scores import make_score
from dubito.table import Provenance

from .conftest import COUNT, MODEL, Run, write_images


@pytest.fixture(scope="module")
def ood(run: Run, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ood")
    write_images(folder / "images", 6, seed=7)
    command = ("extract", MODEL, folder / "images", "--to", folder / "cache", "--weights", weights, "--workers", 0)
    assert run(*command).code == 0
    return folder / "cache"


def test_json_is_that_of_the_library(run: Run, labelled: Path, ood: Path) -> None:
    options = ("-s", "entropy", "--resamples", 20, "--seed", 3, "--ood", ood)
    result = run("evaluate", labelled, *options, "--json").json
    table = dubito.open(labelled)
    expected = dubito.evaluate(
        {"entropy": dubito.Entropy()}, table, ood=dubito.open(ood), resamples=20, seed=3
    ).to_dict()
    for one in (result, expected):
        del one["microseconds"]  # measured, so never twice the same
    assert result == {**expected, "notes": []}
    assert result["model"]["accuracy"]["value"] == pytest.approx(8 / 12)


def test_table_names_metrics_and_scores(run: Run, labelled: Path) -> None:
    answer = run("evaluate", labelled, "--learn-from", labelled, "--set", "neighbours.k=2", "--resamples", 5)
    assert answer.code == 0, answer.err
    for text in ("12 images", "accuracy", "0.667", "error AUROC", "AURC", "µs / image", "entropy", "neighbours"):
        assert text in answer.out


def test_density_is_one_that_suits_the_images_unless_it_is_requested(run: Run, labelled: Path, monkeypatch) -> None:
    """Full covariances of wide features take minutes, so nobody gets them without a word."""
    options = ("evaluate", labelled, "--learn-from", labelled, "--resamples", 5, "--metric", "error_auroc", "--json")
    made: list[dubito.Density] = []
    fit = dubito.Density.fit
    monkeypatch.setattr(dubito.Density, "fit", lambda score, table: (made.append(score), fit(score, table))[1])
    notes = run(*options).json["notes"]
    # Twelve images of 96 features: less than 5 a feature, and no ten a class.
    assert (made[0].covariance, made[0].start, made[0].components) == ("diagonal", "free", 1)
    output = "density: 1 Gaussian, diagonal covariances of 96 features, by EM, 0.0 MB, to suit 12 images of "
    hint = "For another one: --score density, with --set density.covariance=full or the like."
    assert any(note.startswith(output) and note.endswith(hint) for note in notes)
    for more in (("--score", "density"), ("--set", "density.regularisation=0.1")):
        notes = run(*options, *more).json["notes"]
        assert (made[-1].covariance, made[-1].start) == ("full", "class")
        assert not any(note.startswith("density:") for note in notes)


def test_help_says_which_density_is_taken(run: Run) -> None:
    text = " ".join(run("evaluate", "--help").out.replace("│", " ").split())
    assert "Without --score, density takes the covariances that these images allow in seconds" in text


def test_without_labels_there_is_nothing_to_evaluate(run: Run, cache: Path, ood: Path) -> None:
    answer = run("evaluate", cache)
    assert answer.code == 1
    assert "has no labels, so there is nothing to compare with" in answer.err
    assert run("evaluate", cache, "--ood", ood, "-s", "entropy", "--resamples", 5).code == 0


def test_ood_images_must_be_of_the_same_model(run: Run, images: Path, labelled: Path, tmp_path: Path) -> None:
    other = ("extract", MODEL, images, "--to", tmp_path / "other", "--weights", "none", "--workers", 0)
    assert run(*other).code == 0
    answer = run("evaluate", labelled, "--ood", tmp_path / "other")
    assert answer.code == 1
    assert "error: --ood (" in answer.err


def test_metrics_by_choice(run: Run, labelled: Path) -> None:
    result = run("evaluate", labelled, "-s", "entropy", "--metric", "aurc", "--resamples", 5, "--json").json
    assert set(result["scores"]["entropy"]) == {"aurc"}
    answer = run("evaluate", labelled, "-s", "entropy", "--metric", "arc", "--resamples", 5)
    assert answer.code == 1
    assert "aurc" in answer.err


@pytest.fixture(scope="module")
def ensembles(run: Run, images: Path, weights: Path, labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The labelled images with tiles and views."""
    folder = tmp_path_factory.mktemp("ensembles") / "cache"
    labels = labelled.parent / "labels.csv"
    options = (
        "--labels",
        labels,
        "--weights",
        weights,
        "--workers",
        0,
        "--probe",
        "tiles:grids=2,3,keep=logits",
        "--probe",
        "views:keep=logits",
    )
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
    result = run("evaluate", ensembles, "--resamples", 5, "--json").json
    both = {f"{name}:{of}" for name in OF_MEMBERS for of in ("views", "tiles_3")}  # of tiles, the finest grid
    assert both == {name for name in result["scores"] if name.startswith(OF_MEMBERS)}


def test_one_ensemble_by_choice(run: Run, labelled: Path, ensembles: Path) -> None:
    options = ("-s", "mutual_information", "--set", "mutual_information.of=tiles_2", "--resamples", 5, "--seed", 1)
    result = run("evaluate", ensembles, *options, "--json").json
    table = dubito.open(ensembles)
    score = make_score("mutual_information", of="tiles_2")
    expected = dubito.evaluate({"mutual_information": score}, table, resamples=5, seed=1).to_dict()
    assert result["scores"].keys() == {"mutual_information"}
    for metric in ("error_auroc", "aurc"):
        assert result["scores"]["mutual_information"][metric] == expected["scores"]["mutual_information"][metric]
    answer = run("evaluate", labelled, "-s", "mutual_information", "--resamples", 5)
    assert answer.code == 1
    assert "mutual_information needs column 'members'" in answer.err
    assert "dubito.probes.Members(models)" in answer.err


def test_temperature_and_pooled_weights_of_members(run: Run, ensembles: Path) -> None:
    options = ("-s", "temperature", "--set", "temperature.score_of=mutual_information:tiles_3", "--resamples", 5)
    answer = run("evaluate", ensembles, "--learn-from", ensembles, *options, "--json")
    assert answer.code == 0, answer.err
    assert answer.json["scores"].keys() == {"temperature"}
    name = "weighted_mutual_information"
    options = ("-s", name, "--set", f"{name}.over=pooled", "--set", f"{name}.of=views", "--resamples", 5)
    assert run("evaluate", ensembles, "--learn-from", ensembles, *options).code == 0
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
    dubito.extract(model, images, folder, labels=labels, probes=[dubito.probes.Noise(2)], workers=0)
    result = run("evaluate", folder, "--resamples", 5, "--json").json
    assert {"perturbation_variance", "mutual_information"} < set(result["scores"])
    assert not any("noise" in note for note in result["notes"])


def test_a_truncated_gradient_is_left_out_unless_requested() -> None:
    probe = {"settings": {"last": 1}, "notes": {"layers": ["fc"], "depth": [2], "of": 3}}
    table = dubito.Table(
        logit=[[1.0, 0.0]], feature=[[1.0]], gradient=[[1.0]], provenance=Provenance(probes={"gradient": probe})
    )
    screen = Screen(quiet=True)
    chosen = ScoreOptions().ready(screen, table)
    assert "regrad" not in chosen
    assert any("regrad.score: column 'gradient' of table in memory has 1 of 3 layers" in note for note in screen.notes)
    kept = ScoreOptions(["regrad"], [Assignments({"regrad.layers": "kept"})]).ready(screen, table)["regrad"]
    assert kept.score(table).tolist() == [1.0]
    with pytest.raises(dubito.DubitoError, match="has 1 of 3 layers"):
        ScoreOptions(["regrad"]).ready(screen, table)


def test_scores_are_ranked_by_errors_and_ood_images(run: Run, labelled: Path, ood: Path) -> None:
    result = run("compare", labelled, "--ood", ood, "--resamples", 20, "--json").json
    assert [one["about"] for one in result["questions"]] == ["errors", "errors", "cache"]
    assert {"entropy", "energy", "margin"} <= set(result["questions"][0]["scores"])
    assert result["left_out"]["neighbours"].startswith("it learns from feature")


def test_the_table_and_the_sentences_are_shown(run: Run, labelled: Path) -> None:
    answer = run("compare", labelled, "-s", "entropy", "-s", "energy", "--resamples", 20)
    assert answer.code == 0, answer.err
    for text in ("12 images, 2 scores", "gap to best", "µs / image", "entropy", "energy"):
        assert text in answer.out
    assert "on these 12 images (4 wrong predictions)" in answer.out


def test_scores_that_learn_take_train(run: Run, labelled: Path, ood: Path) -> None:
    options = ("-s", "neighbours", "--set", "neighbours.k=2", "--resamples", 20, "--json")
    assert "neighbours" in run("compare", labelled, "--learn-from", ood, *options).json["costs"]
    answer = run("compare", labelled, *options)
    assert answer.code == 1
    assert "neighbours learns from feature" in answer.err
    assert "Use --learn-from CACHE." in answer.err


def test_without_labels_and_ood_images_there_is_nothing_to_compare(run: Run, cache: Path) -> None:
    answer = run("compare", cache)
    assert answer.code == 1
    assert "Add labels (`dubito label CACHE LABELS`), or give OOD images." in answer.err


QUICK = ("--resamples", 10, "--buckets", 4)


def extracted(folder: Path, weights: Path, seed: int) -> Path:
    """A cache with labels that the model gets right, except for every third; and the logits of its tiles."""
    write_images(folder / "images", COUNT, seed=seed)
    model = dubito.load(MODEL, weights=weights)
    plain = dubito.extract(model, folder / "images", folder / "plain", workers=0, progress=False)
    label = (plain.logit.argmax(1) + (torch.arange(COUNT) % 3 == 0).long()) % 1000
    labels = dict(zip(plain.id.tolist(), label.tolist(), strict=True))
    probes = [dubito.probes.Forward(), Tiles([2, 3], keep="logits")]
    options = {"labels": labels, "label_space": "model", "probes": probes, "workers": 0, "progress": False}
    dubito.extract(model, folder / "images", folder / "cache", **options)
    return folder / "cache"


@pytest.fixture(scope="module")
def tiled(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extracted(tmp_path_factory.mktemp("tiled"), weights, 0)


@pytest.fixture(scope="module")
def other(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extracted(tmp_path_factory.mktemp("other"), weights, 5)


def test_reject_json_is_that_of_the_library(run: Run, tiled: Path, other: Path) -> None:
    answer = run("reject", tiled, "--learn-from", other, *QUICK, "--seed", 3, "--json")
    assert answer.code == 0, answer.err
    study = rejection_study(dubito.open(tiled), calibration=dubito.open(other), resamples=10, buckets=4, seed=3)
    assert answer.json == {**study.to_dict(), "table": None, "curves": None, "page": None, "notes": []}
    assert [result.order.ensemble for result in study.results[:4]] == ["original", *["tiles_2"] * 3]


def test_reject_is_shown_and_written(run: Run, tiled: Path, tmp_path: Path) -> None:
    options = ("--of", "tiles_3", "-u", "mutual_information", "--original", *QUICK)
    answer = run("reject", tiled, *options, "--csv", tmp_path / "csv", "--html", tmp_path / "page.html")
    assert answer.code == 0, answer.err
    for text in (
        f"{COUNT} images, all by the original's",
        "entropy",
        "mutual information",
        "3x3",
        "against 1 other order,",
    ):
        assert text in answer.out
    with (tmp_path / "csv" / "table.csv").open(newline="") as file:
        assert [row["ensemble"] for row in csv.DictReader(file)] == ["original", "tiles_3"]
    assert (tmp_path / "csv" / "curves.csv").exists()
    assert "<svg" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert str(tmp_path / "page.html") in answer.out


def test_what_reject_lacks_is_reported(run: Run, tiled: Path, cache: Path) -> None:
    answer = run("reject", cache)
    assert answer.code == 1
    assert "dubito reject needs column 'label'" in answer.err
    answer = run("reject", tiled, "--of", "tiles_9", *QUICK)
    assert answer.code == 1
    assert "needs an ensemble 'tiles_9'" in answer.err
    answer = run("reject", tiled, "--learn-from", tiled, *QUICK)
    assert answer.code == 1
    assert f"at least {COUNT} of the {COUNT} images of" in answer.err


def test_what_temperatures_are_fitted_on_must_be_of_the_same_model(
    run: Run, images: Path, tiled: Path, tmp_path: Path
) -> None:
    assert run("extract", MODEL, images, "--to", tmp_path / "x", "--weights", "none", "--workers", 0).code == 0
    answer = run("reject", tiled, "--learn-from", tmp_path / "x")
    assert answer.code == 1
    assert answer.err.startswith("error: --learn-from ")


def test_corrupted_copies_choose_a_score_for_unseen_ood_images(
    run: Run, images: Path, weights: Path, labelled: Path, tmp_path: Path
) -> None:
    common = ("extract", MODEL, images, "--to", tmp_path / "copies", "--weights", weights, "--workers", 0)
    answer = run(*common, "--corrupted", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["images"] == 5 * COUNT
    options = ("-s", "entropy", "-s", "energy", "--resamples", 20)
    result = run("compare", labelled, "--corrupted", tmp_path / "copies", *options, "--json").json
    assert result["ood_choice"] in ("entropy", "energy")
    refused = run(*common)
    assert refused.code == 1  # the folder has the copies, not the images
