"""`dubito ensemble`: the same numbers as the library, shown, as JSON, or on a page."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

import dubito
from dubito.explain.collapse import diagnose_ensemble

from .conftest import MODEL, Run, write_images

MEMBERS = 4


@pytest.fixture(scope="module")
def caches(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Of two sets of images, one cache for each of four models."""
    folder = tmp_path_factory.mktemp("ensemble")
    found: dict[str, list[Path]] = {"cats": [], "dogs": []}
    for seed in range(MEMBERS):
        torch.manual_seed(seed)
        state = timm.create_model("test_resnet").state_dict()
        save_file({key: value.contiguous() for key, value in state.items()}, folder / f"{seed}.safetensors")
    for number, name in enumerate(found):
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
            found[name].append(to)
    return found


def test_json_is_that_of_the_library(run: Run, caches: dict[str, list[Path]]) -> None:
    ood = [part for path in caches["dogs"] for part in ("--ood", path)]
    answer = run("ensemble", *caches["cats"], *ood, "--resamples", 20, "--seed", 2, "--partitions", 3, "--json")
    assert answer.code == 0, answer.err
    table, other = (dubito.ensemble([dubito.open(path) for path in paths]) for paths in caches.values())
    table.name = other.name = "0 + 1 + 2 + 3"  # by their folders
    expected = diagnose_ensemble(table, ood=other, partitions=3, resamples=20, seed=2).to_dict()
    assert answer.json == {**expected, "page": None, "notes": []}
    assert [level["size"] for level in answer.json["ensembles"][0]["levels"]] == [1, 2]


def test_text_and_page(run: Run, caches: dict[str, list[Path]], tmp_path: Path) -> None:
    answer = run("ensemble", *caches["cats"], "--resamples", 10, "--html", tmp_path / "page.html")
    assert answer.code == 0, answer.err
    for text in ("4 members", "5 random partitions", "4 x 1", "2 x 2", "Of all uncertainty, "):
        assert text in answer.out
    assert f"The page with the pictures: {tmp_path / 'page.html'}" in answer.out
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


def test_errors(run: Run, cache: Path, caches: dict[str, list[Path]]) -> None:
    answer = run("ensemble", cache)
    assert answer.code == 1
    assert "diagnose_ensemble(of='members') needs column 'members_logit' or 'members'" in answer.err
    answer = run("ensemble", *caches["cats"], "--ood", caches["dogs"][0])
    assert answer.code == 2
    assert "--ood takes as many caches as there are members, 4, in their order; got 1." in answer.err
    assert run("ensemble").code == 2
    assert run("ensemble", cache, "--partitions", -1).code == 2
