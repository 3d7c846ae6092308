"""Joint training: an uncertainty head on a model that is itself still being trained.

    L = mean_i L_i + w * head_loss(u(sg(z)), L^det)          eq. 1 with a stop-gradient sg

z is what the classifying layer reads, L_i the task loss of image i and L^det the same without a gradient. Kirchhof et
al., Pretrained Visual Uncertainties (2024), section 3.2, 3.3 and Fig. 3. Without sg the head's gradients flow into the
backbone and disturb its own task. With it, everything but the head trains as if there were no head, bit for bit: the
head reads a detached feature, draws no random numbers, and is added to a loss whose other term it does not change.
We deviate in one place: the head computes in float32 at least, also under autocast and in a half-precision module,
because a margin of 0.1 is coarse in bfloat16.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dubito.cache.fingerprint import model_identity
from dubito.errors import ModelError, TableError, ValueRangeError
from dubito.heads._layer import classifying_layer, width_read
from dubito.heads.checkpoint import HeadConfig, PretrainedHead
from dubito.heads.losses import DIRECT_LOSSES, ranking_loss
from dubito.heads.module import HeadModule
from dubito.models.frozen import frozen
from dubito.types import Classifier

_CLOSE = 1e-5
"""How far features may differ, relatively: by the order of a sum, not by a step of the training."""


class JointOutput(NamedTuple):
    """What a model with a head answers."""

    logit: Float[Tensor, "n c"]
    u: Float[Tensor, "n"]


def with_uncertainty(
    module: nn.Module,
    *,
    layer: str | None = None,
    width: int = 512,
    depth: int = 2,
    seed: int = 0,
    stop_gradient: bool = True,
    example: Tensor | None = None,
) -> "WithUncertainty":
    """Add an uncertainty head to a classifier that is being trained.

    Args:
        module: Your model; it stays the same object, and its forward runs once a pass.
        layer: The name of the classifying layer, an nn.Linear or a 1x1 convolution. By default the last nn.Linear of
            the module; the first pass checks that it gives the module's output.
        width: Of the head's hidden layers.
        depth: How many hidden layers the head has.
        seed: Of the head's initial weights; the global random state is not touched.
        stop_gradient: False lets the head's gradients into the module, the conflict of Fig. 3a.
        example: A batch: the classifying layer is found by watching the module run on it, before any training.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3))
    >>> model = with_uncertainty(net, width=8)
    >>> logit, u = model(torch.zeros(2, 3, 2, 2))
    >>> tuple(logit.shape), tuple(u.shape), model.layer
    ((2, 3), (2,), '3')
    """
    if any(isinstance(part, WithUncertainty) for part in module.modules()):
        raise ModelError(
            f"with_uncertainty: {type(module).__name__} already holds a model with an uncertainty head. "
            f"Give the model inside, its .module."
        )
    name = classifying_layer(module, layer, example)
    part = module.get_submodule(name)
    head = HeadModule(width_read(part, name), width=width, depth=depth, seed=seed)
    weight = next(part.parameters())
    precise = torch.promote_types(weight.dtype, torch.float32)
    checked = layer is not None or example is not None
    return WithUncertainty(module, head.to(weight.device, precise), name, stop_gradient, checked=checked)


@final
class WithUncertainty(nn.Module):
    """A classifier and its head in one module. Built by `with_uncertainty`.

    Attributes:
        module: The classifier, the very object that was given.
        head_module: The head, in float32, or float64 where the module is; `pretrained` takes it out.
        layer: The name of the classifying layer within `module`. If one pass calls it twice, the last call counts.
        stop_gradient: Whether the head reads a detached feature.
    """

    def __init__(
        self, module: nn.Module, head_module: HeadModule, layer: str, stop_gradient: bool, *, checked: bool
    ) -> None:
        super().__init__()
        self.module, self.head_module = module, head_module
        self.layer, self.stop_gradient = layer, stop_gradient
        self.training = module.training
        self._checked = checked
        self._size: tuple[int, ...] | None = None

    def forward(self, x: Float[Tensor, "n ..."]) -> JointOutput:
        """Logits and u of a batch, from one run of the module."""
        logit, z = self._run(x)
        return JointOutput(logit, self._doubt(z))

    def _run(self, x: Float[Tensor, "n ..."]) -> tuple[Float[Tensor, "n c"], Float[Tensor, "n d"]]:
        """Logits, and the features that the classifying layer read."""
        self._size = tuple(x.shape[1:])
        part = self.module.get_submodule(self.layer)
        calls: list[tuple[Tensor, Tensor]] = []

        def tap(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            calls.append((args[0] if args else kwargs["input"], output))

        # Set for this pass only, so that the module is its owner's in between: copied, saved, wrapped twice.
        handle = part.register_forward_hook(tap, with_kwargs=True)
        try:
            out = self.module(x)
        finally:
            handle.remove()
        logit = _logit(out, len(x), self.module)
        if not calls:
            raise ModelError(
                f"with_uncertainty: {type(self.module).__name__} did not call its layer '{self.layer}' in this pass. "
                f"Name the layer that gives the logits with layer='...'."
            )
        source, output = calls[-1]
        if not self._checked:
            self._check(output, logit)
        return logit, self._feature(source, part, len(x))

    def pretrained(self, classifier: Classifier, example: Tensor | None = None) -> PretrainedHead:
        """The head as it can be kept, when the training is over: it knows its model and will refuse any other.

        `dubito.UncertaintyHead.from_joint` makes a score of it.

        Args:
            classifier: `dubito.wrap` of the trained module, with the transform and the class names that it will have.
            example: A batch of inputs, to check that the classifier reads what the head has learned from. By default
                noise of the size of the last batch.
        """
        module = copy.deepcopy(self.head_module).cpu().float().requires_grad_(False).eval()
        self._check_reads(classifier, self._example(example))
        config = HeadConfig(
            features=module.features,
            width=module.width,
            depth=module.depth,
            model=classifier.name,
            provenance=model_identity(classifier),
            trained={"jointly": True, "stop_gradient": self.stop_gradient},
        )
        return PretrainedHead(module, config)

    def _example(self, given: Tensor | None) -> Tensor:
        if given is not None:
            return given
        if self._size is None:
            raise ModelError(
                f"with_uncertainty: {type(self.module).__name__} has not seen a batch yet, so the size of its inputs "
                f"is not known. Give one as example=."
            )
        weight = next(self.module.get_submodule(self.layer).parameters())
        return torch.rand(2, *self._size, generator=torch.Generator().manual_seed(0)).to(weight)

    def _check_reads(self, classifier: Classifier, x: Tensor) -> None:
        """Raise ModelError unless the classifier's features are those that the head reads, in the module's precision.

        What the head says of them would not do: a head that says the same of every image fits all features.
        """
        with frozen(self):
            _, expected = self._run(x)
        if not _same_features(classifier.features(x), expected):
            raise ModelError(
                f"with_uncertainty: {classifier.name} does not compute the features that the head was trained on, what "
                f"layer '{self.layer}' of {type(self.module).__name__} reads. Wrap the trained module itself, "
                f"dubito.wrap(model.module); only a head on the layer that gives the logits can be kept."
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "WithUncertainty":
        """Moves to another device or precision reach the head too, except for half precision."""
        if recurse:
            self.module._apply(fn)  # type: ignore[no-untyped-call]
            self.head_module._apply(lambda tensor: _precise(fn(tensor), tensor))  # type: ignore[no-untyped-call]
        return self

    def _doubt(self, z: Float[Tensor, "n d"]) -> Float[Tensor, "n"]:
        if self.stop_gradient:
            z = z.detach()
        with torch.autocast(z.device.type, enabled=False):
            u: Tensor = self.head_module(z.to(next(self.head_module.parameters()).dtype))
        return u

    def _feature(self, source: Tensor, part: nn.Module, n: int) -> Float[Tensor, "n d"]:
        """One row an image: a convolution's map is averaged over its positions, as the pool behind it does."""
        z = source.mean((-2, -1)) if isinstance(part, nn.Conv2d) else source
        if len(z) != n or z.numel() != n * self.head_module.features:
            raise ModelError(
                f"with_uncertainty: layer '{self.layer}' reads {tuple(source.shape)} for {n} images; one row of "
                f"{self.head_module.features} an image is needed. Name the layer behind the pool with layer='...'."
            )
        return z.flatten(1)

    def _check(self, output: Tensor, logit: Tensor) -> None:
        """Whether the layer that was not named gives the module's answer."""
        same = output.numel() == logit.numel() and torch.allclose(
            output.reshape(logit.shape).to(logit.dtype), logit, rtol=0, atol=0, equal_nan=True
        )
        if not same:
            raise ModelError(
                f"with_uncertainty: '{self.layer}', the last linear layer of {type(self.module).__name__}, does not "
                f"give its output. Name the classifying layer with layer='...', or give a batch as example=."
            )
        self._checked = True


