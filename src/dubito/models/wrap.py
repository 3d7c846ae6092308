"""Any nn.Module as a Classifier: features, logits from features, and a feature map, found by watching one forward pass.

features(x)    (n, d)    what the last classifying layer reads
logits(z)      (n, c)    that layer on features; logits(features(x)) == module(x)
feature_map(x) (n, t, d) what the layer would read if the image were one tile: everything behind the pool (norms,
                         hidden layers) runs on each tile; class-token transformers give their patch tokens instead
tiled(x)                 features, and the logits of every tile, in one pass
"""

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final, get_args

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from dubito.errors import ModelError, RefusedInputsError, first_words
from dubito.models.classes import ClassNames, read_classes
from dubito.models.from_onnx import OnnxNetwork
from dubito.models.frozen import frozen, signature
from dubito.models.head import Call, ForwardPlan, Output, Reached, Spy, make_plan, named_weight, plain_layer, read_input
from dubito.models.outputs import FEATURES, Key, candidate_keys, check_one_input, output_of, several_outputs
from dubito.models.transform import FunctionTransform, NoTransform
from dubito.models.weights import module_digests, operations
from dubito.threads import one_at_a_time
from dubito.types import Json, Tiled, Transform
from dubito.validate import check_choice


def wrap(
    module: nn.Module,
    *,
    transform: Transform | Callable[[Image.Image], Tensor] | None = None,
    classes: ClassNames | None = None,
    head: str | None = None,
    output: Output = "logits",
    output_key: str | int | None = None,
    device: str | torch.device | None = None,
    name: str | None = None,
) -> "WrappedClassifier":
    """Turn any module that maps a batch to one row of outputs per image into a Classifier.

    Args:
        module: Your model. It is never changed: with another `device`, a copy moves there.
        transform: From a Pillow image to an input: a dubito Preprocess or any callable. None: inputs come as tensors.
        classes: Their names in the order of the outputs, or how many there are (checked at the first batch): a list,
            {index: name}, or the path of a file with one name per line or JSON.
        head: The name of the classifying layer, when the last linear layer or 1x1 convolution is not it.
        output: What the module returns; its logits are taken before the softmax in any case. "features" for a backbone
            without a classifying layer.
        output_key: Which of several outputs it is: a key of the dict, an attribute, a place in the tuple; by default
            `logits`, or the only one that a classifying layer gives.
        device: Where to run: "cpu", "cuda", "mps"; by default where the module is.
        name: The name of the model in errors and caches; by default its class.

    >>> model = wrap(nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3)))
    >>> z = model.features(torch.zeros(2, 3, 2, 2))
    >>> tuple(z.shape), tuple(model.logits(z).shape)
    ((2, 5), (2, 3))
    """
    if not isinstance(module, nn.Module):
        raise ModelError(
            f"wrap: module must be a torch.nn.Module; got {type(module).__name__}. "
            + ("Load that state dict into its module." if isinstance(module, dict) else "For a name, use dubito.load.")
        )
    check_choice(output, get_args(Output), by="wrap", what="output")
    check_one_input(eager(module))
    if transform is None:
        transform = NoTransform()
    elif not isinstance(transform, Transform):
        transform = FunctionTransform(transform)
    module, name = _on_device(module, device), name or type(module).__name__
    names = None if classes is None else read_classes(classes)
    options: Any = {"head": head, "output": output, "output_key": output_key, "name": name}
    return WrappedClassifier(module, transform, classes=names, **options)


