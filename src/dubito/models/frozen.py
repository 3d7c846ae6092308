"""Borrow a module: eval mode inside, everything as it was outside, also after an exception."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def frozen(module: nn.Module) -> Iterator[nn.Module]:
    """The module in eval mode without gradients; every submodule's own mode comes back afterwards.

    Eval mode keeps BatchNorm statistics and dropout still; parameters, requires_grad and hooks are never touched.
    """
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        with torch.inference_mode(False), torch.no_grad():
            yield module
    finally:
        for part, mode in modes:
            part.training = mode
