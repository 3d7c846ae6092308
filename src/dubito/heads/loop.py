"""The training loop of one head on a table's columns: images, backbone and classifier are not involved.

Every twenty seconds the whole state (weights, optimiser, history) replaces `state.safetensors` in one step, and the
batch of each step depends on the seed and the step alone. A training that was killed therefore continues from its last
state and ends with the same bits as one that was not.

The optimisers are those of Table 3 of Kirchhof et al. (2024), with weight decay on matrices only.
"""

import json
import math
import time
import warnings
from contextlib import nullcontext
from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from dubito.cache.disk import differing_parts
from dubito.cache.runner import Advance, bar
from dubito.errors import ArtefactError, ConstantHeadWarning, TableError, ValueRangeError
from dubito.heads.distributed import Processes, SharedTraining, described
from dubito.heads.held_out import HeldOut
from dubito.heads.losses import HeadLoss, head_loss
from dubito.heads.module import HeadModule, start_at_classes
from dubito.heads.recipe import Recipe, target_column
from dubito.heads.stream import Stream, dropped
from dubito.storage import Place, locked, read_tensors, reading, tensors_digest, write_tensors
from dubito.table import Table
from dubito.types import Json
from dubito.validate import check_same_model

STATE = "state.safetensors"
_MEASUREMENTS = 20
_SECONDS_BETWEEN_STATES = 20.0
_CONSTANT = 1e-7
_MOMENTUM = 0.9


