"""The explorer: a table in the browser."""

from dubito.explore.explorer import Explorer, explore

__all__ = ["Explorer", "explore"]
