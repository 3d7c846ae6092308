"""The identity of a cache: what it was made from, as short hashes that can be compared part by part."""

import hashlib
import json

from jaxtyping import Int, Shaped
from torch import Tensor

from dubito.data.augmented import Augmented
from dubito.data.digest import hash_array
from dubito.types import Classifier, Images, Json

MODEL_PARTS = ("weights", "head", "transform")
CARRIED = (*MODEL_PARTS, "tensors", "operations")
"""Tensors and operations are kept too: they outlast other versions of the packages that weights are hashed with."""


def identity(
    model: Classifier,
    images: Images,
    labels: Int[Tensor, "n"] | None,
    space: str | None,
    targets: Shaped[Tensor, "photos ..."] | None = None,
) -> Json:
    """weights, transform, count, images, labels: equal if and only if an extraction would give the same columns.

    Augmented images add the augmentation, targets of the task loss add theirs. The photos behind augmented rows and
    their labels are counted and hashed by themselves, so that another seed is not told as other images.
    """
    photos = images.images if isinstance(images, Augmented) else images
    parts = {
        **model_identity(model),
        "count": len(photos),
        "images": photos.digest(),
        "labels": _digest(None if labels is None else labels[: len(photos)], space),
    }
    if isinstance(images, Augmented):
        parts["augmentation"] = images.describe()
    if targets is not None:
        parts["targets"] = hash_array(targets.numpy()).hex()
    return parts


def model_identity(model: Classifier) -> Json:
    """The model's part: weights and transform, as they look after a round through JSON."""
    who = model.fingerprint()
    plain: Json = json.loads(json.dumps({part: who.get(part) for part in CARRIED}))
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
