"""Wrong normalisation, channel order or input size: is the model clearly better with other inputs than its own?

A transform that normalises is  x = a v + b  in every channel, with v the pixel in 0..1. `measured` finds a and b from
the outside, by giving it plain black, white, grey and red images. Then any other normalisation is an affine map of its
inputs, and nothing has to be decoded twice. Only images that all have one size, other than the model's input size, are
prepared again, at their own size: a network that was fine-tuned on small images runs at any size, and no error reveals
the wrong one.

With labels, an alternative wins if it is right on more of the same images: McNemar's exact test, corrected for the
number of alternatives, and a gain of at least two points. Without labels nobody knows what is right. Then it must be
more confident on most images by far, and its predictions must be more informative (H(mean p) - mean H(p)): inputs that
are far too large make a model sure of one class for everything, which says nothing. Its features must be about as long
as before, because longer ones make any network more confident. That is reported as suspicious, never as wrong. So is an
input size that is better by a few points: many networks gain that at a size somewhat above their own.
"""

from dataclasses import replace
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor

from dubito.audit.finding import Finding, NotChecked, Outcome, Severity, below, binomial_tail, paired_gain, percent
from dubito.models.transform import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from dubito.types import Json, Transform

TRANSFORM = "wrong normalisation or channel order"
SIZE = "wrong input size"
OWN = "its own transform"
SWAPPED = "its own, red and blue swapped"
NO_CLASS = -(1 << 40)
"""Below every label, also below shifted ones."""
_GAIN, _ALPHA = 0.02, 0.01
_CONFIDENCE_GAIN, _MOST_IMAGES, _INFORMATION_GAIN, _ALPHA_UNLABELLED = 0.05, 0.6, 0.25, 1e-4
_LONGER = 2.0
_SIZE_GAIN, _MOST_PIXELS = 0.1, 4
_SIDE, _GREY = 512, 128

_NORMALISATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "ImageNet mean and std": (IMAGENET_MEAN, IMAGENET_STD),
    "mean 0.5 and std 0.5": ((0.5,) * 3, (0.5,) * 3),
    "(x - 127) / 128": ((127 / 255,) * 3, (128 / 255,) * 3),
    "pixels 0..1": ((0.0,) * 3, (1.0,) * 3),
    "pixels 0..255": ((0.0,) * 3, (1 / 255,) * 3),
}
"""Mean and std of pixels in 0..1, red first."""


class Scale(NamedTuple):
    """Inputs are `slope * v + start`, v in 0..1; `bgr` if blue comes first."""

    slope: Float[Tensor, "3"]
    start: Float[Tensor, "3"]
    bgr: bool


