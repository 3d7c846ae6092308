"""Weights: read from a file without executing pickle, put into a module, and hashed.

    tensors    = blake2b( (key, dtype, shape, blake2b(bytes)) of every parameter and buffer, by key )
    weights    = blake2b( (name, class, settings) of every submodule, tensors )
    operations = which activations and pools stand among the submodules

Versions of timm and torch rename and extend classes and settings: `weights` reveals any change of the submodules, and
`tensors` alone stays the same. `operations` reveals the most likely change that leaves tensors as they are, another
activation, but ignores what versions change: prefix and suffix of a name (PytorchGELUTanh and SiLUActivation of
transformers are GELUTanh and SiLU now), and how often it occurs. What a forward calls as a function is in none of them.
"""

import hashlib
import pickle
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dubito.errors import CheckpointError, first_words
from dubito.storage import tensors_digest
from dubito.threads import quiet

_WRAPPERS = (
    *("state_dict", "model_state_dict", "model_state", "model", "net", "network", "module", "weights", "params"),
    *("teacher", "student", "state_dict_ema", "model_ema", "ema_state_dict", "ema"),
)
"""Keys under which training programs save a model beside other things; the first one that is there counts."""
_PREFIXES = ("module.", "_orig_mod.")
_INSERTED = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""What torch.compile, FSDP and activation checkpointing insert into names."""
_STARTS = (b"PK", b"\x80")
"""How PyTorch files begin: a zip archive, or in the old format a pickle."""
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_DEEPEST = 4
_MOST_NAMES = 100_000
"""Of the tensors of one module that was saved whole: parts that it shares have a name in each place."""


def read_weights(path: str | Path, *, stand_ins: bool = True) -> dict[str, Tensor]:
    """The tensors of a safetensors or PyTorch file by name; no pickle is executed.

    The usual wrappings are opened: a checkpoint of Lightning or of a training program (`state_dict`, `model`, `ema`
    ...), a whole module. Python objects beside the tensors are read as stand-ins, none of whose code runs; with
    `stand_ins=False`, a file that holds any is refused.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"weights: no file '{path}'. Pass the path of a .safetensors or PyTorch weights file.")
    try:
        content = load_file(path) if path.suffix == ".safetensors" else _read_torch(path, stand_ins)
        weights = _named_tensors(content)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file can fail anywhere
        reason = first_words(error)
        raise CheckpointError(f"weights: '{path}' is not a readable weights file ({reason}). Copy it again.") from error
    if weights is None:
        raise CheckpointError(_no_tensors(path, content))
    for prefix in _PREFIXES:
        if all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights


def _read_torch(path: Path, stand_ins: bool) -> Any:
    with path.open("rb") as file:
        if not file.read(2).startswith(_STARTS):
            raise CheckpointError(f"weights: '{path}' is no PyTorch file. Pass one of torch.save, or a .safetensors.")
    try:
        with quiet():  # torch warns about pickles; whether this one can be read is reported below
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        content = _read_stand_ins(path) if stand_ins and zipfile.is_zipfile(path) else None
        if content is None or _named_tensors(content) is None:
            raise CheckpointError(
                f"weights: '{path}' holds Python objects besides tensors, which could run code; nothing was executed. "
                f"Save model.state_dict() alone, as safetensors or with torch.save, where you trust the file."
            ) from error
        return content


def _named_tensors(content: Any) -> dict[str, Tensor] | None:
    """The tensors by name somewhere in what a file holds; None where they are not to be found, or not without doubt."""
    known: dict[tuple[int, int], dict[str, Tensor] | None] = {}  # what a file shares is looked at once per depth
    states: dict[int, dict[str, Any]] = {}

    def look(content: Any, depth: int) -> dict[str, Tensor] | None:
        if not isinstance(content, dict) or depth > _DEEPEST:
            return None
        key = id(content), depth
        if key not in known:
            known[key] = tensors_in(content, depth)
        return known[key]

    def tensors_in(content: dict[Any, Any], depth: int) -> dict[str, Tensor] | None:
        if "_parameters" in content and "_modules" in content:
            content = _module_state(content, states)
        if content and all(isinstance(key, str | int) and isinstance(one, Tensor) for key, one in content.items()):
            return {str(key): value for key, value in content.items()}
        for key in _WRAPPERS:
            if (inner := look(content.get(key), depth + 1)) is not None:
                return inner
        others = [inner for value in content.values() if (inner := look(value, depth + 1)) is not None]
        return others[0] if len(others) == 1 else None

    return look(content, 0)


def _no_tensors(path: Path, content: Any) -> str:
    kind = type(content).__name__
    keys = f"a dict of {', '.join(sorted(map(str, content))[:5]) or 'nothing'}" if isinstance(content, dict) else kind
    repair = "Save model.state_dict() and pass that file."
    return f"weights: '{path}' must hold tensors by name; got {keys}. {repair}"


