"""`dubito train`: heads from caches, where they go, and what it says."""

import json
import re
from pathlib import Path

import pytest
import torch

import dubito
from dubito.heads import loop, shelf
from dubito.heads.checkpoint import read_config
from dubito.heads.held_out import HeldOut

from .conftest import COUNT, MODEL, Run, write_images

QUICK = ("--set", "rows=120,batch=4", "--width", 8, "--depth", 1)


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty shelf, and a folder to be in."""
    monkeypatch.setenv("DUBITO_HEADS", str(tmp_path / "shelf"))
    monkeypatch.setattr(shelf, "SHIPPED", tmp_path / "shipped")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "shelf"


def plain(text: str) -> str:
    return re.sub(r" +", " ", text)


def test_a_name_goes_to_the_shelf(run: Run, labelled: Path, own: Path) -> None:
    answer = run("train", labelled, "--to", "mine", *QUICK, "--corpus", "Noise in boxes.")
    assert (answer.code, answer.err) == (0, "")
    assert (own / "mine" / "seed-1" / "model.safetensors").is_file()
    shown = plain(answer.out)
    assert shown.startswith(f"a head for {MODEL}\n")
    assert f"rows {COUNT}; 120 seen in 30 steps" in shown
    assert "seeds 1 \n" in shown
    assert re.search(r"training loss 0\.\d{4} \n", shown)
    assert f"saved in {own / 'mine'}" in shown
    assert "use it dubito score CACHE --head mine/seed-1" in shown
    listed = run("list", "heads", "--json").json["heads"]
    assert [(one["name"], one["trained_on"]) for one in listed] == [("mine/seed-1", "Noise in boxes.")]
    scored = run("score", labelled, "--head", "mine/seed-1", "-s", "entropy", "--json")
    assert scored.code == 0, scored.err
    assert (list(scored.json["scores"]), scored.json["notes"]) == (["head", "entropy"], [])


@pytest.mark.parametrize("to", ["./mine", "deep/mine", "there"])
def test_a_path_stays_a_path(run: Run, labelled: Path, own: Path, tmp_path: Path, to: str) -> None:
    (tmp_path / "there").mkdir()
    result = run("train", labelled, "--to", to, *QUICK, "--json").json
    assert (tmp_path / to / "seed-1" / "config.json").is_file()
    assert not own.exists()
    assert run("score", labelled, "--head", result["head"]).code == 0


def test_json(run: Run, labelled: Path, tmp_path: Path) -> None:
    options = ("--seeds", "3,1,2", "--held-out", 0.25, "--json")
    result = run("train", labelled, "--to", tmp_path / "heads", *QUICK, *options).json
    assert set(result) == {
        *("caches", "table_rows", "model", "to", "recipe", "seeds", "summary", "beside", "rows", "rows_seen"),
        *("steps", "median_seed", "head", "seconds", "notes"),
    }
    assert (result["caches"], result["model"], result["to"]) == ([str(labelled)], MODEL, str(tmp_path / "heads"))
    assert (result["table_rows"], result["rows"], result["steps"]) == (COUNT, COUNT - 3, 30)
    assert [one["seed"] for one in result["seeds"]] == [3, 1, 2]
    report = json.loads((tmp_path / "heads" / "training.json").read_text())
    assert result["summary"] == report["summary"]
    assert result["summary"].keys() >= {"loss", "order"}
    assert result["head"] == f"{tmp_path}/heads/seed-{result['median_seed']}"
    orders = sorted(one["order"] for one in result["seeds"])
    assert result["summary"]["order"]["median"] == orders[1]


def test_several_seeds_are_shown_with_their_spread(run: Run, labelled: Path) -> None:
    shown = plain(run("train", labelled, "--to", "mine", *QUICK, "--seeds", "1,2", "--held-out", 0.25).out)
    assert shown.startswith(f"2 heads for {MODEL}\n")
    assert f"rows {COUNT - 3}, and 3 held out; " in shown
    assert "seeds 1, 2 \n" in shown
    for figure in ("training loss", "held-out order"):
        assert re.search(rf"{figure} \d\.\d{{4}} ± \d\.\d{{4}} \n", shown)


def test_options_become_the_recipe(run: Run, labelled: Path, own: Path) -> None:
    expected = dubito.heads.Recipe(
        loss="l2",
        margin=0.2,
        leeway=0.01,
        target="mixed",
        temperature=1.5,
        mix=0.25,
        optimizer="lion",
        lr=0.01,
        betas=(0.7, 0.9),
        weight_decay=0.001,
        schedule="step",
        warmup_lr=0.002,
        final_lr=1e-6,
        episodes=20,
        warmup=5,
        batch=4,
        rows=120,
        dropout=0.5,
        init="zero",
    )
    usual = dubito.heads.Recipe().to_json()
    settings = expected.to_json() | {"betas": "0.7,0.9"}
    assert all(value != usual[name] for name, value in settings.items())  # or an option that does nothing passes
    options = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    answer = run("train", labelled, "--to", "mine", *options, "--width", 8, "--depth", 1, "--float16")
    assert answer.code == 0, answer.err
    config = read_config(own / "mine" / "seed-1")
    assert (config.dtype, config.width, config.depth) == ("float16", 8, 1)
    assert config.trained["recipe"] == expected.to_json()


def test_a_head_from_zero_is_reported(run: Run, labelled: Path) -> None:
    answer = run("train", labelled, "--to", "mine", *QUICK, "--set", "init=zero", "--json")
    assert (answer.code, answer.json["recipe"]["init"]) == (0, "zero")
    assert any("has not learned anything" in note for note in answer.json["notes"]), answer.json["notes"]


def test_defaults_are_those_of_the_recipe(run: Run, labelled: Path) -> None:
    result = run("train", labelled, "--to", "mine", "--set", "rows=40", "--json").json
    assert result["recipe"] == dubito.heads.Recipe(rows=40).to_json()
    assert read_config(result["seeds"][0]["folder"]).width == 512


def test_no_labels_are_needed_for_expected_losses(run: Run, cache: Path) -> None:
    answer = run("train", cache, "--to", "mine", *QUICK)
    assert answer.code == 1
    assert f"dubito train needs column 'loss'; {cache} has" in answer.err
    assert run("train", cache, "--to", "mine", *QUICK, "--set", "target=expected").code == 0


def test_the_temperature_can_be_fitted(run: Run, labelled: Path, cache: Path) -> None:
    options = (*QUICK, "--set", "target=expected", "--set", "temperature=fit")
    result = run("train", labelled, "--to", "mine", *options, "--json").json
    table = dubito.open(labelled)
    assert result["recipe"]["temperature"] == dubito.Temperature().fit(table).temperature_
    assert result["recipe"]["temperature"] != 1
    answer = run("train", cache, "--to", "other", *options)
    assert (answer.code, "temperature needs column 'label'" in answer.err) == (1, True)


def test_caches_are_joined(run: Run, labelled: Path, cache: Path, weights: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "more", 5, seed=3)
    options = ("--to", tmp_path / "cache", "--weights", weights, "--workers", 0, "--epochs", 2)
    assert run("extract", MODEL, tmp_path / "more", *options).code == 0
    options = (*QUICK, "--set", "target=expected", "--json")
    result = run("train", cache, tmp_path / "cache", "--to", "mine", *options).json
    assert result["caches"] == [str(cache), str(tmp_path / "cache")]
    assert result["table_rows"] == COUNT + 10
    answer = run("train", labelled, cache, "--to", "other", *QUICK)  # one of them has no losses
    assert f"dubito train needs column 'loss'; {labelled} + {cache} has" in answer.err


def test_a_cache_of_the_same_images_is_not_held_out(run: Run, labelled: Path, cache: Path) -> None:
    answer = run("train", cache, "--to", "mine", *QUICK, "--set", "target=expected", "--held-out", labelled)
    assert answer.code == 1
    assert f"--held-out: at least 12 of the 12 images of {labelled} are also in the training images" in answer.err
    assert "Pass another cache, or a share such as 0.1." in answer.err


def test_a_cache_is_held_out(run: Run, labelled: Path, weights: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "others", COUNT, seed=7)
    cache = tmp_path / "cache"
    assert run("extract", MODEL, tmp_path / "others", "--to", cache, "--weights", weights, "--workers", 0).code == 0
    options = (*QUICK, "--set", "target=expected", "--held-out", labelled, "--json")
    result = run("train", cache, "--to", "mine", *options).json
    assert (result["table_rows"], result["rows"]) == (COUNT, COUNT)
    head = dubito.UncertaintyHead.from_pretrained(result["head"])
    expected = HeldOut.of(dubito.open(labelled), head.recipe).measure(head.module)
    assert {name: result["seeds"][0][name] for name in expected} == expected
    assert "order" in expected


def test_a_head_on_another_models_cache_is_refused(run: Run, labelled: Path, tmp_path: Path, images: Path) -> None:
    assert run("train", labelled, "--to", "mine", *QUICK).code == 0
    torch.manual_seed(1)
    other = ("--to", tmp_path / "other", "--weights", "none", "--workers", 0)
    assert run("extract", MODEL, images, *other).code == 0
    answer = run("score", tmp_path / "other", "--head", "mine/seed-1")
    assert answer.code == 1
    assert "was made by another model than the head was trained on: its weights differ" in answer.err
    answer = run("train", labelled, tmp_path / "other", "--to", "both", *QUICK)
    assert "must come from one model" in answer.err
    answer = run("train", labelled, "--held-out", tmp_path / "other", "--to", "both", *QUICK)
    assert f"--held-out ({tmp_path / 'other'}) and {labelled} must come from one model" in answer.err


def test_stopped_it_goes_on(run: Run, labelled: Path, own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("train", labelled, "--to", "mine", *QUICK, "--seeds", "1,2")
    undisturbed = run(*("train", labelled, "--to", "other", *QUICK, "--seeds", "1,2"))
    assert undisturbed.code == 0
    step, done = loop.Run._step, []

    def stopping(self: object, *rest: object) -> object:
        done.append(1)
        if len(done) == 45:
            raise KeyboardInterrupt
        return step(self, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(loop.Run, "_step", stopping)
    answer = run(*command)
    assert answer.code == 130
    where = own / "mine"
    assert (
        answer.err
        == f"error: stopped. '{where}' holds all but the last seconds: the same command continues from there.\n"
    )
    assert run(*command).code == 0
    assert len(done) == 45 + 30  # the first seed is not trained again
    for seed in ("seed-1", "seed-2"):
        ours, theirs = (own / name / seed / "model.safetensors" for name in ("mine", "other"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_another_training_of_that_name(run: Run, labelled: Path) -> None:
    assert run("train", labelled, "--to", "mine", *QUICK).code == 0
    answer = run("train", labelled, "--to", "mine", *QUICK, "--set", "lr=0.5")
    assert answer.code == 1
    assert "holds another training: the recipe (lr=0.001 there, 0.5 here)." in answer.err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--seeds", "1,x"), "--seeds takes whole numbers with commas, such as 1,2,3; got '1,x'."),
        (("--set", "temperature=hot"), "--set: temperature must be a number; got 'hot'."),
        (("--held-out", "nowhere"), "--held-out takes a cache, or a share such as 0.1; got 'nowhere'."),
        (("--set", "loss=hinge"), "--set: loss must be one of ranking, l2, l1, log_l2, variance_nll; got 'hinge'."),
        (("--set", "init=ones"), "--set: init must be one of default, zero, classes; got 'ones'."),
        (("--set", "betas=0.9"), "--set: betas must be 2 items separated by commas, each a number; got '0.9'."),
        (("--set", "betas=a,b"), "--set: betas must be 2 items separated by commas, each a number; got 'a,b'."),
        (("--set", "batch=some"), "--set: batch must be a whole number or none; got 'some'."),
        (("--set", "learning_rate=1"), "--set: a setting must be one of loss, margin,"),
        (("--set", "maximum=1"), "--set: a setting must be one of"),
        (("--set", "marjin=1"), "Did you mean margin?"),
        (("--set", "lr"), "Invalid value for '--set': expected KEY=VALUE, with commas between several; got 'lr'."),
    ],
)
def test_calls_that_cannot_be_understood(
    run: Run, labelled: Path, own: Path, options: tuple[object, ...], text: str
) -> None:
    answer = run("train", labelled, "--to", "mine", *options)
    assert (answer.code, text in answer.err) == (2, True), answer.err
    assert not own.exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--set", "batch=1"), "recipe: batch must be"),
        (("--seeds", "1,1"), "--seeds must be at least one whole number, all different; got [1, 1]."),
        (("--held-out", 1.5), "--held-out must be a number in (0, 1); got 1.5."),
        (("--set", "lr=0"), "recipe: lr must be a number, above 0; got 0.0."),
        (("--set", "betas=0.9,1"), "recipe: betas must be two numbers from 0 to below 1; got (0.9, 1.0)."),
        (("--set", "temperature=-1,target=mixed"), "recipe: temperature must be a number, above 0; got -1.0."),
    ],
)
def test_settings_without_meaning(run: Run, labelled: Path, options: tuple[object, ...], text: str) -> None:
    answer = run("train", labelled, "--to", "mine", *options)
    assert (answer.code, text in answer.err) == (1, True), answer.err


def test_trained_on_what_is_held_out(run: Run, labelled: Path) -> None:
    answer = run("train", labelled, "--to", "mine", "--held-out", labelled)
    assert answer.code == 1
    assert "--held-out: at least 12 of the 12 images of" in answer.err


def test_no_cache(run: Run) -> None:
    answer = run("train", "nowhere", "--to", "mine")
    assert (answer.code, "no cache in 'nowhere'" in answer.err) == (1, True)
