"""Members by Monte-Carlo dropout: one model several times, with other units dropped each time.

    p_m = softmax(f(x; mask_m)),   mask_m drawn as in training          (Gal & Ghahramani 2016, arXiv 1506.02142)

The module is not put into training mode, which would also change BatchNorm. It stays as it is, and a TorchFunctionMode
turns on the calls of dropout that it makes: dropout in all its forms, that of `nn.MultiheadAttention`, and with `rate`
that of `scaled_dot_product_attention`, whose own rate a module in eval mode does not show. Stochastic depth (DropPath
of timm and transformers, torchvision's StochasticDepth) is drawn by hooks that are gone after the pass; it keeps its
own rate. Dropout inside recurrent layers is not turned on. What is dropped depends on the seed, the number of the pass
and the batch's own numbers, and on nothing that was drawn before: an extraction that was interrupted gives the same
bits.
"""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dubito.errors import ModelError
from dubito.probes.members import EnsembleProbe
from dubito.storage import tensors_digest
from dubito.threads import seeded
from dubito.types import Classifier, Inputs
from dubito.validate import check_number, check_seed

_PLAIN = ("dropout", "alpha_dropout", "feature_alpha_dropout")
_DROPOUTS: dict[Any, tuple[tuple[str, int], tuple[str, int] | None]] = {
    **{getattr(F, name): (("p", 1), ("training", 2)) for name in (*_PLAIN, "dropout1d", "dropout2d", "dropout3d")},
    **{getattr(torch, name): (("p", 1), ("train", 2)) for name in (*_PLAIN, "feature_dropout")},
    F.multi_head_attention_forward: (("dropout_p", 10), ("training", 13)),
    F.scaled_dot_product_attention: (("dropout_p", 4), None),
}
"""Functions that drop: name and position of their rate, and of their switch, where they have one."""


@final
@dataclass(frozen=True)
class Dropout(EnsembleProbe):
    """Monte-Carlo dropout: the extracted model several times, dropping other units each time.

    Attributes:
        passes: Number of members.
        rate: Rate of every dropout that the model calls; None for its own, which is zero in many pretrained models.
        seed: Seed of the dropped units.
    """

    passes: int = 10
    rate: float | None = None
    seed: int = 0

    name = "dropout"

    def __post_init__(self) -> None:
        check_number(self.passes, "[2, inf)", by="dropout", what="passes", whole=True, hint="10 are usual.")
        if self.rate is not None:
            check_number(self.rate, "(0, 1)", by="dropout", what="rate", hint="Leave it out for the model's own.")
        check_seed(self.seed, by="dropout")
        super().__post_init__()

    def __len__(self) -> int:
        return self.passes

    def check(self, model: Classifier, x: Inputs) -> None:
        """One pass must call dropout; the model analyses itself in a pass before, undisturbed."""
        model.features(x[:2])
        drop = self._features(model, x[:2], seed=0)[1]
        if not drop.dropped:
            raise ModelError(
                f"dropout: {model.name} has {drop.met} calls of dropout, none with a rate above 0, so all passes would "
                f"be equal. Use Dropout(rate=0.1); where there is no call, load the model with dropout (timm: "
                f"drop_rate=0.2), or use probes.Views(), probes.Tiles() or several models."
            )

    def logits(self, model: Classifier, x: Inputs) -> Iterator[Float[Tensor, "n c"]]:
        """The logits of one pass after the other."""
        batch = tensors_digest({"x": x})
        for member in range(self.passes):
            z, _ = self._features(model, x, pass_seed(self.seed, member, batch))
            yield model.logits(z)

    def _features(self, model: Classifier, x: Inputs, seed: int) -> "tuple[Tensor, _Dropping]":
        drop = _Dropping(self.rate)
        with seeded(seed, [x.device]), drop, _stochastic_depth(model.module, drop):
            return model.features(x), drop


def pass_seed(seed: int, member: int, batch: str) -> int:
    """Of one pass: 63 bits of a hash of the seed, the number of the pass and the digest of the batch."""
    state = hashlib.blake2b(f"{seed}|{member}|{batch}".encode(), digest_size=8)
    return int.from_bytes(state.digest(), "little") >> 1


class _Dropping(TorchFunctionMode):
    """Turns dropout on, and counts it.

    Attributes:
        met: Calls of dropout so far.
        dropped: Those with a rate above zero.
    """

    def __init__(self, rate: float | None) -> None:
        super().__init__()
        self.met = self.dropped = 0
        self._rate = rate

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the function; dropout with its switch on, and never in place, because others read its input too."""
        if func not in _DROPOUTS:
            return func(*args, **(kwargs or {}))
        positional, named = list(args), dict(kwargs or {})

        def put(name: str, position: int, value: Any) -> None:
            if len(positional) > position:
                positional[position] = value
            else:
                named[name] = value

        (name, position), switch = _DROPOUTS[func]
        if self._rate is not None:
            put(name, position, self._rate)
        if switch is not None:
            put(*switch, True)
            named.pop("inplace", None)
        self.count(float(positional[position] if len(positional) > position else named.get(name, 0.0)))
        return func(*positional, **named)

    def count(self, rate: float) -> None:
        """One more call of dropout."""
        self.met += 1
        self.dropped += rate > 0


@contextmanager
def _stochastic_depth(module: nn.Module, drop: _Dropping) -> Iterator[None]:
    """Inside, residual branches are left out at random, row by row; in eval mode their layers pass inputs on."""

    def hook(part: nn.Module, _: Any, output: Tensor) -> Tensor:
        rate = float(getattr(part, "drop_prob", getattr(part, "p", 0.0)) or 0.0)
        drop.count(rate)
        rows = 1 if getattr(part, "mode", "row") == "batch" else len(output)
        kept = output.new_empty((rows, *(1 for _ in output.shape[1:]))).bernoulli_(1 - rate)
        scaled = getattr(part, "scale_by_keep", True) and rate < 1
        return output * (kept.div_(1 - rate) if scaled else kept)

    with ExitStack() as hooks:
        for part in module.modules():
            if type(part).__name__.endswith(("DropPath", "StochasticDepth")):
                hooks.callback(part.register_forward_hook(hook).remove)
        yield
