"""`--head` of the commands that score, and `dubito list heads`."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dubito
from dubito.cli._results import folder_name
from dubito.heads import shelf
from dubito.heads.checkpoint import HeadConfig, PretrainedHead, write_head
from dubito.heads.module import HeadModule
from dubito.table import Provenance

from .conftest import COUNT, MODEL, Run

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
    found = torch.tensor([row["scores"]["head"] for row in answer.json["top"]])
    torch.testing.assert_close(found, expected)


def test_beside_scores_that_were_asked_for(run: Run, cache: Path, own: Path) -> None:
    write_head(own / "mine", head_of(cache))
    for options in (("-s", "entropy"), ("-s", "head", "-s", "entropy")):
        found = run("score", cache, "--head", own / "mine", *options, "--json").json
        assert list(found["scores"]) == ["head", "entropy"]


def test_no_head_is_trained_in_passing(run: Run, cache: Path, labelled: Path) -> None:
    found = run("score", cache, "--train", labelled, "--json").json
    assert "head" not in found["scores"]
    assert not any("head" in note for note in found["notes"])


def test_several_heads_are_told_apart(run: Run, cache: Path, own: Path, tmp_path: Path) -> None:
    write_head(own / "one", head_of(cache, seed=1))
    write_head(own / "two", head_of(cache, seed=2))
    options = ("--head", "one", "--head", f"{own}/two/", "--head", "one", "-s", "entropy", "--json")
    found = run("score", cache, *options, "--to", tmp_path / "u.csv").json
    assert list(found["scores"]) == ["head:one", "head:two", "entropy"]
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
    found = run("score", cache, "--head", a, "--head", b, "-s", "entropy", "--json").json
    assert list(found["scores"]) == [f"head:{a}", f"head:{b}", "entropy"]
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
    found = run("score", cache, "--head", "auto", "-s", "entropy", "--json").json
    assert list(found["scores"]) == ["head", "entropy"]


def test_a_head_of_another_backbone_is_refused_with_the_reason(run: Run, cache: Path, own: Path) -> None:
    provenance = replace(dubito.open(cache).provenance, weights="0" * 32, tensors="1" * 32)
    write_head(own / "tuned", head_of(cache, provenance=provenance))
    answer = run("score", cache, "--head", "tuned")
    assert answer.code == 1
    assert "its weights differ (11111111… there" in answer.err
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
        f"head.score: the head does not record its model, so whether it fits {cache}, made by {MODEL}, cannot "
        "be checked."
    ]


def test_saved_heads_are_refused_for_other_models_too(run: Run, cache: Path, own: Path, tmp_path: Path) -> None:
    write_head(own / "mine", head_of(cache))
    kept = tmp_path / "kept"
    assert run("score", cache, "--head", "mine", "-s", "head", "--save", kept).code == 0
    assert run("score", cache, "--load", kept).code == 0
    described = json.loads((kept / "head" / "score.json").read_text())
    described["provenance"] |= {"weights": "0" * 32, "tensors": "1" * 32}
    (kept / "head" / "score.json").write_text(json.dumps(described))
    answer = run("score", cache, "--load", kept)
    assert answer.code == 1
    assert "its weights differ (11111111… there" in answer.err


def test_evaluate(run: Run, labelled: Path, own: Path) -> None:
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
    for text in ("1 heads", "mine", MODEL, "local", "Nothing.", "trained on", "kB"):
        assert text in shown
    assert run("list", "heads", "other", "--json").json["heads"] == []
    assert "mine" in run("list").out
