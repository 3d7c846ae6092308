"""Members that are models: several classifiers with one transform and the same classes."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, final, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from dubito.errors import ModelError
from dubito.models.checkpoint import with_weights
from dubito.models.wrap import WrappedClassifier
from dubito.types import Classifier, Json


@runtime_checkable
class Source(Protocol):
    """Where members come from: it has a name, a number of members, and the logits of each, one after the other."""

    name: str

    def __len__(self) -> int: ...

    def check(self, model: Classifier, x: Float[Tensor, "n ..."]) -> None:
        """Raise an error if these members cannot speak for the extracted model; asked once, with the first batch."""
        ...

    def logits(self, model: Classifier, x: Float[Tensor, "n ..."]) -> Iterator[Float[Tensor, "n c"]]:
        """What each member says of the batch."""
        ...

    def settings(self) -> Json:
        """Everything that changes what they say, as JSON."""
        ...


@final
class Several:
    """Members that are models of their own; the extracted one is among them only if it is listed.

    Args:
        models: At least two.
        name: Of the ensemble.
    """

    def __init__(self, models: Sequence[Any], *, name: str = "members") -> None:
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
                f"{name}: an ensemble has at least two members; got {len(self._models) or 'none'}. With one model, "
                f"ask its tiles (dubito.Tiles()), dropout (Members.dropout()) or views of the image (Members.views())."
            )

    @classmethod
    def of_checkpoints(cls, model: WrappedClassifier, paths: Sequence[str | Path]) -> "Several":
        """Copies of one model with the weights of files."""
        if isinstance(paths, str | Path):
            raise ModelError(f"checkpoints: paths must be a list of files; got '{paths}'. Give at least two.")
        return cls([with_weights(model, path) for path in paths], name="checkpoints")

    def __len__(self) -> int:
        return len(self._models)

    def check(self, model: Classifier, x: Float[Tensor, "n ..."]) -> None:
        """All must see what the extracted model sees, and mean the same classes."""
        seen, count = _plain(model.transform.describe()), _count(model, x)
        for place, member in enumerate(self._models):
            who = f"{self.name}: member {place} ({member.name})"
            if (sees := _plain(member.transform.describe())) != seen:
                raise ModelError(
                    f"{who} has another transform than {model.name}, which is extracted: {_differing(sees, seen)}. "
                    f"Extract each model with its own transform, and join the tables: dubito.ensemble([table_a, ...])."
                )
            if (theirs := _count(member, x)) != count:
                raise ModelError(
                    f"{who} has {theirs} classes, {model.name} has {count}. Members of one ensemble share their "
                    f"classes, in one order."
                )
            _same_names(who, member, model)

    def logits(self, model: Classifier, x: Float[Tensor, "n ..."]) -> Iterator[Float[Tensor, "n c"]]:  # noqa: ARG002
        """Of each model, in the order they were given."""
        for member in self._models:
            yield member.logits(member.features(x)).to(x.device).float()

    def settings(self) -> Json:
        """Hashes of every member's weights, with which layer of it classifies where that was said."""
        return {"members": [_who(_plain(member.fingerprint())) for member in self._models]}


def _who(fingerprint: Json) -> str:
    head = fingerprint.get("head") or {}
    said = [str(head[part]) for part in ("layer", "output") if head.get(part) not in (None, "logits")]
    return " ".join([str(fingerprint.get("weights")), *said])


def _count(model: Classifier, x: Float[Tensor, "n ..."]) -> int:
    return int(model.logits(model.features(x[:1])).shape[-1])


def _same_names(who: str, member: Classifier, model: Classifier) -> None:
    if member.classes is None or model.classes is None:
        return
    for place, (theirs, ours) in enumerate(zip(member.classes, model.classes, strict=False)):
        if theirs != ours:
            raise ModelError(
                f"{who} has other classes than {model.name}: class {place} is '{theirs}' there and '{ours}' here. "
                f"Members of one ensemble share their classes, in one order."
            )


def _plain(described: Mapping[str, Any]) -> Json:
    """As it looks after a round through JSON, so that tuples and lists are the same."""
    plain: Json = json.loads(json.dumps(described))
    return plain


def _differing(there: Json, here: Json) -> str:
    parts = [key for key in {**there, **here} if there.get(key) != here.get(key)]
    return "; ".join(f"{key} {there.get(key)} there, {here.get(key)} here" for key in parts)
