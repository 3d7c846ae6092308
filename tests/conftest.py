"""What tests of several rooms share."""

import atexit
import gc
from collections.abc import Generator, Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from jaxtyping import config
from matplotlib.figure import Figure

from . import type_checks

jaxtyping.jaxtyped = type_checks.jaxtyped  # before dubito is imported: with it, many tests take half the time


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What collection makes stays until the end: looking for garbage among it would take seconds, now and later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # or packages in C report leaks
        gc.enable()


@pytest.fixture(scope="module")
def one_thread():
    """For tiny models: on shared cores, waiting for threads would take most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def unchecked():
    """Without the type checks of the tests, which draw from Python's generator."""
    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)


@pytest.fixture
def axes():
    """Axes for `Result.plot`, of a figure without a window, which nobody has to close."""
    return Figure().subplots()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """An S3 server of its own."""
    from moto.server import ThreadedMotoServer  # noqa: PLC0415 (it takes seconds)

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an empty bucket; options come from the environment, as they do for users."""
    import s3fs  # noqa: PLC0415 (it takes seconds)

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("DUBITO_COPIES", str(tmp_path / "copies"))
    files = s3fs.S3FileSystem()
    files.mkdir("bucket")
    yield "s3://bucket"
    files.rm("bucket", recursive=True)
