"""The only loop over images: decode in workers, transform, run probes; images that cannot be decoded are set apart.

Extraction writes what it yields to disk (`extract.py`), `predict_table` keeps it in memory, and the audit reads inputs
from it. Its progress bar (`bar`) and its care for memory (`kept_memory`) serve other long loops, too.
"""

import ctypes
import os
import pickle
import platform
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib import import_module
from multiprocessing import current_process
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from dubito.cache.labels import names_of_labels, resolve_labels
from dubito.cache.probe_runner import Columns, ProbeRunner
from dubito.choices import Precision
from dubito.data.image_set import ImageSet
from dubito.errors import BrokenImageError, DubitoError, ImagesError, SkippedImagesWarning, first_words, users_level
from dubito.probes import base_probe
from dubito.table import Provenance, Table
from dubito.threads import Lock, cores, kept_random_states
from dubito.types import Classifier, Images, Inputs, NotingProbe, Probe, Transform

Advance = Callable[..., None]
"""Called with a count, moves a bar on by as many units; a second argument is a note to show beside it from then on."""
_BATCH = {"cpu": 16, "cuda": 128, "mps": 64}
_MOST_WORKERS, _AHEAD = 8, 4
_LISTED = 3
_REFRESH_SECONDS = 0.25
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # the numbers of glibc's malloc.h
_MOST = 2**31 - 1
_USUAL = {_MMAP_MAX: 65536, _MMAP_THRESHOLD: 32 * 2**20, _TRIM_THRESHOLD: 64 * 2**20}
"""The defaults, with the thresholds where glibc itself moves them once a program has freed large blocks."""
_limits = Lock()
_keeping: list[ctypes.CDLL] = []
"""One entry per thread that keeps memory: the limits are those of the process, and the last thread restores them."""


def default_batch_size(device: torch.device) -> int:
    """Images through the model at once, as fits the device."""
    return _BATCH.get(device.type, 16)


def default_workers(images: Images) -> int:
    """Processes that decode: one per core, none for inputs in memory, and one where each would read everything.

    A daemonic process, such as a worker of a pool, may not start others, and decodes by itself.
    """
    if current_process().daemon:
        return 0
    if isinstance(images, ImageSet) and (images.ready or images.forward_only):
        return 0 if images.ready else 1
    return min(cores(), _MOST_WORKERS)


def in_batches(indices: Sequence[int], size: int) -> list[Sequence[int]]:
    """Consecutive indices, `size` at a time; those of a range are ranges, which take no memory.

    >>> in_batches(range(5), 2), in_batches([7, 8, 9], 2)
    ([range(0, 2), range(2, 4), range(4, 5)], [[7, 8], [9]])
    """
    return [indices[start : start + size] for start in range(0, len(indices), size)]


@dataclass
class Batch:
    """Consecutive images of one shard: those that were read, stacked, and those that were not, with the reason.

    Attributes:
        indices: Of the images that were read.
        inputs: These images, stacked; None if there are none.
        broken: Indices of the other images, with the reason.
        contents: By index, the hash of every image's content, if `hashed`.
        ready: Whether the first image that was read is a finished float input.
    """

    indices: list[int] = field(default_factory=list)
    inputs: Tensor | None = None
    broken: list[tuple[int, str]] = field(default_factory=list)
    contents: dict[int, bytes] = field(default_factory=dict)
    ready: bool = False


