"""`dubito audit`: what the library finds, shown or as JSON, and an exit code that a script can stop at."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dubito
from dubito.audit.audit import audit

from .conftest import MODEL, Run, write_images


@pytest.fixture(scope="module")
def options(weights: Path) -> tuple[object, ...]:
    return ("--weights", weights, "--workers", 0)


def test_a_healthy_set_up_ends_with_zero(run: Run, images: Path, options: tuple[object, ...]) -> None:
    answer = run("audit", MODEL, images, *options)
    assert answer.code == 0, answer.err
    for text in ("nothing wrong was found", MODEL, "12 of 12", "looked for", "saturated softmax", "no labels"):
        assert text in answer.out


def test_duplicates_end_with_three(run: Run, images: Path, tmp_path: Path, options: tuple[object, ...]) -> None:
    write_images(tmp_path, 5)  # of the same seed as the images
    answer = run("audit", MODEL, images, "--against", tmp_path, *options)
    assert answer.code == 3
    assert "wrong: duplicates across the sets. 5 (5 exact, 0 near) of 12 images (41.7 %)" in answer.out
    assert "Repair: Remove them from one of the two sets" in answer.out
    assert "nothing wrong" not in answer.out
    assert answer.err == ""


def test_json_is_that_of_the_library(run: Run, images: Path, weights: Path, options: tuple[object, ...]) -> None:
    answer = run("audit", MODEL, images, "--against", images, "--limit", 6, "--seed", 2, "--json", *options)
    assert answer.code == 3
    model = dubito.load(MODEL, weights=weights)
    expected = audit(model, images, against=images, limit=6, seed=2, workers=0, progress=False)
    assert answer.json == {**expected.to_dict(), "notes": []}
    assert answer.json["rows"] == 6
    assert answer.json["ok"] is False


def test_weights_that_were_not_loaded_well(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    tensors = load_file(weights)
    tensors["fc.bias"] = torch.full_like(tensors["fc.bias"], float("nan"))
    save_file(tensors, tmp_path / "broken.safetensors")
    answer = run("audit", MODEL, images, "--weights", tmp_path / "broken.safetensors", "--workers", 0)
    assert answer.code == 3
    assert "They are already in 1 weight tensor: fc.bias." in answer.out


def test_what_is_merely_suspicious_ends_with_zero(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    """A logit 30 above a thousand others: 1 - p = 1e-10, which is a tie in float32 and none in float64."""
    tensors = load_file(weights)
    tensors["fc.bias"][0] += 30
    save_file(tensors, tmp_path / "sharp.safetensors")
    answer = run("audit", MODEL, images, "--weights", tmp_path / "sharp.safetensors", "--workers", 0)
    assert "suspicious: saturated softmax." in answer.out
    assert answer.code == 0


def test_the_part_that_was_compared_is_shown(run: Run, images: Path, options: tuple[object, ...]) -> None:
    answer = run("audit", MODEL, images, "--compare", 8, *options)
    assert "8 of 12 images of this set were compared" in " ".join(answer.out.split())


def test_repairs_and_reasons_are_shown(run: Run, tmp_path: Path, options: tuple[object, ...]) -> None:
    write_images(tmp_path / "zebra crossing of the moon", 3)
    write_images(tmp_path / "no such thing", 3)
    answer = run("audit", MODEL, tmp_path, *options)
    assert answer.code == 0
    repair = "or set --label-space 'own' for classes of another set."
    assert repair in answer.out
    assert "duplicates across the sets (needs a second set: --against)" in answer.out
    again = run("audit", MODEL, tmp_path, "--label-space", "own", *options)
    assert repair not in again.out


def test_errors_are_errors(run: Run, images: Path, tmp_path: Path) -> None:
    assert run("audit", MODEL, tmp_path / "nowhere", "--weights", "none").code == 1
    assert run("audit", MODEL, images, "--limit", 0).code == 2
