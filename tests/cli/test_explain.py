"""`dubito diagnose` and `dubito ensemble`: the same numbers as the library, shown, as JSON, or on a page."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

import dubito
from dubito.explain.collapse import diagnose_ensemble
from dubito.explain.diagnosis import diagnose

from .conftest import MODEL, Run, write_images


@pytest.fixture(scope="module")
def caches(run: Run, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("diagnose")
    result = {}
    for seed, (name, count) in enumerate({"train": 20, "cats": 8, "dogs": 6}.items(), start=5):
        write_images(folder / "images" / name, count, seed=seed)
        command = ("extract", MODEL, folder / "images" / name, "--to", folder / name, "--weights", weights)
        assert run(*command, "--workers", 0).code == 0
        result[name] = folder / name
    return result


def test_json_is_that_of_the_library(run: Run, cache: Path, caches: dict[str, Path]) -> None:
    options = ("--learn-from", caches["train"], "--draws", 3, "--resamples", 20, "--seed", 2)
    answer = run("diagnose", cache, caches["cats"], caches["dogs"], *options, "--json")
    assert answer.code == 0, answer.err
    tables = {name: dubito.open(caches[name]) for name in ("cats", "dogs")}
    train = dubito.open(caches["train"])
    expected = diagnose(dubito.open(cache), tables, train=train, draws=3, resamples=20, seed=2).to_dict()
    assert answer.json == {**expected, "page": None, "notes": []}
    assert list(answer.json["sets"]) == ["cats", "dogs", "mean"]


def test_text_and_page(run: Run, cache: Path, caches: dict[str, Path], tmp_path: Path) -> None:
    options = ("--covariance", "spherical", "--resamples", 10, "--html", tmp_path / "why.html")
    answer = run("diagnose", cache, caches["cats"], *options)
    assert answer.code == 0, answer.err
    for text in ("6 images scored", "A max p", "3 overlap", "spherical covariances", "half of plain (6 rows"):
        assert text in answer.out
    assert "cats: The entropy misses" in answer.out or "cats: There is little to explain" in answer.out
    assert f"written: {tmp_path / 'why.html'}" in answer.out
    assert "Why does confidence fail on cats?" in (tmp_path / "why.html").read_text(encoding="utf-8")


def test_with_the_model_the_page_has_lengths_and_angles(
    run: Run, weights: Path, cache: Path, caches: dict[str, Path], tmp_path: Path
) -> None:
    for model, shown in (((), False), (("--model", MODEL, "--weights", weights), True)):
        page = tmp_path / f"{shown}.html"
        answer = run("diagnose", cache, caches["cats"], "--resamples", 10, "--html", page, *model)
        assert answer.code == 0, answer.err
        assert ("largest cosine with a class weight" in page.read_text(encoding="utf-8")) is shown
    answer = run("diagnose", cache, caches["cats"], "--resamples", 10, "--model", MODEL, "--weights", "none")
    assert answer.code == 1
    assert answer.err.startswith(f"error: --model: {MODEL} must be the model that made")
    assert "its weights differ" in answer.err


def test_folders_of_one_name_keep_different_names(
    run: Run, cache: Path, caches: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "cats").symlink_to(caches["dogs"])
    other = tmp_path / "more" / "cats"
    other.parent.mkdir()
    other.symlink_to(caches["cats"])
    answer = run("diagnose", cache, tmp_path / "cats", other, "--resamples", 10, "--json")
    assert list(answer.json["sets"]) == ["dogs", "cats", "mean"]  # by where links lead
    twice = run("diagnose", cache, caches["cats"], other, "--resamples", 10, "--json")
    assert list(twice.json["sets"]) == [str(caches["cats"]), str(other), "mean"]


def test_the_same_cache_twice_is_noted(run: Run, cache: Path) -> None:
    answer = run("diagnose", cache, cache, "--resamples", 10, "--json")
    assert answer.code == 0
    assert "12 of 12 images of plain (100.0 %) are also in plain" in answer.json["notes"][0]


def test_errors(run: Run, images: Path, cache: Path, caches: dict[str, Path], tmp_path: Path) -> None:
    other = ("extract", MODEL, images, "--to", tmp_path / "other", "--weights", "none", "--workers", 0)
    assert run(*other).code == 0
    answer = run("diagnose", cache, tmp_path / "other")
    assert (answer.code, answer.err[:21]) == (1, "error: diagnose: OOD ")
    answer = run("diagnose", cache, caches["cats"], "--learn-from", tmp_path / "other")
    assert (answer.code, answer.err[:21]) == (1, "error: --learn-from (")
    assert run("diagnose", cache).code == 2
    assert run("diagnose", cache, caches["cats"], "--seed", -1).code == 2
    assert run("diagnose", cache, caches["cats"], "--covariance", "round").code == 2


MEMBERS = 4


@pytest.fixture(scope="module")
def members(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Of two sets of images, one cache for each of four models."""
    folder = tmp_path_factory.mktemp("ensemble")
    result: dict[str, list[Path]] = {"cats": [], "dogs": []}
    for seed in range(MEMBERS):
        torch.manual_seed(seed)
        state = timm.create_model("test_resnet").state_dict()
        save_file({key: value.contiguous() for key, value in state.items()}, folder / f"{seed}.safetensors")
    for number, name in enumerate(result):
        write_images(folder / "images" / name, 8, seed=number)
        for seed in range(MEMBERS):
            to = folder / name / str(seed)
            command = (
                "extract",
                MODEL,
                folder / "images" / name,
                "--to",
                to,
                "--weights",
                folder / f"{seed}.safetensors",
            )
            assert run(*command, "--workers", 0).code == 0
            result[name].append(to)
    return result


