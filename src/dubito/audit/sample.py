"""One pass over a sample of the images: what the model predicts under its own transform, and under alternatives.

Every image is decoded once. Features and logits are kept of the own transform only, a few numbers per image of the
others, so memory grows with the sample and not with the set.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dubito.audit.finding import Finding
from dubito.audit.outputs import understand
from dubito.audit.transforms import TransformedPredictions, alternatives, guessed, measured
from dubito.cache.runner import default_batch_size, in_batches, inputs_of, open_stream
from dubito.data import Subset
from dubito.types import Classifier, Images


class Sample(NamedTuple):
    """The sample as the model sees it.

    Attributes:
        model: The classifier, repaired where it had to be so that the other checks can go on.
        rows: Which images of the sample could be read.
        x: The inputs of the first batch whose outputs are finite.
        feature: Features under the model's own transform.
        logit: Logits under the model's own transform.
        predictions: By transform, the model's own first, for rows without NaN and infinity.
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
) -> tuple[Sample | None, Sequence[Finding], list[tuple[int, str]]]:
    """Run the model over the images.

    Returns the sample, None if no image can be read or the outputs cannot be understood; what is wrong with the outputs
    of the model as it is; and which images are broken.
    """
    groups = in_batches(range(len(images)), batch_size or default_batch_size(model.device))
    understood: Classifier | None = model
    findings: Sequence[Finding] = ()
    rows: list[int] = []
    broken: list[tuple[int, str]] = []
    outputs, predictions, first, scale, title = [], [], torch.empty(0), None, f"audit {images.name}"
    with open_stream(images, model.transform, groups, workers=workers, title=title, progress=progress) as stream:
        for batch in stream:
            broken += batch.broken
            x = inputs_of(batch, model) if understood is not None else None
            if x is not None and not rows:
                understood, findings = understand(model, x)
                image = images.read(batch.indices[0])
                ready = isinstance(image, Tensor) and image.is_floating_point()
                first, scale = x, guessed(x) if ready else measured(model.transform)
                predictions = [TransformedPredictions(other) for other in alternatives(x, scale)]
            if x is not None and understood is not None:
                outputs.append(_run(understood, x, predictions))
                rows += batch.indices
    if understood is None or not rows:
        return None, findings, broken
    feature, logit = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    sample = Sample(understood, torch.tensor(rows), first, feature, logit, predictions, scale is not None)
    return sample._replace(x=first[sample.finite[: len(first)].to(first.device)]), findings, broken


def _run(
    model: Classifier, x: Float[Tensor, "n ..."], predictions: list[TransformedPredictions]
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n c"]]:
    """Add a batch under every transform; features and logits under the model's own, which comes first."""
    feature = model.features(predictions[0].alternative(x))
    logit = model.logits(feature).float()
    usable = logit.isfinite().all(-1) & feature.isfinite().all(-1)
    predictions[0].add(feature, logit, usable)
    for other in predictions[1:]:
        changed = model.features(other.alternative(x))
        other.add(changed, model.logits(changed).float(), usable)
    return feature.float().cpu(), logit.cpu()
