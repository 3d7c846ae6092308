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
    training = [part for part in module.modules() if part.training]
    try:
        for part in training:
            part.training = False
        with torch.inference_mode(False), torch.no_grad():
            yield module
    finally:
        for part in training:
            part.training = True
