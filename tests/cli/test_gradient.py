"""`dubito extract --gradient`: its options are the settings of the probe."""

from pathlib import Path

import dubito
from dubito.probes import Gradient

from .conftest import COUNT, MODEL, Run


def extracted(run: Run, images: Path, weights: Path, to: Path, *options: object) -> dict:
    """What the cache tells of its gradients; every call has a cache of its own."""
    command = ("extract", MODEL, images, "--to", to, "--weights", weights, "--workers", 0, "--json")
    answer = run(*command, "--gradient", *options)
    assert answer.code == 0, answer.err
    probe = dubito.open(to).provenance.probes["gradient"]
    assert answer.json["columns"]["gradient"] == [COUNT, len(probe["notes"]["layers"])]
    return {"settings": probe["settings"], **probe["notes"], "columns": set(answer.json["columns"])}


def test_by_default(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    found = extracted(run, images, weights, tmp_path / "cache")
    assert found["settings"] == Gradient().settings()
    assert {"gradient", "gradient_predicted"} < found["columns"]
    assert len(found["layers"]) == found["of"]
    scored = run("score", tmp_path / "cache", "-s", "regrad", "--json")
    assert scored.code == 0, scored.err


def test_every_option(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    options = ("--gradient-method", "top", "--gradient-classes", 1, "--gradient-draws", 0, "--gradient-last", 2)
    more = ("--gradient-weighting", "root", "--gradient-weighting", "expected_l1", "--gradient-uniform")
    found = extracted(run, images, weights, tmp_path / "one", *options, *more)
    settings = {"weightings": ["root", "expected_l1"], "uniform": True, "last": 2}
    assert found["settings"] == Gradient("top", 1, 0, **settings).settings()
    assert {"gradient_root", "gradient_l1", "gradient_uniform"} < found["columns"]
    assert len(found["layers"]) == 2

    depth = ("--gradient-beta", 9, "--gradient-tolerance", 0.5, "--gradient-method", "signs", "--gradient-draws", 1)
    noise = ("--gradient-copies", 1, "--gradient-sigma", 0.2, "--gradient-seed", 3)
    found = extracted(run, images, weights, tmp_path / "two", *depth, *noise)
    settings = {"beta": 9.0, "tolerance": 0.5, "copies": 1, "sigma": 0.2, "seed": 3}
    assert found["settings"] == Gradient("signs", draws=1, **settings).settings()
    assert len(found["layers"]) < found["of"]


def test_mistakes(run: Run, images: Path, weights: Path, tmp_path: Path) -> None:
    command = ("extract", MODEL, images, "--to", tmp_path / "cache", "--weights", weights, "--workers", 0)
    for options, told in (
        (("--gradient-draws", 3), "--gradient-draws needs --gradient."),
        (("--gradient-weighting", "root"), "--gradient-weighting needs --gradient."),
        (("--gradient-uniform",), "--gradient-uniform needs --gradient."),
        (("--gradient", "--gradient-sigma", 0.1), "--gradient-sigma needs --gradient-copies."),
        (("--gradient", "--gradient-tolerance", 0.1), "--gradient-tolerance needs --gradient-beta."),
        (("--gradient", "--gradient-method", "all"), "'all' is not one of"),
        (
            ("--gradient", "--gradient-weighting", "mean"),
            "--gradient-weighting is one of fisher, root, expected_l1; got 'mean'.",
        ),
    ):
        answer = run(*command, *options)
        assert answer.code == 2
        assert told in " ".join(answer.err.replace("│", " ").split())
    answer = run(*command, "--gradient", "--gradient-weighting", "root", "--json")
    assert (answer.code, answer.json["kind"]) == (1, "ValueRangeError")
    assert "weighting 'root' is a sum of norms, which random signs do not estimate" in answer.err
    assert not (tmp_path / "cache").exists()
