"""Images are read once, their contents are hashed on the way, and a cache of images that have changed is refused."""

import json
import os
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

import dubito
from dubito.cache.shards import forget_shards, write_shard
from dubito.data import Augment, decode
from dubito.errors import CacheError, RepairedShardWarning, SkippedImagesWarning, StaleCacheError
from dubito.storage import write_csv
from tests.cache.conftest import contents, edit_manifest


class Stopping:
    """A probe that is interrupted at one of its batches."""

    name, price = "stopping", "nothing"

    def __init__(self, at=None):
        self.at, self.seen = at, 0

    def run(self, model, x, label):
        self.seen += 1
        if self.seen == self.at:
            raise KeyboardInterrupt
        return {"stopping": torch.zeros(len(x))}

    def settings(self):
        return {}


def extract(model, images, to, **options):
    return dubito.extract(model, images, to, **{"batch_size": 4, "shard_size": 8, "workers": 0, **options})


def stopped(model, images, to, at, **options):
    with pytest.raises(KeyboardInterrupt):
        extract(model, images, to, probes=[Stopping(at)], **options)


def change(folder, number):
    path = sorted(folder.rglob("*.png"))[number]
    Image.new("RGB", (20, 20), "white").save(path)
    return path.relative_to(folder).as_posix()


@pytest.fixture
def reads(monkeypatch):
    """How often each file is read."""
    count, read_regular = Counter(), decode.read_regular
    monkeypatch.setattr(decode, "read_regular", lambda path: count.update([path.name]) or read_regular(path))
    return count


def images_read(reads):
    result = {name: times for name, times in reads.items() if name.endswith(".png")}
    reads.clear()
    return result


def test_each_image_is_read_once(model, folder, tmp_path, reads):
    once = {path.name: 1 for path in folder.rglob("*.png")}
    extract(model, folder, tmp_path / "cache")
    assert images_read(reads) == once
    extract(model, folder, tmp_path / "cache")  # finished: read for the comparison alone
    assert images_read(reads) == once
    extract(model, folder, tmp_path / "cache", probes=[Stopping()])
    assert images_read(reads) == once
    stopped(model, folder, tmp_path / "other", at=4)
    reads.clear()
    extract(model, folder, tmp_path / "other", probes=[Stopping()])
    assert images_read(reads) == once
    assert contents(tmp_path / "other").keys() >= contents(tmp_path / "cache").keys()


def test_the_hash_of_the_contents_is_that_of_the_images(model, folder, tmp_path):
    extract(model, folder, tmp_path / "cache")
    manifest = json.loads((tmp_path / "cache" / "manifest.json").read_text())
    assert manifest["identity"]["images"] == dubito.open_images(folder).digest()
    extract(model, folder, tmp_path / "epochs", epochs=3, augment=Augment(strong="mixup"))
    augmented = json.loads((tmp_path / "epochs" / "manifest.json").read_text())
    assert augmented["identity"]["images"] == manifest["identity"]["images"]


@pytest.mark.parametrize("number", [0, 12, 22], ids=["a finished block", "the block that was stopped", "a later block"])
@pytest.mark.parametrize("epochs", [1, 2])
def test_images_that_change_before_a_resumption(model, folder, tmp_path, number, epochs):
    """Stopped in the second block, after its rows were lost: only images of the first block have been read for good."""
    stopped(model, folder, tmp_path / "cache", at=4, epochs=epochs)
    name = change(folder, number)
    if number < 8:
        with pytest.raises(StaleCacheError, match=rf"the contents of the images \('{name}' has changed\)"):
            extract(model, folder, tmp_path / "cache", probes=[Stopping()], epochs=epochs)
    else:  # nothing of it is in the cache yet
        extract(model, folder, tmp_path / "cache", probes=[Stopping()], epochs=epochs)
        extract(model, folder, tmp_path / "undisturbed", probes=[Stopping()], epochs=epochs)
        assert contents(tmp_path / "cache") == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("number", [0, 22])
def test_a_further_probe_for_changed_images_leaves_the_cache_as_it_was(model, folder, tmp_path, number):
    extract(model, folder, tmp_path / "cache")
    before = contents(tmp_path / "cache")
    name = change(folder, number)
    write_shard(tmp_path / "cache", Stopping().name, 1, {"x": torch.zeros(8)}, {})  # by a worker of another node
    with pytest.raises(StaleCacheError, match=rf"'{name}' has changed"):
        extract(model, folder, tmp_path / "cache", probes=[Stopping()])
    assert contents(tmp_path / "cache") == before
    assert len(dubito.open(tmp_path / "cache")) == 23


