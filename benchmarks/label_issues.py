"""Label issues: `dubito.find_label_issues` against cleanlab's confident learning, in time, recall and precision.

Logits of a classifier whose accuracy is about that of a good network, or with --cache DIR your own, of a cache with
labels of the model's classes. A share of the labels is changed to another class at random. Both get the same
predictions: cleanlab probabilities, dubito logits. `ratio` is our seconds over cleanlab's, the best of the draws each,
both from logits: cleanlab's include the softmax, which `ratio_of_probabilities` leaves out. Recall and precision are
means over the draws of which labels are changed, and so are average precisions of the rankings, cleanlab's by its
default label quality score. `precision_at_count` and `recall_at_count` are ours with as many flags as cleanlab has.

    python benchmarks/label_issues.py                        # 6,000 rows, 10 classes, 5 % wrong: seconds
    python benchmarks/label_issues.py --cache cache/test

The last line is one JSON object. cleanlab is optional: pip install cleanlab.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from _measure import timed

import dubito

try:
    from cleanlab.filter import find_label_issues as confident_learning
    from cleanlab.rank import get_label_quality_scores
    from sklearn.metrics import average_precision_score
except ImportError:
    confident_learning = None


def main() -> None:
    """Parse the command line, plant, look, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--wrong", type=float, default=0.05, help="share of the labels that are changed")
    parser.add_argument("--cache", type=Path, help="a cache with labels of the model's classes")
    parser.add_argument("--draws", type=int, default=5)
    options = parser.parse_args()
    if confident_learning is None:
        print("cleanlab is not installed, so only dubito is measured: pip install cleanlab")
    logit, label = made_up(options.rows, options.classes) if options.cache is None else read(options.cache)
    runs = [one_draw(logit, label, options.wrong, seed) for seed in range(options.draws)]
    result = {key: round(float(np.mean([run[key] for run in runs])), 4) for key in runs[0]}
    seconds = {key: min(run[key] for run in runs) for key in runs[0] if "seconds" in key}
    result |= {key: round(value, 4) for key, value in seconds.items()}
    if confident_learning is not None:
        both = seconds["cleanlab_seconds"] + seconds["softmax_seconds"]
        result["ratio"] = round(seconds["seconds"] / both, 3)
        result["ratio_of_probabilities"] = round(seconds["seconds"] / seconds["cleanlab_seconds"], 3)
    print(json.dumps({"rows": len(label), "classes": logit.shape[1], "wrong": options.wrong, **result}))


def one_draw(logit: np.ndarray, label: np.ndarray, share: float, seed: int) -> dict[str, float]:
    """Change some labels and look for them with both."""
    rng = np.random.default_rng(seed)
    wrong = np.isin(np.arange(len(label)), rng.permutation(len(label))[: round(share * len(label))])
    shift = rng.integers(1, logit.shape[1], len(label))
    noisy = np.where(wrong, (label + shift) % logit.shape[1], label)
    table = dubito.Table(logit=logit, label=noisy)
    issues, seconds = timed(lambda: dubito.find_label_issues(table))
    hit = wrong[issues.rows]
    result = {
        "seconds": seconds,
        "accuracy": issues.accuracy.value,
        "flags": len(issues),
        "recall": hit.sum() / wrong.sum(),
        "precision": hit.mean(),
        "expected_precision": 1 - issues.expected_right,
    }
    if confident_learning is not None:
        p, softmax = timed(lambda: torch.from_numpy(logit).softmax(1).numpy())
        flags, theirs = timed(lambda: confident_learning(noisy, p, n_jobs=1))  # its own processes take longer to start
        everything = dubito.find_label_issues(table, least=0)
        as_many, rank = wrong[everything.rows[: flags.sum()]], np.zeros(len(noisy))
        rank[everything.rows] = everything.probability
        result |= {
            "cleanlab_seconds": theirs,
            "softmax_seconds": softmax,
            "average_precision": average_precision_score(wrong, rank),
            "cleanlab_average_precision": average_precision_score(wrong, -get_label_quality_scores(noisy, p)),
            "cleanlab_flags": flags.sum(),
            "cleanlab_recall": wrong[flags].sum() / wrong.sum(),
            "cleanlab_precision": wrong[flags].mean(),
            "precision_at_count": as_many.mean(),
            "recall_at_count": as_many.sum() / wrong.sum(),
        }
    return result


def made_up(n: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of which about 94 of 100 are right, and overconfident, as those of a network are."""
    rng = np.random.default_rng(0)
    logit = rng.normal(size=(n, classes))
    label = rng.integers(classes, size=n)
    logit[np.arange(n), label] += rng.normal(loc=5.0, scale=2.0, size=n)
    return (2 * logit).astype(np.float32), label


def read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Logits and labels of a cache."""
    table = dubito.open(path)
    return table.whole("logit").float().numpy(), table.label.numpy()


if __name__ == "__main__":
    main()
