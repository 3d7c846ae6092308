"""Train heads from a cache: several seeds, resumable, each saved as a folder that can be loaded or shared.

    heads/mine/
      seed-1/   model.safetensors, config.json, README.md: the finished head; state.safetensors: the training's state
      seed-2/
      training.json       the results of all seeds, and when they were finished
      .lock               held while a training writes here, as in each seed's folder; left over, it means nothing

Over several seeds a figure is reported as the paper does: the median, and its distance to the farther of minimum and
maximum (Kirchhof et al. 2024, section 4.1).
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from dubito.errors import DubitoError
from dubito.heads.checkpoint import DiskType
from dubito.heads.held_out import split
from dubito.heads.loop import STATE
from dubito.heads.recipe import Recipe
from dubito.heads.score import UncertaintyHead
from dubito.heads.shelf import TRAINING
from dubito.metrics import MedianSpread, median_spread
from dubito.result import Result, axes, plain
from dubito.storage import locked, write_json
from dubito.table import Table
from dubito.types import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURES = {"loss": "training loss", "r_auroc": "held-out R-AUROC", "order": "held-out order"}
"""What is measured during a training."""


@final
@dataclass(frozen=True)
class Training(Result):
    """One trained head per seed; `plot` draws their learning curves.

    Attributes:
        heads: One head per seed, in the order of the seeds.
        histories: The measurements of each, from first to last.
        folders: Where each is saved; empty without a folder.
    """

    heads: tuple[UncertaintyHead, ...]
    histories: tuple[list[Json], ...]
    folders: tuple[Path, ...] = ()

    titles = FIGURES

    @property
    def head(self) -> UncertaintyHead:
        """The head with the median held-out R-AUROC (of an even number, the better of the middle two).

        Without held-out images, it is the first one. It is not the best one: how good that is, only yet another set of
        images could show.
        """
        key = next((name for name in ("r_auroc", "order") if name in self.histories[0][-1]), None)
        if key is None:
            return self.heads[0]
        order = sorted(range(len(self.heads)), key=lambda number: float(self.histories[number][-1][key]))
        return self.heads[order[len(order) // 2]]

    def summary(self) -> dict[str, MedianSpread]:
        """By figure: the median over seeds, and its distance to the farther of minimum and maximum."""
        last = [history[-1] for history in self.histories]
        return {name: median_spread([one[name] for one in last]) for name in FIGURES if name in last[0]}

    def title(self) -> str:
        """How many heads there are."""
        return f"{len(self.heads)} head{'s' if len(self.heads) > 1 else ''}"

    def facts(self) -> dict[str, str]:
        """The summary, with distances if there are several seeds."""
        several = len(self.heads) > 1
        return {
            FIGURES[name]: f"{median:.4f}" + (f" ± {distance:.4f}" if several else "")
            for name, (median, distance) in self.summary().items()
        }

    def records(self) -> list[dict[str, Any]]:
        """One row per seed: the figures at the end of its training."""
        return [
            {"seed": head.seed, **{name: history[-1][name] for name in ("step", *FIGURES) if name in history[-1]}}
            for head, history in zip(self.heads, self.histories, strict=True)
        ]

    def to_dict(self) -> Json:
        """Seeds, folders, the summary and all measurements; not the heads themselves."""
        seeds = {"seeds": [head.seed for head in self.heads], "median_seed": self.head.seed}
        values: Json = plain({**seeds, "folders": self.folders, "summary": self.summary(), "histories": self.histories})
        return values

    def plot(self, ax: "Axes | None" = None, *, figure: str | None = None) -> "Axes":
        """Learning curves of all seeds.

        Args:
            ax: Axes to draw on; None makes new ones.
            figure: "r_auroc", "order" or "loss"; None is the first of them that was measured.
        """
        figure = figure or next(name for name in ("r_auroc", "order", "loss") if name in self.histories[0][-1])
        ax = axes(ax)
        for head, history in zip(self.heads, self.histories, strict=True):
            ax.plot([one["step"] for one in history], [one[figure] for one in history], label=f"seed {head.seed}")
        ax.set(xlabel="step", ylabel=FIGURES[figure])
        if len(self.heads) > 1:
            ax.legend()
        return ax


def train(  # noqa: PLR0913 (one call that users type; everything after `to` is optional)
    table: Table,
    to: str | Path | None = None,
    *,
    seeds: Sequence[int] = (1,),
    recipe: Recipe | None = None,
    width: int = 512,
    depth: int = 2,
    held_out: Table | float | None = None,
    progress: bool = True,
    trained: Json | None = None,
    measured: Json | None = None,
    licence: str | None = None,
    dtype: DiskType = "float32",
) -> Training:
    """Train one head per seed on a table's features and losses; called again after a kill, it continues.

    Args:
        table: A table from `dubito.extract`, ideally of several augmented epochs, or from arrays; join several with
            `dubito.concat`.
        to: Folder of the heads and their states; None saves nothing.
        seeds: One head is trained for each; the paper uses 1 to 5.
        recipe: Settings of the training; by default the paper's, scaled to the table.
        width: Width of the hidden layers.
        depth: Number of hidden layers.
        held_out: Another table on which R-AUROC is measured, or a share of the table's images, such as 0.1.
        progress: Whether to show a progress bar on a terminal.
        trained: Facts about the training for the heads' config, such as {"corpus": "my images"}.
        measured: Figures by name for the heads' config.
        licence: Licence for the heads' config, such as "Apache-2.0".
        dtype: Type of the weights on disk.
    """
    seeds = list(seeds)
    if not seeds or len(set(seeds)) < len(seeds):
        raise DubitoError(f"train: seeds must be at least one, all different; got {seeds}.")
    if isinstance(held_out, int | float):
        table, held_out = split(table, float(held_out))
    about: Json = {"trained": trained or {}, "measured": measured or {}, "licence": licence, "dtype": dtype}
    heads, histories, folders, any_new = [], [], [], False
    with nullcontext() if to is None else locked(Path(to)):
        for seed in seeds:
            folder = None if to is None else Path(to) / f"seed-{seed}"
            head = UncertaintyHead(width, depth, seed, recipe or Recipe())
            result = head.train(table, held_out=held_out, folder=folder, progress=progress)
            if folder is not None:
                head.save_pretrained(folder, **about)
                folders.append(folder)
            heads.append(head)
            histories.append(result.history)
            any_new = any_new or result.resumed_from < result.steps
        training = Training(tuple(heads), tuple(histories), tuple(folders))
        if to is not None:
            _write_report(Path(to), training, new=any_new)
    return training


def _write_report(to: Path, training: Training, *, new: bool) -> None:
    """Write training.json; its time `finished` changes if and only if this call trained a seed."""
    try:
        before = json.loads((to / TRAINING).read_text())
    except (OSError, ValueError):
        before = None
    finished = before.get("finished") if isinstance(before, dict) and not new else None
    report = training.to_dict()
    report["folders"] = [folder.relative_to(to).as_posix() for folder in training.folders]
    # A seed's state is written with its last step and never again.
    last = max((folder / STATE).stat().st_mtime for folder in training.folders)
    report["finished"] = finished or datetime.fromtimestamp(last, timezone.utc).isoformat(timespec="seconds")
    if report != before:
        write_json(to / TRAINING, report)
