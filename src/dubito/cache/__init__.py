"""The cache: one resumable loop over images, memory-mapped shards, and an identity that must agree."""

from dubito.cache.disk import open_cache
from dubito.cache.extract import extract
from dubito.cache.plan import Cluster, plan_extraction
from dubito.cache.relabel import label_cache

__all__ = ["Cluster", "extract", "label_cache", "open_cache", "plan_extraction"]
