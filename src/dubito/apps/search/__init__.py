"""Safe retrieval: a search that may refuse a query, and never answers with an item that it does not understand."""

from dubito.apps.search.result import NeighbourSet as NeighbourSet
from dubito.apps.search.result import Retrieved as Retrieved
from dubito.apps.search.rule import Rule as Rule
from dubito.apps.search.rule import Thresholds as Thresholds
from dubito.apps.search.safe_index import SafeIndex as SafeIndex
