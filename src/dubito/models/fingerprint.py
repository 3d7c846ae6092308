"""Who is this model: a hash of its structure and of every weight.

digest = blake2b( (name, class, settings) of every submodule, (key, dtype, shape, bytes) of every tensor )
"""

import hashlib
import re
from typing import Any

import torch
from torch import Tensor, nn


def weights_digest(module: nn.Module) -> str:
    """32 hex digits that change when the architecture or any parameter or buffer changes."""
    state = hashlib.blake2b(digest_size=16)
    for name, part in module.named_modules():
        settings = re.sub(r"0x[0-9a-f]+", "", part.extra_repr())
        state.update(f"{name}|{type(part).__qualname__}|{settings}\n".encode())
    tensors: list[tuple[str, Tensor]] = [*module.named_parameters(), *module.named_buffers()]
    for key, tensor in tensors:
        state.update(f"{key}|{tensor.dtype}|{tuple(tensor.shape)}\n".encode())
        state.update(_bytes(tensor))
    return state.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    """The raw memory, whatever the type; hashing reads it without a copy."""
    flat = tensor.detach().to("cpu").contiguous().flatten()
    return flat.view(torch.uint8).numpy() if flat.numel() else b""
