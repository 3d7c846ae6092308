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
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dubito.errors import CheckpointError, first_words
from dubito.storage import tensors_digest

_WRAPPERS = ("state_dict", "model", "model_state_dict", "model_state", "net")
_PREFIXES = ("module.", "_orig_mod.")
_STARTS = (b"PK", b"\x80")
"""How PyTorch files begin: a zip archive, or in the old format a pickle."""


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a PyTorch file of tensors only, by key; no pickle is executed.

    The usual wrappings (state_dict, model, "module.") are removed.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"weights: no file '{path}'. Pass the path of a .safetensors or PyTorch weights file.")
    try:
        content = load_file(path) if path.suffix == ".safetensors" else _read_torch(path)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged file can fail anywhere
        reason = first_words(error)
        raise CheckpointError(f"weights: '{path}' is not a readable weights file ({reason}). Copy it again.") from error
    for key in _WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        keys = f"a dict of {', '.join(sorted(map(str, content))[:5]) or 'nothing'}" if isinstance(content, dict) else ""
        raise CheckpointError(
            f"weights: '{path}' must hold tensors by name; got {keys or type(content).__name__}. "
            f"Save model.state_dict() and pass that file."
        )
    weights = {str(key): value for key, value in content.items()}
    for prefix in _PREFIXES:
        if all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights


def _read_torch(path: Path) -> Any:
    with path.open("rb") as file:
        if not file.read(2).startswith(_STARTS):
            raise CheckpointError(f"weights: '{path}' is no PyTorch file. Pass one of torch.save, or a .safetensors.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about pickles; whether this one can be read is reported below
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"weights: '{path}' holds Python objects besides tensors, which could run code; nothing was executed. "
            f"Save model.state_dict() alone, as safetensors or with torch.save, where you trust the file."
        ) from error


def put_weights(module: nn.Module, weights: Mapping[str, Tensor], source: str) -> None:
    """Load weights into a module that we own; every key and shape must fit."""
    own = module.state_dict()
    shapes = {key: (tuple(weights[key].shape), tuple(own[key].shape)) for key in own if key in weights}
    problems = {
        "missing": sorted(key for key in own.keys() - weights.keys() if not key.endswith("num_batches_tracked")),
        "unknown": sorted(weights.keys() - own.keys()),
        "of another shape": [f"{key} ({a}, the model has {b})" for key, (a, b) in shapes.items() if a != b],
    }
    shown = {what: ", ".join(keys[:3]) + (" ..." if len(keys) > 3 else "") for what, keys in problems.items()}
    mismatch = "; ".join(f"{len(keys)} {what}: {shown[what]}" for what, keys in problems.items() if keys)
    if mismatch:
        raise CheckpointError(
            f"weights: '{source}' does not fit {type(module).__name__}: {mismatch}. "
            f"Load the architecture that the file was saved from (and its number of classes)."
        )
    module.load_state_dict(weights, strict=False)


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
