"""Items and queries of four classes, and a search by brute force."""

import numpy as np

from dubito.table import Table

N, D = 200, 8


def data(seed: int, n: int = N) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    label = draw.integers(0, 4, n)
    feature = 2 * np.eye(4, D)[label] + draw.normal(size=(n, D))
    return {"feature": feature, "u": draw.random(n), "label": label}


def table(seed: int, n: int = N, **more) -> Table:
    made = data(seed, n)
    ids = [f"{seed}/{row}.png" for row in range(n)]
    logit = made["feature"][:, :3]
    return Table(feature=made["feature"], logit=logit, label=made["label"], id=ids, name=f"cache/{seed}", **more)


def brute_force(items, queries, k):
    """Indices and cosines of the k nearest, in float64."""
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (items, queries)]
    cosine = unit[1] @ unit[0].T
    order = np.argsort(-cosine, axis=1)[:, :k]
    return order, np.take_along_axis(cosine, order, 1)
