"""All rows of benchmarks/peers.py."""

from _peers_guarantees import guarantee_rows, set_rows
from _peers_labels import label_rows
from _peers_metrics import metric_rows
from _peers_posteriors import posterior_rows
from _peers_row import Row
from _peers_scores import neighbour_rows, score_rows


def rows() -> list[Row]:
    """In the order of the tables."""
    parts = (score_rows, neighbour_rows, metric_rows, posterior_rows, label_rows, set_rows, guarantee_rows)
    return [row for part in parts for row in part()]
