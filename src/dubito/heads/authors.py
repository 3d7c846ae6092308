"""Heads that the authors of Pretrained Visual Uncertainties released: vit_{tiny,small,base,large}_checkpoint.pth.tar.

    {epoch, arch, state_dict, optimizer, version, args, ...}      a pickle; args is an argparse.Namespace
    state_dict: model.<timm's key>, unc_module.unc_module.{0,2,4}.{weight,bias}; sometimes with a leading "module."

The file is read by torch's weights-only reader with that one class allowed besides tensors and plain values: nothing
in it is executed. Kirchhof et al. 2024, arXiv 2402.16569; the networks are those of `HeadModule`, 1e-6 included.
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
from dubito.models.checkpoint import read_weights
from dubito.models.fingerprint import operations, tensors_digest
from dubito.models.from_timm import transform_of
from dubito.models.wrap import wrap
from dubito.table import Provenance

BACKBONES = {
    192: "timm:vit_tiny_patch16_224.augreg_in21k",
    384: "timm:vit_small_patch16_224.augreg_in21k",
    768: "timm:vit_base_patch16_224.augreg_in21k",
    1024: "timm:vit_large_patch16_224.augreg_in21k",
}
"""Which backbone it was, by the width of its features."""

_HEAD, _BACKBONE = "unc_module.unc_module.", "model."
_LAYOUT = f"{_HEAD}{{0,2,4}}.{{weight,bias}}"
_TRAINED = {
    "corpus": "ImageNet-21k, by the authors of Pretrained Visual Uncertainties",
    "paper": "Kirchhof et al. 2024, arXiv 2402.16569",
    "loss": "ranking of cross-entropies, margin 0.1",
}


def import_authors_head(path: str | Path) -> PretrainedHead:
    """The head of a released checkpoint.

    Where the file also holds a whole backbone that timm knows, its identity is recorded, and tables of any other are
    refused. Otherwise `config.provenance` is None: nothing can be checked, and a warning says so.
    """
    weights = _read(path)
    head = {key.removeprefix(_HEAD): value for key, value in weights.items() if key.startswith(_HEAD)}
    module = _module(head, path)
    model = BACKBONES.get(module.features)
    provenance = _provenance(model, _backbone(weights)) if model else None
    if provenance is None:
        warnings.warn(
            f"head: '{path}' does not hold a whole backbone that timm knows, so no table can be refused. Make sure "
            f"that features come from {model or 'the model that it was trained on'}.",
            DubitoWarning,
            stacklevel=2,
        )
    config = HeadConfig(
        features=module.features,
        width=module.width,
        depth=module.depth,
        model=model,
        provenance=provenance,
        trained=dict(_TRAINED),
    )
    return PretrainedHead(module, config, make_card(config, name=str(Path(path).name)))


def authors_backbone(path: str | Path) -> dict[str, Tensor]:
    """The backbone's tensors under timm's own keys, for a file that `dubito.load(name, weights=FILE)` takes."""
    found = _backbone(_read(path))
    if not found:
        raise CheckpointError(
            f"head: '{path}' holds no backbone: none of its keys begins with '{_BACKBONE}'. "
            f"Take the weights from timm: dubito.load('{BACKBONES[192]}') or its larger sisters."
        )
    return found


def _read(path: str | Path) -> dict[str, Tensor]:
    """The tensors of the file without "module."; a Python object other than the one Namespace is named and refused."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            weights = read_weights(path)
    except CheckpointError as error:
        culprit = re.search(r"GLOBAL (\S+)", str(error.__cause__))
        if culprit is None:
            raise
        raise CheckpointError(
            f"head: '{path}' holds a Python object '{culprit[1]}', which could run code; nothing was executed. Of such "
            f"objects only argparse.Namespace is allowed. Save its state_dict alone, where you trust the file."
        ) from error
    return {key.removeprefix("module."): value for key, value in weights.items()}


def _backbone(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(_BACKBONE): value for key, value in weights.items() if key.startswith(_BACKBONE)}


def _module(head: dict[str, Tensor], path: str | Path) -> HeadModule:
    """The network, if the tensors are a chain of linear layers that ends in one number."""
    depth = len(head) // 2 - 1
    keys = [f"{2 * place}.{part}" for place in range(depth + 1) for part in ("weight", "bias")]
    shapes = ", ".join(f"{key} {tuple(value.shape)}" for key, value in head.items())
    if depth < 0 or sorted(head) != sorted(keys) or head["0.weight"].dim() != 2:
        raise CheckpointError(
            f"head: '{path}' must hold an uncertainty head as {_LAYOUT}; got {shapes or 'none of these keys'}. "
            f"Give a vit_*_checkpoint.pth.tar as it was released."
        )
    width, features = head["0.weight"].shape if depth else (1, head["0.weight"].shape[1])
    sizes = [features, *[width] * depth, 1]
    for place in range(depth + 1):
        wanted = (sizes[place + 1], sizes[place])
        if head[f"{2 * place}.weight"].shape != wanted or head[f"{2 * place}.bias"].shape != wanted[:1]:
            raise CheckpointError(
                f"head: '{path}' must hold linear layers of sizes {' - '.join(map(str, sizes))}; got {shapes}. "
                f"Give a vit_*_checkpoint.pth.tar as it was released."
            )
    if not all(value.isfinite().all() for value in head.values()):
        raise CheckpointError(f"head: '{path}' holds NaN or infinite weights. Copy the file again.")
    module = HeadModule(features, width=width, depth=depth)
    module.load_state_dict({f"layers.{key}": value.float() for key, value in head.items()})
    return module.eval()


def _provenance(model: str, backbone: dict[str, Tensor]) -> Provenance | None:
    """The identity that timm's model with these tensors has, or None if they are not all that it consists of.

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
