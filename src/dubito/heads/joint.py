"""Joint training: an uncertainty head on a model that is itself still being trained.

    L = mean_i L_i + w * head_loss(u(sg(z)), L^det)          eq. 1 with a stop-gradient sg

z is the input of the classifying layer, L_i the task loss of image i and L^det the same without a gradient. Kirchhof et
al., Pretrained Visual Uncertainties (2024), sections 3.2, 3.3 and Fig. 3. Without sg the head's gradients flow into the
backbone and disturb its own task. With it, everything but the head trains bit for bit as if there were no head: the
head reads a detached feature, draws no random numbers, and is added to a loss whose other term it does not change.
We deviate in one place: the head computes in at least float32, also under autocast and in a half-precision module,
because a margin of 0.1 is coarse in bfloat16.
"""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from dubito.cache.disk import model_identity
from dubito.choices import nearest
from dubito.errors import ModelError, TableError
from dubito.heads.checkpoint import HeadConfig, PretrainedHead
from dubito.heads.losses import head_loss
from dubito.heads.module import HeadModule
from dubito.models import wrap
from dubito.models.frozen import frozen
from dubito.models.outputs import output_of
from dubito.types import Classifier

_CLOSE = 1e-5
"""Relative tolerance of features: for the order of a sum, not for a step of the training."""


