"""Classifiers of torchvision, with the preset transform of their default weights."""

from typing import Any

import torch
from torchvision import models as zoo

from dubito.errors import ModelError
from dubito.models.checkpoint import put_weights, read_weights
from dubito.models.load import LOCAL, Weights, building, unknown_model
from dubito.models.transform import Preprocess
from dubito.models.wrap import WrappedClassifier, wrap


def load(
    name: str, *, weights: Weights = "pretrained", device: str | torch.device | None = None, **options: Any
) -> WrappedClassifier:
    """torchvision.models.get_model(name, **options), wrapped; `resnet50.IMAGENET1K_V1` names one of its weights.

    The weights decide the transform, also when a local file brings the numbers.
    """
    architecture, _, tag = name.partition(".")
    if architecture not in models():
        raise unknown_model("torchvision", architecture, models())
    known = zoo.get_model_weights(architecture)
    if tag and tag not in known.__members__:
        raise unknown_model("torchvision", name, [f"{architecture}.{one}" for one in known.__members__])
    best = known[tag] if tag else known.DEFAULT
    if architecture in ("googlenet", "inception_v3"):
        options.setdefault("init_weights", False)
    with building(f"torchvision:{name}", options, fetches=weights == "pretrained", repair=LOCAL):
        module = zoo.get_model(architecture, weights=best if weights == "pretrained" else None, **options)
    if weights not in ("pretrained", None):
        put_weights(module, read_weights(weights), str(weights))
    names: list[str] = best.meta["categories"]
    count: int = options.get("num_classes", len(names))
    return wrap(
        module.eval().to(memory_format=torch.channels_last),
        transform=_transform(best.transforms(), options.get("image_size")),
        classes=names if count == len(names) else count,
        device=device,
        name=f"torchvision:{name}",
    )


def models() -> list[str]:
    """The names of all image classifiers."""
    return list(zoo.list_models(module=zoo))


def _transform(preset: Any, size: int | None) -> Preprocess:
    if not hasattr(preset, "crop_size"):
        raise ModelError(f"load: {type(preset).__name__} is not an image classification preset; use dubito.wrap.")
    scale = 1 if size is None else size / preset.crop_size[0]
    resize = tuple(round(scale * side) for side in preset.resize_size)
    return Preprocess(
        size=(round(scale * preset.crop_size[0]), round(scale * preset.crop_size[-1])),
        resize=resize[0] if len(resize) == 1 else resize,
        interpolation=preset.interpolation.value,
        mean=tuple(preset.mean),
        std=tuple(preset.std),
    )
