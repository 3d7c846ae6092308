"""Weights from a file, safely: safetensors, or a PyTorch checkpoint of tensors only. No pickle is ever executed."""

import copy
import pickle
import warnings
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dubito.errors import CheckpointError, ModelError
from dubito.models.wrap import WrappedClassifier, eager, wrap

_WRAPPERS = ("state_dict", "model", "model_state_dict", "model_state", "net")
_PREFIXES = ("module.", "_orig_mod.")
_STARTS = (b"PK", b"\x80")
"""How PyTorch files begin: a zip archive, or in the old format a pickle."""


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a weights file, by key; the usual wrappings (state_dict, model, "module.") are removed."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"weights: no file '{path}'. Give the path of a .safetensors or PyTorch weights file.")
    content: object = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    for key in _WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise CheckpointError(
            f"weights: '{path}' must hold tensors by name; got {_contents(content)}. "
            f"Save model.state_dict() and give that file."
        )
    weights = {str(key): value for key, value in content.items()}
    for prefix in _PREFIXES:
        if all(key.startswith(prefix) for key in weights):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights


def put_weights(module: nn.Module, weights: dict[str, Tensor], source: str) -> None:
    """Load weights into a module that we own; every key and shape must fit."""
    own = module.state_dict()
    problems = [
        (
            "missing",
            sorted(key for key in own.keys() - weights.keys() if not key.endswith("num_batches_tracked")),
        ),
        ("unknown", sorted(weights.keys() - own.keys())),
        (
            "of another shape",
            [
                f"{key} ({tuple(weights[key].shape)}, the model has {tuple(own[key].shape)})"
                for key in own
                if key in weights and own[key].shape != weights[key].shape
            ],
        ),
    ]
    mismatch = "; ".join(
        f"{len(keys)} {what}: {', '.join(keys[:3])}{' ...' if len(keys) > 3 else ''}" for what, keys in problems if keys
    )
    if mismatch:
        raise CheckpointError(
            f"weights: '{source}' does not fit {type(module).__name__}: {mismatch}. "
            f"Load the architecture that the file was saved from (and its number of classes)."
        )
    module.load_state_dict(weights, strict=False)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"weights: '{path}' is not a whole safetensors file ({error}). Copy it again.") from error


def _read_torch(path: Path) -> object:
    with path.open("rb") as file:
        if not file.read(2).startswith(_STARTS):
            raise CheckpointError(
                f"weights: '{path}' is not a PyTorch file. Give a file of torch.save, or a safetensors file with the "
                f"ending .safetensors."
            )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about pickles; whether this one can be read is reported below
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"weights: '{path}' holds Python objects besides tensors, which could run code; nothing was executed. "
            f"Save model.state_dict() alone, as safetensors or with torch.save, where you trust the file."
        ) from error
    except Exception as error:  # a damaged file can fail anywhere
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise CheckpointError(f"weights: '{path}' is not a readable PyTorch file ({reason}). Copy it again.") from error


def _contents(content: object) -> str:
    if isinstance(content, dict):
        return "a dict of " + (", ".join(sorted(map(str, content))[:5]) or "nothing")
    return type(content).__name__


def with_weights(model: WrappedClassifier, path: str | Path) -> WrappedClassifier:
    """The same architecture, transform and classes with the weights of a file; the model itself is left alone.

    Args:
        model: From dubito.load or dubito.wrap.
        path: A safetensors file, or a PyTorch file of tensors only, as `dubito.load(weights=...)` takes it.
    """
    if not isinstance(model, WrappedClassifier):
        raise ModelError(
            f"with_weights: model must come from dubito.load or dubito.wrap; got {type(model).__name__}. "
            f"Wrap it: dubito.wrap(module, transform=...)."
        )
    weights = read_weights(path)
    module = copy.deepcopy(eager(model.module))
    put_weights(module, weights, str(path))
    head = model.fingerprint()["head"]
    return wrap(
        module,
        transform=model.transform,
        classes=model.classes,
        head=head["layer"],
        output=head["output"],
        name=f"{model.name} with {Path(path).name}",
    )