@contextmanager
def open_stream(
    images: Images,
    transform: Transform,
    groups: Sequence[Sequence[int]],
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
    random = kept_random_states() if _may_draw(images, transform, workers) else nullcontext()
    # Workers end with the context, also after an error. Otherwise its traceback would keep them, and the workers of a
    # later call, which inherit them, would fail to end them: "can only test a child process".
    with (
        _ended_workers(),
        closing(stream),
        random,
        memory,
        bar(title, len(images), done=done, show=progress) as advance,
    ):

        def advanced() -> Iterator[Batch]:
            for batch in stream:
                yield batch
                advance(len(batch.indices) + len(batch.broken))

        counted = advanced()
        yield counted
        next(counted, None)  # a reader that takes exactly as many batches never counts the last one


def _may_draw(images: Images, transform: Transform, workers: int) -> bool:
    """Whether code of the user runs in this process that may draw random numbers; ours never does."""
    reads = workers == 0 and (not isinstance(images, ImageSet) or images.draws)
    return reads or bool(getattr(transform, "draws", True))


def inputs_of(batch: Batch, model: Classifier) -> Inputs | None:
    """The model's inputs, finished on its device; None if no image of the batch could be decoded."""
    return None if batch.inputs is None else model.transform.finish(batch.inputs.to(model.device))


def batches(
    images: Images, transform: Transform, groups: Sequence[Sequence[int]], workers: int, *, hashed: bool = False
) -> Generator[Batch, None, None]:
    """Prepared batches, one per group of indices, in the order of the groups; the workers start at once.

    With `hashed`, `images` is an ImageSet, and batches have the hash of every image's content.
    """
    loader: DataLoader[Any] = DataLoader(
        _Reader(images, transform, groups, hashed=hashed),
        batch_size=None,
        num_workers=workers,
        prefetch_factor=_AHEAD if workers else None,
        generator=torch.Generator(),  # which draws the seeds of workers: by default the one of the process
    )
    try:
        with _ended_workers():
            return _raised(iter(loader))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise ImagesError(
            f"the images or the transform cannot be sent to worker processes ({error}). "
            f"Define them at the top of a module, or pass workers=0."
        ) from error


def _raised(items: Iterator[Batch | DubitoError]) -> Generator[Batch, None, None]:
    try:
        with _ended_workers(ConnectionError, EOFError):
            for batch in items:
                if isinstance(batch, DubitoError):
                    raise batch
                yield batch
    finally:
        del items  # ends the workers, whoever keeps the traceback of an error


@contextmanager
def _ended_workers(*also: type[Exception]) -> Iterator[None]:
    """Turn what torch raises when a worker ends by itself, wherever this process is at that moment, into our error.

    Args:
        also: Further errors that mean the same, where nothing but batches are received.
    """
    try:
        yield
    except DubitoError:
        raise
    except Exception as error:
        if not isinstance(error, also) and "DataLoader worker" not in str(error):
            raise
        raise ImagesError(
            f"a process that decodes images ended by itself ({first_words(error)}), as when memory runs out. "
            f"Run the same call again, with fewer workers or workers=0."
        ) from error


class _Reader(Dataset[Any]):
    """One item is one batch: read and stacked in the worker, so that one tensor crosses to the main process."""

    def __init__(self, images: Images, transform: Transform, groups: Sequence[Sequence[int]], *, hashed: bool) -> None:
        self.images, self.transform, self.groups, self.hashed = images, transform, groups, hashed

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, number: int) -> Batch | DubitoError:
        try:
            return self._read(self.groups[number])
        except DubitoError as error:
            return error  # raised in the main process, where its one sentence is not buried in a worker's traceback

    def _read(self, group: Sequence[int]) -> Batch:
        tensors: list[Tensor] = []
        batch = Batch()
        for index in group:
            try:
                tensors.append(self._prepare(index, batch))
                batch.indices.append(index)
            except BrokenImageError as error:  # noqa: PERF203 (decoding costs a thousand times more)
                batch.broken.append((index, str(error)))
        odd = next((place for place, one in enumerate(tensors) if one.shape != tensors[0].shape), None)
        if odd is not None:
            first, other = (self.images.ids[batch.indices[place]] for place in (0, odd))
            raise ImagesError(
                f"inputs must have one shape; got {tuple(tensors[0].shape)} for '{first}' and "
                f"{tuple(tensors[odd].shape)} for '{other}'. Resize and crop in the transform."
            )
        batch.inputs = torch.stack(tensors) if tensors else None
        return batch

    def _prepare(self, index: int, batch: Batch) -> Tensor:
        try:
            if self.hashed and isinstance(self.images, ImageSet):
                image, batch.contents[index] = self.images.read_hashed(index)
                if isinstance(image, BrokenImageError):
                    raise image
            else:
                image = self.images.read(index)
            if not batch.indices:
                batch.ready = isinstance(image, Tensor) and image.is_floating_point()
            return image if isinstance(image, Tensor) else self.transform.prepare(image)
        except DubitoError:
            raise
        except Exception as error:  # a user's data set or transform may raise anything
            raise ImagesError(
                f"image '{self.images.ids[index]}' could not be prepared: {type(error).__name__}: {error}. "
                f"The data set or the transform raised this; fix it and run the same call again."
            ) from error


