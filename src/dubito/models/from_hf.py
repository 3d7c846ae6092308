"""Image classifiers of transformers, from the hub or a local folder, with their own image processor."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dubito.errors import MissingPackageError, ModelError
from dubito.models.checkpoint import put_weights, read_weights
from dubito.models.load import Weights, building
from dubito.models.wrap import WrappedClassifier, wrap

try:
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification
except ImportError as error:
    raise MissingPackageError(
        "load: 'hf:' models need the package transformers. Install it: pip install \"dubito[hf]\""
    ) from error


def load(
    name: str, *, weights: Weights = "pretrained", device: str | torch.device | None = None, **options: Any
) -> WrappedClassifier:
    """AutoModelForImageClassification from a hub id or a folder that save_pretrained wrote."""
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise ModelError(
            f"load: no folder '{name}'. Give a folder with config.json and model.safetensors, or a hub id."
        )
    place = str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
    repair = "Give a local folder that save_pretrained wrote, as 'hf:FOLDER'."
    with building(f"hf:{name}", options, fetches=True, repair=repair):
        processor = AutoImageProcessor.from_pretrained(place)
        module = _module(place, weights, options)
    if weights not in ("pretrained", None):
        put_weights(module, read_weights(weights), str(weights))
    labels = module.config.id2label
    return wrap(
        module.eval(),
        transform=ProcessorTransform(processor),
        classes=[str(labels[index]) for index in sorted(labels)],
        device=device,
        name=f"hf:{name}",
    )


@dataclass(frozen=True)
class ProcessorTransform:
    """A processor of transformers as a callable from an image to an input."""

    processor: Any

    def __call__(self, image: Image.Image) -> Tensor:
        """pixel_values of one image."""
        pixels: Tensor = self.processor(images=image, return_tensors="pt")["pixel_values"][0]
        return pixels


def _module(place: str, weights: Weights, options: dict[str, Any]) -> Any:
    if weights == "pretrained":
        module, loading = AutoModelForImageClassification.from_pretrained(
            place, use_safetensors=True, output_loading_info=True, **options
        )
        if loading["missing_keys"]:
            raise ModelError(
                f"load: 'hf:{place}' has no weights for {', '.join(sorted(loading['missing_keys'])[:3])}: it is not a "
                f"trained classifier, so its predictions would be random. Choose a model that was trained to classify."
            )
        return module
    config = AutoConfig.from_pretrained(place, **options)
    return AutoModelForImageClassification.from_config(config)
