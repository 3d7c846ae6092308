"""Saved and loaded: the same answers, damage seen, and a kill leaves the old index or the new one."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from dubito.apps.search import SafeIndex
from dubito.apps.search import _folder as folder_module
from dubito.errors import ArtefactError, DiskFullError
from dubito.scores import Neighbours
from dubito.table import Table


def some(seed: int, n: int = 60) -> Table:
    draw = np.random.default_rng(seed)
    ids = [f"{seed}-{row}é" for row in range(n)]
    return Table(
        feature=draw.normal(size=(n, 5)), label=draw.integers(0, 2, n), id=ids, source="m", maker={"model": "m"}
    )


@pytest.fixture
def index() -> SafeIndex:
    return SafeIndex.build(some(0), Neighbours(k=3).fit(some(9)), quantile=0.8, per_class=True)


@pytest.mark.parametrize("mapped", [True, False])
def test_it_answers_as_before(index, tmp_path, mapped):
    before = index.search(some(1), k=4, sets=True)
    index.save(tmp_path / "a" / "index")
    loaded = SafeIndex.load(tmp_path / "a" / "index", mapped=mapped)
    found = loaded.search(some(1), k=4, sets=True)
    assert found.ids.tolist() == before.ids.tolist()
    assert found.similarities.tobytes() == before.similarities.tobytes()
    assert found.sets == before.sets
    assert (loaded.rule, loaded.thresholds, loaded.maker) == (index.rule, index.thresholds, {"model": "m"})
    assert isinstance(loaded.backend.vectors, np.memmap) == mapped
    assert not [path for path in (tmp_path / "a" / "index").iterdir() if path.suffix == ".part"]


@pytest.mark.parametrize("mapped", [True, False])
def test_a_loaded_index_can_change_and_the_file_does_not(index, tmp_path, mapped):
    index.save(tmp_path)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    loaded = SafeIndex.load(tmp_path, mapped=mapped)
    for one in (index, loaded):
        one.remove(["0-3é", "0-7é"])
        one.search(some(1), k=1)
        one.add(some(2))
    assert loaded.search(some(1), k=4).ids.tolist() == index.search(some(1), k=4).ids.tolist()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == files
    loaded.save(tmp_path)  # over the very files that it is mapped from
    assert SafeIndex.load(tmp_path).search(some(1), k=4).ids.tolist() == index.search(some(1), k=4).ids.tolist()
    names = {path.name.partition("-")[0] for path in tmp_path.iterdir()}
    assert (names, len(list(tmp_path.iterdir()))) == ({"index.json", "vectors", "items", "score"}, 4)


def test_an_approximation_is_kept(index, tmp_path):
    index.approximate("IVF2,Flat", effort=2)
    expected = index.search(some(1), k=3)
    index.save(tmp_path)
    for mapped in (True, False):
        loaded = SafeIndex.load(tmp_path, mapped=mapped)
        assert loaded.backend.approximation == index.backend.approximation
        found = loaded.search(some(1), k=3)
        assert (found.exact, found.ids.tolist()) == (False, expected.ids.tolist())


def test_an_empty_index_is_an_index(tmp_path):
    SafeIndex(5, quantile=0.7).save(tmp_path)
    loaded = SafeIndex.load(tmp_path)
    loaded.add(np.eye(5), np.arange(5.0))
    assert (len(loaded), loaded.kept) == (5, 4)


def test_vectors_are_a_safetensors_file(index, tmp_path):
    index.save(tmp_path)
    (path,) = tmp_path.glob("vectors-*.safetensors")
    vectors = load_file(path)["vectors"]
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert vectors.shape == (60, 5)


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda place: flip(next(place.glob("vectors-*"))), r"has checksum [0-9a-f]{8}: it was altered"),
        (lambda place: flip(next(place.glob("items-*"))), "it was altered"),
        (lambda place: next(place.glob("vectors-*")).write_bytes(b"short"), r"has 5 bytes, not \d+"),
        (lambda place: next(place.glob("items-*")).unlink(), "cannot be read .*No such file"),
        (lambda place: (place / "index.json").write_text("{"), "index.json in .* cannot be read"),
        (lambda place: (place / "index.json").write_text('{"format": 7}'), "has format 7, this dubito reads 1"),
        (lambda place: (place / "index.json").unlink(), "no index in .*: index.json is not there. Save one"),
        (lambda place: rename(place, "../../secret"), "'../../secret' is no file of an index"),
    ],
)
def test_damage_is_seen(index, tmp_path, harm, text):
    index.save(tmp_path)
    harm(tmp_path)
    with pytest.raises(ArtefactError, match=text):
        SafeIndex.load(tmp_path)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def rename(place: Path, name: str) -> None:
    head = json.loads((place / "index.json").read_text())
    head["files"]["vectors"]["name"] = name
    (place / "index.json").write_text(json.dumps(head))


def test_a_full_disk_leaves_the_old_index(index, tmp_path, monkeypatch):
    index.save(tmp_path)
    old = sorted(path.name for path in tmp_path.iterdir())
    index.remove(["0-3é"])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module, "write_file", full)
    with pytest.raises(DiskFullError, match="The index in memory is safe, and so is what was saved there before"):
        index.save(tmp_path)
    assert set(old) <= {path.name for path in tmp_path.iterdir()}
    assert len(SafeIndex.load(tmp_path)) == 60
    monkeypatch.undo()
    index.save(tmp_path)
    assert (len(SafeIndex.load(tmp_path)), len(list(tmp_path.iterdir()))) == (59, len(old))


def test_a_place_that_cannot_be(index, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtefactError, match=r"the index cannot be saved in .*Give another place"):
        index.save(tmp_path / "file" / "index")


class KilledError(BaseException):
    """Nothing catches it, so that nothing is tidied up, as after a kill."""


def test_killed_at_any_step_it_is_the_old_one_or_the_new_one(index, tmp_path, monkeypatch):
    index.approximate("HNSW8")
    index.save(tmp_path)
    replace, steps, lengths = Path.replace, [0], []

    def killed(path, target):
        steps[0] -= 1
        if steps[0] == 0:
            raise KilledError
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", killed)
    index.remove(["0-3é"])
    for step in range(1, 20):
        steps[0] = step
        try:
            index.save(tmp_path)
        except KilledError:
            lengths.append(len(SafeIndex.load(tmp_path)))
        else:
            break
    assert lengths == [60] * 5  # two files of the score, vectors, items, and the head at last
    assert len(SafeIndex.load(tmp_path)) == 59
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == [
        "index.json",
        "items",
        "score",
        "vectors",
    ]


CHILD = """
import os, signal, sys
from pathlib import Path
import numpy as np
from dubito.apps.search import SafeIndex
index = SafeIndex.load(sys.argv[1])
index.remove(["1"])
Path.replace = lambda path, target: os.kill(os.getpid(), signal.SIGKILL)
index.save(sys.argv[1])
"""


def test_a_real_kill_leaves_the_old_one(tmp_path):
    SafeIndex.build(np.eye(8), np.arange(8.0)).save(tmp_path)
    child = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], check=False, capture_output=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert (tmp_path / "vectors.part").exists()
    loaded = SafeIndex.load(tmp_path)
    assert len(loaded) == 8
    loaded.save(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3  # what the killed one left is swept away
