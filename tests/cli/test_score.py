"""`dubito score`: choice of scores, order, files; `--head` of the commands that score, and `dubito list heads`."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import dubito
from dubito.cli._console import Screen
from dubito.cli.score import ScoreOptions, folder_name
from dubito.errors import DubitoError
from dubito.heads import shelf
from dubito.heads.checkpoint import HeadConfig, PretrainedHead, write_head
from dubito.heads.module import HeadModule
from dubito.storage import write_sealed
from dubito.table import Provenance

from .conftest import COUNT, MODEL, Run, write_images

PLAIN = [
    "max_probability",
    "entropy",
    "scaled_entropy",
    "margin",
    "max_logit",
    "energy",
    "gen",
    "last_layer_gradient",
    "grad_norm",
]


def head_of(cache: Path, *, seed: int = 0, **changes: object) -> PretrainedHead:
    """An untrained head that fits the model which made a cache."""
    table = dubito.open(cache)
    module = HeadModule(table.shape("feature")[1], width=8, depth=1, seed=seed)
    about = {
        "model": MODEL,
        "provenance": table.provenance,
        "trained": {"corpus": "Nothing.\nReally."},
    } | changes
    return PretrainedHead(module, HeadConfig(features=module.features, width=8, depth=1, **about))


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty shelf."""
    monkeypatch.setenv("DUBITO_HEADS", str(tmp_path / "shelf"))
    monkeypatch.setattr(shelf, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "shelf"


def test_all_that_can_be_had_and_a_note_on_the_rest(run: Run, cache: Path) -> None:
    answer = run("score", cache, "--json")
    assert answer.code == 0
    assert list(answer.json["scores"]) == PLAIN
    assert answer.json["scores"]["energy"] == {"kind": "epistemic", "needs": ["logit"]}
    assert answer.json["notes"] == [
        "left out: temperature, neighbours, density, mahalanobis, mental, kl_matching, residual, vim, fdbd, nci, "
        "react, scale, ash, mahalanobis_pp, nnguide, prototypes, laplace, which learn first. "
        "Pass in-distribution images: --learn-from CACHE."
    ]
    assert [f"note: {note}" for note in answer.json["notes"]] == answer.err.splitlines()


def test_top_is_ordered_by_the_first_score(run: Run, cache: Path) -> None:
    result = run("score", cache, "-s", "energy", "-s", "entropy", "--top", 5, "--json").json
    expected = dubito.Energy().score(dubito.open(cache)).sort(descending=True).values[:5]
    assert result["order_by"] == "energy"
    assert [row["scores"]["energy"] for row in result["top"]] == expected.tolist()
    first = result["top"][0]
    table = dubito.open(cache)
    row = table.id.tolist().index(first["id"])
    p = table.logit[row].double().softmax(-1)
    assert (first["predicted"], first["probability"]) == (int(p.argmax()), pytest.approx(float(p.max())))
    assert first["predicted_class"] == table.classes[first["predicted"]]


def test_text_names_images_and_classes(run: Run, cache: Path) -> None:
    answer = run("score", cache, "-s", "entropy", "--top", 3)
    assert f"the 3 most uncertain of {COUNT} images, by entropy" in answer.out
    assert answer.out.count(".png") == 3
    assert ".png" not in run("score", cache, "-s", "entropy", "--top", 0).out


def test_without_names_six_scores_have_columns_and_the_others_are_named(run: Run, cache: Path) -> None:
    text = run("score", cache, "--top", 2).out
    assert "also computed: last_layer_gradient, grad_norm. Choose with --score NAME, or write all" in text
    assert text.count("grad_norm") == 1
    assert list(run("score", cache, "--top", 2, "--json").json["top"][0]["scores"]) == PLAIN
    named = [part for name in PLAIN for part in ("-s", name)]
    assert "also computed" not in run("score", cache, *named).out


def test_fit_unlocks_the_learned_ones(run: Run, cache: Path, labelled: Path) -> None:
    answer = run(
        "score", cache, "--learn-from", labelled, "--set", "neighbours.k=2", "--set", "temperature.score_of=entropy"
    )
    assert answer.code == 0, answer.err
    assert "neighbours" in answer.out
    assert "temperature" in answer.out


def test_settings_reach_the_scores(run: Run, cache: Path) -> None:
    result = run("score", cache, "-s", "scaled_entropy", "--set", "scaled_entropy.scale=0.5", "--top", 1, "--json").json
    expected = dubito.scores.ScaledEntropy(scale=0.5).score(dubito.open(cache)).max()
    assert result["top"][0]["scores"]["scaled_entropy"] == float(expected)


def test_settings_may_be_words_switches_and_nothing(run: Run, cache: Path, labelled: Path) -> None:
    settings = ("density.covariance=tied", "density.neurons=none", "mahalanobis.relative=yes")
    options = [part for setting in settings for part in ("--set", setting)]
    result = run(
        "score", cache, "--learn-from", labelled, "-s", "density", "-s", "mahalanobis", *options, "--top", 1, "--json"
    )
    assert result.code == 0, result.err
    table, train = dubito.open(cache), dubito.open(labelled)
    density = dubito.Density(covariance="tied").fit(train).score(table)
    (top,) = result.json["top"]
    assert top["scores"]["density"] == pytest.approx(float(density.max()))
    relative = dubito.Mahalanobis(relative=True).fit(train).score(table)
    assert top["scores"]["mahalanobis"] == pytest.approx(float(relative[density.argmax()]))


def test_csv_and_npz_hold_every_row(run: Run, cache: Path, labelled: Path, tmp_path: Path) -> None:
    answer = run("score", labelled, "-s", "entropy", "-s", "margin", "--to", tmp_path / "new" / "scores.csv")
    assert f"written: {tmp_path / 'new' / 'scores.csv'}" in answer.out
    with (tmp_path / "new" / "scores.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["id", "predicted", "predicted_class", "probability", "label", "entropy", "margin"]
    table = dubito.open(labelled)
    assert [float(row["entropy"]) for row in rows] == dubito.Entropy().score(table).tolist()
    assert [int(row["label"]) for row in rows] == table.label.tolist()
    assert run("score", labelled, "-s", "entropy", "--to", tmp_path / "scores.npz").code == 0
    with np.load(tmp_path / "scores.npz") as arrays:
        assert arrays["id"].tolist() == table.id.tolist()
        assert torch.equal(torch.from_numpy(arrays["entropy"]), dubito.Entropy().score(table))


def test_saved_scores_score_alike(run: Run, cache: Path, labelled: Path, tmp_path: Path) -> None:
    options = ("-s", "neighbours", "-s", "entropy", "--top", COUNT, "--json")
    saved = run("score", cache, "--learn-from", labelled, "--save", tmp_path, *options)
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
        assert [line for line in answer.err.splitlines() if not line.startswith("note: scores that learn:")] == [
            answer.err.splitlines()[-1]
        ]
        return answer.err

    assert "got 'entrpy'. Did you mean entropy?" in sentence(cache, "-s", "entrpy")
    assert "neighbours learns from feature" in sentence(cache, "-s", "neighbours")
    assert "k must be a whole number in [1, 12]" in sentence(
        cache, "--learn-from", labelled, "-s", "neighbours", "--set", "neighbours.k=13"
    )
    for setting, message in {
        "scaled_entropy.warmth=1": "--set: scaled_entropy: a setting must be one of scale; got 'warmth'.",
        "scaled_entropy.scale=hot": "--set: scaled_entropy: scale must be a number; got 'hot'.",
        "density.space=x": "--set: density: space must be one of z, log; got 'x'.",
        "mahalanobis.relative=maybe": "--set: mahalanobis: relative must be one of true, false, yes, no; got 'maybe'.",
    }.items():
        name = setting.partition(".")[0]
        assert message in sentence(cache, "--learn-from", labelled, "-s", name, "--set", setting, code=2)
    assert "--set names 'scaled_entropy', which is not made here" in sentence(
        cache, "-s", "entropy", "--set", "scaled_entropy.scale=1", code=2
    )
    assert "--load: no saved scores in" in sentence(cache, "--load", tmp_path)
    (tmp_path / "taken").write_text("")
    assert "cannot be saved" in sentence(cache, "-s", "entropy", "--to", tmp_path / "taken" / "scores.csv")


def test_fit_must_be_of_the_same_model(run: Run, images: Path, cache: Path, tmp_path: Path) -> None:
    other = ("extract", MODEL, images, "--to", tmp_path / "other", "--weights", "none", "--workers", 0)
    assert run(*other).code == 0
    answer = run("score", cache, "--learn-from", tmp_path / "other")
    assert answer.code == 1
    assert "must come from one model with one transform" in answer.err


def test_a_small_fit_leaves_scores_out_with_a_note(run: Run, weights: Path, cache: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "few", 3, seed=9)
    command = ("extract", MODEL, tmp_path / "few", "--to", tmp_path / "cache", "--weights", weights, "--workers", 0)
    assert run(*command).code == 0
    notes = run("score", cache, "--learn-from", tmp_path / "cache", "--json").json["notes"]
    assert notes[0].startswith("left out: temperature.fit needs column 'label'")
    assert notes[1].startswith("left out: neighbours.fit: k must be a whole number in [1, 3]; got")


def test_a_table_that_allows_nothing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DubitoError, match="nothing can be computed from table in memory"):
        ScoreOptions().ready(Screen(), dubito.Table(label=[0, 1]))
    error = " ".join(capsys.readouterr().err.split())
    assert error.count("there is no column 'logit'") == 1  # one note for all scores of logits
    assert "left out: max_probability, entropy, scaled_entropy, margin, max_logit, energy, " in error


def test_a_head_comes_first_and_the_plain_scores_with_it(run: Run, cache: Path, own: Path) -> None:
    head = head_of(cache)
    write_head(own / "mine", head)
    answer = run("score", cache, "--head", "mine", "--top", COUNT, "--json")
    assert answer.code == 0, answer.err
    assert list(answer.json["scores"]) == ["head", *PLAIN]
    assert answer.json["scores"]["head"] == {"kind": "aleatoric", "needs": ["feature"]}
    assert answer.json["order_by"] == "head"
    with torch.no_grad():
        expected = head.module(dubito.open(cache).feature).sort(descending=True).values
    result = torch.tensor([row["scores"]["head"] for row in answer.json["top"]])
    torch.testing.assert_close(result, expected)


def test_beside_requested_scores(run: Run, cache: Path, own: Path) -> None:
    write_head(own / "mine", head_of(cache))
    for options in (("-s", "entropy"), ("-s", "head", "-s", "entropy")):
        result = run("score", cache, "--head", own / "mine", *options, "--json").json
        assert list(result["scores"]) == ["head", "entropy"]


def test_no_head_is_trained_in_passing(run: Run, cache: Path, labelled: Path) -> None:
    result = run("score", cache, "--learn-from", labelled, "--json").json
    assert "head" not in result["scores"]
    assert not any("head" in note for note in result["notes"])


def test_several_heads_are_distinguished(run: Run, cache: Path, own: Path, tmp_path: Path) -> None:
    write_head(own / "one", head_of(cache, seed=1))
    write_head(own / "two", head_of(cache, seed=2))
    options = ("--head", "one", "--head", f"{own}/two/", "--head", "one", "-s", "entropy", "--json")
    result = run("score", cache, *options, "--to", tmp_path / "u.csv").json
    assert list(result["scores"]) == ["head:one", "head:two", "entropy"]
    with (tmp_path / "u.csv").open(newline="") as file:
        assert next(iter(csv.DictReader(file))).keys() >= {"head:one", "head:two", "entropy"}


def test_several_heads_are_kept_and_loaded(run: Run, cache: Path, own: Path, tmp_path: Path) -> None:
    write_head(own / "one", head_of(cache, seed=1))
    write_head(own / "two", head_of(cache, seed=2))
    options = ("--top", 1, "--json")
    saved = run(
        "score", cache, "--head", "one", "--head", "two", "-s", "entropy", "--save", tmp_path / "kept", *options
    )
    assert saved.code == 0, saved.err
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["entropy", "head_one", "head_two"]
    loaded = run("score", cache, "--load", tmp_path / "kept", "-s", "head_one", "-s", "head_two", *options)
    assert loaded.code == 0, loaded.err
    assert list(loaded.json["top"][0]["scores"].values()) == list(saved.json["top"][0]["scores"].values())[:2]


def test_heads_of_the_same_name_keep_their_whole_names(run: Run, cache: Path, tmp_path: Path) -> None:
    a, b = write_head(tmp_path / "a" / "mine", head_of(cache)), write_head(tmp_path / "b" / "mine", head_of(cache))
    result = run("score", cache, "--head", a, "--head", b, "-s", "entropy", "--json").json
    assert list(result["scores"]) == [f"head:{a}", f"head:{b}", "entropy"]
    assert folder_name("head:a/mine") == "head_a_mine"


def test_auto_takes_the_one_that_fits(run: Run, cache: Path, own: Path) -> None:
    write_head(own / "other", head_of(cache, provenance=Provenance(weights="0" * 32, tensors="1" * 32)))
    answer = run("score", cache, "--head", "auto")
    assert answer.code == 1
    assert (
        f"--head auto: no head here was trained for {MODEL} with these weights and this transform, which made {cache}. "
        f"See `dubito list heads`, or train one with `dubito train`."
    ) in answer.err
    write_head(own / "this", head_of(cache))
    result = run("score", cache, "--head", "auto", "-s", "entropy", "--json").json
    assert list(result["scores"]) == ["head", "entropy"]


def test_a_head_of_another_backbone_is_refused_with_the_reason(run: Run, cache: Path, own: Path) -> None:
    provenance = replace(dubito.open(cache).provenance, weights="0" * 32, tensors="1" * 32)
    write_head(own / "tuned", head_of(cache, provenance=provenance))
    answer = run("score", cache, "--head", "tuned")
    assert answer.code == 1
    assert "its weights differ (11111111 there" in answer.err
    assert "transform differs" not in answer.err


def test_another_version_of_timm_is_no_other_backbone(run: Run, cache: Path, own: Path) -> None:
    provenance = replace(dubito.open(cache).provenance, weights="0" * 32)
    write_head(own / "shipped", head_of(cache, provenance=provenance))
    assert run("score", cache, "--head", "shipped", "-s", "entropy").code == 0


def test_a_head_of_an_unknown_backbone_is_used_with_a_note(run: Run, cache: Path, own: Path) -> None:
    write_head(own / "stray", head_of(cache, provenance=None, model=None))
    answer = run("score", cache, "--head", "stray", "-s", "entropy", "--json")
    assert answer.code == 0, answer.err
    assert answer.json["notes"] == [
        f"head: the head does not record its model, so whether it fits {cache}, made by {MODEL}, cannot be checked."
    ]


def test_saved_heads_are_refused_for_other_models_too(run: Run, cache: Path, own: Path, tmp_path: Path) -> None:
    write_head(own / "mine", head_of(cache))
    kept = tmp_path / "kept"
    assert run("score", cache, "--head", "mine", "-s", "head", "--save", kept).code == 0
    assert run("score", cache, "--load", kept).code == 0
    described = json.loads((kept / "head" / "score.json").read_text())
    described["provenance"] |= {"weights": "0" * 32, "tensors": "1" * 32}
    del described["digest"]
    write_sealed(kept / "head" / "score.json", described)
    answer = run("score", cache, "--load", kept)
    assert answer.code == 1
    assert "its weights differ (11111111 there" in answer.err


def test_evaluate_takes_a_head(run: Run, labelled: Path, own: Path) -> None:
    write_head(own / "mine", head_of(labelled))
    answer = run("evaluate", labelled, "--head", "mine", "-s", "entropy", "--resamples", 5, "--json")
    assert answer.code == 0, answer.err
    assert list(answer.json["scores"]) == ["head", "entropy"]


def test_unknown_names(run: Run, cache: Path, own: Path) -> None:
    write_head(own / "lite0", head_of(cache))
    answer = run("score", cache, "--head", "lite")
    assert answer.code == 1
    assert "head: there is no 'lite'. Nearest: lite0." in answer.err


def test_list_heads(run: Run, cache: Path, own: Path) -> None:
    assert run("list", "heads", "--json").json["heads"] == []
    assert f"Your own are looked for in {own}" in run("list", "heads").out
    folder = write_head(own / "mine", head_of(cache))
    assert run("list", "heads", "--json").json["heads"] == [
        {
            "name": "mine",
            "model": MODEL,
            "features": dubito.open(cache).shape("feature")[1],
            "bytes": sum(path.stat().st_size for path in folder.iterdir()),
            "where": "local",
            "trained_on": "Nothing.",
            "path": str(folder),
        }
    ]
    shown = run("list", "heads").out
    for text in ("1 head\n", "mine", MODEL, "local", "Nothing.", "trained on", "kB"):
        assert text in shown
    assert run("list", "heads", "other", "--json").json["heads"] == []
    assert "mine" in run("list").out