class _StandIn(dict[Any, Any]):
    """Takes the place of every object that is no tensor: keeps what it was made of, and runs none of its code."""

    def __new__(cls, *_: Any, **__: Any) -> "_StandIn":
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    __hash__ = object.__hash__  # type: ignore[assignment]  # it may be a key
    __repr__ = object.__repr__  # what it holds may share parts so often that its text had no end

    def __call__(self, *_: Any, **__: Any) -> "_StandIn":
        return _StandIn()

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            self.update(part if isinstance(part, dict) else {})

    def _ignore(self, *_: Any) -> None:
        """What lists and sets are filled by."""

    append = extend = add = _ignore


class _RebuiltTensor:
    """Stands for torch's functions that make a tensor of a storage, or a parameter of a tensor."""

    __slots__ = ()

    def __call__(self, data: Tensor, *view: Any) -> Tensor:
        if len(view) < 4:  # of a parameter: whether it has a gradient, hooks
            return data.detach()
        offset, size, stride = view[:3]
        return data.as_strided(tuple(size), tuple(stride), offset)


class _TensorsOnly(pickle._Unpickler):
    """Reads a pickle of PyTorch without importing or calling anything that it names, tensors excepted.

    A pickle can only call what `find_class` returns: stand-ins of ours, and types of Python that hold values. The
    unpickler is the one written in Python: its memo is a dict, so a hostile index cannot claim all memory.
    """

    def __init__(self, file: Any, path: Path, archive: zipfile.ZipFile, root: str) -> None:
        super().__init__(file)
        self._path, self._archive, self._root = path, archive, root

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_parameter"):
            return _RebuiltTensor()
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return set if name == "set" and module in ("builtins", "__builtin__") else _StandIn

    def persistent_load(self, pid: Any) -> Tensor:
        """A storage as a flat tensor, mapped from the file, so that only the tensors that are used are read."""
        kind, dtype, key, _, count = pid
        member = self._archive.getinfo(f"{self._root}data/{key}")
        if (
            kind != "storage"
            or member.compress_type != zipfile.ZIP_STORED
            or member.file_size != count * dtype.itemsize
        ):
            raise pickle.UnpicklingError(f"storage {key} is not as torch.save writes it")
        if not count:
            return torch.empty(0, dtype=dtype)
        with self._path.open("rb") as file:  # the data come behind a header, a name and a padding of their own lengths
            file.seek(member.header_offset + 26)
            lengths = np.frombuffer(file.read(4), "<u2")
        start = member.header_offset + 30 + int(lengths.sum())
        data = np.memmap(self._path, np.uint8, "c", start, (member.file_size,))
        return torch.from_numpy(data).view(dtype)


def _read_stand_ins(path: Path) -> Any:
    """What a zip file of torch.save holds: tensors, plain values, and stand-ins for all other objects."""
    with zipfile.ZipFile(path) as archive:
        pickles = [name for name in archive.namelist() if name.endswith("data.pkl") and name.count("/") <= 1]
        if len(pickles) != 1:
            return None
        if archive.getinfo(pickles[0]).compress_type != zipfile.ZIP_STORED:  # torch never compresses
            return None
        with archive.open(pickles[0]) as file:
            return _TensorsOnly(file, path, archive, pickles[0].removesuffix("data.pkl")).load()


