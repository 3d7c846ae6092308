"""Run by test_kill in a process of its own: a training that keeps its state often, to be killed in the middle."""

from pathlib import Path

import torch
from tests.heads.conftest import learnable, train_head

from dubito.heads import loop
from dubito.heads.recipe import Recipe

torch.set_num_threads(1)
loop._SECONDS_BETWEEN_STATES = 0.01
arguments = globals()  # set by test_kill
train_head(
    learnable(300),
    recipe=Recipe(batch=16, rows=300 * 16, optimizer=arguments["optimizer"], dropout=arguments["dropout"]),
    width=16,
    held_out=learnable(60, seed=1),
    folder=Path(arguments["folder"]),
)
