import importlib.util
import socket

import numpy as np
import pytest

from dubito.data.photos import photos
from dubito.errors import MissingPackageError


def test_ten_colour_photographs_without_a_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("photos opened a connection")

    monkeypatch.setattr(socket, "socket", refuse)
    result = photos()
    assert [name for name, _ in result] == [
        "astronaut",
        "cat",
        "coffee",
        "rocket",
        "motorcycle",
        "temple",
        "flower",
        "galaxies",
        "retina",
        "tissue",
    ]
    for _, image in result:
        pixels = np.asarray(image).astype(int)
        assert image.mode == "RGB"
        assert min(image.size) >= 224
        assert (pixels[..., 0] != pixels[..., 2]).mean() > 0.3  # colour, not grey


def test_missing_package(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "skimage" else find(name))
    with pytest.raises(
        MissingPackageError,
        match=r'photos needs the file data/astronaut\.png .* skimage; it is not installed\. .* "dubito\[demo\]"',
    ):
        photos()
