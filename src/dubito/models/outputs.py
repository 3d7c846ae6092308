"""What a module takes and returns: one batch of images, and among its outputs the one tensor with a row per image."""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from dubito.errors import ModelError

Key = str | int | None
"""Where an output is: under a key of a dict, an attribute, a place in a tuple; None for a tensor alone."""
LOGITS = ("logits", "logit", "class_logits", "output", "out", "prediction", "predictions", "pred", "preds", "scores")
FEATURES = ("features", "feature", "pooler_output", "image_embeds", "embedding", "embeddings", "x_norm_clstoken")
"""How modules call these outputs, the most telling name first."""


def output_of(out: Any, n: int, name: str, key: Key = None, names: Sequence[str] = LOGITS) -> Float[Tensor, "n c"]:
    """The one tensor among what a module returns, checked: a row for each of n images.

    Args:
        out: What the module returned: a tensor, or a dict, tuple, dataclass or other object that holds it.
        n: How many images there were.
        name: How errors call the module.
        key: Which of several outputs it is; by default the one of a known name, or the only one that can be it.
        names: The known names.
    """
    keys = [key] if key is not None else candidate_keys(out, n, names)
    if len(keys) > 1:
        raise ModelError(several_outputs(out, keys, name))
    parts = _parts(out)
    if not keys or keys[0] not in parts or not isinstance(parts[keys[0]], Tensor):
        got = type(out).__name__ + (f" of {', '.join(map(str, parts))}" if parts else "")
        what = (
            "a tensor (n, classes), alone or in a dict, tuple or dataclass" if key is None else f"a tensor as {key!r}"
        )
        raise ModelError(f"{name} must return {what}; got {got}. Wrap a module that returns the logits.")
    output: Tensor = parts[keys[0]]
    output = output.flatten(1) if output.dim() > 2 and output.shape[2:].numel() == 1 and names is FEATURES else output
    if output.dim() != 2 or output.shape[0] != n:
        raise ModelError(
            f"{name} must return (n, classes); got {tuple(output.shape)} for {n} images. "
            f"Wrap a module that returns one row of logits per image."
        )
    return output


def candidate_keys(out: Any, n: int, names: Sequence[str] = LOGITS) -> list[Key]:
    """Where the output of a module may be: under a known name, or wherever a tensor has a row for each of n images."""
    if isinstance(out, Tensor):
        return [None]
    tensors = {key: part for key, part in _parts(out).items() if isinstance(part, Tensor)}
    rows = [key for key, part in tensors.items() if part.dim() >= 2 and part.shape[0] == n and part[0].dim() < 3]
    matrices = [key for key in rows if tensors[key].dim() == 2] or rows
    named: list[Key] = [name for name in names if name in tensors]
    return named[:1] or matrices


def several_outputs(out: Any, keys: Sequence[Key], name: str) -> str:
    """The error for outputs among which the logits are not known."""
    shapes = ", ".join(f"{key!r} (n, {', '.join(map(str, _parts(out)[key].shape[1:]))})" for key in keys)
    return f"{name} returns several tensors with a row per image: {shapes}. Name the logits, output_key={keys[0]!r}."


def check_one_input(module: nn.Module) -> None:
    """Raise ModelError for a module that cannot be called with a batch of images alone."""
    needed: list[inspect.Parameter] = []
    with suppress(TypeError, ValueError):  # of TorchScript, for instance
        parameters = inspect.signature(module.forward).parameters.values()
        single = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [one for one in parameters if one.default is one.empty and one.kind not in single]
    by_name = [one for one in needed if one.kind is one.KEYWORD_ONLY]
    if len(needed) > 1 or by_name:
        names = [one.name for one in needed]
        problem = f"takes {len(names)} inputs ({', '.join(names)}); images are one. Wrap a module that sets the others"
        if len(needed) == 1:
            problem = f"takes its input by name only ({names[0]}). Wrap a module that passes it on"
        passed = [f"{name}={'...' if place else name}" for place, name in enumerate(names)]
        if needed[0] not in by_name:
            passed[0] = names[0]
        kind = type(module).__name__
        raise ModelError(
            f"wrap: {kind} {problem}:\n"
            f"class OneInput({kind}):\n"
            f"    def forward(self, {names[0]}): return super().forward({', '.join(passed)})"
        )


def _parts(out: Any) -> dict[Any, Any]:
    """The outputs by key, attribute or place."""
    if isinstance(out, Tensor):
        return {None: out}
    if isinstance(out, Mapping):
        return dict(out)
    if is_dataclass(out) and not isinstance(out, type):
        return {field.name: getattr(out, field.name) for field in fields(out)}
    if isinstance(out, (tuple, list)):
        return dict(getattr(out, "_asdict", lambda: dict(enumerate(out)))())
    return {"logits": out.logits} if hasattr(out, "logits") else {}