def test_ensemble_json_is_that_of_the_library(run: Run, members: dict[str, list[Path]]) -> None:
    ood = [part for path in members["dogs"] for part in ("--ood", path)]
    answer = run("ensemble", *members["cats"], *ood, "--resamples", 20, "--seed", 2, "--partitions", 3, "--json")
    assert answer.code == 0, answer.err
    table, other = (dubito.ensemble([dubito.open(path) for path in paths]) for paths in members.values())
    table.name = other.name = "0 + 1 + 2 + 3"  # by their folders
    expected = diagnose_ensemble(table, ood=other, partitions=3, resamples=20, seed=2).to_dict()
    assert answer.json == {**expected, "page": None, "notes": []}
    assert [level["size"] for level in answer.json["ensembles"][0]["levels"]] == [1, 2]


def test_ensemble_text_and_page(run: Run, members: dict[str, list[Path]], tmp_path: Path) -> None:
    answer = run("ensemble", *members["cats"], "--resamples", 10, "--html", tmp_path / "page.html")
    assert answer.code == 0, answer.err
    for text in ("4 members", "5 random partitions", "4 x 1", "2 x 2", "Of all uncertainty, "):
        assert text in answer.out
    assert f"written: {tmp_path / 'page.html'}" in answer.out
    assert "Do your members disagree?" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_one_cache_with_an_ensemble(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    model = dubito.load(MODEL, weights=weights)
    probes = [dubito.probes.Tiles([2], keep="logits")]
    table = dubito.extract(model, images, tmp_path / "cache", probes=probes, workers=0, progress=False)
    answer = run("ensemble", tmp_path / "cache", "--of", "tiles_2", "--resamples", 10, "--json")
    assert answer.code == 0, answer.err
    expected = diagnose_ensemble(table, of="tiles_2", resamples=10).to_dict()
    assert {key: answer.json[key] for key in expected} == expected
    assert expected["ensembles"][0]["members"] == 4


def test_ensemble_errors(run: Run, cache: Path, members: dict[str, list[Path]]) -> None:
    answer = run("ensemble", cache)
    assert answer.code == 1
    assert "dubito ensemble needs column 'members_logit' or 'members'" in answer.err
    answer = run("ensemble", *members["cats"], "--ood", members["dogs"][0])
    assert answer.code == 2
    assert "--ood takes as many caches as there are members, 4, in their order; got 1." in answer.err
    assert run("ensemble").code == 2
    assert run("ensemble", cache, "--partitions", -1).code == 2
