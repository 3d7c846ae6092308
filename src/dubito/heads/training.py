"""Train heads from a cache: several seeds, resumable, each kept as a folder that can be loaded or shared.

    heads/mine/
      seed-1/   model.safetensors, config.json, README.md: the finished head; state.safetensors: how far it has come
      seed-2/
      training.json       what all seeds reached, and when
      .lock               held while a training writes here, as in each seed's folder; left over, it means nothing

Over several seeds a figure is reported as the paper does: the median, and the distance to the farther of minimum and
maximum (Kirchhof et al. 2024, section 4.1).
"""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import final

from dubito.errors import DubitoError
from dubito.heads._state import FILE as STATE
from dubito.heads._state import alone
from dubito.heads.config import DiskType
from dubito.heads.held_out import split
from dubito.heads.recipe import Recipe
from dubito.heads.score import UncertaintyHead
from dubito.heads.shelf import TRAINING
from dubito.heads.train import Trained, train_head
from dubito.protocols.transfer import median_and_spread
from dubito.storage import write_file
from dubito.table import Table
from dubito.types import Json

FIGURES = {"loss": "training loss", "r_auroc": "held-out R-AUROC", "order": "held-out order"}


@final
@dataclass(frozen=True)
class Training:
    """What a training gave.

    Attributes:
        heads: One a seed, in the order of the seeds.
        histories: The measurements of each, from first to last.
        folders: Where each is kept; empty if nowhere.
    """

    heads: tuple[UncertaintyHead, ...]
    histories: tuple[list[Json], ...]
    folders: tuple[Path, ...] = ()

    @property
    def head(self) -> UncertaintyHead:
        """The head whose held-out R-AUROC is the median of all (of an even number, the better of the middle two).

        Without held-out images, the first one. Not the best: choosing it would need yet another set of images to tell
        how good it is.
        """
        key = next((name for name in ("r_auroc", "order") if name in self.histories[0][-1]), None)
        if key is None:
            return self.heads[0]
        order = sorted(range(len(self.heads)), key=lambda number: float(self.histories[number][-1][key]))
        return self.heads[order[len(order) // 2]]

    def summary(self) -> dict[str, tuple[float, float]]:
        """By figure: the median over seeds, and the distance to the farther of minimum and maximum."""
        last = [history[-1] for history in self.histories]
        return {name: median_and_spread([one[name] for one in last]) for name in FIGURES if name in last[0]}

    def to_json(self) -> Json:
        """Plain values."""
        return {
            "seeds": [head.seed for head in self.heads],
            "median_seed": self.head.seed,
            "folders": [str(folder) for folder in self.folders],
            "summary": {name: {"median": m, "spread": s} for name, (m, s) in self.summary().items()},
            "histories": list(self.histories),
        }

    def __str__(self) -> str:
        lines = [f"{FIGURES[name]}  {m:.4f} ± {s:.4f}" for name, (m, s) in self.summary().items()]
        return "\n".join([f"{len(self.heads)} head{'s' if len(self.heads) > 1 else ''}", *lines])


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
    """Train one head a seed on a table's features and losses; called again after a kill, it goes on.

    Args:
        table: From `dubito.extract`, best of several augmented epochs, or from arrays; several by `dubito.concat`.
        to: A folder for the heads and their state; None keeps nothing.
        seeds: The paper has 1 to 5.
        recipe: By default the paper's, scaled to the table.
        width: Of the hidden layers.
        depth: How many.
        held_out: Another table whose R-AUROC is watched, or a share of the table's photographs, such as 0.1.
        progress: Show a bar when a terminal is watching.
        trained: For the heads' config: what is worth knowing of the training, such as {"corpus": "my photographs"}.
        measured: For the heads' config: figures by name.
        licence: For the heads' config, such as "Apache-2.0".
        dtype: Of the heads on disk.
    """
    chosen = list(seeds)
    if not chosen or len(set(chosen)) < len(chosen):
        raise DubitoError(f"train: seeds must be at least one, all different; got {chosen}.")
    if isinstance(held_out, int | float):
        table, held_out = split(table, float(held_out))
    settings = recipe or Recipe()
    about: Json = {"trained": trained or {}, "measured": measured or {}, "licence": licence, "dtype": dtype}
    heads, histories, folders = [], [], []
    new = False
    with nullcontext() if to is None else alone(Path(to)):
        for seed in chosen:
            folder = None if to is None else Path(to) / f"seed-{seed}"
            result = train_head(
                table,
                recipe=settings,
                width=width,
                depth=depth,
                seed=seed,
                held_out=held_out,
                folder=folder,
                progress=progress,
            )
            heads.append(_kept(result, table, UncertaintyHead(width, depth, seed, settings), folder, about))
            histories.append(result.history)
            new = new or result.went_on_from < result.steps
            folders += [folder] if folder else []
        training = Training(tuple(heads), tuple(histories), tuple(folders))
        if to is not None:
            _write_report(Path(to), training, new=new)
    return training


def _write_report(to: Path, training: Training, *, new: bool) -> None:
    """What all seeds reached, and when: `finished` changes if and only if a seed was trained in this call."""
    try:
        before = json.loads((to / TRAINING).read_text())
    except (OSError, ValueError):
        before = None
    finished = before.get("finished") if isinstance(before, dict) and not new else None
    report: Json = json.loads(json.dumps(training.to_json()))
    report["folders"] = [folder.relative_to(to).as_posix() for folder in training.folders]
    report["finished"] = finished or _last_state(training.folders)
    if report != before:
        write_file(to / TRAINING, (json.dumps(report, indent=1) + "\n").encode())


def _last_state(folders: Sequence[Path]) -> str:
    """When the last seed ended: its state is written with its last step and never again."""
    last = max((folder / STATE).stat().st_mtime for folder in folders)
    return datetime.fromtimestamp(last, timezone.utc).isoformat(timespec="seconds")


def _kept(trained: Trained, table: Table, head: UncertaintyHead, folder: Path | None, about: Json) -> UncertaintyHead:
    head.take(trained, table)
    if folder is not None:
        head.save_pretrained(folder, **about)
    return head
