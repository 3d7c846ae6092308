"""The model card of a head: README.md as the Hugging Face hub shows it, made of what its config says and no more."""

import json
from typing import Any

from dubito.heads.config import HeadConfig
from dubito.types import Json

_SOURCES = {"timm:": "timm/", "hf:": ""}
"""Where the hub keeps the backbones of a source."""

_CARD = """\
---
{front}
---

# An uncertainty head for {model}

It reads the {features} features that {model} computes for an image, and gives one positive number: how uncertain the
image itself leaves the model (aleatoric: blurred, cut off, ambiguous). Higher is more uncertain. It needs no classes
and no labels, and it does not change the model.

## Use

```python
import dubito

table = dubito.extract(dubito.load("{load}"), "photos", to="cache/photos")
u = dubito.UncertaintyHead.from_pretrained("{name}").score(table)
```

## The backbone

{backbone}

## Training

{trained}

## Measured

{measured}

## Limits

- It fits this backbone with these weights and this transform only. Features of a fine-tuned copy are other features.
- Only the order of its numbers has a meaning, not their size: they are no probabilities, and numbers of two heads must
  not be compared.
- It tells what is ambiguous, not what is foreign: an image of something that the model has never seen may look certain.
  Use an epistemic score beside it.
- On images unlike those that it was trained on it is untested, unless a figure above says otherwise.

The network is {layers} (Kirchhof et al., Pretrained Visual Uncertainties, arXiv 2402.16569). Weights: {dtype}, licence:
{licence}.
"""


def make_card(config: HeadConfig, *, name: str | None = None) -> str:
    """A readable README.md with the front matter that the hub reads; `name` is what from_pretrained takes."""
    return _CARD.format(
        front="\n".join(_front(config)),
        model=config.model or "a model that was not recorded",
        load=config.model or "SOURCE:NAME",
        features=config.features,
        name=name or "FOLDER",
        backbone=_backbone(config),
        trained=_listed(config.trained, "Nothing was recorded about its training."),
        measured=_listed(config.measured, "Nothing was measured. Measure it on your own images before you rely on it."),
        layers=f"{config.depth} hidden layers of width {config.width}" if config.depth else "one linear layer",
        dtype=config.dtype,
        licence=config.licence or "not stated",
    )


def _front(config: HeadConfig) -> list[str]:
    """YAML; texts are quoted as JSON, which YAML contains."""
    lines = ["library_name: dubito", "tags:", "- uncertainty", "- aleatoric-uncertainty", "- image-feature-extraction"]
    if config.licence:
        lines.append(f"license: {json.dumps(config.licence.lower())}")
    for source, place in _SOURCES.items():
        if config.model and config.model.startswith(source):
            lines.append(f"base_model: {json.dumps(place + config.model.removeprefix(source))}")
    return lines


def _backbone(config: HeadConfig) -> str:
    if config.provenance is None:
        return (
            "Its exact weights were not recorded, so dubito cannot refuse a wrong one; it warns instead. "
            "Make sure yourself that the features come from the right model."
        )
    parts = {part: value for part, value in config.provenance.model_parts.items() if value}
    lines = [f"- {part}: `{parts[part]}`" for part in ("weights", "tensors") if part in parts]
    lines += [f"- {part}: {_text(parts[part])}" for part in ("transform", "head") if part in parts]
    return "\n".join(["dubito refuses tables of any other:", "", *lines])


def _listed(entries: Json, nothing: str) -> str:
    return "\n".join(f"- {key.replace('_', ' ')}: {_text(value)}" for key, value in entries.items()) or nothing


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
