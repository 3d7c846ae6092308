"""One contender of one row of benchmarks/peers.py, in a process of its own: seconds, memory and answer.

Memory is what resident memory grows by at most, beyond the columns and the imported libraries.
"""

import gc
import os
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _measure import growth_of, seconds_of, timed
from _peers_data import Columns
from _peers_rows import Row, rows
from sklearn.metrics import average_precision_score, roc_auc_score
from threadpoolctl import threadpool_limits


def contend(
    results: Connection,
    name: str,
    side: str,
    *,
    columns: Path,
    warm: Path,
    answer: Path,
    queries: int | None,
    threads: int,
) -> None:
    """Measure one side of a row, and send its seconds, megabytes and figures, or its error.

    Args:
        results: Where they are sent.
        name: The row's.
        side: "ours" or "theirs".
        columns: The folder of the columns.
        warm: A folder of few columns, for a first run that is not measured.
        answer: The file for an answer with one number per row.
        queries: How many rows are scored; None for all.
        threads: How many threads it may use.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    row = {one.name: one for one in rows()}[name]
    try:
        with threadpool_limits(threads):
            if row.kind != "Guarantees":  # hundreds of draws need none
                warm_up(row, side, Columns(warm))
            result, values = measured(row, side, Columns(columns, queries))
        result["figures"] = figures(values, columns, answer)
    except Exception as error:  # whatever it is, the table lists it
        result = {"error": f"{type(error).__name__}: {error}"}
    results.send(result)
    os._exit(0)  # some peers' threads do not end by themselves


def warm_up(row: Row, side: str, columns: Columns) -> None:
    """Compile and initialise what libraries compile and initialise at first use; errors show when it is measured."""
    with suppress(Exception):
        fit, score = getattr(row, side)(columns)
        fit()
        score()


def measured(row: Row, side: str, columns: Columns) -> tuple[dict[str, Any], Any]:
    """Seconds of both steps and megabytes, and the answer."""
    fit, score = getattr(row, side)(columns)
    gc.collect()
    result: dict[str, Any] = {}
    answers: list[Any] = []

    def both() -> None:
        result["fit"] = seconds_of(fit)
        answer, result["score"] = timed(score)
        answers.append(answer)

    result["megabytes"] = growth_of(both, passes=1) / 1e6
    return result, answers[0]


def figures(values: Any, columns: Path, answer: Path) -> dict[str, float]:
    """What an answer comes down to; an array is also written, to be compared with the other side's."""
    if isinstance(values, np.ndarray):
        np.save(answer, values)
        ood = columns / "ood.npy"
        return {"auroc": float(roc_auc_score(np.load(ood)[: len(values)], values))} if ood.exists() else {}
    if "inside" in values:
        inside, label = values["inside"].bool(), values["label"]
        covered = inside.gather(1, label[:, None])
        return {"coverage": float(covered.float().mean()), "size": float(inside.sum(1).float().mean())}
    if "wrong" in values:
        return of_flags(values["wrong"], values["rows"], values["rank"]())
    return {key: float(value) for key, value in values.items()}


def of_flags(wrong: np.ndarray, flagged: np.ndarray, rank: np.ndarray) -> dict[str, float]:
    """Precision and recall of flagged labels, and of the ranking of all labels, highest first.

    At shares of the wrong labels that are in the first part of the ranking, and of as many labels for both sides.
    """
    hits = np.cumsum(wrong[np.argsort(-rank, kind="stable")])
    places = {share: int(np.searchsorted(hits, share / 100 * hits[-1])) for share in (25, 50, 75, 95)}
    counts = {share: len(wrong) * share // 100 for share in (1, 4)}
    return {
        "flags": len(flagged),
        "precision": float(wrong[flagged].mean()) if len(flagged) else 0.0,
        "recall": float(wrong[flagged].sum() / wrong.sum()),
        "average_precision": float(average_precision_score(wrong, rank)),
        **{f"precision_at_recall_{share}": float(hits[at] / (at + 1)) for share, at in places.items()},
        **{f"precision_of_first_{share}_percent": float(hits[n - 1] / n) for share, n in counts.items()},
        **{f"recall_of_first_{share}_percent": float(hits[n - 1] / hits[-1]) for share, n in counts.items()},
    }
