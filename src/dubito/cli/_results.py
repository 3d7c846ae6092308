"""Results of commands that no function of the library returns: what was extracted, scored, trained, built, listed."""

import io
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

import dubito
from dubito.heads import Recipe
from dubito.heads.training import Training
from dubito.result import Result, plain
from dubito.search import SafeIndex
from dubito.storage import export, write_csv
from dubito.table import Table
from dubito.types import Json, Score

_SKIPPED_SHOWN = 10


@final
@dataclass
class Extraction(Result):
    """What one run of `dubito extract` did.

    Attributes:
        model: Name of the model.
        epochs: Number of augmented epochs.
        table: The finished table.
        cache: Where it is.
        new_rows: How many rows were extracted by this run.
        seconds: How long that took.
    """

    model: str
    epochs: int
    table: Table
    cache: Path
    new_rows: int
    seconds: float

    def title(self) -> str:
        """The folder of the cache."""
        return str(self.cache)

    def facts(self) -> dict[str, str]:
        """What is in the cache, and how fast it went."""
        table, skipped = self.table, self.table.skipped
        images = len(table) + len(skipped)
        often = f" ({images // self.epochs} in {self.epochs} augmented epochs)" if self.epochs > 1 else ""
        facts = {
            "model": self.model,
            "images": f"{images}{often}" + (f", {len(skipped)} skipped" if skipped else ""),
            "columns": ", ".join(f"{one} ({' x '.join(map(str, table.shape(one)))})" for one in table.columns),
        }
        accuracy = dubito.metrics.table_accuracy(table)
        if accuracy is not None:
            order = ", class names taken in sorted order: the model does not name its own" if _by_order(table) else ""
            facts["accuracy"] = f"{accuracy:.4f}{order}"
        elif "label" in table and table.label_space == "own":
            facts["labels"] = "classes of another set, not the model's: no accuracy"
        speed = f"{self.new_rows} images at {self.new_rows / self.seconds:.1f} per second"
        facts["time"] = f"{self.seconds:.1f} s, {speed if self.new_rows else 'everything was there already'}"
        facts["size"] = f"{self._bytes() / 1e6:.1f} MB"
        return facts | {f"skipped {name}": reason for name, reason in skipped[:_SKIPPED_SHOWN]}

    def to_dict(self) -> Json:
        """Everything that is known of the cache, and the speed."""
        table = self.table
        return {
            "model": self.model,
            "epochs": self.epochs,
            "cache": str(self.cache),
            "images": len(table) + len(table.skipped),
            "rows": len(table),
            "skipped": [{"id": name, "reason": reason} for name, reason in table.skipped],
            "columns": {column: list(table.shape(column)) for column in table.columns},
            "label_space": table.label_space if "label" in table else None,
            "labels_by_order": _by_order(table),
            "accuracy": dubito.metrics.table_accuracy(table),
            "new_rows": self.new_rows,
            "seconds": round(self.seconds, 3),
            "images_per_second": round(self.new_rows / self.seconds, 2) if self.new_rows else None,
            "bytes": self._bytes(),
        }

    def _bytes(self) -> int:
        return sum((self.cache / name).stat().st_size for name in files_in(self.cache))


