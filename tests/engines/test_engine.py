"""What holds on every engine, without a cluster: blocks in any order, in copies of the work, give the same bytes."""

import json
import pickle
from dataclasses import dataclass

import pytest
import torch

import dubito
from dubito.engines import LocalEngine, RayEngine, as_engine
from dubito.errors import CacheError, EngineError, ImagesError, SkippedImagesWarning, ValueRangeError
from tests.cache.conftest import contents, image_folder

from .conftest import SETTINGS, every_probe


@dataclass
class CopyingEngine:
    """Every block in a copy of the work, the last one first; those in `out` are left out."""

    out: tuple[int, ...] = ()
    default_threads: int = 1

    def run(self, work, blocks, *, workers=None, progress=True):
        work.check(blocks[0])
        sent = pickle.dumps(work)
        for block in reversed(blocks):
            copy = pickle.loads(sent)  # noqa: S301
            copy.start("cpu")
            if block.number in self.out:
                yield block, work.leave_out(block, "it was too heavy")
            else:
                yield from copy.run([block], workers=workers)


def extract(model, images, to, **options):
    return dubito.extract(model, images, to, **{**SETTINGS, **options})


def test_copies_of_the_work_give_the_same_bytes_with_every_probe(model, photos, tmp_path):
    extract(model, photos, tmp_path / "local", probes=every_probe(model))
    extract(model, photos, tmp_path / "copies", probes=every_probe(model), engine=CopyingEngine())
    assert contents(tmp_path / "copies") == contents(tmp_path / "local")


def test_an_extraction_goes_on_with_another_engine(model, photos, tmp_path):
    extract(model, photos, tmp_path / "local", probes=[dubito.probes.Noise(copies=2)])
    extract(model, photos, tmp_path / "cache")
    for path in (*tmp_path.glob("cache/rows-00002-*"), *tmp_path.glob("cache/forward-00004-*")):
        path.unlink()
    with pytest.warns(dubito.errors.RepairedShardWarning):
        extract(model, photos, tmp_path / "cache", probes=[dubito.probes.Noise(copies=2)], engine=CopyingEngine())
    assert contents(tmp_path / "cache") == contents(tmp_path / "local")


def test_a_cache_keeps_its_number_of_threads(model, photos, tmp_path):
    seen = []

    class Counting:
        name, price = "counting", "nothing"

        def run(self, model, x, label):
            seen.append(torch.get_num_threads())
            return {"counting": x.flatten(1).sum(1)}

        def settings(self):
            return {}

    before = torch.get_num_threads()
    extract(model, photos, tmp_path / "cache", threads=2)
    extract(model, photos, tmp_path / "cache", threads=1, probes=[Counting()])
    assert set(seen) == {2}
    assert torch.get_num_threads() == before
    assert json.loads((tmp_path / "cache" / "manifest.json").read_text())["threads"] == 2


def test_a_block_that_is_left_out_has_its_images_in_skipped(model, photos, tmp_path):
    whole = extract(model, photos, tmp_path / "whole")
    with pytest.warns(SkippedImagesWarning, match="8 of 44 images"):
        table = extract(model, photos, tmp_path / "cache", engine=CopyingEngine(out=(1,)))
    kept = [*range(8), *range(16, 44)]
    assert list(table.id) == [whole.id[row] for row in kept]
    assert torch.equal(table.logit, whole.logit[kept])
    assert [name for name, _ in table.skipped] == list(whole.id[8:16])
    assert table.skipped[0][1] == f"image '{whole.id[8]}' is in a block that failed: it was too heavy"
    assert len(dubito.open(tmp_path / "cache")) == 36


def test_a_block_that_has_rows_cannot_be_left_out(model, photos, tmp_path):
    extract(model, photos, tmp_path / "cache")
    noise = [dubito.probes.Noise(copies=2)]
    with pytest.raises(EngineError, match=r"images 'a/024\.png' to '.*' have rows already .*: it was too heavy\."):
        extract(model, photos, tmp_path / "cache", probes=noise, engine=CopyingEngine(out=(1,)))


def test_a_worker_refuses_a_folder_or_images_that_it_cannot_see(model, tmp_path):
    photos = image_folder(tmp_path / "photos", count=9)

    @dataclass
    class Elsewhere(CopyingEngine):
        lost: str = ""

        def run(self, work, blocks, *, workers=None, progress=True):
            work.check(blocks[0])
            (tmp_path / self.lost).rename(tmp_path / "away")
            work.start(None)
            yield from ()

    with pytest.raises(CacheError, match=r"folder '.*cache' of the cache cannot be seen there\. Choose a folder that"):
        extract(model, photos, tmp_path / "cache", engine=Elsewhere(lost="cache/manifest.json"))
    (tmp_path / "away").unlink()
    with pytest.raises(ImagesError, match=r"image 'a/000\.png' cannot be seen there as it is here: .* Put the images"):
        extract(model, photos, tmp_path / "other", engine=Elsewhere(lost="photos/a/000.png"))


def test_engines_by_name():
    assert as_engine("local", by="extract") == LocalEngine()
    assert as_engine("ray", by="extract") == RayEngine()
    assert as_engine(RayEngine(replicas=2), by="extract").replicas == 2
    with pytest.raises(ValueRangeError, match=r"extract: engine must be one of local, ray; got 'rya'"):
        as_engine("rya", by="extract")