def joint_loss(
    task_losses: Float[Tensor, "..."],
    u: Float[Tensor, "..."],
    *,
    loss: str = "ranking",
    weight: float = 1.0,
    margin: float = 0.1,
    leeway: float = 0.0,
) -> Float[Tensor, ""]:
    """The mean task loss plus the head's loss on the detached task losses (eq. 1).

    Args:
        task_losses: (n), one number an image: reduction="none".
        u: (n), what the head says about the same images.
        loss: "ranking", or one that predicts the loss itself: "l2" (eq. 2), "l1", "log_l2", "variance_nll".
        weight: Of the head's loss. Behind a stop-gradient it only scales the head's own learning rate.
        margin: Of the ranking loss.
        leeway: Of the ranking loss.

    >>> joint_loss(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]), loss="l2").item()  # 2 + (0² + 1²) / 2
    2.5
    """
    if loss != "ranking" and loss not in DIRECT_LOSSES:
        raise ValueRangeError(f"joint_loss: loss must be one of ranking, {', '.join(DIRECT_LOSSES)}; got '{loss}'.")
    if task_losses.dim() != 1 or task_losses.shape != u.shape:
        raise TableError(
            f"joint_loss needs one task loss and one u an image; shapes {tuple(task_losses.shape)} and "
            f'{tuple(u.shape)} came. Compute the task loss with reduction="none".'
        )
    if loss == "ranking":
        doubt = ranking_loss(u, task_losses, margin=margin, leeway=leeway)
    else:
        doubt = DIRECT_LOSSES[loss](u, task_losses)
    return task_losses.mean() + weight * doubt


def _precise(moved: Tensor, before: Tensor) -> Tensor:
    """A tensor that was moved, in no less than float32: rounded to half precision, it could not be restored."""
    wanted = torch.promote_types(moved.dtype, torch.float32)
    return moved if moved.dtype == wanted else before.to(moved.device, wanted)


def _same_features(found: Tensor, expected: Float[Tensor, "n d"]) -> bool:
    """Equal but for the order of sums, as far as the precision of what is expected can tell."""
    close = max(_CLOSE, 2 * torch.finfo(expected.dtype).eps)
    found, expected = found.cpu().double(), expected.cpu().double()
    tiny = close / 10 * float(expected.abs().max())
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=close, atol=tiny)


def _logit(out: Any, n: int, module: nn.Module) -> Float[Tensor, "n c"]:
    logit = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if not isinstance(logit, Tensor) or logit.dim() != 2 or len(logit) != n:
        came = tuple(logit.shape) if isinstance(logit, Tensor) else type(out).__name__
        raise ModelError(
            f"with_uncertainty: {type(module).__name__} must return one tensor (n, classes), or an output with "
            f".logits; {came} came for {n} images."
        )
    return logit
