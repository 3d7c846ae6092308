"""The only loop over images: decode in workers, transform, run probes; images that cannot be decoded are set apart.

Extraction writes what it yields to disk (`extract.py`), `predict_table` keeps it in memory, and the audit reads inputs
from it. Nothing else drives the loader.
"""

import ctypes
import os
import platform
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from dubito.cache.labels import names_of_labels, resolve_labels
from dubito.cache.loader import Batch as Batch  # noqa: PLC0414 (extract reads batches through the runner)
from dubito.cache.loader import batches
from dubito.cache.progress import bar
from dubito.data.image_set import ImageSet
from dubito.errors import BrokenImageError, SkippedImagesWarning, TableError, ValueRangeError
from dubito.probes import base_probe
from dubito.probes.forward import Mixed
from dubito.table import Provenance, Table
from dubito.types import BaseProbe, Classifier, Images, NotingProbe, Probe, SharingProbe, Transform

Columns = dict[str, Tensor]
ROW_COLUMNS = ("id", "label", "epoch", "image_index")
"""What the loop itself knows of every row; no probe may write these."""
_BATCH = {"cpu": 16, "cuda": 128, "mps": 64}
_MOST_WORKERS = 8
_LISTED = 3
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # the numbers of glibc's malloc.h
_MOST = 2**31 - 1
_USUAL = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: 64 * 2**20}
"""The defaults, with the thresholds where glibc itself moves them once a program has freed large blocks."""


def default_batch_size(device: torch.device) -> int:
    """Images through the model at once, as fits the device."""
    return _BATCH.get(device.type, 16)


def default_workers(images: Images) -> int:
    """Processes that decode: one per core, and none for inputs that are ready in memory."""
    return 0 if isinstance(images, ImageSet) and images.ready else min(cores(), _MOST_WORKERS)


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_batches(indices: Sequence[int], size: int) -> list[list[int]]:
    """Consecutive indices, `size` at a time.

    >>> in_batches(range(5), 2)
    [[0, 1], [2, 3], [4]]
    """
    return [list(indices[start : start + size]) for start in range(0, len(indices), size)]


@contextmanager
def open_stream(
    images: Images,
    transform: Transform,
    groups: list[list[int]],
    *,
    hashed: bool = False,
    workers: int = 0,
    title: str = "",
    progress: bool = False,
) -> Iterator[Iterator[Batch]]:
    """Batches of prepared images, one per group of indices, while a bar advances and freed memory is kept.

    Args:
        images: The images.
        transform: Prepares each of them in the worker that reads it.
        groups: Indices of the images of each batch; images that are in none count as done.
        hashed: Give the hash of every image's content, from the same reading; `images` must be an ImageSet.
        workers: Processes that decode; 0 decodes in this one.
        title: Title of the bar.
        progress: Show a bar when a terminal is watching.
    """
    done = max(len(images) - sum(map(len, groups)), 0)
    # First, so that the workers start with the usual limits of memory.
    stream = batches(images, transform, groups, workers, hashed=hashed)
    memory = kept_memory() if len(groups) > 1 else nullcontext()
    with memory, bar(title, len(images), done=done, show=progress) as advance:

        def advanced() -> Iterator[Batch]:
            for batch in stream:
                yield batch
                advance(len(batch.indices) + len(batch.broken))

        yield advanced()


def inputs_of(batch: Batch, model: Classifier) -> Float[Tensor, "n ..."] | None:
    """The model's inputs, finished on its device; None if no image of the batch could be decoded."""
    return None if batch.inputs is None else model.transform.finish(batch.inputs.to(model.device))


