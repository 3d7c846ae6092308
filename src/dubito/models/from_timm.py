"""Classifiers of timm, with the input settings of their pretrained configuration."""

import math
from typing import Any

import timm
import torch
from timm.data import ImageNetInfo, create_transform, resolve_model_data_config
from torch import nn

from dubito.models.load import building, unknown_model
from dubito.models.transform import Preprocess
from dubito.types import Transform


def build(name: str, options: dict[str, Any], *, pretrained: bool) -> dict[str, Any]:
    """timm.create_model(name, **options), as arguments of `wrap`."""
    hub = "hub:" in name or "hub/" in name
    if not hub and not (name in models() if pretrained and "." in name else timm.is_model(name)):
        tags = [model for model in models() if model.startswith(name.partition(".")[0] + ".")]
        raise unknown_model("timm", name, tags or models())
    with building(f"timm:{name}", options, fetches=pretrained):
        module = timm.create_model(name, pretrained=pretrained, **options)
    return {
        "module": module.to(memory_format=torch.channels_last),
        "transform": transform_of(module, options),
        "classes": class_names(module.num_classes),
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


def class_names(count: int) -> list[str] | int:
    """ImageNet's names for a thousand classes; otherwise only how many there are."""
    if count != 1000:
        return count
    info = ImageNetInfo("imagenet-1k")
    return [info.index_to_description(index) for index in range(count)]
