"""A classifier with other weights: a copy of its module, filled from a file, with everything else as it was."""

import copy
from pathlib import Path

from dubito.errors import ModelError
from dubito.models.checkpoint import put_weights, read_weights
from dubito.models.wrap import WrappedClassifier, eager, wrap


def with_weights(model: WrappedClassifier, path: str | Path) -> WrappedClassifier:
    """The same architecture, transform and classes with the weights of a file; the given model is left alone.

    Args:
        model: From dubito.load or dubito.wrap.
        path: A safetensors file, or a PyTorch file of tensors only, as `dubito.load(weights=...)` takes it.
    """
    if not isinstance(model, WrappedClassifier):
        raise ModelError(
            f"with_weights: model must come from dubito.load or dubito.wrap; got {type(model).__name__}. "
            f"Wrap it: dubito.wrap(module, transform=...)."
        )
    weights = read_weights(path)
    module = copy.deepcopy(eager(model.module))
    put_weights(module, weights, str(path))
    head = model.fingerprint()["head"]
    return wrap(
        module,
        transform=model.transform,
        classes=model.classes,
        head=head["layer"],
        output=head["output"],
        name=f"{model.name} with {Path(path).name}",
    )
