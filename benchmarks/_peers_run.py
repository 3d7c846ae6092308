"""One contender of one row of benchmarks/peers.py, in a process of its own: seconds, memory and answer.

    python _peers_run.py ROW SIDE FOLDER --warm FOLDER --queries N --threads 2 --answer FILE.npy

SIDE is ours or theirs. The last line is one JSON object. Memory is what resident memory grows by at most, beyond the
columns and the imported libraries.
"""

import argparse
import gc
import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _measure import growth_of, seconds_of, timed
from _peers_data import Columns
from _peers_rows import Row, rows
from sklearn.metrics import average_precision_score, roc_auc_score
from threadpoolctl import threadpool_limits


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("row")
    parser.add_argument("side", choices=("ours", "theirs"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--warm", type=Path, required=True, help="few columns for a first run that is not measured")
    parser.add_argument("--queries", type=int, help="how many rows are scored")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--answer", type=Path, required=True, help="where an array goes")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    row = {one.name: one for one in rows()}[options.row]
    with threadpool_limits(options.threads):
        if options.warm != options.folder:
            once(row, options.side, Columns(options.warm))
        result, answer = measured(row, options.side, Columns(options.folder, options.queries))
    if isinstance(answer, np.ndarray):
        np.save(options.answer, answer)
        ood = options.folder / "ood.npy"
        if ood.exists():
            result["figures"] = {"auroc": float(roc_auc_score(np.load(ood)[: len(answer)], answer))}
    else:
        result["figures"] = figures(answer)
    print(json.dumps(result), flush=True)
    os._exit(0)  # some peers' threads do not end by themselves


def once(row: Row, side: str, columns: Columns) -> None:
    """Import and compile what is imported and compiled at first use; what few rows do not allow is no failure yet."""
    try:
        fit, score = getattr(row, side)(columns)
        fit()
        score()
    except Exception as error:  # whatever it is, the measurement will show it
        print(f"on few rows: {type(error).__name__}: {error}")


def measured(row: Row, side: str, columns: Columns) -> tuple[dict[str, Any], Any]:
    """Seconds of both steps and megabytes, and the answer."""
    fit, score = getattr(row, side)(columns)
    gc.collect()
    result: dict[str, Any] = {}
    kept: list[Any] = []

    def both() -> None:
        result["fit"] = seconds_of(fit)
        answer, result["score"] = timed(score)
        kept.append(answer)

    result["megabytes"] = growth_of(both, passes=1) / 1e6
    return result, kept[0]


def figures(answer: dict[str, Any]) -> dict[str, float]:
    """What an answer that is no array comes down to."""
    if "inside" in answer:
        inside, label = answer["inside"].bool(), answer["label"]
        covered = inside.gather(1, label[:, None])
        return {"coverage": float(covered.float().mean()), "size": float(inside.sum(1).float().mean())}
    if "wrong" in answer:
        wrong, flagged = answer["wrong"], answer["rows"]
        return {
            "flags": len(flagged),
            "precision": float(wrong[flagged].mean()) if len(flagged) else 0.0,
            "recall": float(wrong[flagged].sum() / wrong.sum()),
            "average_precision": float(average_precision_score(wrong, answer["rank"]())),
            **at_recall(wrong, answer["rank"]()),
            **at_count(wrong, answer["rank"]()),
        }
    return {key: float(value) for key, value in answer.items()}


def at_recall(wrong: np.ndarray, rank: np.ndarray) -> dict[str, float]:
    """Points of the precision-recall curve: the precision where so many of the wrong labels are found."""
    hits = np.cumsum(wrong[np.argsort(-rank, kind="stable")])
    places = [int(np.searchsorted(hits, share * hits[-1])) for share in (0.25, 0.5, 0.75, 0.95)]
    shares = ("25", "50", "75", "95")
    return {
        f"precision_at_recall_{share}": float(hits[at] / (at + 1)) for share, at in zip(shares, places, strict=True)
    }


def at_count(wrong: np.ndarray, rank: np.ndarray) -> dict[str, float]:
    """Precision and recall of as many flags for both sides: the first 1 and 4 % of the ranking."""
    order, found = np.argsort(-rank, kind="stable"), {}
    for share in (1, 4):
        hits = wrong[order[: len(wrong) * share // 100]]
        found |= {
            f"precision_of_first_{share}_percent": float(hits.mean()),
            f"recall_of_first_{share}_percent": float(hits.sum() / wrong.sum()),
        }
    return found


if __name__ == "__main__":
    main()
