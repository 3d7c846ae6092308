"""What the Ray engine does about workers that die, blocks that fail and clusters that do not fit, on a stand-in."""

import sys
from types import SimpleNamespace

import pytest

import dubito
from dubito.engines import RayEngine
from dubito.errors import (
    ClusterWarning,
    EngineError,
    FailedBlocksWarning,
    MissingPackageError,
    ModelError,
    SkippedImagesWarning,
    ValueRangeError,
)
from tests.cache.conftest import contents, image_folder

from .conftest import SETTINGS


def extract(model, images, to, **options):
    return dubito.extract(model, images, to, **{**SETTINGS, "engine": "ray", **options})


class Sixth:
    """A probe that raises in the sixth batch that it gets in a process, and later."""

    name, price, runs = "fails", "nothing", 0

    def __init__(self, error: Exception):
        self.error = error

    def run(self, model, x, label):
        type(self).runs += 1
        if type(self).runs > 5:
            raise self.error
        return {"fails": x.mean((1, 2, 3))}

    def settings(self):
        return {}


@pytest.fixture(autouse=True)
def from_the_first_batch():
    Sixth.runs = 0


def test_one_copy_of_the_work_serves_as_many_workers_as_there_is_room_for(model, photos, tmp_path, fake_ray):
    extract(model, photos, tmp_path / "local", engine="local")
    extract(model, photos, tmp_path / "ray")
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    assert len(fake_ray.stored) == 1
    assert len(fake_ray.started) == len(fake_ray.killed) == 3  # one CPU on a node, two on the other
    assert (fake_ray.options["num_cpus"], fake_ray.options["num_gpus"]) == (1, 0)


def test_no_more_workers_than_replicas_or_blocks(model, photos, tmp_path, fake_ray):
    extract(model, photos, tmp_path / "two", engine=RayEngine(replicas=2))
    assert len(fake_ray.started) == 2
    extract(model, photos, tmp_path / "one", shard_size=40)  # two blocks
    assert len(fake_ray.started) == 2 + 2


def test_a_block_is_run_again_when_its_worker_dies(model, photos, tmp_path, fake_ray):
    extract(model, photos, tmp_path / "local", engine="local")
    deaths = iter([True, False, True, True, False, True])
    fake_ray.dies = lambda method, *_: method == "run" and next(deaths, False)
    extract(model, photos, tmp_path / "ray")
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    assert len(fake_ray.started) == 3 + 4


def test_a_block_that_kills_its_workers_is_named(model, photos, tmp_path, fake_ray):
    fake_ray.dies = lambda method, block, *_: method == "run" and block.number == 2
    first, last = (dubito.open_images(photos).ids[row] for row in (16, 23))
    expected = (
        rf"1 blocks failed on Ray: images '{first}' to '{last}': the worker died \(The actor died .* \(3 attempts\)"
    )
    with pytest.raises(EngineError, match=rf"{expected}; failures=0 allows no more\. Finished shards are safe"):
        extract(model, photos, tmp_path / "cache", engine=RayEngine(retries=2))
    assert len(fake_ray.killed) >= 1
    with pytest.warns(FailedBlocksWarning, match=expected), pytest.warns(SkippedImagesWarning, match="8 of 44"):
        table = extract(model, photos, tmp_path / "cache", engine=RayEngine(retries=2, failures=1))
    assert len(table) == 36
    assert [name for name, _ in table.skipped] == list(dubito.open_images(photos).ids[16:24])


def test_nodes_that_die_do_not_count_as_attempts(model, photos, tmp_path, fake_ray, monkeypatch):
    monkeypatch.setattr("dubito.engines.ray._WAIT_SECONDS", 0.0)
    extract(model, photos, tmp_path / "local", engine="local")
    deaths = iter([True] * 9)
    fake_ray.dies = lambda method, block, *_: method == "run" and block.number == 2 and next(deaths, False)
    monkeypatch.setattr(fake_ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "gone"))
    extract(model, photos, tmp_path / "ray", engine=RayEngine(retries=1))
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_an_error_of_a_probe_names_the_probe_and_the_images(model, photos, tmp_path, fake_ray):
    with pytest.raises(EngineError, match=r"probe fails, images '.*' to '.*': KeyError: 'oops' \(2 attempts\)"):
        extract(model, photos, tmp_path / "cache", probes=[Sixth(KeyError("oops"))], engine=RayEngine(retries=1))


