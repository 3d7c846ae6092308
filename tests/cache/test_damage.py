"""Truncated, altered or deleted shards are named, never served, and repaired alone."""

import shutil

import pytest

import dubito
from dubito.cache.shards import forget_shards, shard_at, write_shard
from dubito.errors import DamagedShardError, RepairedShardWarning
from tests.cache.conftest import contents, edit_manifest


def extract(model, images, to, **options):
    return dubito.extract(model, images, to, **{"batch_size": 4, "shard_size": 8, "workers": 0, **options})


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


class Brightness:
    name, price, uses_labels = "brightness", "nothing", False

    def run(self, model, x, label):
        return {"brightness": x.mean((1, 2, 3))}

    def settings(self):
        return {}


def test_a_copy_under_another_name_is_no_shard_of_that_block(model, folder, tmp_path):
    cache = tmp_path / "cache"
    extract(model, folder, cache)
    expected = contents(cache)
    first, second = (sorted(cache.glob(f"forward-0000{block}-*"))[0] for block in (0, 1))
    copy = cache / second.name.replace("00001", "00000")
    second.rename(copy)
    edit_manifest(cache, lambda entries: entries["probes"]["forward"].pop("shards"))
    first.unlink()
    with pytest.warns(RepairedShardWarning, match=rf"{copy.name} was written as forward of block 1: it was renamed"):
        extract(model, folder, cache)
    assert contents(cache) == expected


def test_of_several_shards_of_a_block_the_named_one_is_kept(model, folder, tmp_path):
    cache = tmp_path / "cache"
    extract(model, folder, cache)
    expected = contents(cache)
    shard = shard_at(sorted(cache.glob("forward-00001-*"))[0])
    columns = {key: value + 1 for key, value in shard.read().items()}
    other = write_shard(cache, "forward", 1, columns, {})
    extract(model, folder, cache)
    assert contents(cache) == expected
    write_shard(cache, "forward", 1, columns, {})
    edit_manifest(cache, lambda entries: entries["probes"]["forward"].pop("shards"))  # killed before it was finished
    with pytest.warns(RepairedShardWarning, match=r"is one of 2 of the same images; it is extracted again") as caught:
        extract(model, folder, cache)
    assert len(caught) == 2
    assert not other.path.exists()
    assert contents(cache) == expected


def test_a_shard_that_a_worker_of_another_extraction_wrote_is_never_taken(model, folder, tmp_path):
    """Its driver was killed before its first shard, so its settings did not bind; one of its workers lived on."""
    cache, other = tmp_path / "cache", tmp_path / "other"
    extract(model, folder, cache)
    expected = contents(cache)
    extract(model, folder, other, batch_size=5)
    for kind in ("rows", "forward"):
        (own,) = cache.glob(f"{kind}-00001-*")
        (late,) = other.glob(f"{kind}-00001-*")
        own.unlink()
        shutil.copy(late, cache)
    edit_manifest(cache, lambda entries: [entries["rows"].clear(), entries["probes"]["forward"].pop("shards")])
    with pytest.warns(RepairedShardWarning, match="is of another extraction; it is extracted again") as caught:
        extract(model, folder, cache)
    assert len(caught) == 2
    assert contents(cache) == expected


def test_a_shard_with_other_rows_than_its_images_have(model, folder, tmp_path):
    cache = tmp_path / "cache"
    extract(model, folder, cache)
    expected = contents(cache)
    shard = shard_at(sorted(cache.glob("forward-00001-*"))[0])
    write_shard(cache, "forward", 1, {key: value[:7] for key, value in shard.read().items()}, {})
    shard.path.unlink()
    edit_manifest(cache, lambda entries: entries["probes"]["forward"].pop("shards"))
    with pytest.warns(RepairedShardWarning, match="has 7 rows for 8 images"):
        extract(model, folder, cache)
    assert contents(cache) == expected


def test_a_shard_of_a_probe_that_does_not_run_now(model, folder, tmp_path):
    cache = tmp_path / "cache"
    dubito.extract(model, folder, cache, batch_size=4, shard_size=8, workers=0, probes=[Brightness()])
    expected = contents(cache)
    sorted(cache.glob("brightness-00001-*"))[0].unlink()
    with pytest.raises(DamagedShardError, match="Run the same extraction again with the probe brightness"):
        extract(model, folder, cache)
    with pytest.warns(RepairedShardWarning, match="brightness-00001"):
        dubito.extract(model, folder, cache, workers=0, probes=[Brightness()])
    assert contents(cache) == expected


def test_a_lost_head_is_written_again(model, folder, tmp_path):
    cache, probes = tmp_path / "cache", [dubito.probes.Forward(store_logit=False)]
    dubito.extract(model, folder, cache, workers=0, probes=probes)
    expected = contents(cache)
    sorted(cache.glob("head-*"))[0].unlink()
    with pytest.warns(RepairedShardWarning, match="head-00000"):
        dubito.extract(model, folder, cache, workers=0, probes=probes)
    assert contents(cache) == expected
