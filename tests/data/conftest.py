"""Small image files that tests of every source share."""

from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import pytest
import s3fs
from moto.server import ThreadedMotoServer
from PIL import Image

Colour = tuple[int, int, int]


def png(colour: Colour | str, size: tuple[int, int] = (8, 6)) -> bytes:
    buffer = BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a folder of files: path -> colour of a PNG, or bytes as they are."""

    def write(files: dict[str, str | bytes], name: str = "photos") -> Path:
        root = tmp_path / name
        for path, content in files.items():
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content if isinstance(content, bytes) else png(content))
        return root

    return write


@pytest.fixture
def archive(tmp_path: Path) -> Callable[..., Path]:
    """Writes a zip file of the same description."""

    def write(files: dict[str, str | bytes], name: str = "photos.zip") -> Path:
        path = tmp_path / name
        with ZipFile(path, "w") as file:
            for member, content in files.items():
                file.writestr(member, content if isinstance(content, bytes) else png(content))
        return path

    return write


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """An S3 server of its own, with one bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an empty bucket; options come from the environment, as they do for users."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    files = s3fs.S3FileSystem()
    files.mkdir("bucket")
    yield "s3://bucket"
    files.rm("bucket", recursive=True)
