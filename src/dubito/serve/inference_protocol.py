"""Requests and answers of the Open Inference Protocol (version 2), which clients of KServe, Triton and MLServer speak.

    input     one tensor of datatype BYTES and shape [n] or [n, 1]: the files of n images
    outputs   one number, truth value or text per image; see `OUTPUTS`

In JSON, an image is a text in base64. With the binary tensor extension, the JSON is followed by the images, each after
its length in four bytes (little-endian), and `Inference-Header-Content-Length` is the length of the JSON; outputs come
in the same way where they are requested so.
"""

import base64
import binascii
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from dubito.errors import ImagesError
from dubito.guard import Verdict
from dubito.storage import parse_json
from dubito.types import Json

LENGTH_HEADER = "Inference-Header-Content-Length"
OUTPUTS: Mapping[str, tuple[str, Callable[[Verdict], Any]]] = {
    "predicted": ("INT64", lambda one: one.predicted),
    "predicted_class": ("BYTES", lambda one: one.predicted_class or str(one.predicted)),
    "probability": ("FP64", lambda one: one.probability),
    "uncertainty": ("FP64", lambda one: one.uncertainty),
    "accept": ("BOOL", lambda one: one.accept),
    "reason": ("BYTES", lambda one: one.reason),
}
"""By name, the datatype of an output, and its value of a verdict."""
_NUMBERS = {"INT64": "<i8", "FP64": "<f8", "BOOL": "?"}
_INPUT = "The one input must have datatype BYTES and shape [n]."


@final
@dataclass(frozen=True)
class InferRequest:
    """What a client sends.

    Attributes:
        id: The client's own name of the request, which is sent back.
        images: The files.
        outputs: By name of each output that is requested, whether it is sent in binary.
    """

    id: str | None
    images: list[bytes]
    outputs: dict[str, bool]

    @classmethod
    def parse(cls, body: bytes, header_length: str | None) -> "InferRequest":
        """Read a request; ImagesError says what is wrong with it."""
        text = str(len(body)) if header_length is None else header_length
        size = int(text) if text.isdecimal() and len(text) < 16 else -1
        if not 0 <= size <= len(body):
            raise ImagesError(f"{LENGTH_HEADER} must be at most the length of the body; got '{text[:40]}'.")
        try:
            request = parse_json(body[:size])
        except ValueError as error:
            raise ImagesError(f"the request must be JSON ({error}).") from error
        inputs = request.get("inputs") if isinstance(request, dict) else None
        if not isinstance(inputs, list) or len(inputs) != 1 or not isinstance(inputs[0], dict):
            raise ImagesError(f"the request must have one input. {_INPUT}")
        name = request.get("id")
        return cls(
            None if name is None else str(name).encode(errors="replace").decode(),
            _images(inputs[0], body[size:]),
            _outputs(request),
        )

    def answer(self, model: str, verdicts: Sequence[Verdict]) -> tuple[bytes, int | None]:
        """The body of the answer, and the length of its JSON where binary outputs follow."""
        outputs: list[Json] = []
        blocks: list[bytes] = []
        for name, binary in self.outputs.items():
            kind, value = OUTPUTS[name]
            values = [value(verdict) for verdict in verdicts]
            output: Json = {"name": name, "datatype": kind, "shape": [len(values)]}
            if binary:
                blocks.append(_packed(kind, values))
                output["parameters"] = {"binary_data_size": len(blocks[-1])}
            else:
                output["data"] = values
            outputs.append(output)
        about = {"model_name": model, **({} if self.id is None else {"id": self.id})}
        text = json.dumps({**about, "outputs": outputs}, allow_nan=False).encode()
        return b"".join([text, *blocks]), len(text) if blocks else None


def describe(name: str, classes: Sequence[str] | None) -> Json:
    """Metadata of the model, as the protocol has it."""
    return {
        "name": name,
        "platform": "dubito_guard",
        "versions": [],
        "inputs": [{"name": "image", "datatype": "BYTES", "shape": [-1]}],
        "outputs": [{"name": key, "datatype": kind, "shape": [-1]} for key, (kind, _) in OUTPUTS.items()],
        "parameters": {} if classes is None else {"classes": list(classes)},
    }


def _images(tensor: Json, binary: bytes) -> list[bytes]:
    shape, kind = tensor.get("shape"), tensor.get("datatype")
    sides = shape if isinstance(shape, list) and all(type(side) is int for side in shape) else []
    if kind != "BYTES" or len(sides) not in (1, 2) or sides[1:] not in ([], [1]):
        raise ImagesError(f"{_INPUT} Got datatype {str(kind)[:20]!r} and shape {str(shape)[:40]}.")
    parameters = tensor.get("parameters")
    if isinstance(parameters, dict) and "binary_data_size" in parameters:
        if parameters["binary_data_size"] != len(binary):
            raise ImagesError(f"binary_data_size must be the {len(binary)} bytes after the JSON.")
        images = _unpacked(binary)
    else:
        images = _decoded(tensor.get("data"))
    if len(images) != sides[0] or not images:
        raise ImagesError(f"the input must hold as many images as its shape says, at least one; got {len(images)}.")
    return images


def _unpacked(binary: bytes) -> list[bytes]:
    images, start = [], 0
    while start < len(binary):
        end = start + 4
        if end <= len(binary):
            end += int(struct.unpack_from("<I", binary, start)[0])
        if end > len(binary):
            raise ImagesError("binary data must be images, each after its length in four bytes; it is cut off.")
        images.append(binary[start + 4 : end])
        start = end
    return images


def _decoded(data: Any) -> list[bytes]:
    items = [one for row in data for one in (row if isinstance(row, list) else [row])] if isinstance(data, list) else []
    try:
        return [base64.b64decode(one, validate=True) for one in items]
    except (binascii.Error, TypeError, ValueError) as error:
        raise ImagesError(f"in JSON, data must be a list of images in base64 ({error}).") from error


def _outputs(request: Json) -> dict[str, bool]:
    binary = _flag(request, "binary_data_output")
    wanted = request.get("outputs")
    if not wanted:
        return dict.fromkeys(OUTPUTS, binary)
    names: dict[str, bool] = {}
    for one in wanted if isinstance(wanted, list) else [wanted]:
        name = one.get("name") if isinstance(one, dict) else None
        if not isinstance(name, str) or name not in OUTPUTS:
            raise ImagesError(f"outputs must be among {', '.join(OUTPUTS)}; got {str(name)[:40]!r}.")
        names[name] = _flag(one, "binary_data", default=binary)
    return names


def _flag(holder: Json, name: str, *, default: bool = False) -> bool:
    parameters = holder.get("parameters")
    return parameters.get(name, default) is True if isinstance(parameters, dict) else default


def _packed(kind: str, values: Sequence[Any]) -> bytes:
    if kind == "BYTES":
        texts = [str(value).encode(errors="replace") for value in values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return np.array(values, dtype=_NUMBERS[kind]).tobytes()