def test_errors_of_dubito_arrive_as_they_are_and_are_not_tried_again(model, photos, tmp_path, fake_ray):
    with pytest.raises(ModelError, match=r"^no such layer$"):
        extract(model, photos, tmp_path / "cache", probes=[Sixth(ModelError("no such layer"))])
    assert Sixth.runs == 6


def test_what_does_not_fit_is_seen_before_a_worker_starts(model, photos, tmp_path, fake_ray):
    with pytest.raises(dubito.DubitoError, match="labels"):
        extract(model, photos, tmp_path / "cache", labels=[7] * 44, label_space="model")
    assert fake_ray.started == []


def test_workers_that_die_as_they_start_end_the_extraction(model, photos, tmp_path, fake_ray):
    fake_ray.dies = lambda method, *_: method == "start"
    with pytest.raises(EngineError, match=r"workers of Ray die as they start, 4 in a row: The actor died unexpectedly"):
        extract(model, photos, tmp_path / "cache")


def test_a_worker_that_cannot_see_the_cache_ends_the_extraction(model, photos, tmp_path, fake_ray, monkeypatch):
    put = fake_ray.put

    def elsewhere(work):
        (tmp_path / "cache" / "manifest.json").unlink()
        return put(work)

    fake_ray.put = elsewhere
    with pytest.raises(EngineError, match=r"cannot start on node 10\.0\.0\.7: the folder .* cannot be seen there"):
        extract(model, photos, tmp_path / "cache")


def test_a_worker_that_cannot_see_the_images_ends_the_extraction_though_the_first_are_broken(
    model, tmp_path, fake_ray, monkeypatch
):
    root, put = image_folder(tmp_path / "photos", count=24), fake_ray.put
    paths = [root / name for name in dubito.open_images(root).ids]
    for path in paths[:8]:  # all of the first block
        path.write_bytes(b"broken")

    def elsewhere(work):
        for path in paths:
            path.unlink()
        return put(work)

    fake_ray.put = elsewhere
    with pytest.raises(EngineError, match=rf"image '{paths[8].relative_to(root)}' cannot be seen there as it is here"):
        extract(model, root, tmp_path / "cache")


def test_a_connection_that_is_lost_is_an_error_of_ours(model, photos, tmp_path, fake_ray, monkeypatch):
    def lost(*_, **__):
        raise ConnectionError("Client is shutting down")

    monkeypatch.setattr(fake_ray, "wait", lost)
    with pytest.raises(EngineError, match=r"cluster of Ray is lost \(Client is shutting down\)\. Finished shards"):
        extract(model, photos, tmp_path / "cache")


def test_a_cluster_without_room(model, photos, tmp_path, fake_ray):
    with pytest.raises(EngineError, match=r"no node of the cluster has 1 CPUs and 1 GPUs.*they have 1 CPUs and 0 GPUs"):
        extract(model, photos, tmp_path / "cache", engine=RayEngine(gpus=1))


def test_an_idle_gpu_is_warned_of(model, photos, tmp_path, fake_ray):
    fake_ray.resources = [{"CPU": 4.0, "GPU": 2.0}]
    with pytest.warns(ClusterWarning, match=r"the cluster has 2 GPUs, of which this extraction uses 0\. Pass gpus=1"):
        extract(model, photos, tmp_path / "cache")


def test_without_ray_the_pip_line_is_given(model, photos, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'dubito\[ray\]'"):
        extract(model, photos, tmp_path / "cache")


@pytest.mark.parametrize(
    "wrong",
    [
        {"replicas": 0},
        {"retries": -1},
        {"failures": -1},
        {"cpus": 0},
        {"cpus": 0.00001},
        {"gpus": -1},
        {"gpus": 1.5},
        {"gpus": 0.33333},
    ],
)
def test_settings_are_checked(wrong):
    with pytest.raises(ValueRangeError, match=f"RayEngine: {next(iter(wrong))} must be"):
        RayEngine(**wrong)


def test_shares_that_ray_reserves():
    engine = RayEngine(cpus=1.5, gpus=0.3333)
    assert (engine.cpus, engine.gpus) == (1.5, 0.3333)
