"""Borrow a module: eval mode inside, everything as it was outside, also after an exception."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def frozen(module: nn.Module) -> Iterator[nn.Module]:
    """The module in eval mode without gradients; every submodule's own mode and the random state come back afterwards.

    Eval mode keeps BatchNorm statistics and dropout still; parameters, requires_grad and hooks are never touched.
    """
    training = [part for part in module.modules() if part.training]
    random = torch.get_rng_state()
    try:
        for part in training:
            part.training = False
        with torch.inference_mode(False), torch.no_grad():
            yield module
    finally:
        torch.set_rng_state(random)
        for part in training:
            part.training = True


class KeptBuffers:
    """A copy of all buffers, for a module whose forward changes them even in eval mode, such as a counter."""

    def __init__(self, module: nn.Module) -> None:
        self._kept: list[tuple[nn.Module, str, Tensor, int, Tensor]] = [
            (part, name, buffer, _version(buffer), buffer.clone())
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        ]

    def restore(self) -> bool:
        """Put back what has changed; says whether anything had."""
        changed = False
        for part, name, buffer, version, before in self._kept:
            if part._buffers[name] is not buffer or _version(buffer) != version:
                changed = True
                part._buffers[name] = buffer
                with torch.no_grad():
                    buffer.copy_(before)
        return changed


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to; one made under inference_mode does not count, and cannot be written to."""
    return 0 if tensor.is_inference() else tensor._version
