import pickle
from pathlib import Path

import pytest
from fsspec.config import conf

from dubito.errors import StoreError
from dubito.storage import RemotePath, sizes_in, to_path, to_place


@pytest.fixture(scope="module")
def google():
    """A Google Cloud Storage server of its own, with one bucket."""
    from gcp_storage_emulator.server import create_server  # noqa: PLC0415 (it takes seconds)

    server = create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    server.start()
    settings = pytest.MonkeyPatch()
    settings.setenv("STORAGE_EMULATOR_HOST", "http://{}:{}".format(*server._api._httpd.socket.getsockname()))
    settings.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    settings.setitem(conf, "gs", {"token": "anon"})
    yield
    settings.undo()
    server.stop()


@pytest.fixture(params=["memory", "s3", "gs"])
def folder(request, bucket):
    """An empty folder in a store."""
    if request.param == "gs":
        request.getfixturevalue("google")
    place = RemotePath({"memory": "memory://", "s3": bucket, "gs": "gs://bucket"}[request.param]) / "cache"
    yield place
    if place.exists():
        place.remove()


def test_a_remote_path_reads_like_a_path():
    path = RemotePath("s3://bucket/cache/") / "rows-00000.safetensors"
    assert (str(path), path.name, path.suffix) == (
        "s3://bucket/cache/rows-00000.safetensors",
        "rows-00000.safetensors",
        ".safetensors",
    )
    assert path.parent == RemotePath("s3://bucket/cache") == path.parent.absolute() == path.parent.resolve()
    assert path.parent / "../other/a" == RemotePath("s3://bucket/other/a")
    assert pickle.loads(pickle.dumps(path)) == path  # noqa: S301 (our own bytes)
    assert to_place(path) is path
    assert to_place(str(path)) == path
    assert to_place("~/x") == Path("~/x").expanduser()


def test_files_are_written_listed_and_removed(folder):
    assert (folder.exists(), folder.is_dir(), list(folder.iterdir()), sizes_in(folder)) == (False, False, [], {})
    file = folder / "a.json"
    file.write_bytes(b"12345")
    (folder / "deep" / "b").write_bytes(b"1")
    assert (file.is_file(), file.is_dir(), folder.is_dir(), file.stat().st_size) == (True, False, True, 5)
    assert [path.name for path in folder.iterdir()] == ["a.json", "deep"]
    assert sizes_in(folder) == {"a.json": 5, "deep": 0}
    assert (file.read_bytes(), file.read_text()) == (b"12345", "12345")
    with file.open("rb") as opened:
        opened.seek(3)
        assert opened.read() == b"45"
    file.unlink()
    assert not file.exists()
    file.unlink(missing_ok=True)
    (folder / "deep").remove()
    assert sizes_in(folder) == {}
    with pytest.raises(FileNotFoundError, match=r"there is no '.*a\.json'"):
        file.read_bytes()
    with pytest.raises(ValueError, match="mode must be 'rb'"):
        file.open("wb")


def test_of_two_writers_one_creates_a_file(folder):
    if folder.url.startswith("gs:"):
        pytest.skip("the server of this test ignores the condition of a request")
    (folder / "a").create(b"first")
    with pytest.raises(FileExistsError):
        (folder / "a").create(b"second")
    assert (folder / "a").read_bytes() == b"first"


@pytest.mark.filterwarnings("ignore:Sending a large body")  # of gcsfs
def test_files_travel_between_disk_and_store(folder, tmp_path):
    (tmp_path / "a").write_bytes(bytes(3_000_000))
    (folder / "b").upload(tmp_path / "a")
    (folder / "b").download(tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == bytes(3_000_000)


def test_an_address_is_no_path():
    assert to_path("x/y", "to") == Path("x/y")
    with pytest.raises(StoreError, match=r"acquire: to must be on this machine; got 's3://b/x'\. Pass a path\."):
        to_path("s3://b/x", "acquire: to")
