"""`dubito extract`: its summary, notes and errors."""

import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import dubito
from dubito.cli.extract import _by_place
from dubito.table import Table

from .conftest import COUNT, MODEL, Run, write_images


def test_summary_as_text(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0)
    answer = run(*command)
    assert (answer.code, answer.err) == (0, "")
    assert f"images   {COUNT}\n" in _plain(answer.out)
    assert f"logit ({COUNT} x 1000)" in answer.out
    assert f"{COUNT} images at" in answer.out
    again = run(*command)
    assert again.code == 0
    assert "all was there already" in again.out


def test_summary_as_json(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0, "--json")
    found = run(*command).json
    assert (found["model"], found["cache"]) == (MODEL, str(tmp_path / "cache"))
    assert (found["images"], found["rows"], found["new_rows"], found["skipped"]) == (COUNT, COUNT, COUNT, [])
    assert found["columns"]["logit"] == [COUNT, 1000]
    assert (found["label_space"], found["accuracy"], found["notes"]) == (None, None, [])
    assert found["seconds"] > 0
    assert found["images_per_second"] > 0
    assert found["bytes"] == sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())
    again = run(*command).json
    assert (again["rows"], again["new_rows"], again["images_per_second"]) == (COUNT, 0, None)


def test_skipped_images_are_noted(run: Run, weights: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "images", 3)
    (tmp_path / "images" / "01.png").write_bytes(b"no image")
    command = ("extract", MODEL, tmp_path / "images", "--to", tmp_path / "cache", "--weights", weights, "--workers", 0)
    answer = run(*command)
    assert answer.code == 0
    assert answer.err.startswith("note: 1 of 3 images could not be decoded and were skipped:")
    assert "Warning" not in answer.err
    assert ".py" not in answer.err
    assert "3, 1 skipped" in answer.out
    assert "skipped 01.png" in answer.out
    found = run(*command, "--json").json
    assert (found["images"], found["rows"]) == (3, 2)
    assert found["skipped"][0]["id"] == "01.png"
    assert len(found["notes"]) == 1
    assert found["notes"][0].startswith("1 of 3 images")
    assert run(*command, "--quiet").err == ""


