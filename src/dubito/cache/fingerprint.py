"""The identity of a cache: what it was made from, as short hashes that can be compared part by part."""

import hashlib
import json
from typing import Any

from jaxtyping import Int
from torch import Tensor

from dubito.types import Classifier, Images, Json


def identity(model: Classifier, images: Images, labels: Int[Tensor, "n"] | None, space: str | None) -> Json:
    """weights, transform, count, images, labels: equal if and only if an extraction would give the same columns."""
    who = model.fingerprint()
    parts: dict[str, Any] = {
        "weights": who["weights"],
        "transform": who["transform"],
        "count": len(images),
        "images": images.digest(),
        "labels": _digest(labels, space),
    }
    plain: Json = json.loads(json.dumps(parts))
    return plain


def _digest(labels: Int[Tensor, "n"] | None, space: str | None) -> str:
    if labels is None:
        return "none"
    state = hashlib.blake2b(str(space).encode(), digest_size=16)
    state.update(labels.long().contiguous().numpy().tobytes())
    return state.hexdigest()
