"""A backbone without a classifying layer: search, maps and scores by features alone, and clear errors for the rest."""

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import dubito
from dubito.cli import main
from dubito.errors import MissingColumnError, ModelError

COUNT = 30
MODEL = "timm:test_resnet"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos in two class folders, the weights of a network, and the cache of that network without its last layer."""
    folder = tmp_path_factory.mktemp("backbone")
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        path = folder / "photos" / ("cat" if number % 2 else "dog") / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((48, 48)).save(path)
    torch.manual_seed(0)
    network = timm.create_model("test_resnet")
    save_file({key: value.contiguous() for key, value in network.state_dict().items()}, folder / "net.safetensors")
    options = ("--classes", "0", "--weights", folder / "net.safetensors", "--workers", "0", "--quiet")
    assert run("extract", MODEL, folder / "photos", "--to", folder / "cache", *options) == 0
    return folder


@pytest.fixture(scope="module")
def index(place: Path) -> Path:
    assert run("search", "build", place / "cache", "--to", place / "index") == 0
    return place / "index"


def run(*arguments: object) -> int:
    return main([str(one) for one in arguments])


def farthest(feature: torch.Tensor, k: int) -> torch.Tensor:
    """The distance of every row to its k-th nearest other row, at length one."""
    unit = torch.nn.functional.normalize(feature.double())
    return torch.cdist(unit, unit).sort(1).values[:, k]  # the first is the row itself


def test_an_index_in_python_needs_no_score(place: Path, tmp_path: Path) -> None:
    table = dubito.open(place / "cache")
    assert "logit" not in table
    index = dubito.SafeIndex.build(table)
    u = farthest(table.feature, 10)
    assert index.left_out() == sorted(table.id[(u > index.thresholds.overall).numpy()].tolist())
    assert index.kept == 27  # the 0.9 quantile of 30
    index.save(tmp_path / "index")
    loaded = dubito.SafeIndex.load(tmp_path / "index")
    assert isinstance(loaded.score, dubito.Neighbours)
    far = dubito.Table(feature=-table.feature[:2], id=["far", "farther"])
    result = loaded.search(far, k=1)
    assert result.refused.tolist() == [True, True]
    near = loaded.search(table, k=1, exclude=table.id)
    assert near.to_dict() == index.search(table, k=1, exclude=table.id).to_dict()
    np.testing.assert_allclose(near.uncertainty, u, atol=1e-6)


def test_an_index_of_few_images_and_of_none() -> None:
    one = dubito.Table(feature=[[1.0, 0.0]])
    assert dubito.SafeIndex.build(one).search(one, k=1).ids.tolist() == [["0"]]
    with pytest.raises(dubito.DubitoError, match=r"SafeIndex.build: items needs at least 1 row"):
        dubito.SafeIndex.build(dubito.Table(feature=torch.zeros(0, 2)))
    with pytest.raises(dubito.DubitoError, match="needs the uncertainty of every item; got none"):
        dubito.SafeIndex.build(torch.ones(3, 2))


def test_with_logits_an_index_takes_max_probability() -> None:
    table = dubito.Table(feature=torch.eye(3), logit=torch.eye(3))
    assert dubito.SafeIndex.build(table).score == dubito.MaxProbability()


def test_an_index_on_the_command_line_says_which_uncertainty_it_took(place: Path, capsys, tmp_path: Path) -> None:
    assert run("search", "build", place / "cache", "--to", tmp_path / "index", "--json") == 0
    built = json.loads(capsys.readouterr().out)
    assert (built["items"], built["searched"], built["score"]) == (COUNT, 27, "neighbours")
    assert built["notes"][0] == (
        "uncertainty by neighbours, the distance of an image to its tenth nearest neighbour in this table, which has "
        "no logits. Choose another with --score or --head."
    )


def test_queries_are_a_cache_or_images(place: Path, index: Path, capsys) -> None:
    assert run("search", "query", index, place / "cache", "--k", 1, "--json") == 0
    cached = json.loads(capsys.readouterr().out)
    assert run("search", "query", index, place / "photos", "--k", 1, "--json") == 0  # the index names its weights
    seen = json.loads(capsys.readouterr().out)
    assert [one["ids"] for one in seen["queries"]] == [one["ids"] for one in cached["queries"]]
    assert [one["refused"] for one in seen["queries"]] == [one["refused"] for one in cached["queries"]]
    assert (cached["refused"], len(cached["queries"])) == (3, COUNT)


def test_a_map(place: Path, capsys, tmp_path: Path) -> None:
    assert run("map", place / "cache", "--to", tmp_path / "map.html", "--json") == 0
    drawn = json.loads(capsys.readouterr().out)
    assert drawn["score"] == "neighbours"
    assert drawn["notes"][0].startswith("uncertainty by neighbours, the distance of an image to its tenth")
    table = dubito.open(place / "cache")
    np.testing.assert_allclose(dubito.draw_map(table).u, farthest(table.feature, 10), atol=1e-6)


def test_scores_of_features(place: Path, capsys, tmp_path: Path) -> None:
    assert run("score", place / "cache") == 1
    *notes, error = capsys.readouterr().err.splitlines()
    assert error.endswith("Pass images for scores to learn from: --learn-from CACHE.")
    assert len(notes) == 2  # those that learn, and those of logits
    scores = ("--score", "neighbours", "--set", "neighbours.k=2", "--learn-from", place / "cache")
    assert run("score", place / "cache", *scores, "--to", tmp_path / "u.csv", "--top", 3) == 0
    assert "predicted" not in capsys.readouterr().out
    assert (tmp_path / "u.csv").read_text().splitlines()[0] == "id,label,neighbours"
    assert run("score", place / "cache", *scores, "--json") == 0
    top = json.loads(capsys.readouterr().out)["top"]
    assert (len(top), top[0]["predicted"], top[0]["probability"]) == (10, None, None)


def test_a_head_learns_which_images_linear_classifiers_get_wrong(place: Path, capsys, tmp_path: Path) -> None:
    head = tmp_path / "head"
    assert run("train", place / "cache", "--to", head, "--set", "rows=2000", "--width", 16, "--held-out", 0.3) == 0
    assert "losses of linear classifiers on its features" in " ".join(capsys.readouterr().out.split())
    assert run("score", place / "cache", "--head", head / "seed-1", "--to", tmp_path / "u.csv") == 0
    header, *rows = (tmp_path / "u.csv").read_text().splitlines()
    assert header.startswith("id,label,")
    assert len({row.split(",")[2] for row in rows}) == COUNT


def test_label_issues_by_linear_classifiers_on_features(place: Path, capsys) -> None:
    assert run("label-issues", place / "cache") == 0
    assert "Cross-validated linear classifiers agree with" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command",
    [
        ("report", "{cache}"),
        ("guard", "fit", "{cache}", "--to", "guard"),
        ("reject", "{cache}"),
        ("diagnose", "{cache}", "{cache}"),
    ],
    ids=lambda one: one[0],
)
def test_what_needs_predictions_says_so(place: Path, command: tuple[str, ...], capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*(one.format(cache=place / "cache") for one in command)) == 1
    error = capsys.readouterr().err
    assert "needs column 'logit'" in error
    assert "a backbone without one has no logits, but scores of features, search and maps" in error


def test_the_audit_says_so_too(place: Path) -> None:
    backbone = dubito.load(MODEL, weights=place / "net.safetensors", classes=0)
    with pytest.raises(ModelError, match="has features and no logits: it has no classifying layer"):
        dubito.audit(backbone, place / "photos", workers=0, progress=False)
    unlabelled = dubito.open(place / "cache").select("feature")
    with pytest.raises(MissingColumnError, match=r"column 'loss'; .* forward probe of a model with a clas"):
        dubito.train(unlabelled, progress=False)