def _module_state(module: Mapping[str, Any], known: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The state dict of a module that was saved whole, from its stand-in; those of its parts are kept in `known`."""
    if id(module) in known:
        return known[id(module)]
    hidden = module.get("_non_persistent_buffers_set") or ()
    state = {
        str(name): value
        for kind in ("_parameters", "_buffers")
        for name, value in (module.get(kind) or {}).items()
        if value is not None and (kind == "_parameters" or name not in hidden)
    }
    for name, part in (module.get("_modules") or {}).items():
        if isinstance(part, dict):
            state |= {f"{name}.{key}": value for key, value in _module_state(part, known).items()}
        if len(state) > _MOST_NAMES:
            raise pickle.UnpicklingError(f"a module of more than {_MOST_NAMES:,} tensors, as by parts shared too often")
    known[id(module)] = state
    return state


def under_own_names(weights: Mapping[str, Tensor], own: Collection[str]) -> dict[str, Tensor]:
    """Tensors under a module's own names: without the prefix that they have as part of a larger module.

    Of all prefixes ("model.", "module.net." ...), the one counts under which most of the module's names are found; what
    lies beside it belongs to other parts, such as a loss.

    >>> sorted(under_own_names({"net.fc.weight": torch.ones(1), "loss.scale": torch.ones(1)}, ["fc.weight"]))
    ['fc.weight']
    """
    plain = {_INSERTED.sub("", key): value for key, value in weights.items()}
    mine = {_INSERTED.sub("", key): key for key in own}
    prefix = _common_prefix(plain, mine)
    inner = {key.removeprefix(prefix): value for key, value in plain.items() if key.startswith(prefix)}
    return {mine.get(key, key): value for key, value in inner.items()}


def _common_prefix(names: Collection[str], own: Collection[str]) -> str:
    """What stands before a module's own names in a file: the shortest text behind which most of them are."""
    prefixes: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        for depth in range(len(parts)):
            if ".".join(parts[depth:]) in own:
                prefixes["".join(f"{part}." for part in parts[:depth])] += 1
    return min(prefixes, key=lambda one: (-prefixes[one], len(one)), default="")


def head_size(weights: Mapping[str, Tensor], module: nn.Module) -> int | None:
    """How many classes weights are for, if that is all in which they differ from a module's; None otherwise."""
    own = module.state_dict()
    named = under_own_names(weights, own)
    pairs = [(named[key].shape, own[key].shape) for key in own if key in named and named[key].shape != own[key].shape]
    sizes = {(one[0], other[0]) for one, other in pairs if one[1:] == other[1:] and len(one) == len(other)}
    alike = all(one[1:] == other[1:] and len(one) == len(other) for one, other in pairs)
    return next(iter(sizes))[0] if alike and len(sizes) == 1 else None


def fits(weights: Mapping[str, Tensor], module: nn.Module) -> bool:
    """Whether weights have a module's names and shapes, up to the number of classes."""
    problems = _problems(weights, module)
    shapes = problems.pop("of another shape")
    return not any(problems.values()) and (not shapes or head_size(weights, module) is not None)


def put_weights(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load weights into a module that we own; every name, without a common prefix, and every shape must fit."""
    problems = _problems(weights, module)
    shown = {what: ", ".join(keys[:3]) + (" ..." if len(keys) > 3 else "") for what, keys in problems.items()}
    mismatch = "; ".join(f"{len(keys)} {what}: {shown[what]}" for what, keys in problems.items() if keys)
    if mismatch:
        reason = _likely_reason(problems, len(module.state_dict()))
        raise CheckpointError(f"weights: '{source}' does not fit {type(module).__name__}: {mismatch}. {reason}")
    module.load_state_dict(under_own_names(weights, module.state_dict()), strict=False)


def _problems(weights: Mapping[str, Tensor], module: nn.Module) -> dict[str, list[str]]:
    """In what weights differ from a module's: by kind, the names."""
    own = module.state_dict()
    named = under_own_names(weights, own)
    shapes = {key: (tuple(named[key].shape), tuple(own[key].shape)) for key in own if key in named}
    missing = sorted(key for key in own.keys() - named.keys() if not key.endswith("num_batches_tracked"))
    beside = sorted(key for key in weights if not any(key.endswith(name) for name in named)) if missing else []
    return {
        "missing": missing,
        "unknown": sorted(named.keys() - own.keys()) + beside,
        "of another shape": [f"{key} ({a}, the model has {b})" for key, (a, b) in shapes.items() if a != b],
    }


def _likely_reason(problems: Mapping[str, list[str]], names: int) -> str:
    """Why weights do not fit, and what to do about it."""
    missing, unknown, shapes = problems.values()
    if len(missing) + len(shapes) > names / 2:
        return "It is of another architecture. Load the one that the file was saved from."
    if any(re.search("pos_embed|position", shape) for shape in shapes):
        return "The file is for inputs of another size. Pass transform=... with the size that it was trained with."
    if 0 < len(missing) <= 2 and not shapes and unknown:
        own = "Build the same head in a function of your own, 'python:FILE.py:FUNCTION', and load the file into that"
        return f"The file's head has other layers. {own}; or pass classes=0 for features alone."
    if 0 < len(missing) <= 2 and not shapes:
        return "The file has no classifying layer. Pass classes=0 for features alone."
    return "Load the architecture that the file was saved from (and its number of classes)."


def module_digests(module: nn.Module) -> dict[str, str]:
    """`weights` and `tensors`, 32 hex digits each; every byte is read once."""
    tensors = tensors_digest({**dict(module.named_parameters()), **dict(module.named_buffers())})
    state = hashlib.blake2b(digest_size=16)
    for name, part in module.named_modules():
        settings = re.sub(r"0x[0-9a-f]+", "", part.extra_repr())
        state.update(f"{name}|{type(part).__qualname__}|{settings}\n".encode())
    state.update(tensors.encode())
    return {"weights": state.hexdigest(), "tensors": tensors}


def operations(module: nn.Module) -> list[str]:
    """The activations and pools without weights, each kind once, by class and settings.

    >>> operations(nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True), nn.ReLU(), nn.LeakyReLU(0.2)))
    ['LeakyReLU(negative_slope=0.2)', 'ReLU']
    """
    kinds = set()
    for part in module.modules():
        if re.search(r"\b(activations?|pooling)\b", type(part).__module__) and not list(part.parameters()):
            # Whether it writes into its input does not change its output.
            settings = re.sub(r"(, )?inplace(=True)?", "", part.extra_repr())
            name = re.sub(r"^Pytorch(?=.)|(?<=.)Activation$", "", type(part).__name__)
            kinds.add(name + (f"({settings})" if settings else ""))
    return sorted(kinds)
