"""Which layer of a module classifies: named by the user, found by watching a batch, or the last linear one."""

from difflib import get_close_matches

from torch import Tensor, nn

from dubito.errors import ModelError
from dubito.models import wrap


def classifying_layer(module: nn.Module, layer: str | None, example: Tensor | None) -> str:
    """Its name within the module."""
    if layer is not None:
        return _named(module, layer)
    return _last_linear(module) if example is None else _watched(module, example)


def width_read(part: nn.Module, name: str) -> int:
    """The width of the feature, known before the first pass so that an optimizer gets the head's parameters."""
    if isinstance(part, nn.Linear):
        return part.in_features
    if isinstance(part, nn.Conv2d) and part.kernel_size == (1, 1) and part.groups == 1:
        return part.in_channels
    raise ModelError(
        f"layer: '{name}' is a {type(part).__name__}. Name the nn.Linear or the 1x1 convolution that gives the logits."
    )


def _named(module: nn.Module, layer: str) -> str:
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    if layer not in names:
        near = get_close_matches(layer, [name for name in names if name], n=3, cutoff=0.3)
        raise ModelError(
            f"layer: {type(module).__name__} has no layer '{layer}'. Nearest: {', '.join(near) or 'none'}."
        )
    return layer


def _watched(module: nn.Module, example: Tensor) -> str:
    model = wrap(module)
    model.features(example)
    names: list[str] = [name for name, part in module.named_modules() if part is model.layer]
    if names:
        return names[0]
    raise ModelError(
        f"with_uncertainty: {type(module).__name__} classifies by something else than one nn.Linear. "
        f"Name the layer whose input the head shall read with layer='...'; it may be a 1x1 convolution."
    )


def _last_linear(module: nn.Module) -> str:
    names: list[str] = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    if not names:
        raise ModelError(
            f"with_uncertainty: {type(module).__name__} has no linear layer. "
            f"Name the layer whose input the head shall read with layer='...'; it may be a 1x1 convolution."
        )
    return names[-1]
