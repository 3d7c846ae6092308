"""Safe retrieval: a search that may refuse a query, and never returns an item that is too uncertain."""

from dubito.search.retrieval import NeighbourSet as NeighbourSet
from dubito.search.retrieval import SearchResult as SearchResult
from dubito.search.rule import Rule as Rule
from dubito.search.rule import Thresholds as Thresholds
from dubito.search.safe_index import SafeIndex as SafeIndex

__all__ = ["NeighbourSet", "Rule", "SafeIndex", "SearchResult", "Thresholds"]