@final
class ProbeRunner:
    """Runs probes on batches and checks what they write: one owner per column, one row per image, finite values.

    Args:
        model: The model that the probes run.
        probes: The probes by name.
        owners: Columns that exist already, with the name of who writes each.
    """

    def __init__(self, model: Classifier, probes: Mapping[str, Probe], owners: Mapping[str, str] | None = None) -> None:
        self.model, self.probes = model, dict(probes)
        self._owners = {**(owners or {}), **dict.fromkeys(ROW_COLUMNS, "extract")}
        self._written: dict[str, set[str]] = {}

    def run(
        self,
        x: Float[Tensor, "n ..."],
        ids: Sequence[str],
        *,
        names: Sequence[str] | None = None,
        target: Shaped[Tensor, "n ..."] | None = None,
        mixed: Mixed | None = None,
    ) -> dict[str, Columns]:
        """The columns of each probe, on the CPU.

        Args:
            x: The model's inputs.
            ids: Names of the images, for errors.
            names: Probes to run; all by default.
            target: What the task loss compares the logits with.
            mixed: Of images that are mixed from two: the other one's target, and the weight of the first.
        """
        chosen = {name: self.probes[name] for name in (self.probes if names is None else names)}
        label = target if mixed is None else None  # two images in one have no class of their own
        shared, feature = _share(self.model, x, chosen, label)
        written: dict[str, Columns] = {}
        for name, probe in chosen.items():
            if name in shared:
                columns = shared[name]
            elif isinstance(probe, BaseProbe):
                columns = probe.run(self.model, x, target, mixed=mixed, feature=feature)
            else:
                columns = probe.run(self.model, x, label)
            self._check_owner(name, columns)
            written[name] = {key: value.detach().cpu() for key, value in columns.items()}
            self._check(name, written[name], ids)
        return written

    def _check_owner(self, name: str, columns: Mapping[str, Tensor]) -> None:
        for column in columns:
            owner = self._owners.setdefault(column, name)
            if owner != name:
                raise TableError(
                    f"probe {name} writes column '{column}', which {owner} writes already. Give it another name."
                )

    def _check(self, name: str, columns: Columns, ids: Sequence[str]) -> None:
        usual = self._written.setdefault(name, set(columns))
        if set(columns) != usual:
            raise TableError(
                f"probe {name} must write the same columns for every batch; got {', '.join(sorted(usual))} before and "
                f"{', '.join(sorted(columns))} from image '{ids[0]}' on. Write the same columns for all images."
            )
        for key, column in columns.items():
            if column.shape[:1] != (len(ids),):
                raise TableError(
                    f"probe {name} must write one row per image; got column '{key}' of shape {tuple(column.shape)} for "
                    f"{len(ids)} images. Return (n, ...) tensors."
                )
            bad = ~torch.isfinite(column.flatten(1) if column.dim() > 1 else column[:, None]).all(1)
            if bad.any():
                row = int(bad.nonzero()[0, 0])
                raise ValueRangeError(f"image '{ids[row]}': {_not_finite(key, column[row])}; finished shards are kept.")


def predict_table(
    model: Classifier,
    images: Images,
    probes: Sequence[Probe] = (),
    *,
    feature_dtype: Literal["float16", "float32"] | None = None,
    provenance: Provenance | None = None,
    labelled: bool = False,
    workers: int = 0,
    progress: bool = False,
) -> Table:
    """What the model predicts for images, as a table in memory, without a cache.

    The columns have the values that an extraction would store and read back. Images that cannot be decoded have no
    row; the table lists them in `skipped`.

    Args:
        model: The model to run.
        images: The images, opened.
        probes: Further probes; features and logits are always there.
        feature_dtype: Precision that features are rounded to; by default that of the cache that `provenance` describes,
            float16 where it does not say. Features beyond float16's range are not rounded.
        provenance: Who made the table, if known: settings and notes of the probes are added.
        labelled: Add the images' own labels, if they have any, as an extraction does.
        workers: Processes that decode.
        progress: Show a bar when a terminal is watching.

    Raises:
        BrokenImageError: Not one image can be decoded.
    """
    base = base_probe(provenance)
    base = base if feature_dtype is None else replace(base, feature_dtype=feature_dtype)
    runner = ProbeRunner(model, {base.name: base.in_memory(), **{probe.name: probe for probe in probes}})
    groups = in_batches(range(len(images)), default_batch_size(model.device))
    parts: list[Columns] = []
    kept: list[int] = []
    broken: list[tuple[str, str]] = []
    title = f"predict {images.name}"
    with open_stream(images, model.transform, groups, workers=workers, title=title, progress=progress) as stream:
        for batch in stream:
            kept += batch.indices
            broken += [(images.ids[index], why) for index, why in batch.broken]
            x = inputs_of(batch, model)
            if x is not None:
                columns = runner.run(x, [images.ids[index] for index in batch.indices])
                parts.append({key: value for part in columns.values() for key, value in part.items()})
    if not kept:
        raise BrokenImageError(broken[0][1] if broken else f"{images.name} holds no images.")
    whole: dict[str, Any] = joined(parts)
    whole["feature"] = base.as_stored(whole["feature"])
    labels, space = resolve_labels(images, model, None) if labelled else (None, None)
    if labels is not None:
        whole["label"] = labels[kept]
    table = Table(
        name=images.name,
        classes=model.classes,
        label_space=space or "model",
        label_names=names_of_labels(images, model, space),
        skipped=broken,
        provenance=provenance and replace(provenance, probes=_recorded([base, *probes], provenance)),
        id=[images.ids[index] for index in kept],
        **whole,
    )
    if broken:
        warnings.warn(describe_skipped(table), SkippedImagesWarning, stacklevel=3)
    return table


