"""The probe of explicit ensembles: what several members say of each image, summed up as they come.

    NAME           (n, s)     the fields of `metrics.SUMMARY`: total, aleatoric and epistemic uncertainty, and others
    NAME_loss      (n)        -log of the mean probability of the label, where labels are the model's classes
    NAME_between   (n, q)     I[Y; K] between sub-ensembles of 2, 3 ... neighbouring members (Kirsch 2024, eq. 17), for
                              every size that divides the members; single ones have the epistemic uncertainty itself
    NAME_logit     (n, m, c)  what each member says, only with keep="logits"
    NAME_variance  (n)        the variance of their probabilities, summed over classes, only with variance=True

NAME is "members", "checkpoints", "dropout", "views" or "noise". Members are asked one after the other, and without
keep="logits" none of their answers is kept, so memory does not grow with their number.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from dubito.choices import Keep
from dubito.errors import ValueRangeError
from dubito.metrics.information import sub_ensembles
from dubito.metrics.streaming import MemberStream, VarianceStream, check_temperature
from dubito.models.wrap import WrappedClassifier
from dubito.probes._classes import as_classes
from dubito.probes._several import Several, Source
from dubito.probes.dropout import Dropout
from dubito.probes.noise import Noise
from dubito.probes.views import DEFAULT, Views
from dubito.types import Classifier, Json


@final
class Members:
    """What several members say of each image: models, checkpoints, dropout, views or noisy copies.

    Args:
        models: From dubito.load or dubito.wrap, with the transform and the classes of the model that is extracted,
            which is a member only if it is listed. For models with transforms of their own, extract each and join the
            tables with `dubito.ensemble`.
        keep: "summary": a few numbers an image. "logits": also what each member says, which temperatures, pooled
            weights and other partitions need: 4 m c bytes an image.
        temperature: Logits are divided by it before they are summed up; kept ones are not.
        variance: Whether to write `NAME_variance` as well, which `PerturbationVariance` reads.

    >>> import dubito
    >>> models = [dubito.load("timm:test_resnet", weights=None, num_classes=3) for _ in range(4)]
    >>> columns = Members(models).run(models[0], torch.rand(2, 3, 64, 64), None)
    >>> {name: tuple(column.shape) for name, column in columns.items()}
    {'members': (2, 9), 'members_between': (2, 1)}
    """

    name = "members"
    price = "1 forward pass a member"

    def __init__(
        self,
        models: Sequence[Any] | Source | Classifier,
        *,
        keep: Keep = "summary",
        temperature: float = 1.0,
        variance: bool = False,
    ) -> None:
        if keep not in get_args(Keep):
            raise ValueRangeError(f"keep must be 'summary' or 'logits'; got '{keep}'. Choose one of the two.")
        listed = [models] if isinstance(models, Classifier) else models  # one that is no list is told as one too few
        self._source: Source = listed if isinstance(listed, Source) else Several(listed)
        self._keep, self._temperature, self._variance = keep, check_temperature(temperature), variance
        self._checked: Classifier | None = None
        self.name, self.price = self._source.name, f"{len(self._source)} forward passes"

    @classmethod
    def checkpoints(
        cls,
        model: WrappedClassifier,
        paths: Sequence[str | Path],
        *,
        keep: Keep = "summary",
        temperature: float = 1.0,
    ) -> "Members":
        """One architecture with the weights of several files, such as several runs or epochs of a training.

        Args:
            model: Whose module is copied, once a file; its own weights are no member.
            paths: Safetensors files, or PyTorch files of tensors only; no pickle is executed.
            keep: See `Members`.
            temperature: See `Members`.
        """
        return cls(Several.of_checkpoints(model, paths), keep=keep, temperature=temperature)

    @classmethod
    def dropout(
        cls,
        passes: int = 10,
        rate: float | None = None,
        seed: int = 0,
        *,
        keep: Keep = "summary",
        temperature: float = 1.0,
    ) -> "Members":
        """Monte-Carlo dropout: the extracted model several times, dropping other units each time.

        Args:
            passes: How many members.
            rate: Of every dropout that the model calls; None: its own, which is zero in many pretrained models.
            seed: Of what is dropped.
            keep: See `Members`.
            temperature: See `Members`.
        """
        return cls(Dropout(passes, rate, seed), keep=keep, temperature=temperature)

    @classmethod
    def views(
        cls,
        views: Sequence[str] = DEFAULT,
        amount: float = 0.125,
        *,
        keep: Keep = "summary",
        temperature: float = 1.0,
    ) -> "Members":
        """Test-time augmentation: the extracted model on several views of each image.

        Args:
            views: Names out of `dubito.probes.views.VIEWS`, joined by `+` for one after the other.
            amount: The share of each side that a view cuts off or moves.
            keep: See `Members`.
            temperature: See `Members`.
        """
        return cls(Views(views, amount), keep=keep, temperature=temperature)

    @classmethod
    def noise(
        cls,
        copies: int = 8,
        sigma: float = 0.05,
        seed: int = 0,
        *,
        keep: Keep = "summary",
        temperature: float = 1.0,
    ) -> "Members":
        """The extracted model on several copies of each image with Gaussian noise, the same for all images.

        Args:
            copies: How many members; the image itself is none.
            sigma: The standard deviation of the noise, in the units of finished inputs.
            seed: Of the noise.
            keep: See `Members`.
            temperature: See `Members`.
        """
        return cls(Noise(copies, sigma, seed), keep=keep, temperature=temperature, variance=True)

    def __len__(self) -> int:
        return len(self._source)

    def __repr__(self) -> str:
        return f"Members({self.name}: {len(self)} members, keep={self._keep!r}, temperature={self._temperature:g})"

    def run(
        self, model: Classifier, x: Float[Tensor, "n ..."], label: Shaped[Tensor, "n ..."] | None
    ) -> Mapping[str, Tensor]:
        """The columns of the ensemble."""
        if self._checked is not model:
            self._source.check(model, x)
            self._checked = model
        stream = MemberStream(temperature=self._temperature, sizes=[size for _, size in sub_ensembles(len(self))][1:])
        spread = VarianceStream(temperature=self._temperature) if self._variance else None
        kept = []
        for logits in self._source.logits(model, x):
            stream.add(logits[:, None])
            if spread is not None:
                spread.add(logits[:, None])
            if self._keep == "logits":
                kept.append(logits.cpu())
        columns = {self.name: stream.summary().float()}
        if len(sub_ensembles(len(self))) > 1:
            columns[f"{self.name}_between"] = stream.between().float()
        if spread is not None:
            columns[f"{self.name}_variance"] = spread.variance().float()
        if kept:
            columns[f"{self.name}_logit"] = torch.stack(kept, 1)
        classes = as_classes(label, stream.probs().shape[1])
        if classes is not None:
            columns[f"{self.name}_loss"] = stream.loss(classes).float()
        return columns

    def settings(self) -> Json:
        """Those of the members, with hashes of their weights, what is kept, and the temperature."""
        # Told only where it is asked for: caches that were made before there was a choice stay what they are.
        also = {"variance": True} if self._variance else {}
        return {**self._source.settings(), "keep": self._keep, "temperature": self._temperature, **also}
