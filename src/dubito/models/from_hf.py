"""Image classifiers of transformers, from the hub or a local folder, with their own image processor."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor, nn

from dubito.errors import MissingPackageError, ModelError
from dubito.models.load import building
from dubito.models.transform import NewTransform, changed_transform

try:
    from transformers import AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification
except ImportError as error:
    raise MissingPackageError("load: 'hf:' models need transformers. Install it: pip install \"dubito[hf]\"") from error

_PROCESSOR = ("preprocessor_config.json", "processor_config.json")


def build(
    name: str, options: dict[str, Any], *, pretrained: bool, transform: NewTransform | None = None
) -> dict[str, Any]:
    """AutoModelForImageClassification from a hub id or a folder that save_pretrained wrote, as arguments of `wrap`.

    With num_labels=0, the backbone alone (AutoModel), for features.
    """
    folder = Path(name).expanduser()
    if name.startswith((".", "/", "~")) and not folder.is_dir():
        raise ModelError(f"load: no folder '{name}'. Name one with config.json and model.safetensors, or a hub id.")
    place = str(folder) if folder.is_dir() else name
    complete = transform is not None and (not isinstance(transform, Mapping) or "size" in transform)
    own = changed_transform(None, transform, f"hf:{name}") if complete else None
    if own is None and folder.is_dir() and not any((folder / file).is_file() for file in _PROCESSOR):
        raise ModelError(
            f"load: 'hf:{name}' has no {_PROCESSOR[0]}, so it is not known how images become its inputs. Pass "
            f"transform=... with the size, mean and std that it was trained with, or save its image processor there: "
            f"AutoImageProcessor.from_pretrained(ID).save_pretrained('{name}')."
        )
    features = options.get("num_labels") == 0
    kind = AutoModel if features else AutoModelForImageClassification
    arguments = {key: value for key, value in options.items() if not (features and key == "num_labels")}
    repair = "Name a local folder that save_pretrained wrote, as 'hf:FOLDER'."
    with building(f"hf:{name}", options, fetches=True, repair=repair):
        if own is None:
            own = changed_transform(
                partial(_pixels, AutoImageProcessor.from_pretrained(place)), transform, f"hf:{name}"
            )
        if pretrained:
            loading: Any = {"use_safetensors": True, "output_loading_info": True}
            module, report = kind.from_pretrained(place, **loading, **arguments)
        else:
            module, report = kind.from_config(AutoConfig.from_pretrained(place, **arguments)), {"missing_keys": []}
    missing = sorted(report["missing_keys"])
    if features:
        pooled = not any(key.startswith("pooler") for key in missing)
        return {"module": _Backbone(module, pooled=pooled), "transform": own, "classes": None, "output": "features"}
    if missing:
        raise ModelError(
            f"load: 'hf:{place}' has no weights for {', '.join(missing[:3])}: it is not a trained classifier, so its "
            f"predictions would be random. Choose a model that was trained to classify, or pass classes=0 for its "
            f"features alone."
        )
    labels = module.config.id2label
    names = [str(labels[index]) for index in sorted(labels)]
    return {"module": module, "transform": own, "classes": names}


class _Backbone(nn.Module):
    """A backbone of transformers that returns one row of features per image: pooled, or its class token."""

    def __init__(self, backbone: nn.Module, *, pooled: bool) -> None:
        super().__init__()
        self.backbone, self.pooled = backbone, pooled

    def forward(self, x: Tensor) -> Tensor:
        out = self.backbone(x)
        rows = getattr(out, "pooler_output", None) if self.pooled else None
        features: Tensor = out.last_hidden_state[:, 0] if rows is None else rows.flatten(1)
        return features


def _pixels(processor: Any, image: Image.Image) -> Tensor:
    """What a processor of transformers makes of one image."""
    pixels: Tensor = processor(images=image, return_tensors="pt")["pixel_values"][0]
    return pixels
