"""What a head's config.json says: its shape, whose features it reads, and how it was trained and measured."""

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, final, get_args

from dubito.errors import ArtefactError, ValueRangeError
from dubito.table import Provenance
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
    provenance: Provenance | None = None
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
            provenance = None if self.provenance is None else self.provenance.to_json()
            plain: Json = json.loads(json.dumps(asdict(self) | {"provenance": provenance}, allow_nan=False))
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
            return cls(**{**found, "provenance": Provenance.from_json(found["provenance"], where)})
        except ValueRangeError as error:
            raise ArtefactError(f"{where} cannot be used ({error}). Save the head again.") from error


def _is(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
