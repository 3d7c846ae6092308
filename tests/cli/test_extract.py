"""`dubito extract`: its summary, notes, probes and errors."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dubito
from dubito.cli.extract import named_by_order
from dubito.engines import RayEngine
from dubito.errors import ModelError
from dubito.probes import Gradient
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
    assert "everything was there already" in again.out


def test_summary_as_json(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0, "--json")
    result = run(*command).json
    assert (result["model"], result["cache"]) == (MODEL, str(tmp_path / "cache"))
    assert (result["images"], result["rows"], result["new_rows"], result["skipped"]) == (COUNT, COUNT, COUNT, [])
    assert result["columns"]["logit"] == [COUNT, 1000]
    assert (result["label_space"], result["accuracy"], result["notes"]) == (None, None, [])
    assert result["seconds"] > 0
    assert result["images_per_second"] > 0
    assert result["bytes"] == sum(path.stat().st_size for path in (tmp_path / "cache").iterdir())
    again = run(*command).json
    assert (again["rows"], again["new_rows"], again["images_per_second"]) == (COUNT, 0, None)


def test_skipped_images_are_noted(run: Run, weights: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "images", 3)
    (tmp_path / "images" / "01.png").write_bytes(b"no image")
    command = ("extract", MODEL, tmp_path / "images", "--to", tmp_path / "cache", "--weights", weights, "--workers", 0)
    answer = run(*command)
    assert answer.code == 0
    assert answer.err == ""
    assert "3, 1 skipped" in answer.out
    assert answer.out.count("01.png") == 1
    result = run(*command, "--json").json
    assert (result["images"], result["rows"]) == (3, 2)
    assert result["skipped"][0]["id"] == "01.png"
    assert result["notes"] == []


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
    result = run("extract", MODEL, images, "--to", labelled, *options, "--json").json
    assert result["label_space"] == "model"
    assert result["accuracy"] == 8 / 12  # every third of the twelve labels is wrong


def test_class_names_by_order_are_shown_beside_the_accuracy() -> None:
    columns = {"logit": [[1.0, 0.0], [1.0, 0.0]], "label": [0, 1]}
    assert named_by_order(Table(**columns, label_names=["cat", "dog"]))
    assert not named_by_order(Table(**columns))  # integers: the user counted
    assert not named_by_order(Table(**columns, label_names=["cat", "dog"], classes=["cat", "dog"]))
    assert not named_by_order(Table(**columns, label_names=["cat", "dog"], label_space="own"))


def test_labels_of_another_set(run: Run, weights: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "images" / "kittens", 2)
    write_images(tmp_path / "images" / "puppies", 2, seed=1)
    command = ("extract", MODEL, tmp_path / "images", "--to", tmp_path / "cache", "--weights", weights, "--workers", 0)
    answer = run(*command)
    assert "classes of another set, not the model's: no accuracy" in answer.out
    assert run(*command, "--label-space", "own", "--json").json["label_space"] == "own"


def test_options_reach_the_extraction(run: Run, images: Path, tmp_path: Path) -> None:
    options = (
        "--weights",
        "none",
        "--workers",
        0,
        "--batch-size",
        5,
        "--probe",
        "forward:store_logit=no",
        "--device",
        "cpu",
    )
    answer = run("extract", MODEL, images, "--to", tmp_path / "cache", *options, "--json")
    assert answer.code == 0, answer.err
    assert list(tmp_path.glob("cache/head-*")), "without stored logits the head is kept"
    assert dubito.open(tmp_path / "cache").shape("logit") == (COUNT, 1000)


def test_a_probe_can_be_added_later(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0, "--json")
    assert "pre_activation" not in run(*command).json["columns"]
    columns = run(*command, "--probe", "pre_activation").json["columns"]
    assert columns["pre_activation"] == columns["feature"]


def test_augmented_epochs(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0)
    result = run(*command, "--epochs", 2, "--augment", "strong=box", "--json").json
    assert (result["epochs"], result["images"], result["rows"]) == (2, 2 * COUNT, 2 * COUNT)
    assert result["columns"]["image_index"] == [2 * COUNT]
    assert f"{2 * COUNT} ({COUNT} in 2 augmented epochs)" in run(*command, "--epochs", 2, "--augment", "strong=box").out
    stale = run(*command, "--epochs", 2, "--augment", "strong=box,seed=3")
    assert stale.code == 1
    assert "the augmentation (seed=0 there, 3 here)" in stale.err
    assert run(*command, "--epochs", 0).code == 2
    for text, message in (
        (
            "strong=fog",
            "--augment: strong must be one of augmix, cutmix, mixup, blur, crop, box, noise or none; got 'fog'",
        ),
        ("stronk=box", "--augment: a setting must be one of scale, ratio, flip"),
        ("stronk=box", "Did you mean strong?"),
        ("box", "Invalid value for '--augment': expected KEY=VALUE, with commas between several; got 'box'."),
    ):
        answer = run(*command, "--augment", text)
        assert (answer.code, message in answer.err) == (2, True), answer.err
    answer = run(*command, "--augment", "scale=0.5,0.1")
    assert (answer.code, "augment: scale must be two growing positive numbers" in answer.err) == (1, True)


def test_a_seed_alone_augments_one_epoch(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0)
    result = run(*command, "--augment", "seed=1", "--json").json
    assert (result["epochs"], result["rows"]) == (1, COUNT)
    assert dubito.open(tmp_path / "cache").whole("epoch").tolist() == [0] * COUNT


def test_several_labels_per_image(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    several = np.zeros((COUNT, 1000), dtype=bool)
    several[:, :3] = True
    np.save(tmp_path / "targets.npy", several)
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0)
    without = run(*command, "--probe", "forward:task_loss=bce", "--json")
    assert without.json["kind"] == "ImagesError"
    assert "Forward(task_loss='bce') needs something to compare the logits with" in without.err
    missing = run(*command, "--targets", "none.npy", "--json")
    assert "targets file 'none.npy' must be an .npy or .npz file" in missing.err
    answer = run(*command, "--probe", "forward:task_loss=bce", "--targets", tmp_path / "targets.npy", "--json")
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
    assert "'no/such/folder' does not exist" in sentence(MODEL, "no/such/folder", *none, kind="ImagesError")
    assert "timm has no model 'test_resnat'. Nearest: test_resnet" in sentence(
        "timm:test_resnat", images, kind="ModelError"
    )
    assert "Did you mean 'timm:resnet50'?" in sentence("resnet50", images, kind="ModelError")
    assert "weights: no file 'w.pth'" in sentence(MODEL, images, "--weights", "w.pth", kind="CheckpointError")
    assert "CSV file 'l.csv' must be a file; there is none. Check the path." in sentence(
        MODEL, images, *none, "--labels", "l.csv", kind="ImagesError"
    )
    assert "device" in sentence(MODEL, images, *none, "--device", "abacus", kind="ModelError")
    stale = run("extract", MODEL, images, "--to", cache, *none, "--workers", 0, "--json")
    assert (stale.code, stale.json["kind"]) == (1, "StaleCacheError")
    assert "does not match: the model's weights" in stale.err


def _plain(text: str) -> str:
    return "\n".join(line.strip() for line in text.splitlines())


def test_ensembles(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0, "--json")
    result = run(*command, "--probe", "tiles:grids=2,3,keep=logits", "-p", "views:keep=logits").json["columns"]
    assert {"tiles_2", "tiles_3", "tiles_2_logit", "tiles_3_logit", "views", "views_between", "views_logit"} < set(
        result
    )
    assert result["views_logit"] == [COUNT, 8, 1000]
    assert run(*command, "-p", "tiles:grids=2,3,keep=logits").json["new_rows"] == 0
    plain = run(*command[:4], tmp_path / "plain", *command[5:], "--probe", "tiles").json["columns"]
    assert not any(name.endswith("_logit") for name in plain)
    assert {"tiles_2", "tiles_3"} < set(plain)


def test_dropout(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    command = ("extract", "timm:test_vit", images, "--to", tmp_path / "cache", "--weights", "none", "--workers", 0)
    answer = run(*command, "--probe", "dropout:passes=3")
    assert answer.code == 1
    assert "calls of dropout, none with a rate above 0" in answer.err
    result = run(*command[:4], tmp_path / "other", *command[5:], "--probe", "dropout:passes=3,rate=0.2", "--json").json
    assert result["columns"]["dropout"][0] == COUNT
    table = dubito.open(tmp_path / "other")
    assert bool((table.whole("dropout")[:, 3] > 0).all())
    answer = run(
        "extract",
        MODEL,
        images,
        "--to",
        tmp_path / "none",
        "--weights",
        weights,
        "--workers",
        0,
        "--probe",
        "dropout:passes=2",
    )
    assert "has 0 calls of dropout, none with a rate above 0" in answer.err


def test_noise(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0, "--json")
    result = run(*command, "--probe", "noise:copies=3,sigma=0.2").json["columns"]
    assert {"noise", "noise_variance"} < set(result)
    settings = dubito.open(tmp_path / "cache").provenance.probes["noise"]["settings"]
    assert (settings["copies"], settings["sigma"]) == (3, 0.2)
    assert run(*command, "--probe", "noise:copies=3", "--json").json["kind"] == "StaleCacheError"  # another sigma


def extracted(run: Run, images: Path, weights: Path, to: Path, *options: object) -> dict:
    """What the cache tells of its gradients; every call has a cache of its own."""
    command = ("extract", MODEL, images, "--to", to, "--weights", weights, "--workers", 0, "--json")
    answer = run(*command, "--probe", ":".join(["gradient", *options]))
    assert answer.code == 0, answer.err
    probe = dubito.open(to).provenance.probes["gradient"]
    assert answer.json["columns"]["gradient"] == [COUNT, len(probe["notes"]["layers"])]
    return {"settings": probe["settings"], **probe["notes"], "columns": set(answer.json["columns"])}


def test_gradient_by_default(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    result = extracted(run, images, weights, tmp_path / "cache")
    assert result["settings"] == Gradient().settings()
    assert {"gradient", "gradient_predicted"} < result["columns"]
    assert len(result["layers"]) == result["of"]
    scored = run("score", tmp_path / "cache", "-s", "regrad", "--json")
    assert scored.code == 0, scored.err


def test_every_setting_of_the_gradient_probe(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    options = "method=top,classes=1,draws=0,last=2,weightings=root,expected_l1,uniform=yes"
    result = extracted(run, images, weights, tmp_path / "one", options)
    settings = {"weightings": ["root", "expected_l1"], "uniform": True, "last": 2}
    assert result["settings"] == Gradient("top", 1, 0, **settings).settings()
    assert {"gradient_root", "gradient_l1", "gradient_uniform"} < result["columns"]
    assert len(result["layers"]) == 2

    options = "beta=9,tolerance=0.5,method=signs,draws=1,copies=1,sigma=0.2,seed=3"
    result = extracted(run, images, weights, tmp_path / "two", options)
    settings = {"beta": 9.0, "tolerance": 0.5, "copies": 1, "sigma": 0.2, "seed": 3}
    assert result["settings"] == Gradient("signs", draws=1, **settings).settings()
    assert len(result["layers"]) < result["of"]


def test_mistakes_in_probes(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0)
    for text, message in (
        (
            "tils",
            "--probe: the name must be one of forward, pre_activation, layers, tiles, dropout, views, noise, ",
        ),
        ("tils", "got 'tils'. Did you mean tiles?"),
        (
            "tiles:grid=2",
            "--probe tiles: a setting must be one of grids, keep, temperature, dtype; got 'grid'.",
        ),
        ("tiles:grids=2;3", "--probe tiles: grids must be some items separated by commas, each a whole number or none"),
        ("tiles:keep=all", "--probe tiles: keep must be one of summary, logits; got 'all'."),
        ("dropout:passes=many", "--probe dropout: passes must be a whole number; got 'many'."),
        (
            "noise:sigma",
            "'--probe' / '-p': expected KEY=VALUE, with commas between several; got 'sigma'.",
        ),
        ("forward:task_loss=mse", "--probe forward: task_loss must be one of cross_entropy, bce; got 'mse'."),
        ("gradient:method=all", "--probe gradient: method must be one of exact, top, signs, combined; got 'all'."),
        ("gradient:weightings=mean", "each one of fisher, root, expected_l1; got 'mean'."),
        ("gradient:uniform=maybe", "--probe gradient: uniform must be one of true, false, yes, no; got 'maybe'."),
    ):
        answer = run(*command, "--probe", text)
        assert (answer.code, message in answer.err) == (2, True), answer.err
    answer = run(*command, "--probe", "gradient:weightings=root", "--json")
    assert (answer.code, answer.json["kind"]) == (1, "ValueRangeError")
    assert "weighting 'root' is a sum of norms, which random signs do not estimate" in answer.err
    for text in ("dropout:passes=1", "noise:copies=1"):
        assert run(*command, "--probe", text).code == 1
    answer = run(*command, "--probe", "tiles", "--probe", "tiles:grids=2")
    assert (answer.code, "tiles" in answer.err) == (1, True)
    assert not (tmp_path / "cache").exists()


def test_settings_of_ray_need_ray(run: Run, images: Path, tmp_path: Path) -> None:
    answer = run("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", "none", "--replicas", 2)
    assert answer.code == 2
    assert "--replicas is for Ray: add --engine ray" in " ".join(answer.err.split())


def test_the_engine_gets_its_options(run: Run, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def extraction(*_: object, **options: object) -> None:
        calls.append(options)
        raise ModelError("extract: threads must be smaller")

    monkeypatch.setattr("dubito.cache.extract", extraction)
    options = ("--engine", "ray", "--address", "ray://head:10001", "--replicas", 2, "--gpus", 0.5, "--threads", 3)
    options = (*options, "--cpus", 4, "--retries", 0, "--failures", 1)
    answer = run("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", "none", *options)
    assert (answer.code, calls[0]["threads"]) == (1, 3)
    assert calls[0]["engine"] == RayEngine(
        address="ray://head:10001", replicas=2, cpus=4.0, gpus=0.5, retries=0, failures=1
    )
    assert "--threads must be smaller" in answer.err