class Alternative(NamedTuple):
    """Another input in place of x: `x * slope + start`, after the channels have been reversed if `swap`.

    Attributes:
        name: Its name in findings.
        repair: What to change to get it.
        scale: Slope and start; None if inputs keep their scale.
        swap: Whether to reverse the channels.
        check: The fault that it would repair.
    """

    name: str
    repair: str
    scale: tuple[Float[Tensor, "3"], Float[Tensor, "3"]] | None = None
    swap: bool = False
    check: str = TRANSFORM

    def __call__(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
        """The inputs that the model would have got."""
        x = x.flip(1) if self.swap else x
        if self.scale is None:
            return x
        slope, start = (value.to(x.device, x.dtype).view(1, 3, 1, 1) for value in self.scale)
        return x * slope + start


@final
class TransformedPredictions:
    """What the model predicts under one transform, gathered batch by batch."""

    def __init__(self, alternative: Alternative) -> None:
        self.alternative = alternative
        self._batches: list[tuple[Tensor, ...]] = []
        self._total: Tensor | float = 0.0

    def add(self, feature: Float[Tensor, "n d"], logit: Float[Tensor, "n c"], usable: Bool[Tensor, "n"]) -> None:
        """Add the usable rows of a batch; those whose logits are not finite here count as undecided.

        Args:
            feature: The features under this transform.
            logit: The logits under this transform.
            usable: Rows that are finite under the model's own transform: the same for all, so that all are comparable.
        """
        feature, logit = feature[usable], logit[usable]
        finite = logit.isfinite().all(-1)
        p = logit.double().masked_fill(~finite[:, None], 0).softmax(-1)
        length = feature.float().norm(dim=-1)
        predicted = logit.argmax(-1).masked_fill(~finite, NO_CLASS)
        entropy = torch.special.entr(p).sum(-1)
        self._batches.append((predicted.cpu(), p.amax(-1).cpu(), entropy.cpu(), length[length.isfinite()].cpu()))
        self._total = self._total + p.sum(0).cpu()

    @property
    def predicted(self) -> Int[Tensor, "n"]:
        """The class of every usable image; NO_CLASS where logits are not finite."""
        return torch.cat([batch[0] for batch in self._batches])

    @property
    def confidence(self) -> Float[Tensor, "n"]:
        """The largest probability of every usable image."""
        return torch.cat([batch[1] for batch in self._batches])

    @property
    def information(self) -> float:
        """H(mean p) - mean H(p) in nats: high if predictions are confident and differ from one another."""
        entropy = torch.cat([batch[2] for batch in self._batches])
        mean = torch.as_tensor(self._total) / max(len(entropy), 1)
        return float(torch.special.entr(mean).sum() - entropy.mean()) if len(entropy) else 0.0

    @property
    def norm(self) -> float:
        """The mean length of a usable feature; zero if none is finite."""
        lengths = torch.cat([batch[3] for batch in self._batches])
        return float(lengths.mean()) if len(lengths) else 0.0


def check_transform(predictions: list[TransformedPredictions], labels: Int[Tensor, "n"] | None) -> Outcome:
    """Compare the model's own transform, which comes first, with the alternatives.

    Args:
        predictions: By transform.
        labels: Of the usable images, to compare accuracies; without labels, confidences are compared.
    """
    own, *others = predictions
    if not others:
        return NotChecked("inputs are not colour images")
    if len(own.predicted) == 0:
        return NotChecked("no image has finite logits")
    better = _by_confidence(own, others) if labels is None else _by_accuracy(own, others, labels)
    if better is None:
        return []
    winner, gain, evidence = better
    evidence = {"better": winner.name, **evidence}
    evidence["alternatives"] = {
        one.alternative.name: {
            "accuracy": None if labels is None else float((one.predicted == labels).double().mean()),
            "confidence": float(one.confidence.mean()),
            "information": one.information,
            "feature_norm": one.norm,
        }
        for one in predictions
    }
    what = f"With {winner.name} instead of its own transform, {gain}"
    slight = (
        winner.check == SIZE and labels is not None and evidence["accuracy_then"] < evidence["accuracy"] + _SIZE_GAIN
    )
    severity: Severity = "suspicious" if labels is None or slight else "wrong"
    return [Finding(winner.check, severity, what, winner.repair, evidence)]


def alternatives(x: Float[Tensor, "n ..."], scale: Scale | None) -> list[Alternative]:
    """The model's own transform first, then others that differ; only the first if inputs are not colour images."""
    own = Alternative(OWN, "")
    if x.dim() != 4 or x.shape[1] != 3:
        return [own]
    # The channels of the image reversed, each then scaled as its new place is.
    order = "" if scale is None else f'channels="{"RGB" if scale.bgr else "BGR"}" in dubito.Preprocess, or '
    repair = f"Reverse the channels: {order}image[..., ::-1] where images are read (OpenCV reads BGR)."
    if scale is None:
        return [own, Alternative(SWAPPED, repair, swap=True)]
    slope = scale.slope / scale.slope.flip(0)
    swapped = Alternative(SWAPPED, repair, (slope, scale.start - scale.start.flip(0) * slope), swap=True)
    return [own, *(other for name in _NORMALISATIONS if (other := _normalised(name, scale))), swapped]


@final
class SizeOnly:
    """An image becomes its height and width."""

    draws = False

    def prepare(self, image: Image.Image) -> Int[Tensor, "2"]:
        """Height and width."""
        return torch.tensor([image.height, image.width])

    def finish(self, batch: Tensor) -> Tensor:
        """The batch as it is."""
        return batch

    def describe(self) -> Json:
        """Its kind: it has no settings."""
        return {"kind": "size"}


def own_size(own: Preprocess, sizes: set[tuple[int, ...]]) -> tuple[Alternative, Preprocess] | NotChecked | None:
    """The images' own size as the input size, and the transform for it; None if that is the model's input size.

    Args:
        own: The model's transform.
        sizes: Heights and widths of the images.
    """
    if len(sizes) > 1:
        return NotChecked("images differ in size")
    ((height, width),) = sizes
    if own.size == (height, width):
        return None
    if height * width > _MOST_PIXELS * own.size[0] * own.size[1]:
        return NotChecked("images are far larger than inputs")
    preprocess = f"dubito.Preprocess(..., size=({height}, {width}), resize={min(height, width)})"
    repair = f"Load the model with that input size: transform={preprocess}."
    name = f"inputs of {height}x{width}, the size of the images,"
    return Alternative(name, repair, check=SIZE), replace(own, size=(height, width), resize=None)


def measured(transform: Transform) -> Scale | None:
    """The scale of a transform; None if it does not treat every channel of a plain image alike and by itself."""
    try:
        black, white, grey, red = (
            _plain(transform, colour) for colour in ((0, 0, 0), (255,) * 3, (_GREY,) * 3, (255, 0, 0))
        )
    except Exception:  # a user's transform may raise anything on an image that it was not made for
        return None
    slope = white - black
    if any(value.shape != (3,) for value in (black, white, grey, red)) or bool((slope.abs() < 1e-6).any()):
        return None
    if bool(((grey - black) / slope - _GREY / 255).abs().max() > 0.01):
        return None
    share = (red - black) / slope
    for bgr in (False, True):
        if bool((share - torch.eye(3)[2 if bgr else 0]).abs().max() < 0.01):
            return Scale(slope, black, bgr)
    return None


def guessed(x: Float[Tensor, "n ..."]) -> Scale | None:
    """The scale of ready inputs: known only where they look like bare pixels, 0..1 or 0..255."""
    finite = x[x.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)
    if low < 0 or high > 255 or high == 0:
        return None
    return Scale(torch.full((3,), 1.0 if high <= 1 else 255.0), torch.zeros(3), bgr=False)


def _normalised(name: str, scale: Scale) -> Alternative | None:
    """Back to v = (x - start) / slope, and from there to (v - mean) / std; None where inputs stay as they are."""
    mean, std = (torch.tensor(values[::-1] if scale.bgr else values) for values in _NORMALISATIONS[name])
    numbers = [f"({', '.join(f'{value:.4g}' for value in values.tolist())})" for values in (mean, std)]
    preprocess = f"dubito.Preprocess(..., mean={numbers[0]}, std={numbers[1]})"
    repair = f"Normalise with {name}: transform={preprocess}, on pixels in 0..1."
    slope, start = 1 / (scale.slope * std), -(scale.start / scale.slope + mean) / std
    same = float(torch.maximum((slope - 1).abs(), start.abs()).max()) < 1e-3  # of a normalised unit
    return None if same else Alternative(name, repair, (slope, start))


def _plain(transform: Transform, colour: tuple[int, ...]) -> Float[Tensor, "c"]:
    """What an image of one colour becomes: the median, because a crop may add a border."""
    image = Image.new("RGB", (_SIDE, _SIDE), colour)
    x = transform.finish(transform.prepare(image)[None]).detach().float().cpu()
    return x[0].flatten(1).median(1).values


def _by_accuracy(
    own: TransformedPredictions, others: list[TransformedPredictions], labels: Int[Tensor, "n"]
) -> tuple[Alternative, str, Json] | None:
    """The alternative that is right most often, by how much, and the numbers; None if it is not clearly better."""
    mine = own.predicted == labels
    gains = [(*paired_gain(mine, other.predicted == labels, tests=len(others)), other) for other in others]
    clear = [one for one in gains if one[0] >= _GAIN and one[1] < _ALPHA]
    if not clear:
        return None
    gain, p, winner = max(clear, key=lambda one: one[0])
    before = float(mine.double().mean())
    then, tested = f"accuracy is {percent(before + gain)}", f"McNemar's exact test, {below(p)}"
    text = f"{then} instead of {percent(before)} on the same {len(mine)} images ({tested})."
    return winner.alternative, text, {"accuracy": before, "accuracy_then": before + gain, "p": p}


def _by_confidence(
    own: TransformedPredictions, others: list[TransformedPredictions]
) -> tuple[Alternative, str, Json] | None:
    """The same without labels: the alternative whose predictions are the most informative."""
    mine = own.confidence
    clear: list[tuple[float, TransformedPredictions]] = []
    for other in others:
        more = int((other.confidence > mine).sum())
        informed = other.information - own.information
        if (
            float((other.confidence - mine).mean()) >= _CONFIDENCE_GAIN
            and informed >= _INFORMATION_GAIN
            and more >= _MOST_IMAGES * len(mine)
            and len(others) * binomial_tail(more, len(mine), 0.5) < _ALPHA_UNLABELLED
            # Larger features make a network more confident, not better informed: only its temperature has changed.
            and 1 / _LONGER <= other.norm / max(own.norm, 1e-30) <= _LONGER
        ):
            clear.append((informed, other))
    if not clear:
        return None
    informed, winner = max(clear, key=lambda one: one[0])
    before, then = float(mine.mean()), float(winner.confidence.mean())
    text = (
        f"the model is more confident (mean largest probability {then:.2f} instead of {before:.2f}) and its "
        f"predictions carry {informed:.2f} nats more information. Labels would decide it."
    )
    return winner.alternative, text, {"confidence": before, "confidence_then": then, "information_gain": informed}
