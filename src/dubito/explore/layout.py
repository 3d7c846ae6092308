"""Where images lie on the explorer's map: principal components at once, t-SNE and UMAP when they are ready.

A layout is computed once, in a thread of its own, and kept beside the table. Of more than 20,000 images, as many are
drawn at random and laid out; each of the others is placed by its nearest neighbours among them,

    y(x) = sum_j w_j y_j / sum_j w_j,     w_j = 1 / |x - x_j|^2      over the 5 nearest x_j, on principal components

and the page says so. A new image is placed in the same way.
"""

import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, final, get_args

import faiss
import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64

from dubito.choices import Layout
from dubito.errors import ArtefactError, DubitoError
from dubito.explore.collection import Collection
from dubito.report.layout import METHODS, Components, lay_out
from dubito.storage import read_tensors, reading, tensors_digest, write_tensors
from dubito.table import Table
from dubito.threads import Lock
from dubito.types import Json
from dubito.validate import check_choice

State = Literal["none", "running", "ready", "failed"]
PCA = "pca"
TITLES = {PCA: "Principal components", **METHODS}
_MOST = 20_000
_COMPONENTS = 50
_NEAREST = 5
_COMPARED = 64
"""Rows that stand for all features where a saved layout is compared with a table."""


@final
@dataclass
class _Run:
    """How far one layout is."""

    state: State = "none"
    progress: float = 0.0
    words: str = ""
    points: Float32[np.ndarray, "n 2"] | None = None