def describe_skipped(table: Table) -> str:
    """How many images have no row, and why the first few have none."""
    reasons = [why.rstrip(".") for _, why in table.skipped[:_LISTED]]
    more = [f"and {len(table.skipped) - _LISTED} more"] if len(table.skipped) > _LISTED else []
    images = len(table) + len(table.skipped)
    return (
        f"{len(table.skipped)} of {images} images could not be decoded and were skipped: {'; '.join(reasons + more)}."
    )


def joined(parts: Sequence[Columns]) -> Columns:
    """The columns of several batches as one."""
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]} if parts else {}


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep freed memory between batches instead of handing it back to the system and fetching it zeroed again.

    By default glibc maps every block above 32 MB anew and unmaps it when it is freed. A network's activations are such
    blocks: on a CPU, a third of a forward pass or more goes into page faults (benchmarks/extract.py measures it).
    Inside this context, freed blocks stay in the process; afterwards they are returned and the usual limits hold.
    Nothing is done without glibc, or where the user has tuned it already.
    """
    tuned = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if tuned or platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_MAX, 0)
    libc.mallopt(_TRIM_THRESHOLD, _MOST)
    try:
        yield
    finally:
        for parameter, value in _USUAL.items():
            libc.mallopt(parameter, value)
        libc.malloc_trim(0)


def _share(
    model: Classifier, x: Tensor, probes: Mapping[str, Probe], label: Tensor | None
) -> tuple[dict[str, Mapping[str, Tensor]], Tensor | None]:
    """The columns of a probe whose pass gives the features too, and these for the base probe: one pass for both."""
    if any(isinstance(probe, BaseProbe) for probe in probes.values()):
        for name, probe in probes.items():
            if isinstance(probe, SharingProbe):
                columns, feature = probe.run_and_share(model, x, label)
                return {name: columns}, feature
    return {}, None


def _recorded(probes: Sequence[Probe], provenance: Provenance) -> dict[str, Mapping[str, Any]]:
    """Settings and notes of all probes: as the provenance has them, and of those that it lacks or that have notes."""
    settings: dict[str, Mapping[str, Any]] = {probe.name: {"settings": probe.settings()} for probe in probes}
    notes = {
        probe.name: {"settings": probe.settings(), "notes": probe.notes()}
        for probe in probes
        if isinstance(probe, NotingProbe)
    }
    return {**settings, **provenance.probes, **notes}


def _not_finite(column: str, value: Tensor) -> str:
    """What is wrong with a value, and where to look: a task loss may fail where the model does not."""
    if column == "loss":
        return f"the task loss is {float(value)}. Look at task_loss, at that image's target and at its logits"
    return (
        f"the model gives NaN or infinite values in '{column}'. Look at its weights, at the transform and at that image"
    )
