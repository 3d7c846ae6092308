"""The training loop of one head on a table's columns: images, backbone and classifier are not involved.

Every twenty seconds the whole state (weights, optimiser, history) replaces `state.safetensors` in one step, and the
batch of each step depends on the seed and the step alone. A training that was killed therefore continues from its last
state and ends with the same bits as one that was not.

The optimisers are those of Table 3 of Kirchhof et al. (2024), with weight decay on matrices only.
"""

import hashlib
import math
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dubito.cache.runner import Advance, bar
from dubito.errors import ConstantHeadWarning, TableError, ValueRangeError
from dubito.heads.held_out import HeldOut
from dubito.heads.losses import DIRECT_LOSSES, HeadLoss, ranking_loss
from dubito.heads.module import HeadModule, start_at_classes
from dubito.heads.recipe import Plan, Recipe
from dubito.heads.state import TrainingState, read_state, write_state
from dubito.heads.stream import Stream, generator
from dubito.heads.targets import target_column
from dubito.result import Result, axes
from dubito.storage import locked
from dubito.table import Table
from dubito.types import Json
from dubito.validate import check_same_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURES = {"loss": "training loss", "r_auroc": "held-out R-AUROC", "order": "held-out order"}
"""What is measured during a training."""
_MEASUREMENTS = 20
_SECONDS_BETWEEN_STATES = 20.0
_CONSTANT = 1e-7
_ROWS_COMPARED = 64
_MOMENTUM = 0.9


@final
@dataclass(frozen=True)
class Trained(Result):
    """One trained head; `plot` draws its learning curve.

    Attributes:
        module: The network.
        history: Step, learning rate, mean loss and held-out figures, at twenty points of the training.
        steps: Number of updates.
        rows: Number of rows seen.
        resumed_from: The step at which this call began: 0 without a saved state, `steps` if nothing was left to do.
    """

    module: HeadModule
    history: list[Json]
    steps: int
    rows: int
    resumed_from: int = 0

    titles = FIGURES

    def title(self) -> str:
        """How long it was trained."""
        return f"Head trained on {self.rows:,} rows in {self.steps:,} steps"

    def records(self) -> list[dict[str, Any]]:
        """One row per measurement."""
        return self.history

    def cell(self, key: str, value: Any) -> str:
        """Learning rates span many decades."""
        return f"{value:.2g}" if key == "lr" else super().cell(key, value)

    def to_dict(self) -> Json:
        """Everything but the network."""
        return {"steps": self.steps, "rows": self.rows, "resumed_from": self.resumed_from, "history": self.history}

    def plot(self, ax: "Axes | None" = None, *, figure: str | None = None) -> "Axes":
        """The learning curve: a figure of `FIGURES` over the steps, by default the most telling one there is."""
        return plot_histories({"": self.history}, figure, ax)


def plot_histories(histories: Mapping[str, list[Json]], figure: str | None, ax: "Axes | None") -> "Axes":
    """Learning curves by name: held-out R-AUROC where it was measured, otherwise held-out order, otherwise the loss."""
    last = next(iter(histories.values()))[-1]
    figure = figure or next(name for name in ("r_auroc", "order", "loss") if name in last)
    ax = axes(ax)
    for name, history in histories.items():
        ax.plot([entry["step"] for entry in history], [entry[figure] for entry in history], label=name)
    ax.set(xlabel="step", ylabel=FIGURES[figure])
    if len(histories) > 1:
        ax.legend()
    return ax


def train_head(
    table: Table,
    *,
    recipe: Recipe | None = None,
    width: int = 512,
    depth: int = 2,
    seed: int = 1,
    held_out: Table | None = None,
    folder: Path | None = None,
    progress: bool = False,
) -> Trained:
    """Train one head on a table's features and losses.

    Args:
        table: Has the column `feature` and those of the recipe's target, in memory or in a cache.
        recipe: Settings of the training; by default the paper's, scaled to the table.
        width: Width of the hidden layers.
        depth: Number of hidden layers.
        seed: Seed of the initial weights and of the order of rows.
        held_out: Other images of the same model, on which the head is measured but not trained.
        folder: Where the state is saved; a state that is there is continued.
        progress: Whether to show a progress bar on a terminal.
    """
    table.require("feature", by="head.fit")
    settings = recipe or Recipe()
    losses = target_column(table, settings)
    plan = settings.plan(len(table))
    module = HeadModule(table.shape("feature")[1], width=width, depth=depth, init=settings.init, seed=seed)
    if settings.init == "classes":
        start_at_classes(module, table)
    stream = Stream(table.column("feature"), losses, plan.batch, seed, table.name)
    measured = None if held_out is None else _held_out(held_out, table, settings)
    identity = _identity(table, measured, losses, plan, module, seed)
    run = _Run(plan, module, make_optimizer(module, settings), stream, measured, folder, identity)
    with nullcontext() if folder is None else locked(folder):
        first = run.go(f"train seed {seed}", progress)
    return Trained(module.eval(), run.state.history, plan.steps, stream.rows_until(plan.steps), first)