@final
class Run:
    """The training of one head: `go` changes `module` and fills `history`.

    Args:
        table: Has the column `feature` and those of the recipe's target, in memory or in a cache.
        recipe: Settings of the training.
        module: The head to train, as it was initialised.
        seed: Seed of the order of rows and of dropout.
        held_out: Other images of the same model, on which the head is measured but not trained.
        folder: Where the state is saved; a state that is there is continued.
        processes: Those that share the training, of which this one leads; None trains in this one alone.
    """

    def __init__(
        self,
        table: Table,
        recipe: Recipe,
        module: HeadModule,
        seed: int,
        held_out: Table | None,
        folder: Place | None,
        processes: Processes | None = None,
    ) -> None:
        losses = target_column(table, recipe)
        self.plan, self.module, self.folder = recipe.plan(len(table)), module, folder
        if recipe.init == "classes":
            start_at_classes(module, table)
        if held_out is table:
            raise TableError(
                f"held_out: {table.name} is trained on and cannot be held out. Pass other images, or a share like 0.1."
            )
        check_same_model(table, {"held_out": held_out}, by="head.fit")
        self.held_out = None if held_out is None else HeldOut.of(held_out, recipe)
        self.optimizer = make_optimizer(module, recipe)
        self.processes, size = processes, 1 if processes is None else processes.size
        self.stream = Stream(table.column("feature"), losses, self.plan.batch, seed, table.name, processes=size)
        self.step, self.history = 0, list[Json]()
        self._losses, self._since = torch.zeros(()), 0  # sum of the losses since the last measurement, and of how many
        self._identity = self._described(table, losses)

    def go(self, *, progress: bool) -> int:
        """Train from the saved state, or from the beginning, to the last step; returns the number of updates."""
        with nullcontext() if self.folder is None else locked(self.folder):
            if self.folder is not None and (self.folder / STATE).exists():
                self._restore(self.folder / STATE)
            first, total = self.step, self.plan.steps
            self._saved = time.monotonic()
            done, rows_in_all = self.stream.rows_until(first), self.stream.rows_until(total)
            with bar(f"train seed {self.stream.seed}", rows_in_all, done=done, unit="rows", show=progress) as advance:
                while self.step < total:  # once, unless processes had to be replaced
                    with nullcontext() if self.processes is None else self.processes.surviving():
                        self._steps(advance)
        self._warn_constant()
        self.module.eval()
        return total - first

    def _steps(self, advance: Advance) -> None:
        """All steps from the next one on; an error leaves everything as it was after the last step."""
        recipe, total = self.plan.recipe, self.plan.steps
        loss_of = head_loss(recipe.loss, margin=recipe.margin, leeway=recipe.leeway, by="recipe")
        every = max(1, total // _MEASUREMENTS)
        if self.processes is not None:
            self.processes.begin(self._shared(), self.module)
        batches = self.stream.batches if self.processes is None else self.stream.shares
        for batch in batches(self.step, total):
            self._losses += self._step(loss_of, *batch)
            self._since += 1
            advance(len(batch[1]))
            if self.step % every == 0 or self.step == total:
                self._measure(advance)
            self._save(always=self.step == total)
        if self.processes is not None:
            self.processes.end()

    def _step(
        self,
        loss_of: HeadLoss,
        rows: Float[Tensor, "own d"],
        losses: Float[Tensor, "b"],
        own: Int[Tensor, "own"] | None = None,
    ) -> Float[Tensor, ""]:
        """One update; where processes share the training, from the rows that this one has of the batch."""
        set_lr(self.optimizer, self.plan.lr(self.step))
        rows = dropped(rows, self.plan.recipe.dropout, self.stream.seed, self.step, own, len(losses))
        self.optimizer.zero_grad()
        if self.processes is None or own is None:
            loss = loss_of(self.module(rows), losses)
            torch.autograd.backward(loss)
        else:
            loss = self.processes.backward(self.module, rows, losses, own, loss_of)
        self.optimizer.step()
        self.step += 1
        return loss.detach()

    def _shared(self) -> SharedTraining:
        """What the other processes must know to take part from the next step on."""
        return SharedTraining(
            table=described(self.stream),
            width=self.module.width,
            depth=self.module.depth,
            batch=self.plan.batch,
            seed=self.stream.seed,
            dropout=self.plan.recipe.dropout,
            first=self.step,
            stop=self.plan.steps,
        )

    def _measure(self, advance: Advance) -> None:
        loss = float(self._losses) / self._since
        self._losses, self._since = torch.zeros(()), 0
        if not math.isfinite(loss):
            raise ValueRangeError(
                f"head.fit: the training loss became {loss} by step {self.step}, so the head has diverged. "
                f"Lower the recipe's lr ({self.plan.recipe.lr})."
            )
        entry: Json = {"step": self.step, "lr": self.plan.lr(self.step - 1), "loss": loss}
        if self.held_out is not None:
            entry |= self.held_out.measure(self.module)
        self.history.append(entry)
        names = {"loss": "loss", "r_auroc": "R-AUROC", "order": "order"}
        advance(0, "  ".join(f"{name} {entry[key]:.4f}" for key, name in names.items() if key in entry))

    def _save(self, *, always: bool) -> None:
        due = time.monotonic() - self._saved > _SECONDS_BETWEEN_STATES
        if self.folder is None or not (due or always):
            return
        parts = {"module": self.module.state_dict(), "optimizer": optimizer_tensors(self.optimizer)}
        tensors = {f"{part}.{key}": value for part, named in parts.items() for key, value in named.items()}
        notes = {"identity": self._identity, "step": self.step, "since": self._since, "history": self.history}
        write_tensors(self.folder / STATE, tensors | {"losses": self._losses}, notes)
        self._saved = time.monotonic()

    def _restore(self, path: Place) -> None:
        with reading(f"'{path}'", "Delete it to train from the beginning."):
            tensors, notes = read_tensors(path)
            now = json.loads(json.dumps(self._identity))
            if differing := differing_parts({part: part for part in now}, notes["identity"], now):
                raise ArtefactError(
                    f"'{path.parent}' holds another training: {'; '.join(differing)}. Train into another folder, or "
                    f"delete this one."
                )
            self.step, self._since, self.history = int(notes["step"]), int(notes["since"]), list(notes["history"])
            self._losses = tensors.pop("losses")
            parts: dict[str, dict[str, Tensor]] = {"module": {}, "optimizer": {}}
            for key, value in tensors.items():
                part, _, name = key.partition(".")
                parts[part][name] = value
            self.module.load_state_dict(parts["module"])
            restore_optimizer(self.optimizer, parts["optimizer"])

    def _described(self, table: Table, losses: Float[Tensor, "n"]) -> Json:
        """What a saved state must have been made with, by what errors call it; some rows stand for the features."""
        return {
            "the recipe": self.plan.recipe.to_json(),
            "the seed": self.stream.seed,
            "the head's width": self.module.width,
            "the head's depth": self.module.depth,
            "the width of the features": self.module.features,
            "the number of rows": len(table),
            "the model that made the table": table.model_id,
            "the losses": tensors_digest({"loss": losses}),
            "the features": self.stream.digest(),
            "the held-out images": None if self.held_out is None else self.held_out.digest(),
        }

    @torch.no_grad()
    def _warn_constant(self) -> None:
        rows = self.held_out.features if self.held_out is not None else next(self.stream.shares(0, 1))[0]
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
