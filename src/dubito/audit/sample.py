"""One pass over a sample of the images: what the model predicts under its own transform, and under alternatives.

Every image is decoded once. Features and logits are kept of the own transform only, a few numbers per image of the
others, so memory grows with the sample and not with the set.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dubito.audit.outputs import Understood, understand
from dubito.audit.transforms import TransformedPredictions, alternatives, guessed, measured
from dubito.cache.runner import default_batch_size, in_batches, inputs_of, open_stream
from dubito.data import Subset
from dubito.types import Classifier, Images


@final
@dataclass(frozen=True)
class Sample:
    """The sample as the model sees it.

    Attributes:
        model: The classifier, repaired where it had to be so that the other checks can go on.
        rows: Which images of the sample could be read.
        x: The inputs of the first batch whose outputs are finite.
        feature: Features under the model's own transform.
        logit: Logits under the model's own transform.
        predictions: By transform, the model's own first.
        scaled: Whether the scale of inputs is known, so that other normalisations could be tried.
    """

    model: Classifier
    rows: Int[Tensor, "n"]
    x: Float[Tensor, "b ..."]
    feature: Float[Tensor, "n d"]
    logit: Float[Tensor, "n c"]
    predictions: list[TransformedPredictions]
    scaled: bool

    @property
    def finite(self) -> Bool[Tensor, "n"]:
        """Rows without NaN and infinity."""
        return self.logit.isfinite().all(-1) & self.feature.isfinite().all(-1)


def draw_subset(images: Images, limit: int, seed: int) -> Subset:
    """Some images at random, in their own order; a smaller draw of the same seed is part of a larger one."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return Subset(images, sorted(order[:limit].tolist()))


def take_sample(
    model: Classifier, images: Subset, *, batch_size: int | None, workers: int, progress: bool
) -> tuple[Sample | None, Understood, list[tuple[int, str]]]:
    """Run the model; None if no image can be read or its outputs cannot be understood. Also which images are broken."""
    groups = in_batches(range(len(images)), batch_size or default_batch_size(model.device))
    gathered, understood, title = _Gathered(images), Understood(model), f"audit {images.name}"
    with open_stream(images, model.transform, groups, workers=workers, title=title, progress=progress) as stream:
        for batch in stream:
            gathered.broken += batch.broken
            x = inputs_of(batch, model) if understood.model is not None else None
            if x is not None:
                understood = understood if gathered.rows else understand(model, x)
                if understood.model is not None:
                    gathered.add(understood.model, batch.indices, x)
    sample = gathered.done(understood.model) if understood.model is not None and gathered.rows else None
    return sample, understood, gathered.broken


class _Gathered:
    def __init__(self, images: Subset) -> None:
        self.images = images
        self.rows: list[int] = []
        self.broken: list[tuple[int, str]] = []
        self.feature: list[Tensor] = []
        self.logit: list[Tensor] = []
        self.predictions: list[TransformedPredictions] = []
        self.first = torch.empty(0)
        self.scaled = False

    def add(self, model: Classifier, indices: list[int], x: Float[Tensor, "n ..."]) -> None:
        if not self.rows:
            image = self.images.read(indices[0])
            ready = isinstance(image, Tensor) and image.is_floating_point()
            scale = guessed(x) if ready else measured(model.transform)
            self.first, self.scaled = x, scale is not None
            self.predictions = [TransformedPredictions(other) for other in alternatives(x, scale)]
        usable: Tensor | None = None
        for predictions in self.predictions:
            feature = model.features(predictions.alternative(x))
            logit = model.logits(feature).float()
            if usable is None:  # the model's own transform comes first
                usable = logit.isfinite().all(-1) & feature.isfinite().all(-1)
                self.feature.append(feature.float().cpu())
                self.logit.append(logit.cpu())
            predictions.add(feature, logit, usable)
        self.rows += indices

    def done(self, model: Classifier) -> Sample:
        rows, feature, logit = torch.tensor(self.rows), torch.cat(self.feature), torch.cat(self.logit)
        first = (logit.isfinite().all(-1) & feature.isfinite().all(-1))[: len(self.first)]
        x = self.first[first.to(self.first.device)]
        return Sample(model, rows, x, feature, logit, self.predictions, self.scaled)