@final
@dataclass
class ScoredImages(Result):
    """Predictions and uncertainties of all images of a table.

    Attributes:
        cache: Where the table comes from.
        table: The table.
        scores: The scores by name; the first one orders the images.
        top: How many of the most uncertain images are shown.
        uncertainties: By name, the uncertainty of every row.
        prediction: The predicted class of every row.
        probability: Its probability.
    """

    cache: Path
    table: Table
    scores: dict[str, Score]
    top: int
    uncertainties: dict[str, Tensor] = field(init=False)
    prediction: Tensor = field(init=False)
    probability: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.uncertainties = {name: score.score(self.table) for name, score in self.scores.items()}
        best = [batch.logit.double().softmax(-1).max(-1) for batch in self.table.batches("logit")]
        self.prediction = torch.cat([one.indices for one in best])
        self.probability = torch.cat([one.values for one in best])

    def title(self) -> str:
        """How many images are shown, and by which score."""
        shown = min(self.top, len(self.table))
        return f"{self.cache}: the {shown} most uncertain of {len(self.table)} images, by {next(iter(self.scores))}"

    def records(self) -> list[dict[str, Any]]:
        """The most uncertain rows by the first score; equal ones in the table's order."""
        # Minus the probability is not shown beside the probability.
        names = [name for name in self.scores if name != "max_probability"]
        return [
            {
                "image": one["id"],
                "prediction": (one["class"] or str(one["prediction"])).partition(",")[0],
                "probability": one["probability"],
                **{name: one["scores"][name] for name in names},
            }
            for one in self._top()
        ]

    def heading(self, key: str) -> str:
        """Names of scores on several lines, since there are many."""
        return key.replace("_", "\n")

    def to_dict(self) -> Json:
        """The scores, and the most uncertain images."""
        return {
            "cache": str(self.cache),
            "rows": len(self.table),
            "scores": {name: {"kind": one.kind, "needs": list(one.needs)} for name, one in self.scores.items()},
            "order_by": next(iter(self.scores)),
            "top": self._top(),
        }

    def write(self, path: Path) -> Path:
        """Write every row as .csv, or as the arrays of an .npz file, which has no class names."""
        table, as_csv = self.table, path.suffix.lower() == ".csv"
        columns: dict[str, Any] = {"id": table.id, "prediction": self.prediction.numpy()}
        if table.classes and as_csv:
            columns["class"] = [table.classes[index] for index in self.prediction.tolist()]
        columns["probability"] = self.probability.numpy()
        if "label" in table:
            columns["label"] = table.label.numpy()
        columns |= {name: values.numpy() for name, values in self.uncertainties.items()}
        if as_csv:
            return write_csv(path, [list(columns), *zip(*columns.values(), strict=True)])
        data = io.BytesIO()
        np.savez_compressed(data, **columns)
        return export(path, data.getvalue())

    def _top(self) -> list[Json]:
        classes = self.table.classes
        order = next(iter(self.uncertainties.values())).argsort(descending=True, stable=True)[: self.top]
        ids: Any = self.table.select("id").rows(order).id if len(order) else []
        return [
            {
                "id": str(name),
                "prediction": int(self.prediction[row]),
                "class": classes[int(self.prediction[row])] if classes else None,
                "probability": float(self.probability[row]),
                "scores": {key: float(values[row]) for key, values in self.uncertainties.items()},
            }
            for name, row in zip(ids, order.tolist(), strict=True)
        ]


@final
@dataclass
class TrainingRun(Result):
    """What one run of `dubito train` did.

    Attributes:
        training: The heads and their measurements.
        caches: What they were trained on.
        table_rows: Rows of all caches, including those held out.
        recipe: How they were trained.
        to: The folder.
        name: What `--head` calls the folder.
        seconds: How long it took.
    """

    training: Training
    caches: Sequence[Path]
    table_rows: int
    recipe: Recipe
    to: Path
    name: str
    seconds: float

    def title(self) -> str:
        """How many heads there are, and for which model."""
        count = len(self.training.heads)
        return f"{'a head' if count == 1 else f'{count} heads'} for {self._model() or 'a model without a name'}"

    def facts(self) -> dict[str, str]:
        """What was learned from, how well, and how to use it."""
        trained = self.training.head.trained_
        held_out = self.table_rows - trained["table_rows"]
        return {
            "rows": f"{trained['table_rows']:,}"
            + (f", and {held_out:,} held out" if held_out else "")
            + f"; {trained['rows_seen']:,} seen in {trained['steps']:,} steps",
            "seeds": ", ".join(str(head.seed) for head in self.training.heads),
            **self.training.facts(),
            "time": f"{self.seconds:.1f} s",
            "saved in": str(self.to),
            "use it": f"dubito score CACHE --head {shlex.quote(self._head())}",
        }

    def to_dict(self) -> Json:
        """Everything but the histories, which the folder has."""
        training, trained = self.training, self.training.head.trained_
        ends = zip(training.heads, training.folders, training.histories, strict=True)
        return {
            "caches": [str(cache) for cache in self.caches],
            "table_rows": self.table_rows,
            "model": self._model(),
            "to": str(self.to),
            "recipe": self.recipe.to_json(),
            "seeds": [{"seed": head.seed, "folder": str(folder), **history[-1]} for head, folder, history in ends],
            "summary": training.to_dict()["summary"],
            "rows": trained["table_rows"],
            "rows_seen": trained["rows_seen"],
            "steps": trained["steps"],
            "median_seed": training.head.seed,
            "head": self._head(),
            "seconds": round(self.seconds, 3),
        }

    def _model(self) -> str | None:
        provenance = self.training.head.provenance_
        return provenance.model if provenance else None

    def _head(self) -> str:
        return f"{self.name}/seed-{self.training.head.seed}"


