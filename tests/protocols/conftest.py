"""Folders of small image files, as in the tests of `data`."""

from tests.data.conftest import folder

__all__ = ["folder"]
