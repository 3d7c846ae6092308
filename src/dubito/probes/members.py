"""The probe of explicit ensembles: what several members predict for each image, summed up as predictions arrive.

    NAME           (n, s)     the fields of `metrics.SUMMARY`: total, aleatoric and epistemic uncertainty, and others
    NAME_loss      (n)        -log of the mean probability of the label, where labels are the model's classes
    NAME_between   (n, q)     I[Y; K] between sub-ensembles of 2, 3 ... neighbouring members (Kirsch 2024, eq. 17), for
                              every size that divides the members; single ones have the epistemic uncertainty itself
    NAME_logit     (n, m, c)  the logits of each member, only with keep="logits"
    NAME_variance  (n)        the variance of their probabilities, summed over classes, only with variance=True

NAME is "members", "checkpoints", "dropout", "views" or "noise". Members run one after the other, and without
keep="logits" none of their predictions is kept, so memory does not grow with their number.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, final, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from dubito.choices import Keep
from dubito.errors import ModelError
from dubito.metrics.information import sub_ensembles
from dubito.metrics.streaming import MemberStream, VarianceStream, check_temperature
from dubito.models.load import as_classifier, with_weights
from dubito.models.wrap import WrappedClassifier
from dubito.probes.forward import as_classes
from dubito.table.provenance import describe_difference
from dubito.table.views import MEMBERS
from dubito.types import Classifier, Inputs, Json, Targets
from dubito.validate import check_choice


@dataclass(frozen=True, kw_only=True)
class EnsembleProbe(ABC):
    """What several members predict for each image. A kind of ensemble provides their number and their logits.

    Attributes:
        keep: "summary" keeps a few numbers per image. "logits" also keeps the logits of each member, 4 m c bytes per
            image, which temperatures, pooled weights and other partitions need.
        temperature: Divides logits before they are summed up; kept logits are not divided.
        variance: Whether to write `NAME_variance` as well, which `PerturbationVariance` reads.
    """

    keep: Keep = "summary"
    temperature: float = 1.0
    variance: bool = False
    _checked: list[Classifier] = field(default_factory=list, init=False, repr=False, compare=False)

    name = MEMBERS
    price = "1 forward pass per member"

    def __post_init__(self) -> None:
        check_choice(self.keep, get_args(Keep), by=self.name, what="keep")
        check_temperature(self.temperature, by=self.name)
        object.__setattr__(self, "price", f"{len(self)} forward passes")

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def check(self, model: Classifier, x: Inputs) -> None:
        """Raise if the members do not suit the extracted model; called once, with the first batch."""

    @abstractmethod
    def logits(self, model: Classifier, x: Inputs) -> Iterator[Float[Tensor, "n c"]]:
        """The logits of each member for a batch, one after the other, on any device and in any precision."""

    def member_settings(self) -> Json:
        """Everything that changes the members' logits, as JSON: by default the fields of the kind itself."""
        shared = {each.name for each in fields(EnsembleProbe)}
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in shared}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def run(self, model: Classifier, x: Inputs, label: Targets | None) -> Mapping[str, Tensor]:
        """The columns of the ensemble."""
        if not self._checked or self._checked[0] is not model:
            self.check(model, x)
            self._checked[:] = [model]
        stream = MemberStream(temperature=self.temperature, sizes=[size for _, size in sub_ensembles(len(self))][1:])
        spread = VarianceStream(temperature=self.temperature)
        kept = []
        for member in self.logits(model, x):
            logits = member.to(x.device).float()
            stream.add(logits[:, None])
            if self.variance:
                spread.add(logits[:, None])
            if self.keep == "logits":
                kept.append(logits.cpu())
        columns = {self.name: stream.summary().float()}
        if len(sub_ensembles(len(self))) > 1:
            columns[f"{self.name}_between"] = stream.between().float()
        if self.variance:
            columns[f"{self.name}_variance"] = spread.variance().float()
        if kept:
            columns[f"{self.name}_logit"] = torch.stack(kept, 1)
        if (classes := as_classes(label, stream.probs().shape[1])) is not None:
            columns[f"{self.name}_loss"] = stream.loss(classes).float()
        return columns

    def settings(self) -> Json:
        """Those of the members, what is kept, and the temperature."""
        variance = {"variance": True} if self.variance else {}
        return {**self.member_settings(), "keep": self.keep, "temperature": self.temperature, **variance}


