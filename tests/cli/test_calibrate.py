"""`dubito calibrate`, and what it saves in use."""

from pathlib import Path

import pytest

import dubito
from dubito.calibration import TemperatureScaling, calibrate, load_calibration, save_calibration

from .conftest import MODEL, Run, write_images

QUICK = ("--resamples", 20, "--folds", 2)


def test_json_is_that_of_the_library(run: Run, labelled: Path) -> None:
    result = run("calibrate", labelled, *QUICK, "-m", "isotonic", "--json").json
    expected = calibrate(dubito.open(labelled), "isotonic", folds=2, resamples=20).to_dict()
    for one in (result, expected):
        for quality in one["methods"].values():
            del quality["fit_seconds"]  # measured, so never twice the same
    assert result == {**expected, "to": None, "csv": None, "page": None, "notes": []}


def test_nothing_is_saved_where_nothing_is_recommended(run: Run, labelled: Path, tmp_path: Path) -> None:
    answer = run("calibrate", labelled, *QUICK, "-m", "isotonic", "--to", tmp_path / "c", "--csv", tmp_path / "c.csv")
    assert answer.code == 0, answer.err
    assert "Recommended: no calibration." in answer.out  # 12 images show nothing
    assert "nothing is saved" in answer.err
    assert not (tmp_path / "c").exists()
    assert (tmp_path / "c.csv").is_file()


def test_a_saved_calibration_is_used_by_score_and_evaluate(run: Run, labelled: Path, tmp_path: Path) -> None:
    table = dubito.open(labelled)
    method = TemperatureScaling().fit(table)
    saved = save_calibration(method, tmp_path / "c")
    scored = run("score", labelled, "-s", "entropy", "--calibration", saved, "--json").json
    expected = dubito.Entropy().score(load_calibration(saved).apply(table)).max().item()
    assert scored["top"][0]["scores"]["entropy"] == pytest.approx(expected, abs=1e-6)
    options = ("-s", "entropy", "--resamples", 20, "--metric", "nll", "--calibration", saved)
    evaluated = run("evaluate", labelled, *options, "--json").json
    assert evaluated["model"]["nll"]["value"] == pytest.approx(
        dubito.evaluate("entropy", method.apply(table), metrics="nll", resamples=20).model["nll"].value, abs=1e-9
    )


def test_compare_and_label_issues_take_it_for_every_cache(
    run: Run, labelled: Path, weights: Path, tmp_path: Path
) -> None:
    write_images(tmp_path / "images", 6, seed=7)
    model, table = dubito.load(MODEL, weights=weights), dubito.open(labelled)
    ood = dubito.extract(model, tmp_path / "images", tmp_path / "ood", workers=0, progress=False)
    method = TemperatureScaling().fit(table)
    saved, own = save_calibration(method, tmp_path / "c"), method.apply(table)
    options = ("-s", "entropy", "-s", "energy", "--resamples", 20, "--calibration", saved, "--json")
    compared = run("compare", labelled, "--ood", tmp_path / "ood", *options).json["questions"]
    scores = ["entropy", "energy"]
    expected = dubito.compare(own, ood={"ood": method.apply(ood)}, scores=scores, resamples=20)
    assert compared == expected.to_dict()["questions"]
    options = ("--least", 0.01, "--calibration", saved, "--json")
    issues = run("label-issues", labelled, "--no-cross-validate", *options).json
    same = dubito.find_label_issues(own, least=0.01, cross_validate=False)
    assert [row["probability"] for row in issues["issues"]] == same.probability.tolist()
    assert issues["notes"] == []
    assert "has no effect" in run("label-issues", labelled, "--cross-validate", *options).json["notes"][0]


def test_errors_are_in_words_of_the_command_line(run: Run, labelled: Path, tmp_path: Path) -> None:
    missing = run("score", labelled, "--calibration", tmp_path / "nothing")
    assert missing.code == 1
    assert "no calibration in" in missing.err
    assert "dubito calibrate CACHE --to DIR" in missing.err
    unknown = run("calibrate", labelled, "-m", "vektor", "--folds", 2)
    assert unknown.code == 1
    assert "Did you mean vector?" in unknown.err


def test_scores_that_were_fitted_on_other_logits_are_refused(run: Run, labelled: Path, tmp_path: Path) -> None:
    saved = save_calibration(TemperatureScaling().fit(dubito.open(labelled)), tmp_path / "c")
    dubito.save_score(dubito.scores.Temperature().fit(dubito.open(labelled)), tmp_path / "fitted" / "temperature")
    answer = run("score", labelled, "-s", "temperature", "--load", tmp_path / "fitted", "--calibration", saved)
    assert answer.code == 1
    assert "its logits are calibrated differently" in answer.err
