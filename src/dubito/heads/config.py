"""What a head's config.json says: its shape, whose features it reads, and how it was trained and measured."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, final, get_args

from dubito.errors import ArtefactError, ValueRangeError
from dubito.types import Json

FORMAT = 1
DiskType = Literal["float16", "float32"]
_KINDS: dict[str, tuple[type, ...]] = {
    "format": (int,),
    "features": (int,),
    "width": (int,),
    "depth": (int,),
    "model": (str, type(None)),
    "provenance": (dict, type(None)),
    "dtype": (str,),
    "trained": (dict,),
    "measured": (dict,),
    "licence": (str, type(None)),
}


@final
@dataclass(frozen=True)
class HeadConfig:
    """Everything about a head but its weights.

    Attributes:
        features: Width d of the features that it reads.
        width: Of every hidden layer.
        depth: Number of hidden layers.
        model: The backbone's name, such as "pypi:efficientnet_lite0", if known.
        provenance: The backbone's identity, `Table.provenance` of what it was trained on; None where it is not known.
        dtype: Of the weights on disk. float16 halves the file; they are read as float32 in any case.
        trained: How, as JSON: settings, rows, seed, and under "corpus" on which images.
        measured: What it reached, as JSON: figures by name.
        licence: Of the weights, as an SPDX name such as "Apache-2.0".
    """

    features: int
    width: int = 512
    depth: int = 2
    model: str | None = None
    provenance: Json | None = None
    dtype: DiskType = "float32"
    trained: Json = field(default_factory=dict)
    measured: Json = field(default_factory=dict)
    licence: str | None = None
    format: int = FORMAT

    def __post_init__(self) -> None:
        if self.features < 1 or self.width < 1 or self.depth < 0:
            raise ValueRangeError(
                f"head: features and width must be at least 1 and depth at least 0; {self.features}, {self.width}, "
                f"{self.depth} came."
            )
        if self.dtype not in get_args(DiskType):
            raise ValueRangeError(f"head: dtype must be one of {', '.join(get_args(DiskType))}; got '{self.dtype}'.")

    def to_json(self) -> Json:
        """The entries of config.json."""
        try:
            plain: Json = json.loads(json.dumps(asdict(self), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ArtefactError(
                f"head: provenance, trained and measured must be JSON without NaN ({error}). Give plain numbers and texts."
            ) from error
        return plain

    @classmethod
    def from_json(cls, found: Any, where: str) -> "HeadConfig":
        """What `to_json` gave, checked entry by entry; `where` is told in errors."""
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            came = found.get("format") if isinstance(found, dict) else type(found).__name__
            raise ArtefactError(
                f"{where} is not a head's config.json of format {FORMAT}; format {came} came. "
                f"Update dubito, or save the head again."
            )
        names = {one.name for one in fields(cls)}
        odd = [f"no entry '{key}'" for key in sorted(names - found.keys())]
        odd += [f"an entry '{key}' that no head has" for key in sorted(found.keys() - names)]
        odd += [
            f"{key}={found[key]!r:.40}" for key, kinds in _KINDS.items() if key in found and not _is(found[key], kinds)
        ]
        odd += [f"dtype='{found['dtype']}'"] if not odd and found["dtype"] not in get_args(DiskType) else []
        if odd:
            raise ArtefactError(f"{where} has {odd[0]}. Copy it again, or save the head again with save_pretrained.")
        try:
            return cls(**found)
        except ValueRangeError as error:
            raise ArtefactError(f"{where} cannot be used ({error}). Save the head again.") from error


def same_backbone(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Why a head's backbone and a table's provenance are not the same; None if they are.

    Weights agree where either their hash or that of the tensors alone does: the first changes with the versions of timm
    and torch, see `dubito.models.fingerprint`. What has no tensors, activations and pools, is compared by itself
    (`operations`), where both sides know it: heads and caches from before it was recorded do not.

    >>> same_backbone({"weights": "ab12"}, {"weights": "cd34"})
    'its weights differ (ab12 there, cd34 here): the backbone was fine-tuned or is another one'
    """
    reasons = []
    if not any(there.get(part) is not None and there.get(part) == here.get(part) for part in ("weights", "tensors")):
        part = "tensors" if there.get("tensors") and here.get("tensors") else "weights"
        told = f"{_short(there.get(part))} there, {_short(here.get(part))} here"
        reasons.append(f"its weights differ ({told}): the backbone was fine-tuned or is another one")
    if replaced := _replaced(there.get("operations"), here.get("operations")):
        reasons.append(f"its operations differ ({replaced}): activations or pools were replaced")
    if _plain(there.get("transform")) != _plain(here.get("transform")):
        told = _differing(there.get("transform"), here.get("transform"))
        reasons.append(f"its transform differs ({told}): images were prepared in another way")
    if _plain(there.get("head")) != _plain(here.get("head")):
        told = _differing(there.get("head"), here.get("head"))
        reasons.append(f"its classifying layer differs ({told}): features are read elsewhere in the model")
    return "; ".join(reasons) or None


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _replaced(there: Any, here: Any) -> str | None:
    """The operations that only one side has, None if there are none; what one side does not know is not compared."""
    if there is None or here is None or set(there) == set(here):
        return None
    gone, new = (", ".join(sorted(some)) or "none" for some in (set(there) - set(here), set(here) - set(there)))
    return f"{gone} there, {new} here"


def _plain(part: Any) -> str:
    """As JSON: tuples and lists are the same once they have been on disk."""
    return json.dumps(part, sort_keys=True)


def _differing(there: Any, here: Any) -> str:
    """Of two settings only what differs."""
    if not isinstance(there, dict) or not isinstance(here, dict):
        return f"{_short(there)} there, {_short(here)} here"
    keys = [key for key in {**there, **here} if _plain(there.get(key)) != _plain(here.get(key))]
    return ", ".join(f"{key}={_short(there.get(key))} there, {_short(here.get(key))} here" for key in keys)


def _short(value: Any) -> str:
    """A hash by its beginning, anything else as it is."""
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value)
    return f"{text[:8]}…" if isinstance(value, str) and len(text) > 16 else text