@final
@dataclass(frozen=True, eq=False, repr=False)
class Members(EnsembleProbe):
    """Members that are models of their own.

    Attributes:
        models: From dubito.load or dubito.wrap, or names, with the transform and the classes of the extracted model,
            which is a member only if it is listed. For models with transforms of their own, extract each and join the
            tables with `dubito.ensemble`.
        name: Of the columns.

    >>> import dubito
    >>> models = [dubito.load("timm:test_resnet", weights=None, num_classes=3) for _ in range(4)]
    >>> columns = Members(models).run(models[0], torch.rand(2, 3, 64, 64), None)
    >>> {name: tuple(column.shape) for name, column in columns.items()}
    {'members': (2, 9), 'members_between': (2, 1)}
    """

    models: Sequence[Any] | Any
    name: str = field(default=MEMBERS, kw_only=True)

    def __post_init__(self) -> None:
        listed = [self.models] if isinstance(self.models, Classifier | str) else self.models
        models = [as_classifier(one, by=f"{self.name}, place {place}") for place, one in enumerate(listed)]
        if len(models) < 2:
            raise ModelError(
                f"{self.name}: an ensemble has at least two members; got {len(models) or 'none'}. With one model, use "
                f"its tiles (probes.Tiles()), dropout (probes.Dropout()) or views of the image (probes.Views())."
            )
        object.__setattr__(self, "models", models)
        super().__post_init__()

    @classmethod
    def checkpoints(
        cls,
        model: WrappedClassifier | str,
        paths: Sequence[str | Path],
        *,
        keep: Keep = "summary",
        temperature: float = 1.0,
        variance: bool = False,
    ) -> "Members":
        """One architecture with the weights of several files, such as several runs or epochs of a training.

        Args:
            model: Its module is copied once per file; its own weights are not a member. A name is loaded.
            paths: Safetensors files, or PyTorch files of tensors only; no pickle is executed.
            keep: "summary", or "logits" to keep those of each member as well.
            temperature: Divides logits before they are summed up.
            variance: Whether to write `checkpoints_variance` as well.
        """
        if isinstance(paths, str | Path):
            raise ModelError(f"checkpoints: paths must be a list of files; got '{paths}'. Pass at least two.")
        whole: Any = as_classifier(model, by="checkpoints")
        models = [with_weights(whole, path) for path in paths]
        return cls(models, name="checkpoints", keep=keep, temperature=temperature, variance=variance)

    def __len__(self) -> int:
        return len(self.models)

    def __repr__(self) -> str:
        return f"Members({self.name}: {len(self)} members, keep={self.keep!r}, temperature={self.temperature:g})"

    def check(self, model: Classifier, x: Inputs) -> None:
        """All must share the transform and the classes of the extracted model."""
        count = _count(model, x)
        for place, member in enumerate(self.models):
            which = f"{self.name}: member {place} ({member.name})"
            if transform := describe_difference(member.transform.describe(), model.transform.describe()):
                raise ModelError(
                    f"{which} has another transform than {model.name}, which is extracted: {transform}. "
                    f"Extract each model with its own transform, and join the tables: dubito.ensemble([table_a, ...])."
                )
            pairs = enumerate(zip(member.classes or (), model.classes or (), strict=False))
            differing = [f"class {row} is '{a}' there and '{b}' here" for row, (a, b) in pairs if a != b]
            if (classes := _count(member, x)) != count:
                differing = [f"{classes} there, {count} here"]
            if differing:
                raise ModelError(
                    f"{which} has other classes than {model.name}: {differing[0]}. "
                    f"Members of one ensemble share their classes, in one order."
                )

    def logits(self, model: Classifier, x: Inputs) -> Iterator[Float[Tensor, "n c"]]:  # noqa: ARG002
        """Of each model, in the order in which they were listed."""
        for member in self.models:
            yield member.logits(member.features(x))

    def member_settings(self) -> Json:
        """A hash of every member's weights, with its classifying layer where that was named."""
        return {"members": [_identity(member.fingerprint()) for member in self.models]}


def _identity(fingerprint: Json) -> str:
    head = fingerprint.get("head") or {}
    named = [str(head[part]) for part in ("layer", "output") if head.get(part) not in (None, "logits")]
    return " ".join([str(fingerprint.get("weights")), *named])


def _count(model: Classifier, x: Inputs) -> int:
    return int(model.logits(model.features(x[:1])).shape[-1])
