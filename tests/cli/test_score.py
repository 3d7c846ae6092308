"""`dubito score`: choice of scores, order, files."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

import dubito
from dubito.cli._console import Screen
from dubito.cli._scores import choose_scores
from dubito.errors import DubitoError

from .conftest import COUNT, MODEL, Run, write_images

PLAIN = [
    "max_probability",
    "entropy",
    "scaled_entropy",
    "margin",
    "max_logit",
    "energy",
    "last_layer_gradient",
    "grad_norm",
]


def test_all_that_can_be_had_and_a_note_on_the_rest(run: Run, cache: Path) -> None:
    answer = run("score", cache, "--json")
    assert answer.code == 0
    assert list(answer.json["scores"]) == PLAIN
    assert answer.json["scores"]["energy"] == {"kind": "epistemic", "needs": ["logit"]}
    assert answer.json["notes"] == [
        "left out: temperature, neighbours, density, mahalanobis, mental, which learn first. "
        "Give in-distribution images: --train CACHE."
    ]
    assert [f"note: {note}" for note in answer.json["notes"]] == answer.err.splitlines()


def test_top_is_ordered_by_the_first_score(run: Run, cache: Path) -> None:
    found = run("score", cache, "-s", "energy", "-s", "entropy", "--top", 5, "--json").json
    expected = dubito.Energy().score(dubito.open(cache)).sort(descending=True).values[:5]
    assert found["order_by"] == "energy"
    assert [row["scores"]["energy"] for row in found["top"]] == expected.tolist()
    first = found["top"][0]
    table = dubito.open(cache)
    row = table.id.tolist().index(first["id"])
    p = table.logit[row].double().softmax(-1)
    assert (first["prediction"], first["probability"]) == (int(p.argmax()), pytest.approx(float(p.max())))
    assert first["class"] == table.classes[first["prediction"]]


def test_text_names_images_and_classes(run: Run, cache: Path) -> None:
    answer = run("score", cache, "-s", "entropy", "--top", 3)
    assert f"the 3 most uncertain of {COUNT} images, by entropy" in answer.out
    assert answer.out.count(".png") == 3
    assert ".png" not in run("score", cache, "-s", "entropy", "--top", 0).out


def test_fit_unlocks_the_learned_ones(run: Run, cache: Path, labelled: Path) -> None:
    answer = run(
        "score", cache, "--train", labelled, "--set", "neighbours.k=2", "--set", "temperature.score_of=entropy"
    )
    assert answer.code == 0, answer.err
    assert "neighbours" in answer.out
    assert "temperature" in answer.out


def test_settings_reach_the_scores(run: Run, cache: Path) -> None:
    found = run("score", cache, "-s", "scaled_entropy", "--set", "scaled_entropy.scale=0.5", "--top", 1, "--json").json
    expected = dubito.scores.ScaledEntropy(scale=0.5).score(dubito.open(cache)).max()
    assert found["top"][0]["scores"]["scaled_entropy"] == float(expected)


def test_settings_may_be_words_switches_and_nothing(run: Run, cache: Path, labelled: Path) -> None:
    settings = ("density.covariance=tied", "density.neurons=none", "mahalanobis.relative=yes")
    options = [part for setting in settings for part in ("--set", setting)]
    found = run(
        "score", cache, "--train", labelled, "-s", "density", "-s", "mahalanobis", *options, "--top", 1, "--json"
    )
    assert found.code == 0, found.err
    table, train = dubito.open(cache), dubito.open(labelled)
    density = dubito.Density(covariance="tied").fit(train).score(table)
    (top,) = found.json["top"]
    assert top["scores"]["density"] == pytest.approx(float(density.max()))
    relative = dubito.Mahalanobis(relative=True).fit(train).score(table)
    assert top["scores"]["mahalanobis"] == pytest.approx(float(relative[density.argmax()]))


def test_csv_and_npz_hold_every_row(run: Run, cache: Path, labelled: Path, tmp_path: Path) -> None:
    answer = run("score", labelled, "-s", "entropy", "-s", "margin", "--to", tmp_path / "new" / "scores.csv")
    assert f"written: {tmp_path / 'new' / 'scores.csv'}" in answer.out
    with (tmp_path / "new" / "scores.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["id", "prediction", "class", "probability", "label", "entropy", "margin"]
    table = dubito.open(labelled)
    assert [float(row["entropy"]) for row in rows] == dubito.Entropy().score(table).tolist()
    assert [int(row["label"]) for row in rows] == table.label.tolist()
    assert run("score", labelled, "-s", "entropy", "--to", tmp_path / "scores.npz").code == 0
    with np.load(tmp_path / "scores.npz") as arrays:
        assert arrays["id"].tolist() == table.id.tolist()
        assert torch.equal(torch.from_numpy(arrays["entropy"]), dubito.Entropy().score(table))


def test_saved_scores_score_alike(run: Run, cache: Path, labelled: Path, tmp_path: Path) -> None:
    options = ("-s", "neighbours", "-s", "entropy", "--top", COUNT, "--json")
    saved = run("score", cache, "--train", labelled, "--save", tmp_path, *options)
    assert saved.code == 0, saved.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["entropy", "neighbours"]
    loaded = run("score", cache, "--load", tmp_path, *options)
    assert loaded.json["top"] == saved.json["top"]
    assert sorted(run("score", cache, "--load", tmp_path, "--json").json["scores"]) == ["entropy", "neighbours"]


def test_errors(run: Run, images: Path, cache: Path, labelled: Path, tmp_path: Path) -> None:
    def sentence(*arguments: object, code: int = 1) -> str:
        answer = run("score", *arguments)
        assert answer.code == code
        assert answer.out == ""
        assert [line for line in answer.err.splitlines() if not line.startswith("note: scores:")] == [
            answer.err.splitlines()[-1]
        ]
        return answer.err

    assert "got 'entrpy'. Did you mean entropy?" in sentence(cache, "-s", "entrpy")
    assert "neighbours learns from feature" in sentence(cache, "-s", "neighbours")
    assert "k must be between 1 and the bank's 12" in sentence(
        cache, "--train", labelled, "-s", "neighbours", "--set", "neighbours.k=13"
    )
    for setting, message in {
        "scaled_entropy.warmth=1": "--set: scaled_entropy has no setting 'warmth'; it has scale.",
        "scaled_entropy.scale=hot": "--set: scaled_entropy: scale must be a number; got 'hot'.",
        "density.space=x": "--set: density: space must be one of z, log; got 'x'.",
        "mahalanobis.relative=maybe": "--set: mahalanobis: relative must be one of true, false, yes, no; got 'maybe'.",
    }.items():
        name = setting.partition(".")[0]
        assert message in sentence(cache, "--train", labelled, "-s", name, "--set", setting, code=2)
    assert "--set names 'scaled_entropy', which is not made here" in sentence(
        cache, "-s", "entropy", "--set", "scaled_entropy.scale=1", code=2
    )
    assert "--load: no saved scores in" in sentence(cache, "--load", tmp_path)
    (tmp_path / "taken").write_text("")
    assert "cannot be saved" in sentence(cache, "-s", "entropy", "--to", tmp_path / "taken" / "scores.csv")


def test_fit_must_be_of_the_same_model(run: Run, images: Path, cache: Path, tmp_path: Path) -> None:
    other = ("extract", MODEL, images, "--to", tmp_path / "other", "--weights", "none", "--workers", 0)
    assert run(*other).code == 0
    answer = run("score", cache, "--train", tmp_path / "other")
    assert answer.code == 1
    assert "must come from one model with one transform" in answer.err


def test_a_small_fit_leaves_scores_out_with_a_note(run: Run, weights: Path, cache: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "few", 3, seed=9)
    command = ("extract", MODEL, tmp_path / "few", "--to", tmp_path / "cache", "--weights", weights, "--workers", 0)
    assert run(*command).code == 0
    notes = run("score", cache, "--train", tmp_path / "cache", "--json").json["notes"]
    assert notes[0].startswith("left out: temperature.fit needs column 'label'")
    assert notes[1].startswith("left out: neighbours.fit: k must be between 1 and the bank's 3 rows")


def test_a_table_that_allows_nothing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DubitoError, match="nothing can be computed from table in memory"):
        choose_scores(Screen(), dubito.Table(label=[0, 1]), [])
    assert "left out: entropy: there is no column 'logit'" in capsys.readouterr().err
