"""Training a head from a table's columns: neither images, backbone nor classifier are touched.

One seed, one folder. Every so often the whole state (weights, optimiser, history) replaces `state.safetensors` in one
step; the batch of any step depends on the seed and the step alone. So a training that was killed goes on from its last
state and ends with the same bits as one that was not.
"""

import hashlib
import math
import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer

from dubito.cache.progress import Advance, bar
from dubito.errors import ConstantHeadWarning, TableError, ValueRangeError
from dubito.heads._state import TrainingState, alone, read_state, write_state
from dubito.heads.class_start import start_at_classes
from dubito.heads.held_out import HeldOut
from dubito.heads.losses import DIRECT_LOSSES, HeadLoss, ranking_loss
from dubito.heads.module import HeadModule
from dubito.heads.optimizers import make_optimizer, optimizer_tensors, restore_optimizer, set_lr
from dubito.heads.recipe import Plan, Recipe
from dubito.heads.stream import Stream, generator
from dubito.heads.targets import target_column
from dubito.table import Table
from dubito.types import Json

_MEASUREMENTS = 20
_SECONDS_BETWEEN_STATES = 20.0
_SAME = 1e-7
_ROWS_COMPARED = 64


@final
@dataclass(frozen=True)
class Trained:
    """A trained head.

    Attributes:
        module: The network.
        history: Step, learning rate, mean loss and held-out figures, at twenty points of the training.
        steps: Updates done.
        rows: Rows seen.
        went_on_from: The step at which this call began: 0 without a kept state, `steps` if all was done before.
    """

    module: HeadModule
    history: list[Json]
    steps: int
    rows: int
    went_on_from: int = 0


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
        table: With the columns `feature` and those of the recipe's target, in memory or in a cache.
        recipe: By default the paper's, scaled to the table.
        width: Of the hidden layers.
        depth: How many.
        seed: Of the first weights and of the order of rows.
        held_out: Other images of the same model: their R-AUROC is watched. They are not learned from.
        folder: Keeps the state there, and goes on from a state that is there.
        progress: Show a bar when a terminal is watching.
    """
    table.require("feature", by="head.fit")
    settings = recipe or Recipe()
    losses = target_column(table, settings)
    plan = settings.plan(len(table))
    module = HeadModule(table.shape("feature")[1], width=width, depth=depth, init=settings.init, seed=seed)
    if settings.init == "classes":
        start_at_classes(module, table)
    stream = Stream(table.column("feature"), losses, plan.batch, seed, table.name)
    watched = None if held_out is None else _watched(held_out, table, settings)
    identity = _identity(table, watched, losses, plan, module, seed)
    run = _Run(plan, module, make_optimizer(module, settings), stream, watched, folder, identity)
    with nullcontext() if folder is None else alone(folder):
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
        """From the state in the folder, or from the beginning, to the last step; says at which step it began."""
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
        self._tell_constant()
        return first

    def _step(self, loss_of: HeadLoss, rows: Float[Tensor, "b d"], losses: Float[Tensor, "b"]) -> Float[Tensor, ""]:
        set_lr(self.optimizer, self.plan.lr(self.state.step))
        loss = loss_of(self.module(self._thinned(rows)), losses)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.state.step += 1
        return loss.detach()

    def _thinned(self, rows: Float[Tensor, "b d"]) -> Float[Tensor, "b d"]:
        """Dropout on the features; what is dropped depends on the seed and the step alone, as the batch does."""
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
        shown = {"loss": "loss", "r_auroc": "R-AUROC", "order": "order"}
        advance(0, "  ".join(f"{told} {entry[name]:.4f}" for name, told in shown.items() if name in entry))

    def _restore(self) -> None:
        found = read_state(self.folder, self.identity) if self.folder is not None else None
        if found is not None:
            self.state = found
            self.module.load_state_dict(found.module)
            restore_optimizer(self.optimizer, found.optimizer)

    def _save(self, *, always: bool) -> None:
        due = time.monotonic() - self._saved > _SECONDS_BETWEEN_STATES
        if self.folder is None or not (due or always):
            return
        self.state.module = dict(self.module.state_dict())
        self.state.optimizer = optimizer_tensors(self.optimizer)
        write_state(self.folder, self.identity, self.state)
        self._saved = time.monotonic()

    @torch.no_grad()
    def _tell_constant(self) -> None:
        rows = self.held_out.features if self.held_out is not None else next(self.stream.batches(0, 1))[0]
        u = self.module(rows)
        if len(u) > 1 and float(u.max() - u.min()) <= _SAME:
            warnings.warn(
                f"the trained head says {float(u[0]):.4g} of every image: it has not learned anything. A head that "
                f"starts at zero cannot learn, and too high a learning rate lets it collapse: use init='default', or "
                f"lower the lr.",
                ConstantHeadWarning,
                stacklevel=4,
            )


def _loss_of(recipe: Recipe) -> HeadLoss:
    if recipe.loss in DIRECT_LOSSES:
        return DIRECT_LOSSES[recipe.loss]
    return partial(ranking_loss, margin=recipe.margin, leeway=recipe.leeway)


def _watched(held_out: Table, table: Table, recipe: Recipe) -> HeldOut:
    if held_out is table:
        raise TableError(
            f"held_out: {table.name} is trained on and cannot be held out. Give other images, or a share such as 0.1."
        )
    if table.model_id and held_out.model_id and table.model_id != held_out.model_id:
        raise TableError(
            f"held_out: {held_out.name} was made by another model ({held_out.model_id}) than {table.name} "
            f"({table.model_id}). Extract both with the same model and transform."
        )
    held_out.require("feature", by="held_out")
    here, there = table.shape("feature")[1], held_out.shape("feature")[1]
    if here != there:
        raise TableError(
            f"held_out: features of {held_out.name} must be {here} wide, as those of {table.name}; got {there}. "
            f"Extract both with the same model."
        )
    return HeldOut.of(held_out, recipe)


def _identity(
    table: Table, held_out: HeldOut | None, losses: Tensor, plan: Plan, module: HeadModule, seed: int
) -> Json:
    """What a kept state must agree with; of the features, some rows from everywhere stand for all."""
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
