"""Classifiers of torchvision, with the preset transform of their default weights."""

from typing import Any

import torch
from torchvision import models as zoo

from dubito.errors import ModelError
from dubito.models.load import building, unknown_model
from dubito.models.transform import NewTransform, Preprocess, changed_transform, input_size


def build(
    name: str, options: dict[str, Any], *, pretrained: bool, transform: NewTransform | None = None
) -> dict[str, Any]:
    """torchvision.models.get_model(name, **options), as arguments of `wrap`.

    `resnet50.IMAGENET1K_V1` names one of its weights, which decide the transform even when a local file replaces them.
    """
    architecture, _, tag = name.partition(".")
    if architecture not in models():
        raise unknown_model("torchvision", architecture, models())
    tags = zoo.get_model_weights(architecture)
    if tag and tag not in tags.__members__:
        raise unknown_model("torchvision", name, [f"{architecture}.{one}" for one in tags.__members__])
    weights = tags[tag] if tag else tags.DEFAULT
    if options.get("num_classes") == 0:
        raise ModelError(
            f"load: 'torchvision:{name}' has a classifying layer in any case; got classes=0. Leave it out: features "
            f"are extracted beside the logits."
        )
    if architecture in ("googlenet", "inception_v3"):
        options = {"init_weights": False, **options}
    if (size := input_size(transform)) and architecture.startswith("vit_"):  # built for one size of inputs
        options = {"image_size": size[0], **options}
    with building(f"torchvision:{name}", options, fetches=pretrained):
        module = zoo.get_model(architecture, weights=weights if pretrained else None, **options)
    names: list[str] = weights.meta["categories"]
    count: int = options.get("num_classes", len(names))
    preset = weights.transforms()
    scale = options.get("image_size", preset.crop_size[0]) / preset.crop_size[0]
    resize = tuple(round(scale * side) for side in preset.resize_size)
    crop = (round(scale * preset.crop_size[0]), round(scale * preset.crop_size[-1]))
    sides = resize[0] if len(resize) == 1 else resize
    own = Preprocess(crop, sides, preset.interpolation.value, tuple(preset.mean), tuple(preset.std))
    return {
        "module": module.to(memory_format=torch.channels_last),
        "transform": changed_transform(own, transform, f"torchvision:{name}"),
        "classes": names if count == len(names) else count,
    }


def models() -> list[str]:
    """The names of all image classifiers."""
    return list(zoo.list_models(module=zoo))