def test_lost_rows_are_made_again_from_the_same_images_only(model, folder, tmp_path):
    extract(model, folder, tmp_path / "cache")
    before = contents(tmp_path / "cache")
    next((tmp_path / "cache").glob("rows-00001-*")).unlink()
    forget_shards()
    with pytest.warns(RepairedShardWarning, match=r"rows-00001-.* is missing"):
        extract(model, folder, tmp_path / "cache")
    assert contents(tmp_path / "cache") == before
    next((tmp_path / "cache").glob("rows-00001-*")).unlink()
    change(folder, 0)
    with pytest.warns(RepairedShardWarning), pytest.raises(StaleCacheError, match="the contents of the images"):
        extract(model, folder, tmp_path / "cache")


def test_another_order_and_other_names_are_not_other_contents(model, folder, tmp_path):
    images = dubito.open_images(folder)
    extract(model, images, tmp_path / "cache")
    turned = dubito.data.Subset(images, range(22, -1, -1))
    with pytest.raises(StaleCacheError, match=r"the names or the order of the images \(\w+ there, \w+ here\); the lab"):
        extract(model, turned, tmp_path / "cache")


def test_images_of_a_users_own_class(model, tmp_path):
    class Own:
        name, labels, classes = "own", None, None
        ids = tuple(f"{index}" for index in range(9))
        shade, digests = 0, 0

        def __len__(self):
            return 9

        def read(self, index):
            return Image.new("RGB", (20, 20), (20 * index, self.shade, 0))

        def digest(self):
            self.digests += 1
            return f"digest of {self.shade}"

    own = Own()
    assert len(extract(model, own, tmp_path / "cache")) == 9
    assert own.digests == 1
    own.shade = 7
    with pytest.raises(StaleCacheError, match="the contents of the images"):
        extract(model, own, tmp_path / "cache", probes=[Stopping()])


def test_a_cache_of_an_older_format(model, folder, tmp_path):
    extract(model, folder, tmp_path / "cache")
    edit_manifest(cache := tmp_path / "cache", lambda entries: entries.update(format=1))
    for call in (lambda: dubito.open(cache), lambda: extract(model, folder, cache)):
        with pytest.raises(CacheError, match=r"manifest\.json must be of format 3; got 1\)\. Extract again"):
            call()


def test_names_that_are_not_utf_8(model, tmp_path):
    (tmp_path / "images").mkdir()
    place = os.fsencode(tmp_path / "images")
    rng = np.random.default_rng(0)
    try:
        for name in (b"caf\xe9.png", b"na\xefve.png", b"plain.png"):
            with open(os.path.join(place, name), "wb") as file:  # noqa: PTH123, PTH118 (bytes are no Path)
                Image.fromarray(rng.integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(file, "PNG")
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    with open(os.path.join(place, b"broken\xff.png"), "wb") as file:  # noqa: PTH123, PTH118 (the same)
        file.write(b"no image")
    names = [os.fsdecode(name) for name in (b"caf\xe9.png", b"na\xefve.png", b"plain.png")]
    for workers in (0, 1):
        with pytest.warns(SkippedImagesWarning):
            table = extract(model, tmp_path / "images", tmp_path / f"cache{workers}", workers=workers)
        assert table.id.tolist() == names
    with pytest.warns(SkippedImagesWarning):
        again = extract(model, tmp_path / "images", tmp_path / "cache0", probes=[Stopping()])
    for result in (again, dubito.open(tmp_path / "cache1")):
        assert result.id.tolist() == names
        assert [name for name, _ in result.skipped] == [os.fsdecode(b"broken\xff.png")]
    manifest = json.loads((tmp_path / "cache0" / "manifest.json").read_text())
    assert manifest["skipped"][0][0] == os.fsdecode(b"broken\xff.png")
    written = write_csv(
        tmp_path / "labels.csv", [["id", "label"], *([name, index] for index, name in enumerate(names))]
    )
    assert b"caf\xe9.png,0\n" in written.read_bytes()
    labelled = dubito.open_images(dubito.data.Subset(dubito.open_images(tmp_path / "images"), [1, 2, 3]), written)
    assert labelled.labels.tolist() == [0, 1, 2]
    assert len(dubito.MaxProbability().score(again)) == 3
