"""Who made a table: the parts of the model, the task loss, and how each probe was configured.

    model_id = hash of weights, head and transform; None where nothing is known of the model

`weights` changes with the class names and settings of timm and torch; `tensors`, a hash of parameters and buffers,
does not. So two provenances agree where either hash does (`difference`): scores fitted on one table may score another
that differs in nothing else, and a head that travels to a machine with other versions still recognises its backbone.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, final

from dubito.errors import ArtefactError, DubitoError, TableError, first_words

MODEL_PARTS = ("weights", "head", "transform")
"""What a cache's identity compares of a model."""
CARRIED = (*MODEL_PARTS, "tensors", "operations", "checkpoint")
"""What is recorded of it: tensors and operations survive other versions of the packages behind `weights`."""


@final
@dataclass(frozen=True)
class Provenance:
    """Where columns come from. Unknown parts are None; of a table made from arrays, at most the calibration is known.

    Attributes:
        model: The model's name, for people.
        weights: Hash of the module's structure and every tensor.
        tensors: Hash of parameters and buffers alone.
        operations: Kinds of activations and pools, by name.
        head: The layer taken as classifying, if it was named.
        transform: Settings of the transform.
        checkpoint: `path` and `checksum` of the file that the weights were read from, to find them again.
        task_loss: Name of the task loss in the column `loss`.
        calibration: By what the column `logit` was calibrated: method and hash of what it learned; None for the
            model's own logits.
        probes: By probe, its `settings` and, where it has any, its `notes`.
        members: For an ensemble of tables, the provenance of each.
    """

    model: str | None = None
    weights: str | None = None
    tensors: str | None = None
    operations: Any = None
    head: Any = None
    transform: Any = None
    checkpoint: Any = None
    task_loss: str | None = None
    calibration: str | None = None
    probes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    members: tuple["Provenance", ...] = ()

    @property
    def model_id(self) -> str | None:
        """The model's part as one short hash, None where nothing is known of it."""
        ids = [member.model_id for member in self.members]
        if None in ids or (self.weights is None and not ids):
            return None
        text = repr(ids) if ids else _plain({part: getattr(self, part) for part in MODEL_PARTS})
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def model_parts(self) -> dict[str, Any]:
        """What is recorded of the model, part by part; None for what is not known."""
        return {part: getattr(self, part) for part in CARRIED}

    @property
    def names_model(self) -> bool:
        """Whether anything is recorded of the model; nothing is of arrays, even if they were calibrated."""
        return bool(self.members) or any(value is not None for value in self.model_parts.values())

    def with_model(self, model: "Provenance") -> "Provenance":
        """The same record, with every part of the model that the other record knows taken from there."""
        return replace(self, **{part: value for part, value in model.model_parts.items() if value is not None})

    def difference(self, other: "Provenance") -> str | None:
        """How two models differ, in words; None if they do not.

        >>> Provenance(weights="ab12").difference(Provenance(weights="cd34"))
        'its weights differ (ab12 there, cd34 here): the backbone was fine-tuned or is another one'
        """
        if len(self.members) != len(other.members):
            return f"it has {len(self.members)} members there, {len(other.members)} here"
        if self.members:
            pairs = enumerate(zip(self.members, other.members, strict=True))
            reasons = [f"member {place}: {reason}" for place, (one, two) in pairs if (reason := one.difference(two))]
            return reasons[0] if reasons else None
        reasons = []
        hashes = [(self.weights, other.weights), (self.tensors, other.tensors)]
        if not any(there is not None and there == here for there, here in hashes):
            what = describe_difference(*hashes[bool(self.tensors and other.tensors)]) or "none is recorded"
            reasons.append(f"its weights differ ({what}): the backbone was fine-tuned or is another one")
        if None not in (self.operations, other.operations) and set(self.operations) != set(other.operations):
            gone, new = {*self.operations} - {*other.operations}, {*other.operations} - {*self.operations}
            what = f"{', '.join(sorted(gone)) or 'none'} there, {', '.join(sorted(new)) or 'none'} here"
            reasons.append(f"its operations differ ({what}): activations or pools were replaced")
        if transform := describe_difference(self.transform, other.transform):
            reasons.append(f"its transform differs ({transform}): images were prepared in another way")
        if layer := describe_difference(self.head, other.head):
            reasons.append(f"its classifying layer differs ({layer}): features are read elsewhere in the model")
        return "; ".join(reasons) or None

    def calibration_difference(self, other: "Provenance") -> str | None:
        """How the logits of two tables of one model were calibrated differently, in words; None if they were not.

        >>> Provenance(calibration="vector 1f2e").calibration_difference(Provenance())
        'its logits are calibrated differently (vector 1f2e there, none here)'
        """
        pairs = [(self, other), *zip(self.members, other.members, strict=False)]
        differing = [describe_difference(one.calibration, two.calibration) for one, two in pairs]
        return next((f"its logits are calibrated differently ({one})" for one in differing if one), None)

    def to_json(self) -> dict[str, Any]:
        """The parts that are known, as plain values."""
        known = {key: value for key, value in asdict(self).items() if value not in (None, {}, ())}
        plain: dict[str, Any] = json.loads(json.dumps(known))
        return plain

    @classmethod
    def from_json(cls, written: Any, where: str) -> "Provenance | None":
        """What `to_json` wrote; None stays None. `where` is named in errors."""
        if written is None:
            return None
        known = {one.name for one in fields(cls)}
        odd = sorted(set(written) - known) if isinstance(written, dict) else [first_words(repr(written), 40)]
        if odd:
            raise ArtefactError(
                f"{where}: provenance has no part {odd[0]}. It was written by another version: save again."
            )
        odd = [key for key, value in written.items() if value is not None and not _is_part(key, value)]
        if odd:
            raise ArtefactError(f"{where}: {odd[0]} of provenance is {written[odd[0]]!r:.40}. Save again.")
        members = tuple(one for each in written.get("members", ()) if (one := cls.from_json(each, where)))
        return cls(**{**written, "members": members})


