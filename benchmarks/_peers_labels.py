"""Rows of label issues: cleanlab's confident learning."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from _peers_data import Columns
from _peers_row import Contender, Row, nothing

import dubito


def label_issues(columns: Columns) -> Contender:
    """Flags, and a ranking of all labels that is not timed."""
    table = dubito.Table(logit=columns["train_logit"], label=columns["noisy_label"])
    wrong = columns["wrong"].numpy()

    def flagged() -> dict[str, Any]:
        return {"rows": dubito.find_label_issues(table).rows, "wrong": wrong, "rank": ranked}

    def ranked() -> np.ndarray:
        probability = np.zeros(len(wrong))
        everything = dubito.find_label_issues(table, least=0)
        probability[everything.rows] = everything.probability
        return probability

    return nothing, flagged


def confident_learning(columns: Columns) -> Contender:
    """In one process: those of its own take longer to start. From logits, as ours."""
    from cleanlab.filter import find_label_issues  # noqa: PLC0415
    from cleanlab.rank import get_label_quality_scores  # noqa: PLC0415

    logit = columns["train_logit"]
    label, wrong = columns["noisy_label"].numpy(), columns["wrong"].numpy()

    def flagged() -> dict[str, Any]:
        p = logit.softmax(1).numpy()
        rows = np.flatnonzero(find_label_issues(label, p, n_jobs=1))
        return {"rows": rows, "wrong": wrong, "rank": lambda: -get_label_quality_scores(label, p)}

    return nothing, flagged


def label_rows() -> Iterator[Row]:
    """Planted errors in synthetic columns, and real ones in CIFAR-10's test labels."""
    columns = {"1,000 classes": "large", "10 classes": "small"}
    columns |= {f"CIFAR-10H, ResNet-{depth}": f"votes{depth}" for depth in (20, 56)}
    for name, place in columns.items():
        yield Row(
            f"label issues, {name}", "cleanlab", label_issues, confident_learning, columns=place, kind="Label issues"
        )
