"""Saved and loaded: the same answers, damage seen, and a kill leaves the old index or the new one."""

import json
import os
import pickle
import shutil
import signal
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
import pytest
from filelock import FileLock
from safetensors.numpy import load_file, save

from dubito import storage
from dubito.cache.shards import pack_strings
from dubito.errors import ArtefactError, DiskFullError
from dubito.scores import Neighbours
from dubito.search import SafeIndex, memory, safe_index
from dubito.table import Provenance, Table
from dubito.types import Score


def some(seed: int, n: int = 60) -> Table:
    draw = np.random.default_rng(seed)
    ids = [f"{seed}-{row}é" for row in range(n)]
    return Table(
        feature=draw.normal(size=(n, 5)), label=draw.integers(0, 2, n), id=ids, provenance=Provenance("m", weights="w")
    )


@pytest.fixture
def index() -> SafeIndex:
    return SafeIndex.build(some(0), Neighbours(k=3).fit(some(9)), quantile=0.8, per_class=True)


@pytest.mark.parametrize("mapped", [True, False])
def test_it_answers_as_before(index, tmp_path, mapped):
    before = index.search(some(1), k=4, sets=True)
    index.save(tmp_path / "a" / "index")
    loaded = SafeIndex.load(tmp_path / "a" / "index", mapped=mapped)
    result = loaded.search(some(1), k=4, sets=True)
    assert result.ids.tolist() == before.ids.tolist()
    assert result.similarities.tobytes() == before.similarities.tobytes()
    assert result.sets == before.sets
    assert (loaded.rule, loaded.thresholds, loaded.provenance) == (
        index.rule,
        index.thresholds,
        Provenance("m", weights="w"),
    )
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
    assert kinds(tmp_path) == ["index.json", "items", "score", "vectors"]


def kinds(place: Path) -> list[str]:
    """What is there, but the lock."""
    return sorted(path.name.partition("-")[0] for path in place.iterdir() if path.name != ".lock")


@pytest.mark.parametrize("kind", ["IVF2,Flat", "IVF2,SQ8", "IVF2,SQfp16", "HNSW8", "HNSW8,SQ8", "PCA4,IVF2,SQ8"])
def test_an_approximation_is_saved_again(index, tmp_path, kind):
    index.approximate(kind)
    index.save(tmp_path / "one")
    expected = index.search(some(1), k=3).ids.tolist()
    SafeIndex.load(tmp_path / "one").save(tmp_path / "two")
    shutil.rmtree(tmp_path / "one")
    loaded = SafeIndex.load(tmp_path / "two")
    loaded.save(tmp_path / "two")
    assert SafeIndex.load(tmp_path / "two").search(some(1), k=3).ids.tolist() == expected


