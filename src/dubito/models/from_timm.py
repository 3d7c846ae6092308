"""Classifiers of timm, with the input settings of their pretrained configuration."""

import math
from typing import Any

import timm
import torch
from timm.data import ImageNetInfo, create_transform, resolve_model_data_config
from torch import nn

from dubito.models.checkpoint import put_weights, read_weights
from dubito.models.load import LOCAL, Weights, building, unknown_model
from dubito.models.transform import Preprocess
from dubito.models.wrap import WrappedClassifier, wrap
from dubito.types import Transform


def load(
    name: str, *, weights: Weights = "pretrained", device: str | torch.device | None = None, **options: Any
) -> WrappedClassifier:
    """timm.create_model(name, **options), wrapped."""
    hub = "hub:" in name or "hub/" in name
    tagged = weights == "pretrained" and "." in name
    if not hub and not (name in models() if tagged else timm.is_model(name)):
        tags = [model for model in models() if model.startswith(name.partition(".")[0] + ".")]
        raise unknown_model("timm", name, tags or models())
    with building(f"timm:{name}", options, fetches=weights == "pretrained", repair=LOCAL):
        module = timm.create_model(name, pretrained=weights == "pretrained", **options)
    if weights not in ("pretrained", None):
        put_weights(module, read_weights(weights), str(weights))
    return wrap(
        module.eval().to(memory_format=torch.channels_last),
        transform=transform_of(module, options),
        classes=class_names(module.num_classes),
        device=device,
        name=f"timm:{name}",
    )


def models() -> list[str]:
    """The names of all architectures, and of those with a tag for their pretrained weights."""
    return [*timm.list_models(), *timm.list_models(pretrained=True)]


def transform_of(module: nn.Module, options: dict[str, Any]) -> Transform | Any:
    """The evaluation transform of a timm model: short side to size / crop_pct, centre crop; an img_size is obeyed."""
    config = resolve_model_data_config(module, _input_size(options))
    _, height, width = config["input_size"]
    plain = config["crop_mode"] == "center" and height == width and config["interpolation"] != "random"
    if not plain:
        return create_transform(**config, is_training=False)
    return Preprocess(
        size=(height, width),
        resize=math.floor(height / config["crop_pct"]),
        interpolation=config["interpolation"],
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
    )


def _input_size(options: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    size = options.get("img_size")
    if size is None:
        return {}
    height, width = (size, size) if isinstance(size, int) else size
    return {"input_size": (3, height, width)}


def class_names(count: int) -> list[str] | int:
    """ImageNet's names for a thousand classes; otherwise only how many there are."""
    if count != 1000:
        return count
    info = ImageNetInfo("imagenet-1k")
    return [info.index_to_description(index) for index in range(count)]
