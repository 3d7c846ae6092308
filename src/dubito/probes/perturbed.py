"""Members by perturbing one model: units dropped at random, other views of the image, copies with Gaussian noise.

    Dropout   p_m = softmax(f(x; mask_m)),   mask_m drawn as in training     (Gal & Ghahramani 2016, arXiv 1506.02142)
    Views     p_m = softmax(f(view_m(x)))                                    (for instance Ayhan & Berens 2018)
    Noise     p_m = softmax(f(x + sigma e_m)),   e_m ~ N(0, I)

For dropout, the module is not put into training mode, which would also change BatchNorm. It stays as it is, and a
TorchFunctionMode turns on the calls of dropout that it makes: dropout in all its forms, that of
`nn.MultiheadAttention`, and with `rate` that of `scaled_dot_product_attention`, whose own rate a module in eval mode
does not show. Stochastic depth (DropPath of timm and transformers, torchvision's StochasticDepth) is drawn by hooks
that are gone after the pass; it keeps its own rate. Dropout inside recurrent layers is not turned on. What is dropped
depends on the seed, the number of the pass and the batch's own numbers, and on nothing that was drawn before: an
extraction that was interrupted gives the same bits.

Views and noisy copies are made from the finished input, on its device. Views show how far a prediction depends on the
framing of the image, not whether the model has seen its like; a model for which left and right differ (digits, text)
must not see a mirrored image. e_m depends on the seed, the number of the copy and the shape of an input alone: all
images get the same noise, so predictions depend neither on the batch nor on their order. Views and amounts are ours.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float, Float32
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchvision.transforms.v2 import functional as pixels

from dubito.errors import ModelError, ValueRangeError
from dubito.probes.forward import Inputs
from dubito.probes.members import EnsembleProbe
from dubito.storage import tensors_digest
from dubito.types import Classifier
from dubito.validate import check_choice, check_number

_PLAIN = ("dropout", "alpha_dropout", "feature_alpha_dropout")
_DROPOUTS: dict[Any, tuple[tuple[str, int], tuple[str, int] | None]] = {
    **{getattr(F, name): (("p", 1), ("training", 2)) for name in (*_PLAIN, "dropout1d", "dropout2d", "dropout3d")},
    **{getattr(torch, name): (("p", 1), ("train", 2)) for name in (*_PLAIN, "feature_dropout")},
    F.multi_head_attention_forward: (("dropout_p", 10), ("training", 13)),
    F.scaled_dot_product_attention: (("dropout_p", 4), None),
}
"""Functions that drop: name and position of their rate, and of their switch, where they have one."""
View = Callable[[Tensor, float], Tensor]
Batch = Float[Tensor, "n channels h w"]

DEFAULT = ("identity", "flip", "zoom_in", "zoom_in+flip", "top_left", "top_right", "bottom_left", "bottom_right")
"""Eight views, so that they divide into sub-ensembles of two and of four."""


@final
@dataclass(frozen=True)
class Dropout(EnsembleProbe):
    """Monte-Carlo dropout: the extracted model several times, dropping other units each time.

    Attributes:
        passes: Number of members.
        rate: Rate of every dropout that the model calls; None for its own, which is zero in many pretrained models.
        seed: Seed of the dropped units.
    """

    passes: int = 10
    rate: float | None = None
    seed: int = 0

    name = "dropout"

    def __post_init__(self) -> None:
        check_number(self.passes, "[2, inf)", by="dropout", what="passes", whole=True, hint="10 are usual.")
        if self.rate is not None:
            check_number(self.rate, "(0, 1)", by="dropout", what="rate", hint="Leave it out for the model's own.")
        super().__post_init__()

    def __len__(self) -> int:
        return self.passes

    def check(self, model: Classifier, x: Inputs) -> None:
        """One pass must call dropout; the model analyses itself in a pass before, undisturbed."""
        model.features(x[:2])
        drop = self._features(model, x[:2], seed=0)[1]
        if not drop.dropped:
            raise ModelError(
                f"dropout: {model.name} has {drop.met} calls of dropout, none with a rate above 0, so all passes would "
                f"be equal. Use Dropout(rate=0.1); where there is no call, load the model with dropout (timm: "
                f"drop_rate=0.2), or use probes.Views(), probes.Tiles() or several models."
            )

    def logits(self, model: Classifier, x: Inputs) -> Iterator[Float[Tensor, "n c"]]:
        """Of each pass."""
        batch = tensors_digest({"x": x})
        for member in range(self.passes):
            z, _ = self._features(model, x, pass_seed(self.seed, member, batch))
            yield model.logits(z)

    def _features(self, model: Classifier, x: Inputs, seed: int) -> "tuple[Tensor, _Dropping]":
        drop = _Dropping(self.rate)
        with _seeded(seed, x.device), drop, _stochastic_depth(model.module, drop):
            return model.features(x), drop


def pass_seed(seed: int, member: int, batch: str) -> int:
    """Of one pass: 63 bits of a hash of the seed, the number of the pass and the digest of the batch."""
    state = hashlib.blake2b(f"{seed}|{member}|{batch}".encode(), digest_size=8)
    return int.from_bytes(state.digest(), "little") >> 1


class _Dropping(TorchFunctionMode):
    """Turns dropout on, and counts it.

    Attributes:
        met: Calls of dropout so far.
        dropped: Those with a rate above zero.
    """

    def __init__(self, rate: float | None) -> None:
        super().__init__()
        self.met = self.dropped = 0
        self._rate = rate

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function; dropout with its switch on, and never in place, because others read its input too."""
        if func not in _DROPOUTS:
            return func(*args, **(kwargs or {}))
        positional, named = list(args), dict(kwargs or {})

        def put(name: str, position: int, value: Any) -> None:
            if len(positional) > position:
                positional[position] = value
            else:
                named[name] = value

        (name, position), switch = _DROPOUTS[func]
        if self._rate is not None:
            put(name, position, self._rate)
        if switch is not None:
            put(*switch, True)
            named.pop("inplace", None)
        self.count(float(positional[position] if len(positional) > position else named.get(name, 0.0)))
        return func(*positional, **named)

    def count(self, rate: float) -> None:
        """One more call of dropout."""
        self.met += 1
        self.dropped += rate > 0


