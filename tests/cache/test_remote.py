"""Caches in an object store: the same table as on the disk, resumed and repaired like one."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import dubito
from dubito.cache.relabel import label_cache
from dubito.cache.shards import forget_shards
from dubito.errors import CacheBusyError, CacheError, DamagedShardError, StaleCacheError, StoreError
from dubito.storage import RemotePath, forget_copy, local_copy, locked, sizes_in

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = 40


@pytest.fixture
def model():
    torch.manual_seed(0)
    return dubito.wrap(nn.Sequential(nn.Flatten(), nn.Linear(48, 3)), transform=dubito.Preprocess(4))


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (ROWS, 5, 5, 3), dtype=np.uint8)


@pytest.fixture
def extract(model, pixels):
    def run(to, **options):
        settings = {"labels": np.arange(ROWS) % 3, "shard_size": 16, "progress": False, "workers": 0, **options}
        return dubito.extract(model, pixels, to, **settings)

    return run


def contents(folder) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in sizes_in(folder) if not name.startswith(".lock")}


def test_the_same_bytes_as_on_the_disk(extract, bucket, tmp_path):
    remote, local = extract(f"{bucket}/cache"), extract(tmp_path / "cache")
    assert contents(RemotePath(f"{bucket}/cache")) == contents(tmp_path / "cache")
    for column in ("feature", "logit", "loss", "label"):
        assert torch.equal(remote.whole(column), local.whole(column))
    assert remote.id.tolist() == local.id.tolist()
    assert dubito.open(f"{bucket}/cache/").name == f"{bucket}/cache"


def test_a_finished_cache_is_opened_and_extended(extract, bucket, monkeypatch):
    extract(f"{bucket}/cache")
    before = contents(RemotePath(f"{bucket}/cache"))
    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "write_bytes", _only_leases(RemotePath.write_bytes))
        extract(f"{bucket}/cache")
    assert contents(RemotePath(f"{bucket}/cache")) == before
    table = extract(f"{bucket}/cache", probes=[dubito.probes.Noise()])
    assert any(column.startswith("noise") for column in table.columns)


def _only_leases(write):
    def checked(path: RemotePath, data: bytes) -> None:
        assert path.parent.name == ".lock", path
        write(path, data)

    return checked


def test_a_shard_that_is_gone_is_extracted_again(extract, bucket):
    extract(f"{bucket}/cache")
    folder = RemotePath(f"{bucket}/cache")
    before = contents(folder)
    gone = next(name for name in before if name.startswith("forward-00001"))
    (folder / gone).unlink()
    with pytest.raises(DamagedShardError, match=r"is missing\. Delete it, and run the same extraction again"):
        dubito.open(f"{bucket}/cache")
    with pytest.warns(dubito.errors.RepairedShardWarning, match="is missing"):
        extract(f"{bucket}/cache")
    assert contents(folder) == before


def test_a_stopped_extraction_goes_on(extract, bucket, monkeypatch, tmp_path):
    written = []
    write = RemotePath.write_bytes

    def fails(path: RemotePath, data: bytes) -> None:
        if path.suffix == ".safetensors":
            if len(written) == 3:
                raise StoreError("'s3://bucket' cannot be accessed (ConnectionError).")
            written.append(path.name)
        write(path, data)

    monkeypatch.setattr(RemotePath, "write_bytes", fails)
    with pytest.raises(StoreError, match="ConnectionError"):
        extract(f"{bucket}/cache")
    with pytest.raises(CacheError, match="is not finished"):
        dubito.open(f"{bucket}/cache")
    written.clear()
    monkeypatch.setattr(RemotePath, "write_bytes", write)
    extract(f"{bucket}/cache")
    extract(tmp_path / "cache")
    assert contents(RemotePath(f"{bucket}/cache")) == contents(tmp_path / "cache")


def test_damage_is_seen_when_rows_are_read(extract, bucket):
    extract(f"{bucket}/cache")
    folder = RemotePath(f"{bucket}/cache")
    name = next(name for name in contents(folder) if name.startswith("forward-00000"))
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(bytes(data))
    forget_copy(folder / name)
    forget_shards()
    table = dubito.open(f"{bucket}/cache")
    with pytest.raises(DamagedShardError, match=r"has checksum .* Delete it, and run the same extraction again"):
        table.whole("logit")


def test_a_damaged_copy_is_fetched_again(extract, bucket):
    table = extract(f"{bucket}/cache")
    expected = table.whole("logit").clone()
    folder = RemotePath(f"{bucket}/cache")
    name = next(name for name in contents(folder) if name.startswith("forward-00000"))
    copy = local_copy(folder / name)
    copy.write_bytes(copy.read_bytes()[:-1] + b"\x99")
    forget_shards()
    assert torch.equal(dubito.open(f"{bucket}/cache").whole("logit"), expected)


def test_one_writer_at_a_time_and_other_images_are_refused(extract, bucket, model, pixels):
    with (
        locked(RemotePath(f"{bucket}/cache")),
        pytest.raises(CacheBusyError, match="another process is writing into 's3://bucket/cache'"),
    ):
        extract(f"{bucket}/cache")
    extract(f"{bucket}/cache")
    with pytest.raises(StaleCacheError, match=r"cache 's3://bucket/cache' does not match: the contents of the images"):
        dubito.extract(model, 255 - pixels, f"{bucket}/cache", labels=np.arange(ROWS) % 3, progress=False)
    RemotePath(f"{bucket}/photos/a.jpg").write_bytes(b"x")
    with pytest.raises(CacheError, match=r"holds other things \(a\.jpg\)"):
        extract(f"{bucket}/photos")
    with pytest.raises(CacheError, match=r"no cache in 's3://bucket/nothing': there is no such folder"):
        dubito.open(f"{bucket}/nothing")


def test_labels_that_come_later(extract, bucket, tmp_path):
    labels = (np.arange(ROWS) + 1) % 3
    for place in (f"{bucket}/cache", tmp_path / "cache"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            extract(place)
            label_cache(place, labels)
    assert contents(RemotePath(f"{bucket}/cache")) == contents(tmp_path / "cache")


def test_the_same_in_memory(extract, tmp_path, monkeypatch):
    monkeypatch.setenv("DUBITO_COPIES", str(tmp_path / "copies"))
    table = extract("memory://cache")
    assert torch.equal(table.whole("logit"), extract(tmp_path / "cache").whole("logit"))
    RemotePath("memory://cache").remove()


def test_damage_to_a_header_is_repaired(extract, bucket):
    extract(f"{bucket}/cache")
    folder = RemotePath(f"{bucket}/cache")
    before = contents(folder)
    first, second, third = (next(name for name in before if name.startswith(f"forward-{n:05}")) for n in range(3))
    damage = [(first, b"\xff" * 8 + b"x"), (second, b""), (third, before[third][:-5]), (first, before[second])]
    for name, content in damage:
        (folder / name).write_bytes(content)
        with pytest.warns(dubito.errors.RepairedShardWarning, match=name):
            extract(f"{bucket}/cache")
        assert contents(folder) == before
