"""How often an approximation finds what the exact search finds, measured on items as queries.

    recall = mean over items of |exact top 10 and approximate top 10| / 10, the item itself not counted

Up to 200 kept items are asked, drawn by lot. An approximation is made of the items, so that new images are served
somewhat worse.
"""

import numpy as np

from dubito.errors import ValueRangeError
from dubito.search.backend import Approximation, Backend

_TOP, _QUERIES = 10, 200


def approximated(backend: Backend, kind: str | None, effort: int | None) -> Approximation:
    """Build an approximation, measure it, and have the backend remember that."""
    if effort is not None and effort < 1:
        raise ValueRangeError(
            f"SafeIndex.approximate: effort must be at least 1; got {effort}. Leave it out for the usual."
        )
    approximation = _measured(backend, backend.approximate(kind, effort))
    backend.remember(approximation)
    return approximation


def _measured(backend: Backend, kind: str) -> Approximation:
    ids, vectors = backend.sample(_QUERIES)
    k = min(_TOP + 1, backend.state().kept)
    near, far = (backend.nearest(vectors, k, exact=exact).ids.tolist() for exact in (True, False))
    shares = [
        len({*one} & {*other} - {own}) / max(1, len({*one} - {own}))
        for own, one, other in zip(ids, near, far, strict=True)
    ]
    return Approximation(kind, float(np.mean(shares)) if k > 1 else 1.0, len(ids))
