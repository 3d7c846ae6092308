"""Image classifiers of transformers, from the hub or a local folder, with their own image processor."""

from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from dubito.errors import MissingPackageError, ModelError
from dubito.models.load import building

try:
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification
except ImportError as error:
    raise MissingPackageError("load: 'hf:' models need transformers. Install it: pip install \"dubito[hf]\"") from error


def build(name: str, options: dict[str, Any], *, pretrained: bool) -> dict[str, Any]:
    """AutoModelForImageClassification from a hub id or a folder that save_pretrained wrote, as arguments of `wrap`."""
    folder = Path(name).expanduser()
    if name.startswith((".", "/", "~")) and not folder.is_dir():
        raise ModelError(f"load: no folder '{name}'. Name one with config.json and model.safetensors, or a hub id.")
    place = str(folder) if folder.is_dir() else name
    repair = "Name a local folder that save_pretrained wrote, as 'hf:FOLDER'."
    with building(f"hf:{name}", options, fetches=True, repair=repair):
        processor = AutoImageProcessor.from_pretrained(place)
        if pretrained:
            module, loading = AutoModelForImageClassification.from_pretrained(
                place, use_safetensors=True, output_loading_info=True, **options
            )
        else:
            config = AutoConfig.from_pretrained(place, **options)
            module, loading = AutoModelForImageClassification.from_config(config), {"missing_keys": []}
    if loading["missing_keys"]:
        raise ModelError(
            f"load: 'hf:{place}' has no weights for {', '.join(sorted(loading['missing_keys'])[:3])}: it is not a "
            f"trained classifier, so its predictions would be random. Choose a model that was trained to classify."
        )
    labels = module.config.id2label
    names = [str(labels[index]) for index in sorted(labels)]
    return {"module": module, "transform": partial(_pixels, processor), "classes": names}


def _pixels(processor: Any, image: Image.Image) -> Tensor:
    """What a processor of transformers makes of one image."""
    pixels: Tensor = processor(images=image, return_tensors="pt")["pixel_values"][0]
    return pixels
