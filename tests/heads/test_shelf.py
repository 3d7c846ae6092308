import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dubito.errors import ArtefactError, CheckpointError, DubitoWarning
from dubito.heads import shelf
from dubito.heads.checkpoint import HeadConfig, PretrainedHead, write_head
from dubito.heads.module import HeadModule
from dubito.table import Provenance

BACKBONE = Provenance(weights="a" * 32, tensors="b" * 32, head={"layer": None}, transform={"kind": "none"})


def head(
    *, seed: int = 0, model: str = "timm:a", provenance: Provenance | None = BACKBONE, corpus: str = "five\nimages"
) -> PretrainedHead:
    config = HeadConfig(features=5, width=4, depth=1, model=model, provenance=provenance, trained={"corpus": corpus})
    return PretrainedHead(HeadModule(5, width=4, depth=1, seed=seed), config)


def is_seed(result: PretrainedHead, seed: int) -> bool:
    return torch.equal(result.module.layers[0].weight, head(seed=seed).module.layers[0].weight)


@pytest.fixture(autouse=True)
def shelves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setattr(shelf, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("DUBITO_HEADS", str(tmp_path / "local"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "shipped", tmp_path / "local"


def test_missing_and_empty_shelves(shelves):
    assert shelf.list_heads() == []
    shelves[0].mkdir()
    (shelves[0] / "empty").mkdir()
    assert shelf.list_heads() == []
    assert shelf.entry_for(BACKBONE) is None
    with pytest.raises(
        ArtefactError, match=r"there is no 'mine'\. On the shelf: nothing\. Pass a name of `dubito list"
    ):
        shelf.find_head("mine")


def test_what_ships_is_what_the_package_holds(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setenv("DUBITO_HEADS", "/none")
    assert Path(shelf.__file__).parent / "pretrained" == shelf.SHIPPED
    for entry in shelf.list_heads():
        if entry.where == "shipped":
            config = shelf.find_head(entry.path).config
            assert config.features == entry.features
            assert config.provenance is not None
            parts = config.provenance.model_parts
            assert parts.pop("checkpoint") is None  # its backbone has published weights, not those of a local file
            assert all(parts.values())  # or its drift guard would be off in part
            assert entry.size < 2_000_000


def test_the_list(shelves):
    write_head(shelves[0] / "b", head(model="pypi:lite"))
    write_head(shelves[1] / "a", head(corpus=""))
    write_head(shelves[1] / "c" / "seed-1", head())
    first, second, third = shelf.list_heads()
    assert second == shelf.HeadEntry(
        name="b",
        path=shelves[0] / "b",
        model="pypi:lite",
        features=5,
        size=sum(path.stat().st_size for path in (shelves[0] / "b").iterdir()),
        where="shipped",
        about="five",
    )
    assert (first.name, first.where, first.about) == ("a", "local", "")
    assert third.name == "c/seed-1"
    assert is_seed(shelf.find_head("c/seed-1"), 0)


def test_the_size_is_that_of_the_head_not_of_its_training(shelves):
    write_head(shelves[1] / "a", head())
    (before,) = shelf.list_heads()
    (shelves[1] / "a" / "state.safetensors").write_bytes(bytes(1000))
    assert shelf.list_heads() == [before]


def test_a_broken_head_is_left_out_with_a_warning(shelves):
    write_head(shelves[1] / "good", head())
    write_head(shelves[1] / "bad", head())
    (shelves[1] / "bad" / "config.json").write_text("{")
    with pytest.warns(DubitoWarning, match=r"left out: head in '.*bad': config\.json cannot be read"):
        assert [entry.name for entry in shelf.list_heads()] == ["good"]


def test_one_s_own_goes_before_the_shipped_of_the_same_name(shelves):
    write_head(shelves[0] / "a", head(seed=1))
    assert is_seed(shelf.find_head("a"), 1)
    write_head(shelves[1] / "a", head(seed=2))
    assert is_seed(shelf.find_head("a"), 2)
    assert [(entry.name, entry.where) for entry in shelf.list_heads()] == [("a", "local")]


def test_folders(shelves, tmp_path):
    write_head(tmp_path / "mine", head(seed=3))
    for name in ("mine", "./mine", str(tmp_path / "mine"), tmp_path / "mine"):
        assert is_seed(shelf.find_head(name), 3)
    for name in ("./gone", tmp_path / "gone"):
        with pytest.raises(ArtefactError, match="there is no such folder"):
            shelf.find_head(name)
    (tmp_path / "other").mkdir()
    with pytest.raises(ArtefactError, match=r"no head in 'other': config\.json is not there"):
        shelf.find_head("other")


def test_a_folder_that_is_no_head_does_not_hide_a_name(shelves, tmp_path):
    write_head(shelves[0] / "lite", head(seed=4))
    (tmp_path / "lite").mkdir()
    assert is_seed(shelf.find_head("lite"), 4)


def test_files(tmp_path):
    module = head(seed=5).module
    keys = {f"unc_module.unc_module.{key.removeprefix('layers.')}": value for key, value in module.state_dict().items()}
    torch.save({"state_dict": keys, "args": argparse.Namespace(lr=1)}, tmp_path / "vit_checkpoint.pth.tar")
    with pytest.warns(DubitoWarning, match="does not hold a whole backbone"):
        assert is_seed(shelf.find_head("vit_checkpoint.pth.tar"), 5)
    with pytest.raises(CheckpointError, match="no file 'gone"):
        shelf.find_head("gone.pth.tar")
    write_head(tmp_path / "mine", head())
    with pytest.raises(ArtefactError, match=r"is a file\. Pass the folder that save_pretrained wrote"):
        shelf.find_head("mine/model.safetensors")


@pytest.mark.parametrize("name", ["hub:org/mine", "org/mine"])
def test_hub_ids(monkeypatch, name):
    args = []
    monkeypatch.setattr(
        "dubito.heads.hub.from_pretrained", lambda name, **options: args.append((name, options)) or head()
    )
    assert is_seed(shelf.find_head(name, revision="v1"), 0)
    assert args == [("org/mine", {"revision": "v1"})]


def test_unknown_names_get_near_ones(shelves):
    write_head(shelves[0] / "efficientnet_lite0", head())
    with pytest.raises(
        ArtefactError, match=r"head: there is no 'efficientnet_lite'\. Nearest: efficientnet_lite0\. Pass"
    ):
        shelf.find_head("efficientnet_lite")
    with pytest.raises(ArtefactError, match=r"there is no 'xyz'\. On the shelf: efficientnet_lite0\."):
        shelf.find_head("xyz")


def test_the_head_that_fits_a_table(shelves):
    write_head(shelves[0] / "a", head(seed=1, provenance=replace(BACKBONE, tensors="c" * 32, weights="d" * 32)))
    write_head(shelves[0] / "b", head(seed=2, provenance=None))
    assert shelf.entry_for(BACKBONE) is None
    assert shelf.entry_for(None) is None
    write_head(shelves[0] / "c", head(seed=3))
    entry = shelf.entry_for(replace(BACKBONE, model="timm:a", weights="other versions"))
    assert entry is not None
    assert is_seed(shelf.find_head(entry.path), 3)
    write_head(shelves[1] / "z", head(seed=4))
    entry = shelf.entry_for(BACKBONE)
    assert entry is not None
    assert (entry.name, entry.where) == ("z", "local")


def training(folder: Path, finished: object, *, median: int = 2) -> None:
    """As `dubito.train` leaves it: three seeds and a report."""
    for seed in (1, 2, 3):
        write_head(folder / f"seed-{seed}", head(seed=seed))
    message = {"median_seed": median} | ({} if finished is None else {"finished": finished})
    (folder / "training.json").write_text(json.dumps(message))


def chosen(**options) -> str | None:
    entry = shelf.entry_for(BACKBONE, **options)
    return None if entry is None else entry.name


def test_of_several_heads_the_newest_training_s_median_one_is_taken(shelves):
    shipped, local = shelves
    write_head(shipped / "a", head())
    assert chosen() == "a"
    write_head(local / "n", head())
    write_head(local / "m", head())
    assert chosen() == "m"  # of those without a time, the first by name; one's own before what ships
    training(local / "y", None)
    assert chosen() == "m"
    training(local / "z", "2026-01-01T10:00:00+00:00")
    assert chosen() == "z/seed-2"  # a time is known; of its seeds the median one
    training(local / "x", "2026-01-01T09:59:59+00:00", median=3)
    assert chosen() == "z/seed-2"
    training(local / "w", "2026-01-01T10:30:00+01:00", median=3)  # half past nine by the others' clock
    assert chosen() == "z/seed-2"
    training(local / "v", "2026-01-02T00:00:00+00:00", median=3)
    assert chosen() == "v/seed-3"


def test_the_newest_counts_only_if_it_fits(shelves):
    training(shelves[1] / "new", "2026-01-02T00:00:00+00:00")
    for seed in (1, 2, 3):
        write_head(
            shelves[1] / "new" / f"seed-{seed}", head(provenance=replace(BACKBONE, tensors="c" * 32, weights="d" * 32))
        )
    training(shelves[1] / "old", "2026-01-01T00:00:00+00:00")
    assert chosen() == "old/seed-2"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"finished": 3, "median_seed": 2}', '{"finished": "noon"}'])
def test_a_report_that_cannot_be_read_is_none(shelves, text):
    training(shelves[1] / "a", "2026-01-01T00:00:00+00:00")
    training(shelves[1] / "b", "2025-01-01T00:00:00+00:00")
    (shelves[1] / "a" / "training.json").write_text(text)
    assert chosen() == "b/seed-2"


def test_only_what_ships(shelves):
    training(shelves[1] / "a", "2026-01-01T00:00:00+00:00")
    assert chosen(shipped_only=True) is None
    write_head(shelves[0] / "a", head(seed=8))
    write_head(shelves[1] / "a", head(seed=9))  # of the same name
    entry = shelf.entry_for(BACKBONE, shipped_only=True)
    assert entry is not None
    assert is_seed(shelf.find_head(entry.path), 8)


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"DUBITO_HEADS": "/somewhere"}, "/somewhere"),
        ("linux", {"XDG_DATA_HOME": "/data"}, "/data/dubito/heads"),
        ("linux", {}, "/home/me/.local/share/dubito/heads"),
        ("darwin", {}, "/home/me/Library/Application Support/dubito/heads"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/dubito/heads"),
    ],
)
def test_the_user_s_folder(monkeypatch, platform, variables, expected):
    for name in ("DUBITO_HEADS", "XDG_DATA_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", platform)
    assert shelf.local_folder() == Path(expected)
