"""Damage drawn from bytes: flips and cuts of files, and edits inside JSON and safetensors.

A script of bytes decides everything, so that hypothesis and libFuzzer need to know nothing but bytes, and a fault is
reproduced by the bytes that showed it.
"""

import json
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Choice = TypeVar("Choice")
NUMBERS = (0, 1, 2, 127, 128, 255, 256, 65535, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
"""Values where integers of some size overflow, or announce more than there is."""
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e-320, 1e308, math.inf, -math.inf, math.nan),
    *(2**31, 2**40, 2**63, 2**64, -(2**63), 10**30, 10**400, "", "x", "0", "nan", "../x", "/", "\ud800", "é\n\x1b[31m"),
    *([], {}, [[]], [None], [0, 0], [2**40, 2**40], {"": None}, {"a": {"b": []}}, "y" * 5000, [0] * 1000),
    json.loads("[" * 500 + "]" * 500),
)
"""Values in the place of others in JSON."""
TYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
"""Types of safetensors and their bytes."""


class Script:
    """Choices from bytes: the same bytes make the same choices, and at their end every choice is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def ended(self) -> bool:
        """Whether all bytes have been used."""
        return self._at >= len(self._data)

    def take(self, count: int) -> bytes:
        """The next bytes, with zeros behind the end."""
        piece = self._data[self._at : self._at + count]
        self._at += count
        return piece.ljust(count, b"\0")

    def number(self, below: int) -> int:
        """A number from 0 to under `below`."""
        size = (max(below, 1).bit_length() + 7) // 8
        return int.from_bytes(self.take(size), "little") % max(below, 1)

    def one_of(self, options: Sequence[Choice]) -> Choice:
        """One of them."""
        return options[self.number(len(options))]


def edit_bytes(script: Script, data: bytes) -> bytes:
    """One change of some bytes: a bit, a number, a cut, a piece that is moved, doubled or lost."""
    start = script.number(len(data) + 1)
    size = 1 + script.number(min(64, len(data) + 1))
    before, piece, after = data[:start], data[start : start + size], data[start + size :]
    number = NUMBERS[script.number(len(NUMBERS))]
    width = script.one_of((1, 2, 4, 8))
    order: Any = script.one_of(("little", "big"))
    patch = (number % 256**width).to_bytes(width, order)
    edits: Sequence[Callable[[], bytes]] = (
        lambda: before + bytes([piece[0] ^ (1 << script.number(8))]) + data[start + 1 :] if piece else data[:-1],
        lambda: before + script.take(1) + data[start + 1 :],
        lambda: before,
        lambda: before + after,
        lambda: before + piece * 2 + after,
        lambda: before + patch + data[start + width :],
        lambda: before + script.take(size) + after,
        lambda: before + bytes(len(piece)) + after,
        lambda: after + before,
        lambda: before + str(number).encode() + after,
    )
    return script.one_of(edits)()


def edit_json(script: Script, value: Any) -> Any:
    """A copy of plain values with one of them replaced, removed, doubled, renamed or exchanged."""
    if isinstance(value, dict | list) and value and script.number(8):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = script.one_of(keys)
        action = script.number(12)
        copy: Any = dict(value) if isinstance(value, dict) else list(value)
        if action == 1:
            del copy[key]
        elif action == 2:
            copy[key] = value[script.one_of(keys)]
        elif action == 3 and isinstance(copy, dict):
            copy[script.one_of(("x", "", "digest", "format", *map(str, keys)))] = copy.pop(key)
        elif action == 3:
            copy.insert(key, copy[key])
        else:
            copy[key] = edit_json(script, value[key])
        return copy
    if isinstance(value, bool) or not isinstance(value, int | float) or script.number(2):
        return script.one_of(ODD)
    return script.one_of((value + 1, value - 1, -value, value * 2, float(value), str(value)))


def edit_tensors(script: Script, data: bytes) -> bytes:
    """A safetensors file with other values, types or shapes, whose header still describes its bytes; or not."""
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return pack_tensors(edit_json(script, header), body)
    name = script.one_of(names)
    about = header[name]
    start, end = about["data_offsets"]
    if not 0 <= start <= end <= len(body):
        raise ValueError("an earlier edit has moved it")
    action = script.number(8)
    if action == 0:
        return pack_tensors(edit_json(script, header), body)
    if action == 1:
        header[name] = edit_json(script, about)
    elif action == 2:
        kind = script.one_of(list(TYPES))
        header[name] = {**about, "dtype": kind, "shape": [(end - start) // TYPES[kind]]}
    elif action == 3:
        header[name] = {**about, "shape": script.one_of((about["shape"][::-1], [1, *about["shape"]], [-1], [0]))}
    elif action == 4:
        body = body[:start] + (script.take(4) * (1 + (end - start) // 4))[: end - start] + body[end:]
    elif action == 5:
        odd = struct.pack("<f", script.one_of((math.nan, math.inf, -math.inf, 1e38, -1.0)))
        at = start + 4 * script.number(max(1, (end - start) // 4))
        body = (body[:at] + odd + body[at + 4 :])[: len(body)]
    elif action == 6:
        return without_tensor(header, body, name)
    else:
        body = body[:start] + edit_bytes(script, body[start:end])[: end - start].ljust(end - start, b"\0") + body[end:]
    return pack_tensors(header, body)


def without_tensor(header: dict[str, Any], body: bytes, name: str) -> bytes:
    """A safetensors file without one of its tensors, which others close up."""
    start, end = header[name]["data_offsets"]
    rest = {}
    for key, about in header.items():
        if key != name:
            moved = [at - (end - start) * (at >= end) for at in about.get("data_offsets", ())]
            rest[key] = {**about, "data_offsets": moved} if moved else about
    return pack_tensors(rest, body[:start] + body[end:])


def pack_tensors(header: Any, body: bytes) -> bytes:
    """A safetensors file."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + body


def edit_file(script: Script, name: str, data: bytes) -> bytes:
    """One edit of what a file says, by its ending."""
    try:
        if name.endswith(".json"):
            return json.dumps(edit_json(script, json.loads(data))).encode()
        return edit_tensors(script, data) if name.endswith(".safetensors") else edit_bytes(script, data)
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError, struct.error, RecursionError):
        return edit_bytes(script, data)  # an earlier edit has left nothing to parse
