import pickle
from pathlib import Path

import fsspec
import pytest

from dubito.errors import StoreError
from dubito.storage import RemotePath, sizes_in, to_path, to_place


@pytest.fixture(params=["memory", "s3"])
def folder(request, bucket):
    """An empty folder in a store."""
    yield RemotePath(f"{bucket}/cache/" if request.param == "s3" else "memory://cache")
    fsspec.filesystem("memory").rm("/", recursive=True)


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
    (folder / "a").create(b"first")
    with pytest.raises(FileExistsError):
        (folder / "a").create(b"second")
    assert (folder / "a").read_bytes() == b"first"


def test_files_travel_between_disk_and_store(folder, tmp_path):
    (tmp_path / "a").write_bytes(bytes(3_000_000))
    (folder / "b").upload(tmp_path / "a")
    (folder / "b").download(tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == bytes(3_000_000)


def test_an_address_is_no_path():
    assert to_path("x/y", "to") == Path("x/y")
    with pytest.raises(StoreError, match=r"acquire: to must be on this machine; got 's3://b/x'\. Pass a path\."):
        to_path("s3://b/x", "acquire: to")
