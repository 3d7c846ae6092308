"""The cache: one resumable loop over images, memory-mapped shards, and an identity that must agree."""

from dubito.cache.extract import extract
from dubito.cache.manifest import open_cache

__all__ = ["extract", "open_cache"]
