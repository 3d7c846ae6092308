"""Who is this model: hashes of its structure and of every weight.

    tensors    = blake2b( (key, dtype, shape, blake2b(bytes)) of every parameter and buffer, by key )
    weights    = blake2b( (name, class, settings) of every submodule, tensors )
    operations = which activations and pools stand among the submodules

Classes and settings are those of timm and torch, whose versions rename and extend them. So `weights` reveals any change
of the submodules, and `tensors` alone stays the same on another machine with other versions. `operations` reveals the
most likely change that leaves tensors as they are, another activation. What versions do change in it is left out: a
prefix or suffix of a name (transformers had PytorchGELUTanh and SiLUActivation, which are GELUTanh and SiLU now), and
how often an activation is there, as one module may be shared by several layers. So one of several equal activations
that is replaced by another kind that is there as well goes unnoticed; and nothing here sees what a forward calls as a
function.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


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
    kinds = {
        _operation(part)
        for part in module.modules()
        if re.search(r"\b(activations?|pooling)\b", type(part).__module__) and not list(part.parameters())
    }
    return sorted(kinds)


def _operation(part: nn.Module) -> str:
    """Class and settings; whether it writes into its input does not change what comes out."""
    settings = re.sub(r"(, )?inplace(=True)?", "", part.extra_repr())
    name = re.sub(r"^Pytorch(?=.)|(?<=.)Activation$", "", type(part).__name__)
    return name + (f"({settings})" if settings else "")


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """32 hex digits that change with any tensor's name, type, shape or value, and not with their order."""
    state = hashlib.blake2b(digest_size=16)
    for key, tensor in sorted(tensors.items()):
        content = hashlib.blake2b(_bytes(tensor), digest_size=16).hexdigest()
        state.update(f"{key}|{tensor.dtype}|{tuple(tensor.shape)}|{content}\n".encode())
    return state.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    """The raw memory, whatever the type; hashing reads it without a copy."""
    flat = tensor.detach().to("cpu").contiguous().flatten()
    return flat.view(torch.uint8).numpy() if flat.numel() else b""
