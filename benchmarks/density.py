"""Gaussian mixtures: `dubito.Density` against scikit-learn's GaussianMixture, and scoring against triangular solves.

Fitting: both run the same number of EM iterations from the same start, the classes, on the same seeded rows, in one
process, in turns; the start itself is on our clock and not on theirs. `ratio` is our seconds over theirs, the median
over the turns. `difference` is that of the mean log-likelihoods of the last iteration. How much work can be saved
depends on the clusters: `ratio` is for clusters that lie apart, `ratio_overlapping` for those that share one covariance
and have nearly the same mean, where every component counts for every row (two iterations, one turn).
Scoring: `scoring_ratio` is our seconds over those of the bare triangular solves L_k y = z - mu_k for the same rows and
components, in blocks of the same size, by torch.

    python benchmarks/density.py                # 50,000 x 512, ten full covariances: some minutes on two cores
    python benchmarks/density.py --rows 5000    # a minute

The last line is one JSON object.
"""

import argparse
import json
import statistics
import warnings
from typing import Any

import numpy as np
import torch
from _measure import seconds_of, timed
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from torch import Tensor

from dubito.scores.density import Density
from dubito.table import Table

REGULARISATION = 1e-5
BLOCK = 2048
APART, OVERLAPPING = 1.0, 0.1
"""Of the class means, in deviations of one feature."""


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--components", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2, help="of which the median counts")
    options = parser.parse_args()

    size = options.rows, options.width, options.components
    train = clustered(*size, APART, shared=False)
    result = race(train, options.iterations, options.turns)
    result.update(scoring(train, options.turns))
    print("clusters that overlap:", flush=True)
    overlapping = race(clustered(*size, OVERLAPPING, shared=True), iterations=2, turns=1)
    result.update({f"{name}_overlapping": value for name, value in overlapping.items()})
    print(json.dumps({**vars(options), "threads": torch.get_num_threads(), **result}))


def race(train: Table, iterations: int, turns: int) -> dict[str, Any]:
    """Fit both, in turns."""
    start = Density(max_iterations=0, regularisation=REGULARISATION).fit(train).mixture
    rows, precisions = train.feature.double().numpy(), (start.factors @ start.factors.mT).numpy()
    ours, theirs = [], []
    for turn in range(1, turns + 1):
        density = Density(max_iterations=iterations, tolerance=0.0, regularisation=REGULARISATION)
        ours.append(seconds_of(lambda d=density: d.fit(train)))
        print(f"turn {turn}: dubito {ours[-1]:.1f} s", flush=True)
        reference = GaussianMixture(
            len(start.weights),
            max_iter=iterations,
            tol=0.0,
            reg_covar=REGULARISATION,
            weights_init=start.weights.numpy(),
            means_init=start.means.numpy(),
            precisions_init=precisions,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            theirs.append(seconds_of(lambda r=reference: r.fit(rows)))
        print(f"turn {turn}: scikit-learn {theirs[-1]:.1f} s", flush=True)
    some = train.rows(slice(0, 1000))
    scores = density.score(some).numpy() + reference.score_samples(some.feature.double().numpy())
    return {
        "seconds": round(statistics.median(ours), 3),
        "sklearn_seconds": round(statistics.median(theirs), 3),
        "ratio": round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3),
        "log_likelihood": density.log_likelihoods_[-1],
        "difference": abs(density.log_likelihoods_[-1] - float(reference.lower_bound_)),
        "largest_score_difference": float(np.abs(scores).max()),
    }


def scoring(train: Table, turns: int) -> dict[str, Any]:
    """Score the rows, and solve the same triangular systems with nothing around them."""
    density = Density(max_iterations=0, regularisation=REGULARISATION).fit(train)
    lower = torch.linalg.cholesky(density.mixture.covariances())
    blocks = train.feature.double().split(BLOCK)
    ours, bare = [], []
    for _ in range(turns):
        _, seconds = timed(lambda: density.score(train))
        ours.append(seconds)
        bare.append(seconds_of(lambda: [solved(block, density.means_, lower) for block in blocks]))
    return {
        "scoring_seconds": round(statistics.median(ours), 3),
        "solving_seconds": round(statistics.median(bare), 3),
        "scoring_ratio": round(statistics.median(a / b for a, b in zip(ours, bare, strict=True)), 3),
    }


def solved(block: Tensor, means: Tensor, lower: Tensor) -> list[Tensor]:
    """The whitened rows of every component."""
    return [
        torch.linalg.solve_triangular(factor, (block - mean).T, upper=False)
        for mean, factor in zip(means, lower, strict=True)
    ]


def clustered(n: int, d: int, k: int, apart: float, *, shared: bool) -> Table:
    """Rows like features: an eighth of the directions has most of the variance, of each class its own or not."""
    generator = torch.Generator().manual_seed(0)
    label = torch.arange(n) % k
    means = apart * torch.randn(k, d, generator=generator)
    bases = torch.randn(k, d // 8, d, generator=generator) / (d // 8) ** 0.5
    feature = 0.3 * torch.randn(n, d, generator=generator)
    for c in range(k):
        rows = label == c
        feature[rows] += (
            means[c] + torch.randn(int(rows.sum()), d // 8, generator=generator) @ bases[0 if shared else c]
        )
    return Table(feature=feature, label=label)


if __name__ == "__main__":
    main()
