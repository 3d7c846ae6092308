"""Small networks that can be masked, data that they can learn, and masks applied in the plainest way."""

import copy

import pytest
import torch
from torch import Tensor, nn

from dubito.ensembles.layers import linear_layers
from dubito.ensembles.masks import LayerMasks


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """All models here are tiny."""


def clusters(n: int = 300, d: int = 12, classes: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs around one centre per class."""
    draw = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(classes, d, generator=torch.Generator().manual_seed(100))
    label = torch.arange(n) % classes
    return centres[label] + torch.randn(n, d, generator=draw), label


def mlp(d: int = 12, hidden: int = 40, classes: int = 3, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(d, hidden), activation(), nn.Dropout(0.1), nn.Linear(hidden, hidden // 2), activation()),
        nn.Linear(hidden // 2, classes),
    ).eval()


def learned(module: nn.Module, x: Tensor, y: Tensor, steps: int = 60) -> nn.Module:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    module.zero_grad(set_to_none=True)
    return module.eval()


@torch.no_grad()
def by_weights(module: nn.Module, masks: dict[str, LayerMasks], member: int) -> nn.Module:
    """The masked model as a copy whose weights are multiplied: W_ij r_i c_j and b_i r_i."""
    whole = copy.deepcopy(module)
    layers = linear_layers(whole)
    for name, mask in masks.items():
        layer = layers[name]
        rows = torch.ones(layer.out_features) if mask.rows is None else mask.rows[member]
        layer.weight.mul_(torch.outer(rows, mask.columns[member]))
        if layer.bias is not None:
            layer.bias.mul_(rows)
    return whole