@final
class WrappedClassifier:
    """The one Classifier, of whatever source, built by `wrap`.

    Attributes:
        output: What the module returns.
        output_key: Which of several outputs it is; known from the first batch on.
        checkpoint: The file that its weights come from and that file's checksum, if `load` has read one.
        layer: The classifying layer, where it is one plain nn.Linear of the module; known from the first batch on.
    """

    def __init__(
        self,
        module: nn.Module,
        transform: Transform,
        *,
        classes: Sequence[str] | int | None,
        head: str | None,
        output: Output,
        output_key: Key,
        name: str,
    ) -> None:
        self.name, self.module, self.transform = name, module, transform
        self.classes: Sequence[str] | None = None if isinstance(classes, int) or classes is None else list(classes)
        self._count = len(self.classes) if self.classes is not None else classes
        self.output, self._head = output, head
        self.output_key = self._named_key = output_key
        self.checkpoint: Json | None = None
        if head is not None:
            named_weight(eager(module), head)
        self.layer: nn.Linear | None = None
        self._plan: ForwardPlan | None = None
        self._heads: list[tuple[Tensor, Tensor | None]] = []
        self._owned = False
        self._signature: tuple[object, ...] = ()
        self._writes = True

    def __repr__(self) -> str:
        return f"WrappedClassifier({self.name!r} on {self.device})"

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return sample_of(self.module).device

    def settings(self) -> Json:
        """The arguments of `wrap` besides the module and its name."""
        classes = self._count if self.classes is None else self.classes
        head: Json = {"head": self._head, "output": self.output, "output_key": self._named_key}
        return {"transform": self.transform, "classes": classes, **head}

    def features(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n d"]:
        """What the last classifying layer reads; of a backbone without one, what the module returns."""
        with one_at_a_time:
            if self.output == "features":
                return output_of(self._run(x), len(x), self.name, self.output_key, FEATURES).clone()
            plan = self._understand(x)
            tapped = None if self.layer is None else read_input(self.layer, lambda: self._run(x))
            # What it read may be the input's own memory.
            return self._watched_features(x, plan) if tapped is None else tapped.clone()

    def logits(self, z: Float[Tensor, "*n d"]) -> Float[Tensor, "*n c"]:
        """The last layer on features, for rows (n, d) and tiles (n, t, d)."""
        with one_at_a_time, torch.no_grad():
            weight, bias = self._concat_heads()
            if z.shape[-1] != weight.shape[1]:
                raise ModelError(
                    f"{self.name}.logits: features must be {weight.shape[1]} wide; got {z.shape[-1]}. "
                    f"Features of another model, or of another layer, do not fit this head."
                )
            return F.linear(z.to(self.device, weight.dtype), weight, bias)

    def feature_map(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n t d"]:
        """The features each tile would give the last layer, tiles in row-major order."""
        return self.feature_grid(x).flatten(1, 2)

    def feature_grid(self, x: Float[Tensor, "n ..."]) -> Float[Tensor, "n h w d"]:
        """The feature map with its two axes."""
        with one_at_a_time:
            return self._rows_and_tiles(x, self._with_map(x))[1]

    def tiled(self, x: Float[Tensor, "n ..."]) -> Tiled:
        """Features and tiles in one pass: `features` has the bits of features(x), `logits` those of each tile."""
        with one_at_a_time:
            plan = self._with_map(x)
            if not plan.convolutional:
                rows, tiles = self._rows_and_tiles(x, plan)
                h, w = tiles.shape[1:3]
                return Tiled(rows.clone(), (h, w), lambda start, stop: self.logits(tiles[start:stop].flatten(1, 2)))
            calls = self._watched(x, plan)
        logits = calls[plan.stop_at].source  # a convolutional head gives every tile's logits before the pool
        h, w = logits.shape[2:]
        features = plan.tile_features(calls).mean(1)
        return Tiled(features, (h, w), lambda start, stop: logits[start:stop].flatten(2).transpose(1, 2))

    def head(self) -> tuple[Float[Tensor, "c d"], Float[Tensor, "c"] | None]:
        """Weight and bias of the last layer: several heads side by side, the identity of a lifted feature behind."""
        with one_at_a_time:
            weight, bias = self._concat_heads()
            return weight.clone(), None if bias is None else bias.clone()

    def fingerprint(self) -> Json:
        """Hashes of the weights and the settings of the transform."""
        key = {} if self._named_key is None else {"key": self._named_key}
        module, about = eager(self.module), {"model": self.name, "transform": self.transform.describe()}
        if isinstance(module, OnnxNetwork):
            return about | module.recorded
        with one_at_a_time:  # what a pass writes is no part of it
            own = {**module_digests(module), "operations": operations(module)}
        return {**about, "head": {"layer": self._head, "output": self.output, **key}, **own}

    def _concat_heads(self) -> tuple[Float[Tensor, "c d"], Float[Tensor, "c"] | None]:
        """One weight and bias for all heads; a single plain one is the module's own tensor, not a copy."""
        if self.output == "features":
            raise ModelError(
                f"{self.name} has features and no logits: it has no classifying layer. Use scores of features "
                f"(density, neighbours), or load it with its classes."
            )
        if self._plan is None or self._replaced():
            raise ModelError(
                f"{self.name} has not seen a batch yet{' since its head was replaced' if self._plan else ''}, "
                f"so its head is not known. Call features(x) once before."
            )
        weights, biases = [weight.detach().flatten(1) for weight, _ in self._heads], [bias for _, bias in self._heads]
        weight, bias = weights[0], biases[0]
        if len(weights) > 1:
            weight = torch.cat(weights, dim=1) / len(weights)
            known = [one for one in biases if one is not None]
            bias = torch.stack(known).sum(0) / len(weights) if known else None
        if (scale := self._plan.scale) != 1:
            weight, bias = scale * weight, None if bias is None else scale * bias
        if self._plan.lift:
            weight = torch.cat([weight, torch.eye(len(weight), dtype=weight.dtype, device=weight.device)], dim=1)
        return weight, None if bias is None else bias.detach()

    def _understand(self, x: Tensor) -> ForwardPlan:
        """The plan, made from the first batch: two rows, so that tiles cannot be mistaken for a broadcast."""
        if self._plan is not None and not self._replaced() and not self._outdated(self._plan):
            return self._plan
        with frozen(eager(self.module)):  # a parametrization may write where its weight is read
            plan = self._make_plan(x)
        self._signature = signature(eager(self.module))
        return plan

    def _make_plan(self, x: Tensor) -> ForwardPlan:
        self._plan = self.layer = None
        if len(x) == 0:
            raise ModelError(f"{self.name}: its first batch has no images. Pass at least one, to find its head.")
        # Of an image alone, also its mirror image: two that are alike would prove less.
        pair = x[:2] if len(x) > 1 else torch.cat([x, x.flip(-1)])
        spy = Spy()
        plan, outputs = self._planned(spy, self._run(pair, spy))
        if self._count is not None and self._count != outputs.shape[1]:
            raise ModelError(
                f"{self.name}: classes says {self._count}, the module gives {outputs.shape[1]} outputs. "
                f"Pass one name per output, in order."
            )
        heads = [spy.calls[number] for number in plan.heads]
        self._heads = [(call.weight, call.bias) for call in heads if call.weight is not None]
        self._owned = any(parameter is self._heads[0][0] for parameter in self.module.parameters())
        if plan.pool is not None and not plan.convolutional:
            try:
                self._rows_and_tiles(pair, plan)
            except Exception:  # whatever a module raises when it meets more rows than images: it has no feature map
                plan = replace(plan, pool=None, pools=(), hidden=())
        self._plan = plan
        layer = plain_layer(eager(self.module), heads[0]) if len(heads) == 1 and plan.scale == 1 else None
        tapped = None if layer is None else read_input(layer, lambda: self._run(pair))
        if tapped is not None and torch.equal(tapped, self._watched_features(pair, plan)):
            self.layer = layer  # a hook on it reads just what the spy saw
        return plan

    def _planned(self, spy: Spy, out: Any) -> tuple[ForwardPlan, Float[Tensor, "2 c"]]:
        """The plan of a watched pass over two images; of several outputs, the one that a head gives."""
        head = None if self._head is None else named_weight(eager(self.module), self._head)
        keys = [self._named_key] if self._named_key is not None else candidate_keys(out, 2)
        biases = [tensor for kind in (self.module.parameters(), self.module.buffers()) for tensor in kind]
        options: Any = {"head": head, "output": self.output, "name": self.name, "biases": biases}
        plans: dict[Key, tuple[ForwardPlan, Tensor]] = {}
        for key in keys if len(keys) > 1 else ():
            with contextlib.suppress(ModelError):
                outputs = output_of(out, 2, self.name, key)
                if self._count in (None, outputs.shape[1]):
                    plans[key] = make_plan(spy, outputs, **options), outputs
        alike = len({id(outputs) for _, outputs in plans.values()}) == 1  # one tensor, returned twice
        if len(keys) > 1 and not alike:
            raise ModelError(several_outputs(out, list(plans) or keys, self.name))
        if len(keys) <= 1:
            outputs = output_of(out, 2, self.name, self._named_key)
            plans = {next(iter(keys), None): (make_plan(spy, outputs, **options), outputs)}
        self.output_key, planned = next(iter(plans.items()))
        return planned

    def _replaced(self) -> bool:
        """Whether the user has put another head into the module since it was understood."""
        return self._owned and all(parameter is not self._heads[0][0] for parameter in self.module.parameters())

    def _outdated(self, plan: ForwardPlan) -> bool:
        """Whether a weight that a pass computes, or a scale, is of a time before the module was trained further."""
        return (not self._owned or plan.scale != 1) and signature(eager(self.module)) != self._signature

    def _watched_features(self, x: Tensor, plan: ForwardPlan) -> Float[Tensor, "n d"]:
        calls = self._watched(x, plan)
        if plan.convolutional:
            return plan.tile_features(calls).mean(1)
        return torch.cat([calls[number].source.flatten(1) for number in plan.heads], dim=1)

    def _with_map(self, x: Tensor) -> ForwardPlan:
        plan = None if self.output == "features" else self._understand(x)
        if plan is None or plan.pool is None:
            raise ModelError(
                f"{self.name} has no feature map: nothing pools tiles or tokens before its last layer. "
                f"Use a score that needs none, or a model with a global pool or a token grid."
            )
        return plan

    def _rows_and_tiles(self, x: Tensor, plan: ForwardPlan) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n h w d"]]:
        """Run once; from the pool to the head, every tile goes along as an image of its own, behind the images."""
        if plan.convolutional:
            calls = self._watched(x, plan)
            tiles = plan.tile_features(calls)
            return tiles.mean(1), tiles.reshape(len(x), *calls[plan.stop_at].source.shape[2:], tiles.shape[2])
        spy = Spy(keep={*plan.heads, *plan.pools}, stop_at=plan.stop_at)
        spy.replace(plan.pools, lambda call: torch.cat([call.output, call.tiles_as_rows(spy.patches)]))
        spy.replace(plan.hidden, lambda call: call.with_own_rows(len(x)))
        calls = self._watched(x, plan, spy)
        h, w = calls[plan.pools[-1]].grid(spy.patches)
        parts = [calls[number].source.flatten(1) for number in plan.heads]
        rows = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        return rows[: len(x)], rows[len(x) :].view(len(x), h, w, rows.shape[1])

    def _watched(self, x: Tensor, plan: ForwardPlan, spy: Spy | None = None) -> Mapping[int, Call]:
        """What the head and, where it comes after it, the pool read; or what a spy of one's own keeps."""
        spy = spy or Spy(keep={*plan.heads, plan.stop_at}, stop_at=plan.stop_at)
        with contextlib.suppress(Reached):
            self._run(x, spy)
        return spy.calls

    def _run(self, x: Tensor, spy: Spy | None = None) -> Any:
        module, like = eager(self.module), sample_of(self.module)
        try:
            with frozen(module):
                # A module may write into its input: the user's is copied, until the first pass shows that it does not.
                x = x.to(like.device, like.dtype if x.is_floating_point() else x.dtype, copy=self._writes)
                with spy or contextlib.nullcontext():
                    out = module(x)
        except (torch.OutOfMemoryError, NotImplementedError):
            raise  # of torch's RuntimeErrors, those that other inputs would not fix
        except (AssertionError, IndexError, RuntimeError, ValueError) as error:
            shape = ", ".join(map(str, ("n", *x.shape[1:])))
            reason = first_words(f"{type(error).__name__}: {error}".rstrip(": "))
            refusal = f"{self.name} cannot take inputs of shape ({shape}) ({reason})"
            raise RefusedInputsError(f"{refusal}. {_repair(x.shape[1:])}") from error
        if self._plan is None and self._writes:
            self._writes = x._version > 0
        return out


def _repair(shape: Sequence[int]) -> str:
    """What to do about inputs that a module refuses, by the shape that each image has."""
    if len(shape) == 4 and shape[0] == 1:
        return "There is one axis too many: transform=... must return (3, h, w), without unsqueeze(0)."
    if len(shape) == 3 and shape[-1] in (1, 3, 4) and shape[0] not in (1, 3, 4):
        return "Channels come last: put them first, as ToTensor() does, or pass pictures as uint8 (h, w, 3)."
    return "Pass a transform=... that returns what the model was built for, often floats (3, h, w) of one size."


def sample_of(module: nn.Module) -> Tensor:
    """Some tensor of the module: where it is, and in which precision it computes."""
    tensors = (tensor for kind in (module.parameters(), module.buffers()) for tensor in kind)
    return next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))


def eager(module: nn.Module) -> nn.Module:
    """The module inside torch.compile or DataParallel: its calls can be watched, and it holds the same weights."""
    while isinstance(inner := getattr(module, "_orig_mod", None), nn.Module) or (
        isinstance(module, nn.DataParallel) and isinstance(inner := module.module, nn.Module)
    ):
        module = inner
    return module


def _on_device(module: nn.Module, device: str | torch.device | None) -> nn.Module:
    here = next((tensor.device for tensor in module.parameters()), None)
    if device is None or here is None:
        return module
    try:
        there = torch.empty(0, device=device).device
        return module if here == there else copy.deepcopy(module).to(there)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"device: '{device}' cannot be used here ({first_words(error)}). Try device='cpu'.") from error
