"""Safe retrieval: a search that may refuse a query, and never answers with an item that it does not understand."""

from dubito.search.result import NeighbourSet as NeighbourSet
from dubito.search.result import Retrieved as Retrieved
from dubito.search.rule import Rule as Rule
from dubito.search.rule import Thresholds as Thresholds
from dubito.search.safe_index import SafeIndex as SafeIndex
