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

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, final, get_args, runtime_checkable

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from dubito.choices import Keep
from dubito.errors import ModelError, ValueRangeError
from dubito.metrics.information import sub_ensembles
from dubito.metrics.streaming import MemberStream, VarianceStream, check_temperature
from dubito.models.checkpoint import with_weights
from dubito.models.wrap import WrappedClassifier
from dubito.probes.dropout import Dropout
from dubito.probes.noise import Noise
from dubito.probes.task_loss import as_classes
from dubito.probes.views import DEFAULT, Views
from dubito.table.views import MEMBERS
from dubito.types import Classifier, Json


@runtime_checkable
class MemberSource(Protocol):
    """Where members come from: a name, a number of members, and the logits of each, one after the other."""

    name: str

    def __len__(self) -> int: ...

    def check(self, model: Classifier, x: Float[Tensor, "n ..."]) -> None:
        """Raise if these members do not suit the extracted model; called once, with the first batch."""
        ...

    def logits(self, model: Classifier, x: Float[Tensor, "n ..."]) -> Iterator[Float[Tensor, "n c"]]:
        """The logits of each member for a batch."""
        ...

    def settings(self) -> Json:
        """Everything that changes their logits, as JSON."""
        ...


@final
class Members:
    """What several members predict for each image: models, checkpoints, dropout, views or noisy copies.

    Args:
        models: From dubito.load or dubito.wrap, with the transform and the classes of the extracted model, which is a
            member only if it is listed. For models with transforms of their own, extract each and join the tables with
            `dubito.ensemble`.
        keep: "summary" keeps a few numbers per image. "logits" also keeps the logits of each member, 4 m c bytes per
            image, which temperatures, pooled weights and other partitions need.
        temperature: Divides logits before they are summed up; kept logits are not divided.
        variance: Whether to write `NAME_variance` as well, which `PerturbationVariance` reads.

    >>> import dubito
    >>> models = [dubito.load("timm:test_resnet", weights=None, num_classes=3) for _ in range(4)]
    >>> columns = Members(models).run(models[0], torch.rand(2, 3, 64, 64), None)
    >>> {name: tuple(column.shape) for name, column in columns.items()}
    {'members': (2, 9), 'members_between': (2, 1)}
    """

    name = MEMBERS
    price = "1 forward pass per member"

    def __init__(
        self,
        models: Sequence[Any] | MemberSource | Classifier,
        *,
        keep: Keep = "summary",
        temperature: float = 1.0,
        variance: bool = False,
    ) -> None:
        if keep not in get_args(Keep):
            raise ValueRangeError(f"keep must be 'summary' or 'logits'; got '{keep}'. Choose one of the two.")
        listed = [models] if isinstance(models, Classifier) else models  # refused as one member too few
        self._source: MemberSource = listed if isinstance(listed, MemberSource) else Models(listed)
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
            model: Its module is copied once per file; its own weights are not a member.
            paths: Safetensors files, or PyTorch files of tensors only; no pickle is executed.
            keep: See `Members`.
            temperature: See `Members`.
        """
        if isinstance(paths, str | Path):
            raise ModelError(f"checkpoints: paths must be a list of files; got '{paths}'. Give at least two.")
        models = Models([with_weights(model, path) for path in paths], name="checkpoints")
        return cls(models, keep=keep, temperature=temperature)

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
            passes: Number of members.
            rate: Rate of every dropout that the model calls; None for its own, which is zero in many pretrained models.
            seed: Seed of the dropped units.
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
            views: Names from `dubito.probes.views.VIEWS`; `+` joins views that are applied one after the other.
            amount: Share of each side that a view cuts off or moves.
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
            copies: Number of members; the image itself is not one of them.
            sigma: Standard deviation of the noise, in the units of finished inputs.
            seed: Seed of the noise.
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
        """Those of the members, with hashes of their weights; what is kept, and the temperature."""
        variance = {"variance": True} if self._variance else {}
        return {**self._source.settings(), "keep": self._keep, "temperature": self._temperature, **variance}


@final
class Models:
    """Members that are models of their own; the extracted one is among them only if it is listed.

    Args:
        models: At least two.
        name: Of the ensemble.
    """

    def __init__(self, models: Sequence[Any], *, name: str = MEMBERS) -> None:
        self.name = name
        self._models: list[Classifier] = []
        for place, model in enumerate(models):
            if not isinstance(model, Classifier):
                raise ModelError(
                    f"{name}: models must come from dubito.load or dubito.wrap; got {type(model).__name__} at place "
                    f"{place}. Wrap it: dubito.wrap(module, transform=...)."
                )
            self._models.append(model)
        if len(self._models) < 2:
            raise ModelError(
                f"{name}: an ensemble has at least two members; got {len(self._models) or 'none'}. With one model, use "
                f"its tiles (probes.Tiles()), dropout (Members.dropout()) or views of the image (Members.views())."
            )

    def __len__(self) -> int:
        return len(self._models)

    def check(self, model: Classifier, x: Float[Tensor, "n ..."]) -> None:
        """All must share the transform and the classes of the extracted model."""
        expected, count = _plain(model.transform.describe()), _count(model, x)
        for place, member in enumerate(self._models):
            which = f"{self.name}: member {place} ({member.name})"
            if (transform := _plain(member.transform.describe())) != expected:
                raise ModelError(
                    f"{which} has another transform than {model.name}, which is extracted: "
                    f"{_differing(transform, expected)}. "
                    f"Extract each model with its own transform, and join the tables: dubito.ensemble([table_a, ...])."
                )
            if (classes := _count(member, x)) != count:
                raise ModelError(
                    f"{which} has {classes} classes, {model.name} has {count}. Members of one ensemble share their "
                    f"classes, in one order."
                )
            pairs = enumerate(zip(member.classes or (), model.classes or (), strict=False))
            if (differing := next(((row, *pair) for row, pair in pairs if pair[0] != pair[1]), None)) is not None:
                raise ModelError(
                    f"{which} has other classes than {model.name}: class {differing[0]} is '{differing[1]}' there and "
                    f"'{differing[2]}' here. Members of one ensemble share their classes, in one order."
                )

    def logits(self, model: Classifier, x: Float[Tensor, "n ..."]) -> Iterator[Float[Tensor, "n c"]]:  # noqa: ARG002
        """Of each model, in the order in which they were listed."""
        for member in self._models:
            yield member.logits(member.features(x)).to(x.device).float()

    def settings(self) -> Json:
        """A hash of every member's weights, with its classifying layer where that was named."""
        return {"members": [_identity(_plain(member.fingerprint())) for member in self._models]}


def _identity(fingerprint: Json) -> str:
    head = fingerprint.get("head") or {}
    named = [str(head[part]) for part in ("layer", "output") if head.get(part) not in (None, "logits")]
    return " ".join([str(fingerprint.get("weights")), *named])


def _count(model: Classifier, x: Float[Tensor, "n ..."]) -> int:
    return int(model.logits(model.features(x[:1])).shape[-1])


def _plain(described: Mapping[str, Any]) -> Json:
    """As it looks after a round trip through JSON, so that tuples and lists are the same."""
    plain: Json = json.loads(json.dumps(described))
    return plain


def _differing(there: Json, here: Json) -> str:
    parts = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    return "; ".join(f"{key} {there.get(key)} there, {here.get(key)} here" for key in parts)