@final
class Layouts:
    """The layouts of a collection.

    Args:
        collection: The images; without features there is no layout.
        folder: Where layouts are kept; None keeps them in memory.
        seed: Seed of the draw and of the layouts.
    """

    def __init__(self, collection: Collection, folder: Path | None, *, seed: int = 0) -> None:
        self.collection, self.folder, self.seed = collection, folder, seed
        self.runs = {name: _Run() for name in TITLES}
        self._lock, self._closed = Lock(), threading.Event()
        self._basis: tuple[Components, Int64[np.ndarray, "m"], Any] | None = None
        if "feature" not in collection.table:
            words = "The table has no features, so images cannot be placed by what they show."
            self.runs = {name: _Run("failed", words=words) for name in TITLES}

    def describe(self) -> list[Json]:
        """Every layout and how far it is."""
        return [
            {"name": name, "title": TITLES[name], "state": run.state, "progress": run.progress, "words": run.words}
            for name, run in self.runs.items()
        ]

    def points(self, name: str) -> Float32[np.ndarray, "n 2"] | None:
        """The coordinates of all images in the unit square; None while there are none. Components are made at once."""
        check_choice(name, TITLES, by="explore", what="layout")
        run = self.runs[name]
        if name == PCA and run.state == "none":
            with self._lock:
                if run.points is None:
                    run.points = self._components()
                    run.state, run.progress = "ready", 1.0
        return run.points

    def start_saved(self) -> None:
        """Read the layouts that are on the disk."""
        for name in get_args(Layout):
            if self.folder is not None and (self.folder / f"{name}.safetensors").is_file():
                self.start(name)

    def start(self, name: str) -> None:
        """Compute a layout in the background, or read it from the disk, unless that has begun."""
        check_choice(name, get_args(Layout), by="explore", what="layout")
        run = self.runs[name]
        with self._lock:
            if run.state in ("running", "ready") or "feature" not in self.collection.table:
                return
            run.state, run.progress, run.words = "running", 0.0, ""
        # Not a daemon: Python aborts where it ends while such a thread is in the native code of a layout.
        threading.Thread(target=self._compute, args=(name, run)).start()

    def close(self) -> None:
        """Stop layouts that are being computed, at their next report of progress."""
        self._closed.set()

    def place(self, features: Float32[torch.Tensor, "1 d"]) -> dict[str, list[float]]:
        """Where a new image lies in every layout that is ready."""
        ready = {name: run.points for name, run in self.runs.items() if run.points is not None}
        components, sample, index = self._sampled()
        near, weight = _nearest(index, components.project(features))
        return {name: (weight[0] @ points[sample[near[0]]]).astype(float).tolist() for name, points in ready.items()}

    def _compute(self, name: Any, run: _Run) -> None:
        try:
            points = self._saved(name)
            if points is None:
                components, sample, index = self._sampled()
                x = components.project(self._rows(sample).feature)
                laid_out = lay_out(x, name, seed=self.seed, progress=partial(self._report, run))
                points = _unit(self._with_others(components, sample, index, laid_out))
                self._save(name, points)
            if self._drawn:
                run.words = (
                    f"{_MOST:,} images drawn at random were laid out; each of the others lies by its nearest "
                    f"neighbours among them."
                )
            run.points, run.progress, run.state = points, 1.0, "ready"
        except DubitoError as error:
            run.state, run.words = "failed", str(error)
        except InterruptedError:
            run.state = "none"
        except Exception as error:  # whatever t-SNE and UMAP raise: the page shows it
            run.state, run.words = "failed", f"{TITLES[name]}: {type(error).__name__}: {error}"

    def _report(self, run: _Run, done: float) -> None:
        if self._closed.is_set() or not threading.main_thread().is_alive():
            raise InterruptedError
        run.progress = done

    @property
    def _drawn(self) -> bool:
        return len(self.collection) > _MOST

    def _rows(self, rows: Int64[np.ndarray, "k"]) -> Table:
        """Features of some rows, in order, in memory."""
        parts = []
        for start, table in zip(self.collection.starts, self.collection.sets.values(), strict=False):
            local = rows[(rows >= start) & (rows < start + len(table))] - start
            parts.append(table.select("feature").rows(torch.from_numpy(local)).feature.float())
        return Table(feature=torch.cat(parts), name=self.collection.table.name)

    def _sampled(self) -> tuple[Components, Int64[np.ndarray, "m"], Any]:
        """Components, the rows that they were computed of, and an index of these."""
        with self._lock:
            if self._basis is None:
                n = len(self.collection)
                sample = np.arange(n)
                if self._drawn:
                    sample = np.sort(np.random.default_rng(self.seed).permutation(n)[:_MOST])
                table = self._rows(sample)
                components = Components.of(table, _COMPONENTS, seed=self.seed)
                x = np.ascontiguousarray(components.project(table.feature), dtype=np.float32)
                index = faiss.IndexFlatL2(x.shape[1])
                index.add(x)
                self._basis = components, sample, index
            return self._basis

    def _components(self) -> Float32[np.ndarray, "n 2"]:
        components, _, _ = self._sampled()
        points = np.empty((len(self.collection), 2))
        for start, batch in self.collection.blocks("feature"):
            points[start : start + len(batch)] = components.project(batch.feature)[:, :2]
        return _unit(points)

    def _with_others(
        self,
        components: Components,
        sample: Int64[np.ndarray, "m"],
        index: Any,
        laid_out: Float64[np.ndarray, "m 2"],
    ) -> Float64[np.ndarray, "n 2"]:
        """All images: those that were not laid out lie by their neighbours."""
        if len(sample) == len(self.collection):
            return laid_out
        points = np.empty((len(self.collection), 2))
        for start, batch in self.collection.blocks("feature"):
            near, weight = _nearest(index, components.project(batch.feature))
            points[start : start + len(batch)] = np.einsum("bk,bkd->bd", weight, laid_out[near])
        points[sample] = laid_out
        return points

    def _identity(self, name: str) -> Json:
        """What a saved layout must have been made of."""
        n = len(self.collection)
        rows = np.unique(np.linspace(0, n - 1, min(n, _COMPARED)).astype(np.int64))
        features = tensors_digest({"feature": self._rows(rows).feature})
        return {"layout": name, "rows": n, "seed": self.seed, "features": features}

    def _saved(self, name: str) -> Float32[np.ndarray, "n 2"] | None:
        """The layout on the disk; None where there is none, or where it belongs to other images."""
        path = None if self.folder is None else self.folder / f"{name}.safetensors"
        if path is None or not path.is_file():
            return None
        try:
            with reading(f"the layout in '{path}'", "It is computed again."):
                tensors, notes = read_tensors(path)
                return tensors["points"].numpy() if notes == self._identity(name) else None
        except ArtefactError:
            return None

    def _save(self, name: str, points: Float32[np.ndarray, "n 2"]) -> None:
        if self.folder is not None:
            write_tensors(
                self.folder / f"{name}.safetensors", {"points": torch.from_numpy(points)}, self._identity(name)
            )


def _nearest(index: Any, x: Float64[np.ndarray, "b k"]) -> tuple[Int64[np.ndarray, "b j"], Float64[np.ndarray, "b j"]]:
    """The nearest rows of an index, and their weights, which sum to 1; a row that is there has all of it."""
    squared, near = index.search(np.ascontiguousarray(x, dtype=np.float32), min(_NEAREST, index.ntotal))
    weight = 1 / np.maximum(squared.astype(np.float64), 1e-12)
    return near, weight / weight.sum(1, keepdims=True)


def _unit(points: Float64[np.ndarray, "n 2"]) -> Float32[np.ndarray, "n 2"]:
    """Into the unit square, with one scale for both axes, in the middle; y grows downwards, as on a screen."""
    low, high = points.min(0), points.max(0)
    span = float((high - low).max()) or 1.0
    unit: np.ndarray = ((points - (low + high) / 2) / span).astype(np.float32)
    unit += np.float32(0.5)
    unit[:, 1] = 1 - unit[:, 1]
    return unit