def test_an_approximation_is_kept(index, tmp_path):
    index.approximate("IVF2,Flat", effort=2)
    expected = index.search(some(1), k=3)
    index.save(tmp_path)
    for mapped in (True, False):
        loaded = SafeIndex.load(tmp_path, mapped=mapped)
        assert loaded.backend.approximation == index.backend.approximation
        result = loaded.search(some(1), k=3)
        assert (result.exact, result.ids.tolist()) == (False, expected.ids.tolist())


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
        (lambda place: flip(next(place.glob("vectors-*"))), r"vectors-\w+-\w+\.safetensors is not the part .* damaged"),
        (lambda place: flip(next(place.glob("items-*"))), "is not the part that index.json was written with"),
        (lambda place: next(place.glob("vectors-*")).write_bytes(b"short"), "missing, damaged or replaced"),
        (lambda place: next(place.glob("items-*")).unlink(), "missing, damaged or replaced"),
        (lambda place: (place / "index.json").write_text("{"), "index in .* cannot be read"),
        (lambda place: (place / "index.json").write_text('{"format": 7}'), "must be of format 3; got 7"),
        (lambda place: (place / "index.json").unlink(), "no index in .*: index.json is not there. Save one"),
        (lambda place: rename(place, "../../secret"), "refers to '../../secret', which is not one of its parts"),
        (lambda place: flip(next(place.glob("score-*/state*"))), r"score-[0-9a-f]+-[0-9a-f]{8} is not the part"),
        (
            lambda place: rename(place, "../elsewhere", "score"),
            "refers to '../elsewhere', which is not one of its parts",
        ),
        (lambda place: rename(place, ["a"], "score"), "refers to .*, which is not one of its parts"),
        (lambda place: change(place, files=[1]), "cannot be read .*make the index again"),
        (lambda place: change(place, files={}), r"cannot be read \(no 'vectors'\)"),
        (lambda place: change(place, radii=[[0.0], [1.0, 2.0]]), r"index in .* cannot be read"),
        (lambda place: change(place, radii=[[0.0]]), "radii must be as many distances as"),
        (
            lambda place: change(place, rule={"quantile": 7.0}),
            r"cannot be read .*quantile must be a number in \(0, 1\]",
        ),
        (lambda place: change(place, rows=10**15), "does not have the size of 1000000000000000 vectors of 5 numbers"),
        (lambda place: change(place, width=-5, rows=-60), r"cannot be read \(.*negative.*\)"),
        (lambda place: edit(place, width=4), "index.json was changed after it was written"),
        (lambda place: forge(place, "vectors", b"abc"), "cannot be read .*unpack requires a buffer of 8 bytes"),
        (lambda place: forge(place, "vectors", struct.pack("<Q", 2**62)), "does not have the size of 60 vectors of 5"),
        (lambda place: forge(place, "items", items(u=np.zeros(59))), "not one finite uncertainty for each of 60"),
        (
            lambda place: forge(place, "items", items(u=np.full(60, np.nan))),
            "not one finite uncertainty for each of 60",
        ),
        (lambda place: forge(place, "items", items(ids=["a"] * 60)), "not one unique id for each of 60"),
        (lambda place: forge(place, "items", items(label=np.zeros(7, int))), "not one class for each of 60 vectors"),
        (lambda place: forge(place, "items", items(label=None)), "per_class=True needs the class of every item"),
        (lambda place: forge(place, "items", pickle.dumps({"u": 1})), "cannot be read .*make the index again"),
        (lambda place: flip(next(place.glob("approximate-*"))), "is not the part that index.json was written with"),
        (lambda place: forge(place, "approximate", b"IxFI" + bytes(50)), "cannot be read .*make the index again"),
        (lambda place: forge(place, "approximate", other_faiss()), "cannot be read .*make the index again"),
        (lambda place: (place / "index.json").write_text("[" * 100_000), "index in .* cannot be read"),
        (lambda place: (place / "index.json").write_text("[]"), "must be of format 3; got list"),
    ],
)
def test_damage_is_seen(index, tmp_path, harm, text):
    index.approximate("HNSW8")
    index.save(tmp_path)
    harm(tmp_path)
    with pytest.raises(ArtefactError, match=text):
        SafeIndex.load(tmp_path)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def edit(place: Path, **entries: object) -> None:
    """Change the description without its seal."""
    saved = json.loads((place / "index.json").read_text())
    (place / "index.json").write_text(json.dumps(saved | entries))


def change(place: Path, **entries: object) -> None:
    """Change the description and seal it again."""
    saved = json.loads((place / "index.json").read_text())
    storage.write_sealed(place / "index.json", {key: one for key, one in (saved | entries).items() if key != "digest"})


def rename(place: Path, name: object, kind: str = "vectors") -> None:
    files = json.loads((place / "index.json").read_text())["files"]
    change(place, files=files | {kind: name})


def forge(place: Path, kind: str, data: bytes) -> None:
    """A file of another content, as its name and the description say."""
    name = f"{kind}-{len(data):x}-{zlib.crc32(data):08x}.safetensors"
    (place / name).write_bytes(data)
    rename(place, name, kind)


def items(**entries: object) -> bytes:
    columns = {"u": np.arange(60.0), "ids": [str(row) for row in range(60)], "label": np.arange(60) % 2} | entries
    names = {name: value.numpy() for name, value in pack_strings(columns.pop("ids")).items()}
    return save({name: value for name, value in columns.items() if value is not None} | names)


def other_faiss() -> bytes:
    other = faiss.IndexHNSWFlat(5, 8, faiss.METRIC_INNER_PRODUCT)
    other.add(np.eye(3, 5, dtype=np.float32))
    return faiss.serialize_index(other).tobytes()


def test_a_damaged_score_is_written_anew(index, tmp_path):
    index.save(tmp_path)
    flip(next(tmp_path.glob("score-*/state*")))
    index.save(tmp_path)
    assert SafeIndex.load(tmp_path).search(some(1), k=4).ids.tolist() == index.search(some(1), k=4).ids.tolist()


def test_an_index_that_is_replaced_while_it_is_read_is_the_new_one(index, tmp_path, monkeypatch):
    index.save(tmp_path)
    read = memory._read_vectors

    def late(path, shape, mapped):
        monkeypatch.setattr(memory, "_read_vectors", read)
        index.remove(["0-3é"])
        index.save(tmp_path)
        return read(path, shape, mapped)

    monkeypatch.setattr(memory, "_read_vectors", late)
    assert len(SafeIndex.load(tmp_path)) == 59


def test_one_saves_at_a_time(index, tmp_path):
    index.save(tmp_path)
    with (
        FileLock(tmp_path / ".lock"),
        pytest.raises(ArtefactError, match=r"another process is writing into .* Wait until"),
    ):
        index.save(tmp_path)


