"""Read what one linear layer is given, at almost no cost: a hook on that layer, gone again when the pass is over.

A Spy sees everything and costs some microseconds a torch function, which a small network on small batches feels.
Once the head is known to be a plain nn.Linear, a hook on it tells the same and ends the pass there.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dubito.models._spy import Call, Reached


def plain_layer(module: nn.Module, call: Call) -> nn.Linear | None:
    """The one nn.Linear whose weight the call used, if it is that and nothing cleverer."""
    layers = [
        part
        for part in module.modules()
        if isinstance(part, nn.Linear) and type(part).forward is nn.Linear.forward and part.weight is call.weight
    ]
    return layers[0] if len(layers) == 1 else None


def read_input(layer: nn.Linear, run: Callable[[], Any]) -> Tensor | None:
    """What the layer is given first while `run` runs; None if it is not called with one tensor."""
    found: list[Tensor] = []

    def tap(_: nn.Module, given: tuple[Any, ...]) -> None:
        found.extend(given)
        raise Reached

    handle = layer.register_forward_pre_hook(tap)
    try:
        run()
    except Reached:
        pass
    finally:
        handle.remove()
    return found[0] if len(found) == 1 else None
