"""Truncated, altered or deleted shards are named, never served, and repaired alone."""

import pytest

import dubito
from dubito.cache.disk import forget_shards
from dubito.errors import DamagedShardError, RepairedShardWarning
from tests.cache.conftest import contents


def extract(model, images, to):
    return dubito.extract(model, images, to, batch_size=4, shard_size=8, workers=0)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-50] ^= 1
    path.write_bytes(bytes(data))


def flip_header(path):
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(bytes(data))


def delete(path):
    path.unlink()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (truncate, "bytes, .* were written"),
        (flip, "has checksum .*, its name says"),
        (flip_header, "has checksum .*, its name says"),
        (delete, "is missing"),
    ],
)
def test_a_damaged_shard_is_named_and_repaired(model, folder, tmp_path, harm, message):
    cache = tmp_path / "cache"
    extract(model, folder, cache)
    expected = contents(cache)
    victim = sorted(cache.glob("forward-00001-*"))[0]
    others = {path: path.stat().st_mtime_ns for path in cache.glob("forward-*") if path != victim}
    harm(victim)
    forget_shards()
    with pytest.raises(
        DamagedShardError, match=rf"shard {victim.name} in .* {message}.*redoes this shard and nothing else"
    ):
        dubito.open(cache).whole("logit")
    with pytest.warns(RepairedShardWarning, match=rf"shard {victim.name} .*; it is extracted again"):
        table = extract(model, folder, cache)
    assert len(table.logit) == 23
    assert contents(cache) == expected
    assert {path: path.stat().st_mtime_ns for path in others} == others


def test_rows_of_whole_shards_can_still_be_read(model, folder, tmp_path):
    table = extract(model, folder, tmp_path / "cache")
    flip(sorted((tmp_path / "cache").glob("forward-00002-*"))[0])
    forget_shards()
    assert len(table.rows(slice(0, 16)).logit) == 16
    with pytest.raises(DamagedShardError, match="forward-00002"):
        table.rows(slice(0, 17))
