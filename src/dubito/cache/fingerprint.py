"""The identity of a cache: what it was made from, as short hashes that can be compared part by part."""

import hashlib
import json

from jaxtyping import Int
from torch import Tensor

from dubito.types import Classifier, Images, Json

MODEL_PARTS = ("weights", "head", "transform")


def identity(model: Classifier, images: Images, labels: Int[Tensor, "n"] | None, space: str | None) -> Json:
    """weights, transform, count, images, labels: equal if and only if an extraction would give the same columns."""
    return {
        **model_identity(model),
        "count": len(images),
        "images": images.digest(),
        "labels": _digest(labels, space),
    }


def model_identity(model: Classifier) -> Json:
    """The model's part: weights and transform, as they look after a round through JSON."""
    who = model.fingerprint()
    plain: Json = json.loads(json.dumps({part: who.get(part) for part in MODEL_PARTS}))
    return plain


def model_digest(identity: Json) -> str:
    """The model's part as one short hash: two tables with the same one can be scored by the same scores."""
    parts = json.dumps({part: identity.get(part) for part in MODEL_PARTS}, sort_keys=True)
    return hashlib.blake2b(parts.encode(), digest_size=8).hexdigest()


def _digest(labels: Int[Tensor, "n"] | None, space: str | None) -> str:
    if labels is None:
        return "none"
    state = hashlib.blake2b(str(space).encode(), digest_size=16)
    state.update(labels.long().contiguous().numpy().tobytes())
    return state.hexdigest()
