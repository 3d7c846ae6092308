"""Are labels classes, so that an ensemble has a loss of its own? Targets of a task loss may be shares, or others."""

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from dubito.errors import ValueRangeError


def as_classes(label: Shaped[Tensor, "n ..."] | None, count: int) -> Int64[Tensor, "n"] | None:
    """One class an image, or None where there are none; whole numbers that are no classes are an error."""
    if label is None or label.dim() != 1 or label.is_floating_point() or label.is_complex():
        return None
    if label.dtype == torch.bool:
        return None
    if bool(((label < 0) | (label >= count)).any()):
        raise ValueRangeError(
            f"labels must be classes of the members, 0 to {count - 1}; got {int(label.min())} to {int(label.max())}. "
            f"Give targets of another kind as floats."
        )
    return label.long()
