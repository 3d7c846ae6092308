"""Approximations come back as they were, and no forged file reaches faiss."""

import json
import zlib
from pathlib import Path

import faiss
import numpy as np
import pytest
from safetensors.numpy import load, save

from dubito import storage
from dubito.errors import ArtefactError, ValueRangeError
from dubito.search import SafeIndex, approximate

KINDS = ("IVF8,SQ8", "IVF8,Flat", "IVF8,SQfp16", "IVF4,SQ4", "HNSW4", "HNSW16", "HNSW8,SQ8", "PCA4,IVF4,Flat", "Flat")
STORED = {"IVF8,SQ8": {"centres", "lists", "ranges", "effort"}, "HNSW4": {"levels", "neighbours", "entry", "effort"}}


def unit_vectors(rows: int = 500, width: int = 8) -> np.ndarray:
    x = np.random.default_rng(0).normal(size=(rows, width)).astype(np.float32)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("effort", [None, 3])
def test_it_comes_back_as_it_was(kind: str, effort: int | None) -> None:
    vectors = unit_vectors()
    built = approximate.build(vectors, kind, effort)
    again = approximate.from_arrays(vectors, kind, load(save(approximate.to_arrays(built))))
    for mine, theirs in zip(again.search(vectors[:100], 10), built.search(vectors[:100], 10), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert again.ntotal == 500
    assert type(again) is type(built)


@pytest.mark.parametrize("kind", STORED)
def test_it_is_saved_without_its_codes(kind: str) -> None:
    arrays = approximate.to_arrays(approximate.build(unit_vectors(), kind, None))
    assert set(arrays) == STORED[kind]
    # faiss itself would give its rows to the same lists
    index = approximate.build(unit_vectors(), "IVF8,Flat", None)
    nearest = index.quantizer.search(unit_vectors(), 1)[1][:, 0]
    np.testing.assert_array_equal(approximate.to_arrays(index)["lists"], nearest)


@pytest.mark.parametrize(
    "kind", ["nonsense", "HNSW999", "IVF600,Flat", "PQ4x24", "PCA9,Flat", "IVF0,Flat", "IVF٣,Flat"]
)
def test_unknown_and_excessive_kinds_are_refused(kind: str) -> None:
    index = SafeIndex.build(unit_vectors(), np.arange(500.0), clean="queries")
    with pytest.raises(ValueRangeError, match="faiss cannot build"):
        index.approximate(kind)


@pytest.fixture(params=["IVF8,SQ8", "HNSW4"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    index = SafeIndex.build(unit_vectors(), np.arange(500.0), clean="queries")
    index.approximate(request.param)
    return index.save(tmp_path / "index")


def forge(place: Path, data: bytes, ending: str = "safetensors", **entries: object) -> None:
    """Replace the approximation, with names, checksums and seal that agree."""
    name = f"approximate-{len(data):x}-{zlib.crc32(data):08x}.{ending}"
    (place / name).write_bytes(data)
    described = json.loads((place / "index.json").read_text())
    described["files"]["approximate"] = name
    del described["digest"]
    storage.write_sealed(place / "index.json", described | entries)


def content(place: Path) -> bytes:
    return next(place.glob("approximate-*")).read_bytes()


@pytest.mark.parametrize("ending", ["safetensors", "faiss"])
def test_faiss_reads_no_file(saved: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    index = faiss.IndexHNSWFlat(8, 4)
    index.add(unit_vectors())
    forge(saved, faiss.serialize_index(index).tobytes(), ending)
    for name in ("read_index", "deserialize_index"):
        monkeypatch.setattr(faiss, name, lambda *_: pytest.fail("faiss must not read it"))
    with pytest.raises(ArtefactError, match="make the index again"):
        SafeIndex.load(saved)


def test_a_file_that_was_cut_or_is_random_is_refused(saved: Path) -> None:
    whole = content(saved)
    draw = np.random.default_rng(0)
    for data in (*(whole[: len(whole) * part // 8] for part in range(8)), draw.bytes(len(whole)), whole[:50] + whole):
        forge(saved, data)
        with pytest.raises(ArtefactError, match="make the index again"):
            SafeIndex.load(saved)


def test_flipped_bits_are_refused_or_harmless(saved: Path) -> None:
    """With a checksum that agrees: what is loaded then answers every query with rows that exist."""
    whole, draw = content(saved), np.random.default_rng(0)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        data[draw.integers(len(data))] ^= 1 << draw.integers(8)
        forge(saved, bytes(data))
        try:
            result = SafeIndex.load(saved).search(unit_vectors()[:20], np.zeros(20), k=5)
        except ArtefactError:
            refused += 1
        else:
            assert {*result.ids.ravel()} <= {str(row) for row in range(500)}
    assert refused


WRONG = {
    "IVF8,SQ8": [
        {"lists": np.full(500, 8)},
        {"lists": np.full(500, -1)},
        {"lists": np.zeros(499, np.int64)},
        {"centres": np.zeros((9, 8), np.float32)},
        {"centres": np.full((8, 8), np.nan, np.float32)},
        {"ranges": np.zeros(3, np.float32)},
        {"effort": np.array([2**40])},
    ],
    "HNSW4": [
        {"levels": np.full(500, 99, np.int32)},
        {"levels": np.zeros(500, np.int32)},
        {"levels": np.ones(500, np.int32)},
        {"neighbours": np.zeros(3, np.int32)},
        {"entry": np.array([500])},
        {"entry": np.array([-1])},
    ],
}


def test_a_forgery_of_consistent_checksums_is_refused(saved: Path) -> None:
    whole = load(content(saved))
    kind = "HNSW4" if "levels" in whole else "IVF8,SQ8"
    for wrong in WRONG[kind]:
        forge(saved, save(whole | wrong))
        with pytest.raises(ArtefactError, match=r"approximation are|levels that they do not have"):
            SafeIndex.load(saved)
    for name in whole:
        forge(saved, save({key: one for key, one in whole.items() if key != name}))
        with pytest.raises(ArtefactError, match=f"no '{name}'"):
            SafeIndex.load(saved)


@pytest.mark.parametrize("saved", ["HNSW4"], indirect=True)
def test_links_beyond_the_array_are_refused(saved: Path) -> None:
    whole = load(content(saved))
    changed = whole["neighbours"].copy()
    changed[0] = 500
    low = int(np.flatnonzero(whole["levels"] == 1)[0])
    above = whole["neighbours"].copy()
    high = int(np.flatnonzero(whole["levels"] > 1)[0])  # 8 links on the lowest level, then 4 on the next
    above[8 * high + 4 * int((whole["levels"][:high] - 1).sum()) + 8] = low
    for neighbours in (changed, above):
        forge(saved, save(whole | {"neighbours": neighbours}))
        with pytest.raises(ArtefactError, match=r"out of range|levels that they do not have"):
            SafeIndex.load(saved)


@pytest.mark.parametrize("kind", ["HNSW999", "nonsense", "IVF8", "Flat,Flat", 7, None])
def test_a_forged_kind_is_refused(saved: Path, kind: object) -> None:
    forge(saved, content(saved), approximation={"kind": kind, "recall": 1.0, "queries": 5})
    with pytest.raises(ArtefactError, match="cannot be read"):
        SafeIndex.load(saved)
