"""Heads that the authors of Pretrained Visual Uncertainties released: vit_{tiny,small,base,large}_checkpoint.pth.tar.

    {epoch, arch, state_dict, optimizer, version, args, ...}      a pickle; args is an argparse.Namespace
    state_dict: model.<timm's key>, unc_module.unc_module.{0,2,4}.{weight,bias}; sometimes with a leading "module."

The file is read by torch's weights-only reader, with that one class allowed in addition to tensors and plain values:
nothing in it is executed. The networks are those of `HeadModule`, 1e-6 included (Kirchhof et al. 2024, arXiv
2402.16569).
"""

import argparse
import json
import re
import warnings
from pathlib import Path

import timm
import torch
from torch import Tensor

from dubito.errors import CheckpointError, DubitoWarning
from dubito.heads.checkpoint import HeadConfig, PretrainedHead, make_card
from dubito.heads.module import HeadModule
from dubito.models.from_timm import transform_of
from dubito.models.weights import operations, read_weights
from dubito.models.wrap import wrap
from dubito.storage import reading, tensors_digest
from dubito.table import Provenance

BACKBONES = {
    192: "timm:vit_tiny_patch16_224.augreg_in21k",
    384: "timm:vit_small_patch16_224.augreg_in21k",
    768: "timm:vit_base_patch16_224.augreg_in21k",
    1024: "timm:vit_large_patch16_224.augreg_in21k",
}
"""The backbone of each head, by the width of its features."""

_HEAD, _BACKBONE = "unc_module.unc_module.", "model."
_RELEASED = (
    f"Pass a vit_*_checkpoint.pth.tar as it was released, with {_HEAD}{{0,2,4}}.{{weight,bias}}: a chain of linear "
    f"layers of one width that ends in one number."
)
_TRAINED = {
    "corpus": "ImageNet-21k, by the authors of Pretrained Visual Uncertainties",
    "paper": "Kirchhof et al. 2024, arXiv 2402.16569",
    "loss": "ranking of cross-entropies, margin 0.1",
}


def import_authors_head(path: str | Path) -> PretrainedHead:
    """The head of a released checkpoint.

    If the file also holds a whole backbone that timm knows, its provenance is recorded, and tables of any other model
    are refused. Otherwise `config.provenance` is None: nothing can be checked, and a warning says so.
    """
    weights = _read(path)
    tensors = {f"layers.{key}": value for key, value in _below(_HEAD, weights).items()}
    first, depth = tensors.get("layers.0.weight"), max(0, len(tensors) // 2 - 1)
    with reading(f"head: the uncertainty head in '{path}'", _RELEASED, error=CheckpointError):
        if first is None or first.ndim != 2:
            listed = ", ".join(f"{key} {tuple(value.shape)}" for key, value in tensors.items())
            raise ValueError(f"it has {listed or 'none of its layers'}")
        width, features = first.shape
        module = HeadModule.filled(tensors, features, width=width if depth else 1, depth=depth)
    model = BACKBONES.get(module.features)
    provenance = _provenance(model, _below(_BACKBONE, weights)) if model else None
    if provenance is None:
        warnings.warn(
            f"head: '{path}' does not hold a whole backbone that timm knows, so tables of a wrong model cannot be "
            f"refused. Make sure that features come from {model or 'the model that it was trained on'}.",
            DubitoWarning,
            stacklevel=2,
        )
    config = HeadConfig.of(module, model=model, provenance=provenance, trained=dict(_TRAINED))
    return PretrainedHead(module, config, make_card(config, name=str(Path(path).name)))


def authors_backbone(path: str | Path) -> dict[str, Tensor]:
    """The backbone's tensors under timm's own keys, to save as a file for `dubito.load(name, weights=FILE)`."""
    backbone = _below(_BACKBONE, _read(path))
    if not backbone:
        raise CheckpointError(
            f"head: '{path}' holds no backbone: none of its keys begins with '{_BACKBONE}'. "
            f"Take the weights from timm: dubito.load('{BACKBONES[192]}') or a larger one."
        )
    return backbone


def _read(path: str | Path) -> dict[str, Tensor]:
    """The tensors of the file without "module."; any Python object but the one Namespace is named and refused."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            weights = read_weights(path, stand_ins=False)
    except CheckpointError as error:
        culprit = re.search(r"GLOBAL (\S+)", str(error.__cause__))
        if culprit is None:
            raise
        raise CheckpointError(
            f"head: '{path}' holds a Python object '{culprit[1]}', which could run code; nothing was executed. The "
            f"only object allowed is argparse.Namespace. If you trust the file, save its state_dict alone."
        ) from error
    return {key.removeprefix("module."): value for key, value in weights.items()}


def _below(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def _provenance(model: str, backbone: dict[str, Tensor]) -> Provenance | None:
    """The provenance of timm's model with these tensors, or None if they are not the whole model.

    The model is built without memory for its weights: its names and shapes are enough.
    """
    if "head.weight" not in backbone:
        return None
    with torch.device("meta"):
        module = timm.create_model(model.removeprefix("timm:"), num_classes=len(backbone["head.weight"]))
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if {key: value.shape for key, value in own.items()} != {key: value.shape for key, value in backbone.items()}:
        return None
    who = {
        "weights": None,
        "tensors": tensors_digest({key: value.to(own[key].dtype) for key, value in backbone.items()}),
        "operations": operations(module),
        "head": {"layer": None, "output": "logits"},  # as dubito.load leaves it
        "transform": wrap(module, transform=transform_of(module, {})).transform.describe(),
    }
    return Provenance(model=model, **json.loads(json.dumps(who)))
