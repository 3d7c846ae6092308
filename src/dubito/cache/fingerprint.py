"""The identity of a cache: what it was made from, as short hashes that can be compared part by part."""

import hashlib
import json

from jaxtyping import Int, Shaped
from torch import Tensor

from dubito.data.augment import Augmented
from dubito.data.digest import hash_array, hash_parts
from dubito.data.image_set import ImageSet
from dubito.storage import encode
from dubito.table.provenance import CARRIED, Provenance
from dubito.types import Classifier, Images, Json


def identity(
    model: Classifier,
    images: Images,
    labels: Int[Tensor, "n"] | None,
    space: str | None,
    targets: Shaped[Tensor, "rows ..."] | None = None,
) -> Json:
    """weights, transform, count, ids, images, labels: equal if and only if an extraction would give the same columns.

    Augmented images add the augmentation, targets of the task loss add theirs. The images behind augmented rows and
    their labels are counted and hashed by themselves, so that another seed does not appear as other images. `images`,
    the hash of the contents, is None where it comes from the same reading as the pixels (`ImageSet.hashed_reads`).
    """
    behind = images.images if isinstance(images, Augmented) else images
    hashed = isinstance(images, ImageSet) and images.hashed_reads
    parts = {
        **model_identity(model).model_parts,
        "count": len(behind),
        "ids": hash_parts(*map(encode, behind.ids)).hex(),
        "images": None if hashed else behind.digest(),
        "labels": _digest(None if labels is None else labels[: len(behind)], space),
    }
    if isinstance(images, Augmented):
        parts["augmentation"] = images.describe()
    if targets is not None:
        parts["targets"] = hash_array(targets.numpy()).hex()
    return parts


def model_identity(model: Classifier) -> Provenance:
    """The model's part of a provenance, as it looks after a round trip through JSON."""
    fingerprint = model.fingerprint()
    plain: Json = json.loads(json.dumps({part: fingerprint.get(part) for part in CARRIED}))
    return Provenance(model=model.name, **plain)


def _digest(labels: Int[Tensor, "n"] | None, space: str | None) -> str:
    if labels is None:
        return "none"
    state = hashlib.blake2b(str(space).encode(), digest_size=16)
    state.update(labels.long().contiguous().numpy().tobytes())
    return state.hexdigest()