@final
@dataclass
class BuiltIndex(Result):
    """What `dubito search build` built.

    Attributes:
        index: The index.
        cache: Its images.
        to: Where it was saved.
    """

    index: SafeIndex
    cache: Path
    to: Path

    def title(self) -> str:
        """Which images it holds."""
        return f"index of {self.cache}"

    def facts(self) -> dict[str, str]:
        """How many items are searched, and by which uncertainty."""
        index, rule = self.index, self.index.rule
        by_class = "; another one for each class" if rule.per_class else ""
        facts = {
            "folder": str(self.to),
            "items": f"{len(index):,}, of which {index.kept:,} are searched",
            "uncertainty": f"{index.score.name if index.score else None}, at most {index.thresholds.overall:.4g} "
            f"(quantile {rule.quantile:g}{by_class}; clean: {rule.clean})",
        }
        if approximation := index.backend.approximation:
            facts["approximation"] = f"{approximation.kind}, recall {approximation.recall:.3f} of ten neighbours"
        return facts

    def to_dict(self) -> Json:
        """Its rule, sizes and thresholds."""
        index, approximation = self.index, self.index.backend.approximation
        return {
            "cache": str(self.cache),
            "to": str(self.to),
            "items": len(index),
            "searched": index.kept,
            "width": index.width,
            "score": None if index.score is None else index.score.name,
            **plain(index.rule),
            "threshold": index.thresholds.overall,
            "approximation": plain(approximation),
        }


@final
@dataclass
class Listing(Result):
    """What `dubito list` found.

    Attributes:
        heading_text: What is listed.
        entries: By kind, everything that is listed, for JSON.
        rows: What people see of it.
        remarks: Sentences below the table.
    """

    heading_text: str
    entries: Mapping[str, Sequence[Mapping[str, Any]]]
    rows: list[dict[str, Any]]
    remarks: list[str] = field(default_factory=list)

    def title(self) -> str:
        """What is listed."""
        return self.heading_text

    def records(self) -> list[dict[str, Any]]:
        """What people see."""
        return self.rows

    def findings(self) -> list[str]:
        """The remarks."""
        return self.remarks

    def cell(self, key: str, value: Any) -> str:
        """Several names in one cell."""
        return ", ".join(map(str, value)) if isinstance(value, list) else super().cell(key, value)

    def to_dict(self) -> Json:
        """All entries."""
        return dict(self.entries)


def folder_name(name: str) -> str:
    """Where `--save` keeps a score: its name, without what file systems do not take.

    >>> folder_name("head:org/mine")
    'head_org_mine'
    """
    return re.sub(r"[^\w.-]", "_", name)


def files_in(folder: Path) -> dict[str, int]:
    """The files of a cache and when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*") if path.is_file()}


def _by_order(table: "Table") -> bool:
    """Whether class names were taken for the model's classes in sorted order, since it does not name them."""
    named = table.classes is None and table.label_names is not None
    return named and "label" in table and table.label_space == "model"
