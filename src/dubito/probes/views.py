"""Members by changed inputs: one model on several views of the image, or on copies with Gaussian noise.

    Views     p_m = softmax(f(view_m(x)))                               (for instance Ayhan & Berens 2018)
    Noise     p_m = softmax(f(x + sigma e_m)),   e_m ~ N(0, I)

Views and noisy copies are made from the finished input, on its device. Views show how far a prediction depends on the
framing of the image, not whether the model has seen its like; a model for which left and right differ (digits, text)
must not see a mirrored image. e_m depends on the seed, the number of the copy and the shape of an input alone: all
images get the same noise, so predictions depend neither on the batch nor on their order. Views and amounts are ours.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float, Float32
from torch import Tensor

from dubito.errors import ModelError, ValueRangeError
from dubito.probes.dropout import pass_seed
from dubito.probes.members import EnsembleProbe
from dubito.types import Classifier, Inputs
from dubito.validate import check_choice, check_number, check_seed

View = Callable[[Tensor, float], Tensor]
Batch = Float[Tensor, "n channels h w"]

DEFAULT = ("identity", "flip", "zoom_in", "zoom_in+flip", "top_left", "top_right", "bottom_left", "bottom_right")
"""Eight views, so that they divide into sub-ensembles of two and of four."""


def view(x: Batch, name: str, amount: float = 0.125) -> Batch:
    """One view of a batch; several by `+`, from left to right.

    Args:
        x: Finished inputs.
        name: A name from VIEWS, or several joined by `+`, such as "zoom_in+flip".
        amount: Share of each side that is cut off or moved.
    """
    for part in name.split("+"):
        x = VIEWS[part](x, amount)
    return x


@final
@dataclass(frozen=True)
class Views(EnsembleProbe):
    """Test-time augmentation: the extracted model on several views of each image.

    Attributes:
        views: Names from `dubito.probes.views.VIEWS`; `+` joins views that are applied one after the other.
        amount: Share of each side that a view cuts off or moves.
    """

    views: Sequence[str] = DEFAULT
    amount: float = 0.125

    name = "views"

    def __post_init__(self) -> None:
        if isinstance(self.views, str):
            raise ValueRangeError(f"views must be a list of names; got '{self.views}'. Pass at least two of them.")
        add = f"Add some of {', '.join(VIEWS)}."
        check_number(len(self.views), "[2, inf)", by="views", what="their number", hint=add)
        for part in (part for name in self.views for part in name.split("+")):
            check_choice(part, VIEWS, by="views", what="a view")
        check_number(self.amount, "(0, 0.5)", by="views", what="amount", hint="0.125 is an eighth.")
        object.__setattr__(self, "views", tuple(self.views))
        super().__post_init__()

    def __len__(self) -> int:
        return len(self.views)

    def check(self, model: Classifier, x: Inputs) -> None:
        """Inputs must be images."""
        if x.dim() != 4:
            raise ModelError(
                f"views: inputs of {model.name} must be images, (n, channels, height, width); got {tuple(x.shape)}. "
                f"Use probes.Dropout() or several models."
            )

    def logits(self, model: Classifier, x: Inputs) -> Iterator[Float[Tensor, "n c"]]:
        """The logits of one view after the other."""
        for name in self.views:
            yield model.logits(model.features(view(x, name, self.amount)))


def noise(shape: Sequence[int], seed: int, copy: int) -> Float32[Tensor, "..."]:
    """The noise of one copy, for inputs of this shape, of standard deviation 1; on the CPU, the same everywhere."""
    generator = torch.Generator().manual_seed(pass_seed(seed, copy, "noise"))
    return torch.randn(*shape, generator=generator, dtype=torch.float32)


@final
@dataclass(frozen=True)
class Noise(EnsembleProbe):
    """The extracted model on several copies of each image with Gaussian noise, the same for all images.

    Attributes:
        copies: Number of members; the image itself is not one of them.
        sigma: Standard deviation of the noise, in the units of finished inputs, whose own is usually about one.
        seed: Seed of the noise.
    """

    copies: int = 8
    sigma: float = 0.05
    seed: int = 0
    variance: bool = field(default=True, kw_only=True)

    name = "noise"

    def __post_init__(self) -> None:
        check_number(self.copies, "[2, inf)", by="noise", what="copies", whole=True, hint="8 are usual.")
        check_number(self.sigma, "(0, inf)", by="noise", what="sigma", hint="0.05 is usual.")
        check_seed(self.seed, by="noise")
        super().__post_init__()

    def __len__(self) -> int:
        return self.copies

    def check(self, model: Classifier, x: Inputs) -> None:
        """Noise must change the inputs: half precision may round it away."""
        first = x[:1]
        if len(first) and torch.equal(self._copy(first, 0), first):
            raise ValueRangeError(
                f"noise: sigma={self.sigma:g} changes nothing of the inputs of {model.name}, which are {x.dtype} and "
                f"as large as {float(first.abs().max()):g}. Pass a larger sigma."
            )

    def logits(self, model: Classifier, x: Inputs) -> Iterator[Float[Tensor, "n c"]]:
        """The logits of one noisy copy after the other."""
        for copy in range(self.copies):
            yield model.logits(model.features(self._copy(x, copy)))

    def _copy(self, x: Inputs, copy: int) -> Float[Tensor, "n ..."]:
        return x + (self.sigma * noise(x.shape[1:], self.seed, copy)).to(x)


def _crop(x: Tensor, amount: float, *, down: float, right: float) -> Tensor:
    """A part of the image enlarged to the whole: 0 is the top or the left, 1 the bottom or the right."""
    h, w = x.shape[-2:]
    inner_h, inner_w = max(1, round((1 - amount) * h)), max(1, round((1 - amount) * w))
    top, left = round(down * (h - inner_h)), round(right * (w - inner_w))
    return _resized(x[..., top : top + inner_h, left : left + inner_w], h, w)


def _shift(x: Tensor, amount: float, *, down: int = 0, right: int = 0) -> Tensor:
    """The image moved by half of the amount; what comes in at the border is mirrored."""
    wider, dy, dx = _mirrored_border(x, amount)
    top, left = dy * (1 - down), dx * (1 - right)
    return wider[..., top : top + x.shape[-2], left : left + x.shape[-1]]


def _zoom_out(x: Tensor, amount: float) -> Tensor:
    """The whole image, smaller, in a border that mirrors it."""
    return _resized(_mirrored_border(x, amount)[0], *x.shape[-2:])


def _resized(x: Tensor, h: int, w: int) -> Tensor:
    """As torchvision resizes a batch of images: bilinear with antialiasing, in float32 where inputs have less."""
    wide = x if x.dtype == torch.float64 else x.float()
    return F.interpolate(wide, (h, w), mode="bilinear", align_corners=False, antialias=True).to(x)


def _mirrored_border(x: Tensor, amount: float) -> tuple[Tensor, int, int]:
    dy, dx = (round(amount / 2 * side) for side in x.shape[-2:])
    return F.pad(x, (dx, dx, dy, dy), mode="reflect"), dy, dx


VIEWS: dict[str, View] = {
    "identity": lambda x, _: x,
    "flip": lambda x, _: x.flip(-1),
    "zoom_in": partial(_crop, down=0.5, right=0.5),
    "zoom_out": _zoom_out,
    "top_left": partial(_crop, down=0.0, right=0.0),
    "top_right": partial(_crop, down=0.0, right=1.0),
    "bottom_left": partial(_crop, down=1.0, right=0.0),
    "bottom_right": partial(_crop, down=1.0, right=1.0),
    "shift_up": partial(_shift, down=-1),
    "shift_down": partial(_shift, down=1),
    "shift_left": partial(_shift, right=-1),
    "shift_right": partial(_shift, right=1),
}
"""Every view by name: from a batch and an amount to a batch of the same shape."""
