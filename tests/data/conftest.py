"""Small image files that tests of every source share."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import pytest
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
