"""Safe retrieval: a search that may refuse a query, and never returns an item that is too uncertain."""

from dubito.search.retrieval import NeighbourSet, SearchResult
from dubito.search.rule import Rule, Thresholds
from dubito.search.safe_index import SafeIndex

__all__ = ["NeighbourSet", "Rule", "SafeIndex", "SearchResult", "Thresholds"]
