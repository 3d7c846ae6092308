"""One pass over a sample of the images: what the model answers under its own transform, and under alternatives.

Every image is decoded once. Features and logits are kept of the own transform only, a few numbers an image of the
others, so memory grows with the sample and not with the set.
"""

from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dubito.audit.alternatives import Alternative, alternatives, guessed, measured
from dubito.audit.understand import Understood, understood
from dubito.cache.runner import default_batch_size, in_batches, inputs_of, open_stream
from dubito.data import Subset
from dubito.types import Classifier, Images

NO_CLASS = -(1 << 40)
"""Below every label, also below shifted ones."""


@final
@dataclass
class Answers:
    """What the model says under one transform, gathered batch by batch."""

    way: Alternative
    _predicted: list[Tensor] = field(default_factory=list)
    _confidence: list[Tensor] = field(default_factory=list)
    _entropy: list[Tensor] = field(default_factory=list)
    _norm: list[Tensor] = field(default_factory=list)
    _total: Tensor | float = 0.0

    def add(self, feature: Float[Tensor, "n d"], logit: Float[Tensor, "n c"], usable: Bool[Tensor, "n"]) -> None:
        """One batch more; of the usable rows, those whose logits are not finite here count as undecided.

        Args:
            feature: Under this transform.
            logit: The same.
            usable: Rows that are finite under the own transform: the same for all, so that all are told by the same.
        """
        finite = logit.isfinite().all(-1)
        p = logit.double().masked_fill(~finite[:, None], 0).softmax(-1)
        length = feature.float().norm(dim=-1)
        self._predicted.append(logit.argmax(-1).masked_fill(~finite, NO_CLASS).cpu())
        self._confidence.append(p.amax(-1).cpu())
        self._entropy.append(torch.special.entr(p[usable]).sum(-1).cpu())
        self._norm.append(length[usable & length.isfinite()].cpu())
        self._total = self._total + p[usable].sum(0).cpu()

    @property
    def predicted(self) -> Int[Tensor, "n"]:
        """The class of every image; NO_CLASS where logits are not finite."""
        return torch.cat(self._predicted)

    @property
    def confidence(self) -> Float[Tensor, "n"]:
        """The largest probability of every image."""
        return torch.cat(self._confidence)

    @property
    def norm(self) -> float:
        """The mean length of a usable feature; zero if none is finite."""
        lengths = torch.cat(self._norm)
        return float(lengths.mean()) if len(lengths) else 0.0

    @property
    def information(self) -> float:
        """What an answer tells in nats: H(mean p) - mean H(p). High if answers are sure and differ from one another."""
        entropy = torch.cat(self._entropy)
        if len(entropy) == 0:
            return 0.0
        mean = torch.as_tensor(self._total) / len(entropy)
        return float(torch.special.entr(mean).sum() - entropy.mean())


@final
@dataclass(frozen=True)
class Sample:
    """The sample as the model sees it.

    Attributes:
        model: The classifier, repaired where it had to be so that the other checks can go on.
        rows: Which images of the sample could be read.
        x: The inputs of the first batch whose answers are finite.
        feature: Under the own transform.
        logit: The same.
        ways: By transform, the own one first.
        scaled: Whether the scale of inputs is known, so that other normalisations could be tried.
    """

    model: Classifier
    rows: Int[Tensor, "n"]
    x: Float[Tensor, "b ..."]
    feature: Float[Tensor, "n d"]
    logit: Float[Tensor, "n c"]
    ways: list[Answers]
    scaled: bool

    @property
    def finite(self) -> Bool[Tensor, "n"]:
        """Rows without NaN and infinity."""
        return self.logit.isfinite().all(-1) & self.feature.isfinite().all(-1)


def drawn(images: Images, limit: int, seed: int) -> Subset:
    """Some images at random, in their own order; a smaller draw of the same seed is part of a larger one."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return Subset(images, sorted(order[:limit].tolist()))


def take_sample(
    model: Classifier, images: Subset, *, batch_size: int | None, workers: int, progress: bool
) -> tuple[Sample | None, Understood, list[tuple[int, str]]]:
    """Run the model; None if no image can be read or its outputs cannot be understood. And what could not be read."""
    groups = in_batches(range(len(images)), batch_size or default_batch_size(model.device))
    gathered, found, title = _Gathered(images), Understood(model), f"audit {images.name}"
    with open_stream(images, model.transform, groups, workers=workers, title=title, progress=progress) as stream:
        for batch in stream:
            gathered.broken += batch.broken
            x = inputs_of(batch, model) if found.model is not None else None
            if x is not None:
                found = found if gathered.rows else understood(model, x)
                if found.model is not None:
                    gathered.add(found.model, batch.indices, x)
    sample = gathered.done(found.model) if found.model is not None and gathered.rows else None
    return sample, found, gathered.broken


class _Gathered:
    def __init__(self, images: Subset) -> None:
        self.images = images
        self.rows: list[int] = []
        self.broken: list[tuple[int, str]] = []
        self.feature: list[Tensor] = []
        self.logit: list[Tensor] = []
        self.ways: list[Answers] = []
        self.first = torch.empty(0)
        self.scaled = False

    def add(self, model: Classifier, indices: list[int], x: Float[Tensor, "n ..."]) -> None:
        if not self.rows:
            given = self.images.read(indices[0])
            ready = isinstance(given, Tensor) and given.is_floating_point()
            scale = guessed(x) if ready else measured(model.transform)
            self.first, self.scaled = x, scale is not None
            self.ways = [Answers(way) for way in alternatives(x, scale)]
        usable: Tensor | None = None
        for answers in self.ways:
            feature = model.features(answers.way(x))
            logit = model.logits(feature).float()
            if usable is None:  # its own transform comes first
                usable = logit.isfinite().all(-1) & feature.isfinite().all(-1)
                self.feature.append(feature.float().cpu())
                self.logit.append(logit.cpu())
            answers.add(feature, logit, usable)
        self.rows += indices

    def done(self, model: Classifier) -> Sample:
        rows, feature, logit = torch.tensor(self.rows), torch.cat(self.feature), torch.cat(self.logit)
        first = (logit.isfinite().all(-1) & feature.isfinite().all(-1))[: len(self.first)]
        x = self.first[first.to(self.first.device)]
        return Sample(model, rows, x, feature, logit, self.ways, self.scaled)
