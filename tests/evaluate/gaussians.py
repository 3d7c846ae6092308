"""A labelled table of five Gaussian classes, as a model with an accuracy between 30 and 90 % sees it."""

import torch

from dubito.evaluate.evaluate import Evaluation, evaluate
from dubito.scores import MaxProbability, Neighbours
from dubito.table import Table

N, C, D = 240, 5, 6
QUICK = {"resamples": 60}


def data(n: int = N, seed: int = 0, shift: float = 0.0) -> Table:
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(C, (n,), generator=generator)
    feature = 1.5 * torch.eye(C, D)[label] + torch.randn(n, D, generator=generator) + shift
    return Table(feature=feature, logit=2 * feature[:, :C], label=label, name="cache/test")


def evaluated(table: Table) -> Evaluation:
    """A score of logits, one that learned, and an array, by every metric."""
    scores = {
        "max_probability": MaxProbability(),
        "neighbours": Neighbours(k=3).fit(data(100, seed=5)),
        "array": torch.linspace(0, 1, N),
    }
    return evaluate(scores, table, **QUICK)
