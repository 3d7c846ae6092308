"""All rows of benchmarks/peers.py."""

from _peers_guarantees import guarantee_rows, sets_rows
from _peers_labels import label_rows
from _peers_metrics import METRICS
from _peers_posteriors import POSTERIORS
from _peers_row import Row
from _peers_scores import NEIGHBOURS, SCORES


def rows() -> list[Row]:
    """In the order of the tables."""
    return [*SCORES, *NEIGHBOURS, *METRICS, *POSTERIORS, *label_rows(), *sets_rows(), *guarantee_rows()]