@dataclass
class _Run:
    plan: Plan
    module: HeadModule
    optimizer: Optimizer
    stream: Stream
    held_out: HeldOut | None
    folder: Path | None
    identity: Json
    state: TrainingState = field(default_factory=TrainingState)
    _saved: float = 0.0

    def go(self, title: str, progress: bool) -> int:
        """Train from the saved state, or from the beginning, to the last step; returns the step it began at."""
        self._restore()
        loss_of = _loss_of(self.plan.recipe)
        first, total = self.state.step, self.plan.steps
        self._saved = time.monotonic()
        every = max(1, total // _MEASUREMENTS)
        seen, rows_in_all = self.stream.rows_until(first), self.stream.rows_until(total)
        with bar(title, rows_in_all, done=seen, unit="rows", show=progress) as advance:
            for rows, losses in self.stream.batches(first, total):
                self.state.losses += self._step(loss_of, rows, losses)
                self.state.since += 1
                advance(len(losses))
                if self.state.step % every == 0 or self.state.step == total:
                    self._measure(advance)
                self._save(always=self.state.step == total)
        self._warn_constant()
        return first

    def _step(self, loss_of: HeadLoss, rows: Float[Tensor, "b d"], losses: Float[Tensor, "b"]) -> Float[Tensor, ""]:
        set_lr(self.optimizer, self.plan.lr(self.state.step))
        loss = loss_of(self.module(self._dropout(rows)), losses)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.state.step += 1
        return loss.detach()

    def _dropout(self, rows: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """Dropout on the features; like the batch, it depends on the seed and the step alone."""
        share = self.plan.recipe.dropout
        if not share:
            return rows
        kept = torch.rand(rows.shape, generator=generator(self.stream.seed, self.state.step, "dropout")) >= share
        return rows * kept / (1 - share)

    def _measure(self, advance: Advance) -> None:
        loss = float(self.state.losses) / self.state.since
        self.state.losses, self.state.since = torch.zeros(()), 0
        if not math.isfinite(loss):
            raise ValueRangeError(
                f"head.fit: the training loss became {loss} by step {self.state.step}, so the head has diverged. "
                f"Lower the recipe's lr ({self.plan.recipe.lr})."
            )
        entry: Json = {"step": self.state.step, "lr": self.plan.lr(self.state.step - 1), "loss": loss}
        if self.held_out is not None:
            entry |= self.held_out.measure(self.module)
        self.state.history.append(entry)
        names = {"loss": "loss", "r_auroc": "R-AUROC", "order": "order"}
        advance(0, "  ".join(f"{name} {entry[key]:.4f}" for key, name in names.items() if key in entry))

    def _restore(self) -> None:
        saved = read_state(self.folder, self.identity) if self.folder is not None else None
        if saved is not None:
            self.state = saved
            self.module.load_state_dict(saved.module)
            restore_optimizer(self.optimizer, saved.optimizer)

    def _save(self, *, always: bool) -> None:
        due = time.monotonic() - self._saved > _SECONDS_BETWEEN_STATES
        if self.folder is None or not (due or always):
            return
        self.state.module = dict(self.module.state_dict())
        self.state.optimizer = optimizer_tensors(self.optimizer)
        write_state(self.folder, self.identity, self.state)
        self._saved = time.monotonic()

    @torch.no_grad()
    def _warn_constant(self) -> None:
        rows = self.held_out.features if self.held_out is not None else next(self.stream.batches(0, 1))[0]
        u = self.module(rows)
        if len(u) > 1 and float(u.max() - u.min()) <= _CONSTANT:
            warnings.warn(
                f"the trained head returns {float(u[0]):.4g} for every image: it has not learned anything. A head that "
                f"starts at zero cannot learn, and too high a learning rate makes it collapse: use init='default', or "
                f"lower the lr.",
                ConstantHeadWarning,
                stacklevel=4,
            )


def make_optimizer(module: nn.Module, recipe: Recipe) -> Optimizer:
    """The recipe's optimiser; its learning rate is set anew at every step."""
    parameters = list(module.parameters())
    groups: Any = [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": recipe.weight_decay},
        {"params": [one for one in parameters if one.dim() <= 1], "weight_decay": 0.0},
    ]
    if recipe.optimizer == "sgd":
        return SGD(groups, lr=recipe.lr, momentum=_MOMENTUM, nesterov=True)
    if recipe.optimizer == "lion":
        from timm.optim import Lion  # noqa: PLC0415 (timm takes seconds to import)

        lion: Optimizer = Lion(groups, lr=recipe.lr, betas=recipe.betas)
        return lion
    return (Adam if recipe.optimizer == "adam" else AdamW)(groups, lr=recipe.lr, betas=recipe.betas)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Give all groups of parameters one learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimiser's state as tensors named NUMBER.NAME."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}.{name}": torch.as_tensor(value) for number, entry in state.items() for name, value in entry.items()
    }


def restore_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` returned."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _loss_of(recipe: Recipe) -> HeadLoss:
    if recipe.loss in DIRECT_LOSSES:
        return DIRECT_LOSSES[recipe.loss]
    return partial(ranking_loss, margin=recipe.margin, leeway=recipe.leeway)


def _held_out(held_out: Table, table: Table, recipe: Recipe) -> HeldOut:
    if held_out is table:
        raise TableError(
            f"held_out: {table.name} is trained on and cannot be held out. Give other images, or a share such as 0.1."
        )
    held_out.require("feature", by="held_out")
    check_same_model(table, {"held_out": held_out}, by="head.fit")
    return HeldOut.of(held_out, recipe)


def _identity(
    table: Table, held_out: HeldOut | None, losses: Tensor, plan: Plan, module: HeadModule, seed: int
) -> Json:
    """What a saved state must agree with; a sample of rows stands for the features."""
    some = torch.linspace(0, len(table) - 1, min(len(table), _ROWS_COMPARED)).long()
    features = table.select("feature").rows(some).feature
    return {
        "recipe": plan.recipe.to_json(),
        "seed": seed,
        "width": module.width,
        "depth": module.depth,
        "features": module.features,
        "rows": len(table),
        "model_id": table.model_id,
        "sample": hashlib.blake2b(features.contiguous().numpy().tobytes(), digest_size=8).hexdigest(),
        "losses": hashlib.blake2b(losses.numpy().data, digest_size=8).hexdigest(),
        "held_out": None if held_out is None else held_out.digest(),
    }