@contextmanager
def _stochastic_depth(module: nn.Module, drop: _Dropping) -> Iterator[None]:
    """Inside, residual branches are left out at random, row by row; in eval mode their layers pass inputs on."""

    def hook(part: nn.Module, _: Any, output: Tensor) -> Tensor:
        rate = float(getattr(part, "drop_prob", getattr(part, "p", 0.0)) or 0.0)
        drop.count(rate)
        rows = 1 if getattr(part, "mode", "row") == "batch" else len(output)
        kept = output.new_empty((rows, *(1 for _ in output.shape[1:]))).bernoulli_(1 - rate)
        scaled = getattr(part, "scale_by_keep", True) and rate < 1
        return output * (kept.div_(1 - rate) if scaled else kept)

    with ExitStack() as hooks:
        for part in module.modules():
            if type(part).__name__.endswith(("DropPath", "StochasticDepth")):
                hooks.callback(part.register_forward_hook(hook).remove)
        yield


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, random numbers of this device follow from the seed; outside, all generators continue undisturbed."""
    others = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(others, device_type=device.type if others else "cuda"):
        torch.default_generator.manual_seed(seed)
        for other in others:
            kind = torch.get_device_module(other)
            # One of several GPUs is seeded by being the current one; where there is only one, there is no such choice.
            with kind.device(other) if hasattr(kind, "device") else nullcontext():
                kind.manual_seed(seed)
        yield


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
        views: Names from `dubito.probes.perturbed.VIEWS`; `+` joins views that are applied one after the other.
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
        """Of each view."""
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
        """Of each copy."""
        for copy in range(self.copies):
            yield model.logits(model.features(self._copy(x, copy)))

    def _copy(self, x: Inputs, copy: int) -> Float[Tensor, "n ..."]:
        return x + (self.sigma * noise(x.shape[1:], self.seed, copy)).to(x)


def _crop(x: Tensor, amount: float, *, down: float, right: float) -> Tensor:
    """A part of the image enlarged to the whole: 0 is the top or the left, 1 the bottom or the right."""
    h, w = x.shape[-2:]
    inner_h, inner_w = max(1, round((1 - amount) * h)), max(1, round((1 - amount) * w))
    top, left = round(down * (h - inner_h)), round(right * (w - inner_w))
    cropped: Tensor = pixels.resized_crop(x, top, left, inner_h, inner_w, [h, w], antialias=True)
    return cropped


def _shift(x: Tensor, amount: float, *, down: int = 0, right: int = 0) -> Tensor:
    """The image moved by half of the amount; what comes in at the border is mirrored."""
    wider, dy, dx = _mirrored_border(x, amount)
    shifted: Tensor = pixels.crop(wider, dy * (1 - down), dx * (1 - right), *x.shape[-2:])
    return shifted


def _zoom_out(x: Tensor, amount: float) -> Tensor:
    """The whole image, smaller, in a border that mirrors it."""
    smaller: Tensor = pixels.resize(_mirrored_border(x, amount)[0], list(x.shape[-2:]), antialias=True)
    return smaller


def _mirrored_border(x: Tensor, amount: float) -> tuple[Tensor, int, int]:
    dy, dx = (round(amount / 2 * side) for side in x.shape[-2:])
    return pixels.pad(x, [dx, dy, dx, dy], padding_mode="reflect"), dy, dx


VIEWS: dict[str, View] = {
    "identity": lambda x, _: x,
    "flip": lambda x, _: pixels.horizontal_flip(x),
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
