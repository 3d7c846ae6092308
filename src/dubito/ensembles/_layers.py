"""Which linear layers get masks: those that the user names, or all that a pass calls."""

from collections.abc import Container, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from dubito.ensembles.masks import Span
from dubito.errors import ModelError


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """All of them by name, those that share a weight once."""
    found = {name: part for name, part in module.named_modules() if isinstance(part, nn.Linear)}
    first = {id(layer.weight): name for name, layer in reversed(found.items())}
    return {name: found[name] for name in found if name in first.values()}


def chosen_layers(
    module: nn.Module, names: Sequence[str] | None, called: Container[str], where: str
) -> dict[str, nn.Linear]:
    """The layers that the names stand for, in the order of the module.

    Args:
        module: The model.
        names: Names or patterns ("blocks.*.mlp.fc?"); None: all that are called.
        called: Layers that a pass calls as linear functions.
        where: How errors call the model.
    """
    there = linear_layers(module)
    if names is None:
        names = [name for name in there if name in called]
        if not names:
            raise ModelError(
                f"{where} calls no nn.Linear that could be masked. Masks are for linear layers; for a convolutional "
                f"model use tiles (dubito.Tiles), or mask its last layer from a cache (HeadMasks)."
            )
    chosen: set[str] = set()
    for asked in [names] if isinstance(names, str) else names:
        matching = {name for name in there if fnmatchcase(name, asked)}
        if not matching:
            near = get_close_matches(asked, list(there), n=3, cutoff=0.3) or list(there)[:3]
            raise ModelError(
                f"layers: {where} has no linear layer '{asked}'. Nearest: {', '.join(near) or 'it has none'}."
            )
        chosen |= matching
    silent = [name for name in there if name in chosen and name not in called]
    if silent:
        raise ModelError(
            f"layers: {where} does not call '{silent[0]}' as a linear layer (it may be part of a fused attention, or "
            f"not be used at all), so it cannot be masked. Leave it out."
        )
    return {name: layer for name, layer in there.items() if name in chosen}


def spans_of(layers: Mapping[str, nn.Linear], classes: int) -> list[Span]:
    """Rows and columns of each layer. A layer with as many rows as there are classes keeps them: none may vanish."""
    spans = []
    for name, layer in layers.items():
        if layer.out_features != classes:
            spans.append(Span(name, "rows", layer.out_features))
        spans.append(Span(name, "columns", layer.in_features))
    return spans