def _is_part(name: str, value: Any) -> bool:
    """Whether a part from a file has the type that it was written with."""
    if name == "operations":
        return isinstance(value, list | dict) and all(isinstance(one, str) for one in value)
    if name == "members":
        return isinstance(value, list)
    if name == "probes":
        return isinstance(value, dict) and all(isinstance(one, dict) for one in value.values())
    return isinstance(value, dict if name in ("head", "transform", "checkpoint") else str)


def check_provenance(
    one: Provenance | None,
    other: Provenance | None,
    *,
    by: str,
    of: str,
    error: type[DubitoError] = TableError,
    logits: bool = True,
) -> None:
    """Raise unless two things come from the same model with the same transform (`difference`), as far as that is known.

    Where logits are compared, they must be calibrated alike, too; arrays without a record count as not calibrated.

    Args:
        one: Who made the first.
        other: Who made the second.
        by: The function that the user called.
        of: What the two are, for the message.
        error: What to raise.
        logits: Whether their logits are compared, and not features alone.
    """
    one, other = one or Provenance(), other or Provenance()
    known = None not in (one.model_id, other.model_id)
    if known and (reason := one.difference(other)):
        names = f" ({one.model}, not {other.model})" if one.model and other.model and one.model != other.model else ""
        raise error(
            f"{by}: {of} must come from one model with one transform; the first comes from another{names}: {reason}. "
            f"Extract both with the same model."
        )
    if logits and (reason := one.calibration_difference(other)):
        raise error(
            f"{by}: {of} must have logits of one kind; of the first, {reason}. Apply the same calibration to both, or "
            f"to neither, and fit what was fitted on other logits again."
        )


def describe_difference(there: Any, here: Any) -> str | None:
    """How two settings or hashes differ, in words; None if they do not. Tuples and lists are the same, as in JSON.

    >>> describe_difference({"lr": 0.1, "k": 2}, {"lr": 0.2, "k": 2}), describe_difference("ab12cd34ef56ab78", None)
    ('lr=0.1 there, 0.2 here', 'ab12cd34 there, none here')
    """
    if _plain(there) == _plain(here):
        return None
    if not isinstance(there, dict) or not isinstance(here, dict):
        return f"{_short(there)} there, {_short(here)} here"
    keys = [key for key in {**there, **here} if _plain(there.get(key)) != _plain(here.get(key))]
    return ", ".join(f"{key}={_short(there.get(key))} there, {_short(here.get(key))} here" for key in keys)


def _plain(part: Any) -> str:
    return json.dumps(part, sort_keys=True)


def _short(value: Any) -> str:
    """A hash by its beginning, anything else as it is."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return value[:8] if re.fullmatch("[0-9a-f]{9,}", value) else value
    return json.dumps(value)
