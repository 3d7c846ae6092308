"""The optimisers of Table 3, with weight decay on matrices only, and their state as plain tensors."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dubito.heads.recipe import Recipe

_MOMENTUM = 0.9


def make_optimizer(module: nn.Module, recipe: Recipe) -> Optimizer:
    """The recipe's optimiser; its learning rate is set anew at every step."""
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in module.parameters() if parameter.dim() <= 1]
    groups: Any = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if recipe.optimizer == "sgd":
        return SGD(groups, lr=recipe.lr, momentum=_MOMENTUM, nesterov=True)
    if recipe.optimizer == "lion":
        from timm.optim import Lion  # noqa: PLC0415 (timm takes seconds to import)

        lion: Optimizer = Lion(groups, lr=recipe.lr, betas=recipe.betas)
        return lion
    if recipe.optimizer == "adam":
        return Adam(groups, lr=recipe.lr, betas=recipe.betas)
    return AdamW(groups, lr=recipe.lr, betas=recipe.betas)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """The same learning rate for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """Everything that the optimiser remembers, as tensors named NUMBER.NAME."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": torch.as_tensor(value) for number, entry in state.items() for name, value in entry.items()
    }


def restore_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` took."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