def predict_table(
    model: Classifier,
    images: Images,
    probes: Sequence[Probe] = (),
    *,
    feature_dtype: Precision | None = None,
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
    precise = replace(base, feature_dtype="float32")  # until all rows are there
    runner = ProbeRunner(model, {probe.name: probe for probe in (precise, *probes)})
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
    whole: dict[str, Any] = concat_columns(parts)
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
        provenance=provenance and _with_probes(provenance, [base, *probes]),
        id=[images.ids[index] for index in kept],
        **whole,
    )
    warn_skipped(table)
    return table


def warn_skipped(table: Table, note: str = "") -> None:
    """Warn of images that have no row, with the reasons of the first few, and a note at the end."""
    count = len(table.skipped)
    reasons = [why.rstrip(".") for _, why in table.skipped[:_LISTED]]
    more = [f"and {count - _LISTED} more"] if count > _LISTED else []
    of = f"{count} of {len(table) + count} images could not be decoded and were skipped"
    if count:
        warnings.warn(f"{of}: {'; '.join(reasons + more)}.{note}", SkippedImagesWarning, stacklevel=users_level())


def concat_columns(parts: Sequence[Columns]) -> Columns:
    """The columns of several batches as one."""
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]} if parts else {}


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep freed memory between batches instead of handing it back to the system and fetching it zeroed again.

    By default glibc maps every block above 32 MB anew and unmaps it when it is freed. A network's activations are such
    blocks: on a CPU, a third of a forward pass or more goes into page faults (benchmarks/extract.py measures it).
    Inside this context, freed blocks stay in the process; after the last thread they are returned and the usual limits
    hold. Nothing is done without glibc, or where the user has tuned it already.
    """
    tuned = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if tuned or platform.libc_ver()[0] != "glibc":
        yield
        return
    libc = ctypes.CDLL(None)
    with _limits:
        _keeping.append(libc)
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, _MOST)
    try:
        yield
    finally:
        with _limits:
            _keeping.pop()
            if not _keeping:
                for parameter, value in _USUAL.items():
                    libc.mallopt(parameter, value)
                libc.malloc_trim(0)


def _with_probes(provenance: Provenance, probes: Sequence[Probe]) -> Provenance:
    """With settings and notes of all probes: as they are recorded, and of those that are not or that have notes."""
    settings = {probe.name: {"settings": probe.settings()} for probe in probes}
    noting = [probe for probe in probes if isinstance(probe, NotingProbe)]
    noted = {probe.name: {**settings[probe.name], "notes": probe.notes()} for probe in noting}
    return replace(provenance, probes={**settings, **provenance.probes, **noted})


@contextmanager
def bar(title: str, total: int, *, done: int = 0, unit: str = "images", show: bool = True) -> Iterator[Advance]:
    """A bar on standard error, or in a notebook's output; yields a function that advances it."""
    console = Console(stderr=True)
    if not (show and (console.is_terminal or console.is_jupyter)):
        yield lambda _count, _note=None: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total, completed=done, rate="", note="")
        refresh = _in_notebook(progress) if console.is_jupyter else None

        def advance(count: int, note: str | None = None) -> None:
            progress.advance(task, count)
            speed = progress.tasks[0].speed
            rate = f"{speed:,.{0 if speed >= 1000 else 1}f} {unit}/s" if speed else ""
            progress.update(task, rate=rate)
            if note is not None:
                progress.update(task, note=note)
            if refresh is not None:
                refresh(False)

        yield advance
        if refresh is not None:
            refresh(True)


def _in_notebook(progress: Progress) -> Callable[[bool], None]:
    """Show a bar in the output of a cell; returns what refreshes it, at most four times a second unless it is forced.

    Rich's own way needs ipywidgets, and warns at every step without them; this one needs IPython alone.
    """
    display = import_module("IPython.display").display
    handle, shown = display(progress, display_id=True), time.monotonic()

    def refresh(force: bool) -> None:
        nonlocal shown
        if force or time.monotonic() - shown > _REFRESH_SECONDS:
            handle.update(progress)
            shown = time.monotonic()

    return refresh