class JointOutput(NamedTuple):
    """The output of a model with a head."""

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
        module: Your model; it stays the same object, and its forward runs once per pass.
        layer: Name of the classifying layer, an nn.Linear or a 1x1 convolution. By default the last nn.Linear of the
            module; the first pass checks that it returns the module's output.
        width: Width of the head's hidden layers.
        depth: Number of the head's hidden layers.
        seed: Seed of the head's initial weights; the global random state is not touched.
        stop_gradient: Whether the head's gradients stop at the feature; False is the conflict of Fig. 3a.
        example: A batch of inputs; the module runs on it once to find the classifying layer before any training.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3))
    >>> model = with_uncertainty(net, width=8)
    >>> logit, u = model(torch.zeros(2, 3, 2, 2))
    >>> tuple(logit.shape), tuple(u.shape), model.layer
    ((2, 3), (2,), '3')
    """
    if any(isinstance(part, WithUncertainty) for part in module.modules()):
        raise ModelError(
            f"with_uncertainty: {type(module).__name__} already has an uncertainty head. Pass its .module instead."
        )
    name = _classifying_layer(module, layer, example)
    part = module.get_submodule(name)
    head = HeadModule(_input_width(part, name), width=width, depth=depth, seed=seed)
    weight = next(part.parameters())
    precise = torch.promote_types(weight.dtype, torch.float32)
    checked = layer is not None or example is not None
    return WithUncertainty(module, head.to(weight.device, precise), name, stop_gradient, checked=checked)


@final
class WithUncertainty(nn.Module):
    """A classifier and its head in one module. Built by `with_uncertainty`.

    Attributes:
        module: The classifier, the same object that was passed to `with_uncertainty`.
        head_module: The head, in float32, or float64 if the module is; `pretrained` takes it out.
        layer: Name of the classifying layer within `module`. If one pass calls it twice, the last call counts.
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
        z = z.detach() if self.stop_gradient else z
        with torch.autocast(z.device.type, enabled=False):
            return JointOutput(logit, self.head_module(z.to(next(self.head_module.parameters()).dtype)))

    def _run(self, x: Float[Tensor, "n ..."]) -> tuple[Float[Tensor, "n c"], Float[Tensor, "n d"]]:
        """Logits, and the features that the classifying layer reads."""
        self._size, kind = tuple(x.shape[1:]), type(self.module).__name__
        part = self.module.get_submodule(self.layer)
        calls: list[tuple[Tensor, Tensor]] = []

        def tap(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            calls.append((args[0] if args else kwargs["input"], output))

        # Registered for this pass only, so that the module can be copied, saved or wrapped again in between.
        handle = part.register_forward_hook(tap, with_kwargs=True)
        try:
            logit = output_of(self.module(x), len(x), f"with_uncertainty: {kind}")
        finally:
            handle.remove()
        if not calls:
            raise ModelError(
                f"with_uncertainty: {kind} did not call its layer '{self.layer}' in this pass. Name the layer that "
                f"returns the logits with layer='...'."
            )
        read, output = calls[-1]
        if not self._checked and not _same_values(output, logit):
            raise ModelError(
                f"with_uncertainty: '{self.layer}', the last linear layer of {kind}, does not return its output. Name "
                f"the classifying layer with layer='...', or pass a batch as example=."
            )
        self._checked = True
        # One row per image: a convolution's map is averaged over its positions, as the pool behind it does.
        z = read.mean((-2, -1)) if isinstance(part, nn.Conv2d) else read
        if len(z) != len(x) or z.numel() != len(x) * self.head_module.features:
            raise ModelError(
                f"with_uncertainty: layer '{self.layer}' must read one row of {self.head_module.features} features per "
                f"image; got {tuple(read.shape)} for {len(x)} images. Name the layer behind the pool with layer='...'."
            )
        return logit, z.flatten(1)

    def pretrained(self, classifier: Classifier, example: Tensor | None = None) -> PretrainedHead:
        """The head to save when the training is over, bound to its model: it will refuse any other.

        `dubito.UncertaintyHead.from_joint` makes a score of it.

        Args:
            classifier: `dubito.wrap` of the trained module, with its final transform and class names.
            example: A batch of inputs, to check that the classifier reads what the head has learned from. By default
                noise of the size of the last batch.
        """
        kind = type(self.module).__name__
        if example is None:
            if self._size is None:
                raise ModelError(
                    f"with_uncertainty: {kind} has not seen a batch yet, so the size of its inputs is not known. Pass "
                    f"one as example=."
                )
            weight = next(self.module.get_submodule(self.layer).parameters())
            example = torch.rand(2, *self._size, generator=torch.Generator().manual_seed(0)).to(weight)
        with frozen(self):
            _, expected = self._run(example)
        # Comparing the head's outputs would not do: a constant head agrees on any features.
        if not _same_features(classifier.features(example), expected):
            raise ModelError(
                f"with_uncertainty: {classifier.name} does not compute the features that the head was trained on, the "
                f"input of layer '{self.layer}' of {kind}. Wrap the trained module itself, dubito.wrap(model.module); "
                f"only a head on the layer that returns the logits can be saved."
            )
        module = copy.deepcopy(self.head_module).cpu().float().requires_grad_(False).eval()
        trained = {"jointly": True, "stop_gradient": self.stop_gradient}
        provenance = model_identity(classifier)
        config = HeadConfig.of(module, model=classifier.name, provenance=provenance, trained=trained)
        return PretrainedHead(module, config)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "WithUncertainty":
        """Moves to another device or precision apply to the head too, except for half precision."""

        def precise(before: Tensor) -> Tensor:  # rounded to half precision, it could not be restored
            moved = fn(before)
            kind = torch.promote_types(moved.dtype, torch.float32)
            return moved if moved.dtype == kind else before.to(moved.device, kind)

        if recurse:
            self.module._apply(fn)  # type: ignore[no-untyped-call]
            self.head_module._apply(precise)  # type: ignore[no-untyped-call]
        return self


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
        task_losses: (n), one number per image: reduction="none".
        u: (n), the head's outputs for the same images.
        loss: "ranking", or a loss that predicts the task loss itself: "l2" (eq. 2), "l1", "log_l2", "variance_nll".
        weight: Weight of the head's loss. Behind a stop-gradient it only scales the head's own learning rate.
        margin: Margin of the ranking loss.
        leeway: Leeway of the ranking loss.

    >>> joint_loss(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 2.0]), loss="l2").item()  # 2 + (0² + 1²) / 2
    2.5
    """
    loss_of = head_loss(loss, margin=margin, leeway=leeway, by="joint_loss")
    if task_losses.dim() != 1 or task_losses.shape != u.shape:
        raise TableError(
            f"joint_loss needs one task loss and one u per image; got shapes {tuple(task_losses.shape)} and "
            f'{tuple(u.shape)}. Compute the task loss with reduction="none".'
        )
    return task_losses.mean() + weight * loss_of(u, task_losses)


def _classifying_layer(module: nn.Module, layer: str | None, example: Tensor | None) -> str:
    """Its name: as the user named it, as one run on a batch shows, or that of the last linear layer."""
    if layer is not None:
        names = [name for name, _ in module.named_modules(remove_duplicate=False)]
        if layer not in names:
            near = ", ".join(nearest(layer, filter(None, names), cutoff=0.3))
            raise ModelError(f"layer: {type(module).__name__} has no layer '{layer}'. Nearest: {near or 'none'}.")
        return layer
    if example is None:
        names = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)][-1:]
        problem = "has no linear layer"
    else:
        model = wrap(module)
        model.features(example)
        names = [name for name, part in module.named_modules() if part is model.layer]
        problem = "does not classify by a single nn.Linear"
    if not names:
        raise ModelError(
            f"with_uncertainty: {type(module).__name__} {problem}. Name the layer whose input the head should read "
            f"with layer='...'; it may be a 1x1 convolution."
        )
    return str(names[0])


def _input_width(part: nn.Module, name: str) -> int:
    """The width of the feature, known before the first pass so that an optimizer gets the head's parameters."""
    if isinstance(part, nn.Linear):
        return part.in_features  # not of the weight, which quantised and sharded layers keep in another shape
    if isinstance(part, nn.Conv2d) and part.kernel_size == (1, 1) and part.groups == 1:
        return part.in_channels
    raise ModelError(
        f"layer: '{name}' is a {type(part).__name__}. Name the nn.Linear or 1x1 convolution that returns the logits."
    )


def _same_features(features: Tensor, expected: Float[Tensor, "n d"]) -> bool:
    """Whether they are equal up to the order of sums, in the precision of the expected ones."""
    close = max(_CLOSE, 2 * torch.finfo(expected.dtype).eps)
    features, expected = features.cpu().double(), expected.cpu().double()
    tiny = close / 10 * float(expected.abs().max())
    return features.shape == expected.shape and torch.allclose(features, expected, rtol=close, atol=tiny)


def _same_values(output: Tensor, logit: Float[Tensor, "n c"]) -> bool:
    if output.numel() != logit.numel():
        return False
    return torch.allclose(output.reshape(logit.shape).to(logit.dtype), logit, rtol=0, atol=0, equal_nan=True)