def test_a_score_that_could_not_be_read_back_is_not_saved(tmp_path):
    @dataclass
    class Own(Score):
        name, kind, needs = "own", "epistemic", ("feature",)

        def score_batch(self, batch):
            return batch.feature[:, 0]

    index = SafeIndex.build(some(0), Own())
    text = (
        r"score 'own' .* cannot be saved: it is not one of dubito's own.* Set index\.score = None and save again; after"
    )
    with pytest.raises(ArtefactError, match=text):
        index.save(tmp_path / "index")
    index.score = None
    index.save(tmp_path / "index")
    assert len(SafeIndex.load(tmp_path / "index")) == 60


def test_a_full_disk_leaves_the_old_index(index, tmp_path, monkeypatch):
    index.save(tmp_path)
    old = sorted(path.name for path in tmp_path.iterdir())
    index.remove(["0-3é"])
    index.approximate("HNSW8")

    def full(*_):
        raise OSError(28, "No space left on device")

    steps = [(memory, "_write_vectors"), (memory, "save"), (memory.safetensors_numpy, "save")]
    steps.append((safe_index, "save_score"))
    for step in [*steps, (storage.files, "write_json")]:
        with monkeypatch.context() as patch:
            patch.setattr(*step, full)
            with pytest.raises(DiskFullError, match="What is in memory is safe, and so is what was saved there before"):
                index.save(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == old  # what was written is gone: there is space again
        assert len(SafeIndex.load(tmp_path)) == 60
    index.save(tmp_path)
    assert (len(SafeIndex.load(tmp_path)), len(list(tmp_path.iterdir()))) == (59, len(old) + 1)


def test_a_place_that_cannot_be(index, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtefactError, match=r"file/index' \(Not a directory\)\. Choose another place"):
        index.save(tmp_path / "file" / "index")


@pytest.mark.parametrize("name", ["holiday.jpg", "index.json", "vectors"])
def test_other_things_are_not_mixed_with_an_index(index, tmp_path, name):
    (tmp_path / name).write_text('{"title": "mine"}')
    with pytest.raises(ArtefactError, match=rf"holds other things \({name}\) and no index. Choose a new or"):
        index.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]  # nothing was written, not even a lock
    assert (tmp_path / name).read_text() == '{"title": "mine"}'


def test_an_index_is_replaced_whatever_lies_beside_it(index, tmp_path):
    index.save(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    index.remove(["0-3é"])
    index.save(tmp_path)
    assert (len(SafeIndex.load(tmp_path)), (tmp_path / "notes.txt").read_text()) == (59, "mine")


@pytest.mark.parametrize("head", [None, "{ cut", '{"format": 99}'])
def test_what_is_left_of_an_index_is_replaced(index, tmp_path, head):
    index.save(tmp_path)
    (tmp_path / "index.json").unlink()
    if head is not None:
        (tmp_path / "index.json").write_text(head)
    index.save(tmp_path)
    assert len(SafeIndex.load(tmp_path)) == 60


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
    sweep = storage.SavedFolder._sweep
    monkeypatch.setattr(storage.SavedFolder, "_sweep", lambda *of: sweep(*of) if steps[0] > 0 else None)
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
    assert kinds(tmp_path) == ["index.json", "items", "score", "vectors"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_real_kill_leaves_the_old_one(tmp_path):
    SafeIndex.build(np.eye(8), np.arange(8.0)).save(tmp_path)
    child = os.fork()  # a new interpreter would import for seconds
    if child == 0:
        signal.alarm(60)
        changed = SafeIndex.load(tmp_path)
        changed.remove(["1"])
        Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
        changed.save(tmp_path)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert (tmp_path / "vectors.part").exists()
    loaded = SafeIndex.load(tmp_path)
    assert len(loaded) == 8
    loaded.save(tmp_path)  # the lock of the killed one is free
    assert kinds(tmp_path) == ["index.json", "items", "vectors"]  # what the killed one left is swept away


def test_an_index_in_a_store_answers_as_before(index, bucket, tmp_path):
    before = index.search(some(1), k=4)
    index.save(f"{bucket}/index")
    loaded = SafeIndex.load(f"{bucket}/index")
    assert loaded.search(some(1), k=4).ids.tolist() == before.ids.tolist()
    assert isinstance(loaded.backend.vectors, np.memmap)
    (copy,) = (tmp_path / "copies").rglob("vectors-*")
    copy.write_bytes(bytes(copy.stat().st_size))  # a damaged copy is fetched again
    assert SafeIndex.load(f"{bucket}/index").search(some(1), k=4).ids.tolist() == before.ids.tolist()