def test_a_damaged_shard_is_noted_and_repaired(
    run: Run, images: Path, weights: Path, cache: Path, tmp_path: Path
) -> None:
    shutil.copytree(cache, tmp_path / "cache")
    shard = next((tmp_path / "cache").glob("forward-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0)
    answer = run(*command)
    assert answer.code == 0
    assert f"note: cache '{tmp_path / 'cache'}': shard {shard.name} has checksum" in answer.err
    assert f"{COUNT} images at" in answer.out


def test_accuracy_of_the_models_own_labels(run: Run, images: Path, weights: Path, labelled: Path) -> None:
    options = ("--labels", labelled.parent / "labels.csv", "--weights", weights, "--workers", 0)
    found = run("extract", MODEL, images, "--to", labelled, *options, "--json").json
    assert found["label_space"] == "model"
    assert found["accuracy"] == 8 / 12  # every third of the twelve labels is wrong


def test_class_names_by_place_are_told_beside_the_accuracy() -> None:
    columns = {"logit": [[1.0, 0.0], [1.0, 0.0]], "label": [0, 1]}
    assert _by_place(Table(**columns, label_names=["cat", "dog"]))
    assert not _by_place(Table(**columns))  # integers: the user counted
    assert not _by_place(Table(**columns, label_names=["cat", "dog"], classes=["cat", "dog"]))
    assert not _by_place(Table(**columns, label_names=["cat", "dog"], label_space="own"))


def test_labels_of_another_set(run: Run, weights: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "images" / "kittens", 2)
    write_images(tmp_path / "images" / "puppies", 2, seed=1)
    command = ("extract", MODEL, tmp_path / "images", "--to", tmp_path / "cache", "--weights", weights, "--workers", 0)
    answer = run(*command)
    assert "classes of their own, not the model's: no accuracy" in answer.out
    assert run(*command, "--label-space", "own", "--json").json["label_space"] == "own"


def test_options_reach_the_extraction(run: Run, images: Path, tmp_path: Path) -> None:
    options = ("--weights", "none", "--workers", 0, "--batch-size", 5, "--no-logit", "--device", "cpu")
    answer = run("extract", MODEL, images, "--to", tmp_path / "cache", *options, "--json")
    assert answer.code == 0, answer.err
    assert list(tmp_path.glob("cache/head-*")), "without stored logits the head is kept"
    assert dubito.open(tmp_path / "cache").shape("logit") == (COUNT, 1000)


def test_features_before_the_non_linearity_come_later_if_asked_for(
    run: Run, images: Path, weights: Path, tmp_path: Path
) -> None:
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0, "--json")
    assert "before" not in run(*command).json["columns"]
    found = run(*command, "--before").json["columns"]
    assert found["before"] == found["feature"]


def test_augmented_epochs(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0)
    found = run(*command, "--epochs", 2, "--strong", "box", "--json").json
    assert (found["epochs"], found["images"], found["rows"]) == (2, 2 * COUNT, 2 * COUNT)
    assert found["columns"]["photo"] == [2 * COUNT]
    assert f"{2 * COUNT} ({COUNT} in 2 augmented epochs)" in run(*command, "--epochs", 2, "--strong", "box").out
    stale = run(*command, "--epochs", 2, "--strong", "box", "--augment-seed", 3)
    assert stale.code == 1
    assert "the augmentation (seed=0 there, seed=3 here)" in stale.err
    assert run(*command, "--epochs", 0).code == 2
    assert "'fog' is not one of" in run(*command, "--strong", "fog").err


def test_a_seed_alone_augments_one_epoch(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0)
    found = run(*command, "--augment-seed", 1, "--json").json
    assert (found["epochs"], found["rows"]) == (1, COUNT)
    assert dubito.open(tmp_path / "cache").whole("epoch").tolist() == [0] * COUNT


def test_several_labels_an_image(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    several = np.zeros((COUNT, 1000), dtype=bool)
    several[:, :3] = True
    np.save(tmp_path / "targets.npy", several)
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0)
    without = run(*command, "--task-loss", "bce", "--json")
    assert without.json["kind"] == "ImagesError"
    assert "Forward(task_loss='bce') needs something to compare the logits with" in without.err
    missing = run(*command, "--targets", "none.npy", "--json")
    assert "targets file 'none.npy' must be an .npy or .npz file" in missing.err
    answer = run(*command, "--task-loss", "bce", "--targets", tmp_path / "targets.npy", "--json")
    assert (answer.code, answer.json["epochs"], answer.json["columns"]["loss"]) == (0, 1, [COUNT])
    table = dubito.open(tmp_path / "cache")
    reference = F.binary_cross_entropy_with_logits(table.logit, torch.from_numpy(several).float(), reduction="none")
    torch.testing.assert_close(table.loss, reference.mean(1))


def test_errors(run: Run, images: Path, cache: Path, tmp_path: Path) -> None:
    def sentence(*arguments: object, kind: str) -> str:
        answer = run("extract", *arguments, "--to", tmp_path / "cache", "--workers", 0, "--json")
        assert answer.code == 1
        assert answer.json["kind"] == kind
        assert "Traceback" not in answer.err
        assert len(answer.err.splitlines()) == 1
        return answer.err

    none = ("--weights", "none")
    assert "'no/such/folder' is not" in sentence(MODEL, "no/such/folder", *none, kind="ImagesError")
    assert "timm has no model 'test_resnat'. Nearest: test_resnet" in sentence(
        "timm:test_resnat", images, kind="ModelError"
    )
    assert "Try 'timm:resnet50'" in sentence("resnet50", images, kind="ModelError")
    assert "weights: no file 'w.pth'" in sentence(MODEL, images, "--weights", "w.pth", kind="CheckpointError")
    assert "labels file 'l.csv'" in sentence(MODEL, images, *none, "--labels", "l.csv", kind="ImagesError")
    assert "device" in sentence(MODEL, images, *none, "--device", "abacus", kind="ModelError")
    stale = run("extract", MODEL, images, "--to", cache, *none, "--workers", 0, "--json")
    assert (stale.code, stale.json["kind"]) == (1, "StaleCacheError")
    assert "was made from something else: the model's weights" in stale.err


def _plain(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())


def test_ensembles(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0, "--json")
    found = run(*command, "--tiles", "--grids", "2,3", "--views", "--keep-logits").json["columns"]
    assert {"tiles_2", "tiles_3", "tiles_2_logit", "tiles_3_logit", "views", "views_between", "views_logit"} < set(
        found
    )
    assert found["views_logit"] == [COUNT, 8, 1000]
    # Later, one more, into the same cache; --grids alone means tiles.
    assert run(*command, "--grids", "2,3", "--keep-logits").json["new_rows"] == 0
    plain = run(*command[:4], tmp_path / "plain", *command[5:], "--tiles").json["columns"]
    assert not any(name.endswith("_logit") for name in plain)
    assert {"tiles_2", "tiles_3"} < set(plain)


def test_dropout(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    command = ("extract", "timm:test_vit", images, "--to", tmp_path / "cache", "--weights", "none", "--workers", 0)
    answer = run(*command, "--dropout", 3)
    assert answer.code == 1
    assert "have rate 0, as pretrained models often do" in answer.err
    found = run(*command[:4], tmp_path / "other", *command[5:], "--dropout", 3, "--dropout-rate", 0.2, "--json").json
    assert found["columns"]["dropout"][0] == COUNT
    table = dubito.open(tmp_path / "other")
    assert bool((table.whole("dropout")[:, 3] > 0).all())
    answer = run(
        "extract", MODEL, images, "--to", tmp_path / "none", "--weights", weights, "--workers", 0, "--dropout", 2
    )
    assert "calls no dropout, so all passes would be equal" in answer.err


def test_options_of_ensembles_that_are_not_there(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0)
    for options, told in (
        (("--keep-logits",), "--keep-logits needs an ensemble: --tiles, --dropout N, --noise N or --views."),
        (("--dropout-rate", 0.1), "--dropout-rate needs --dropout N, the number of passes."),
        (("--noise-sigma", 0.1), "--noise-sigma needs --noise N, the number of copies."),
        (("--grids", "2;3"), "--grids takes numbers with commas, such as 2,3,7; got '2;3'."),
    ):
        answer = run(*command, *options)
        assert answer.code == 2
        assert told in " ".join(answer.err.replace("│", " ").split())
    assert not (tmp_path / "cache").exists()


def test_noise(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0, "--json")
    found = run(*command, "--noise", 3, "--noise-sigma", 0.2).json["columns"]
    assert {"noise", "noise_variance"} < set(found)
    asked = dubito.open(tmp_path / "cache").provenance.probes["noise"]["settings"]
    assert (asked["copies"], asked["sigma"]) == (3, 0.2)
    assert run(*command, "--noise", 3, "--json").json["kind"] == "StaleCacheError"  # another sigma
