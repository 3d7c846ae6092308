"""A real cluster of three nodes: the same bytes as in one process, whatever is killed."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

import dubito
from dubito.engines import RayEngine
from dubito.errors import EngineError, SkippedImagesWarning
from dubito.storage import RemotePath, sizes_in
from tests.cache.conftest import contents, image_folder

from .conftest import SETTINGS, every_probe

pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning")
_STORE = 80_000_000
_QUICK = {"health_check_period_ms": 1000, "health_check_failure_threshold": 3}
"""A node that is gone is found within seconds; one that is slow to answer has as long as ever."""


@pytest.fixture(scope="module")
def cluster(s3_server, tmp_path_factory):
    import ray  # noqa: PLC0415 (its import takes seconds)
    from ray.cluster_utils import Cluster  # noqa: PLC0415

    settings = pytest.MonkeyPatch()  # nodes keep the environment in which they start
    settings.setenv("AWS_ENDPOINT_URL", s3_server)
    settings.setenv("DUBITO_COPIES", str(tmp_path_factory.mktemp("copies")))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        settings.setenv(name, "test")
    head = {"num_cpus": 1, "object_store_memory": _STORE, "include_dashboard": False, "_system_config": _QUICK}
    with socket.create_server(("127.0.0.1", 0)) as free:
        head["ray_client_server_port"] = free.getsockname()[1]
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=_STORE)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    settings.undo()


class Sleepy:
    """A probe that takes its time, and kills its own process once, where a file is missing."""

    name, price = "sleepy", "some time"

    def __init__(self, seconds: float = 0.0, once: Path | None = None):
        self.seconds, self.once = seconds, once

    def run(self, model, x, label):
        time.sleep(self.seconds)
        if (
            self.once is not None
            and os.getpid() != int(self.once.read_text())
            and not self.once.with_suffix(".dead").exists()
        ):
            self.once.with_suffix(".dead").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"sleepy": x.mean((1, 2, 3))}

    def settings(self):
        return {}


class FailsAway(Sleepy):
    """One that raises in every process but this."""

    name = "fails_away"

    def run(self, model, x, label):
        if os.getpid() != int(self.once.read_text()):
            raise RuntimeError("boom")
        return {"fails_away": x.mean((1, 2, 3))}


def extract(model, images, to, **options):
    return dubito.extract(model, images, to, **{**SETTINGS, **options})


@pytest.fixture
def pid(tmp_path):
    (tmp_path / "driver.pid").write_text(str(os.getpid()))
    return tmp_path / "driver.pid"


def test_every_probe_gives_the_bytes_of_the_local_engine_though_a_worker_is_killed(cluster, model, tmp_path, pid):
    photos = image_folder(tmp_path / "photos", count=44)
    (photos / "a" / "012.png").write_bytes(b"no image")
    with pytest.warns(SkippedImagesWarning, match="1 of 44 images"):
        extract(model, photos, tmp_path / "local", probes=[*every_probe(model), Sleepy()])
    probes = [*every_probe(model), Sleepy(once=pid)]
    with pytest.warns(SkippedImagesWarning, match="1 of 44 images"):
        table = extract(model, photos, tmp_path / "ray", probes=probes, engine=RayEngine(replicas=2))
    assert pid.with_suffix(".dead").exists()
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")
    assert table.skipped[0][0] == "a/012.png"


BY_CLIENT = """
import sys, dubito
from dubito.engines import RayEngine
from tests.cache.conftest import small_network
from tests.engines.conftest import SETTINGS
model = dubito.wrap(small_network(), transform=dubito.Preprocess((16, 16), 16), name="small")
dubito.extract(model, sys.argv[1], sys.argv[2], engine=RayEngine(address=sys.argv[3], replicas=1), **SETTINGS)
"""


def test_a_driver_outside_of_the_cluster(cluster, model, photos, tmp_path):
    extract(model, photos, tmp_path / "local")
    address = f"ray://127.0.0.1:{cluster.head_node._ray_params.ray_client_server_port}"
    command = [sys.executable, "-c", BY_CLIENT, str(photos), str(tmp_path / "ray"), address]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=120)
    if "Starting Ray client server failed" in done.stderr or "start_specific_server" in done.stderr:
        pytest.skip("the machine is so busy that Ray gave up starting its own server for clients")
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_a_probe_that_keeps_failing_is_named(cluster, model, photos, tmp_path, pid):
    engine = RayEngine(replicas=1, retries=1)
    with pytest.raises(EngineError, match=r"probe fails_away, images '.*' to '.*': RuntimeError: boom \(2 attempts\)"):
        extract(model, photos, tmp_path / "ray", probes=[FailsAway(once=pid)], engine=engine)


def test_a_killed_node_costs_nothing(cluster, model, photos, tmp_path):
    """The last test: one node is gone afterwards."""
    extract(model, photos, tmp_path / "local", probes=[Sleepy()])
    victim, cache = cluster.list_all_nodes()[-1], tmp_path / "ray"

    def kill():
        while len(list(cache.glob("sleepy-*.safetensors"))) < 1:
            time.sleep(0.02)
        cluster.remove_node(victim, allow_graceful=False)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    extract(model, photos, cache, probes=[Sleepy(seconds=0.5)], engine="ray")
    killer.join()
    assert len(cluster.list_all_nodes()) == 2
    assert contents(cache) == contents(tmp_path / "local")


def test_nodes_that_share_nothing_but_a_store(cluster, model, photos, bucket, tmp_path):
    source = RemotePath(f"{bucket}/photos")
    for path in photos.rglob("*"):
        if path.is_file():
            (source / path.relative_to(photos).as_posix()).upload(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of images that cannot be decoded
        extract(model, photos, tmp_path / "local")
        extract(model, str(source), f"{bucket}/cache", engine="ray")
    stored, local = RemotePath(f"{bucket}/cache"), tmp_path / "local"
    names = {name for name in sizes_in(stored) if not name.startswith(".lock")}
    assert names == {name for name in sizes_in(local) if not name.startswith(".lock")}  # with checksums of the content
    assert (stored / "manifest.json").read_bytes() == (local / "manifest.json").read_bytes()
