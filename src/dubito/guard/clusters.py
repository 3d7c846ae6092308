"""Classes whose scores are alike share one quantile: class-wise sets for classes that have few images each.

Clustered conformal prediction (Ding et al. 2023): on a random part of the calibration images, every class is described
by quantiles of its scores, and classes are clustered by k-means, weighted by the square root of their images. On the
other part, there is one quantile per cluster. Given the clusters, images of one cluster are exchangeable, so the
coverage holds for the images of every cluster together; for each class, about as far as scores within the cluster are
alike. Classes with fewer images than the coverage needs, and clusters with too few on the other part, get the quantile
of all images of the other part: for them, the coverage holds only on average over all images, and `PredictionSets` says
so. Ours: the first centres are evenly spaced in the order of the median score, so nothing depends on a draw but the
split.
"""

import numpy as np
from jaxtyping import Float64, Int64

_SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
_ROUNDS = 100


def cluster_classes(
    scores: Float64[np.ndarray, "n"],
    label: Int64[np.ndarray, "n"],
    classes: int,
    *,
    clusters: int,
    coverage: float,
    fewest: int,
) -> Int64[np.ndarray, "c"]:
    """The cluster of every class; -1 of classes with fewer than `fewest` images.

    >>> scores, label = np.tile(np.linspace(0, 1, 20), 3), np.repeat(np.arange(3), 20)
    >>> scores[label == 2] += 5
    >>> cluster_classes(scores, label, 4, clusters=2, coverage=0.9, fewest=9).tolist()
    [0, 0, 1, -1]
    """
    counts = np.bincount(label, minlength=classes)
    large = np.flatnonzero(counts >= fewest)
    cluster = np.full(classes, -1, dtype=np.int64)
    if not len(large):
        return cluster
    shares = sorted({*_SHARES, coverage})
    points = np.stack([np.quantile(scores[label == one], shares) for one in large])
    weights = np.sqrt(counts[large])
    k = min(clusters, len(large))
    centres = points[np.argsort(points[:, 0], kind="stable")[((np.arange(k) + 0.5) * len(large) / k).astype(int)]]
    nearest = np.full(len(large), -1)
    for _ in range(_ROUNDS):
        distance = ((points[:, None] - centres[None]) ** 2).sum(-1)
        if np.array_equal(closest := distance.argmin(1), nearest):
            break
        nearest = closest
        for one in np.unique(nearest):
            inside = nearest == one
            centres[one] = np.average(points[inside], axis=0, weights=weights[inside])
    cluster[large] = nearest
    return cluster
