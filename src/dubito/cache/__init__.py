"""The cache: one resumable loop over images, memory-mapped shards, and an identity that must agree."""

from dubito.cache.disk import open_cache
from dubito.cache.extract import extract

__all__ = ["extract", "open_cache"]
