"""The only loop over images: decode in workers, run the probes, write shards; resumable at any instant.

Images are cut into blocks of `shard_size`. For each block and probe there is one shard; a block whose shard is there
and whole is never done again. Batches never cross a block, so a resumed extraction gives the same bytes as an
undisturbed one.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dubito.cache._run import Run
from dubito.cache.column import forget_shards
from dubito.cache.fingerprint import identity
from dubito.cache.labels import names_of_labels, resolve_labels
from dubito.cache.manifest import FILE, Manifest, check_identity, check_probe, read_manifest
from dubito.cache.open import table_of_cache
from dubito.cache.order import warn_of_order
from dubito.cache.runner import default_batch_size, default_workers, describe_skipped
from dubito.cache.shard import check_name, is_leftover, list_shards, sweep
from dubito.cache.targets import to_targets
from dubito.choices import LabelSpace
from dubito.data import Augment, Augmented, open_images
from dubito.errors import CacheBusyError, CacheError, ImagesError, ModelError, SkippedImagesWarning
from dubito.probes import base_probe
from dubito.table import Provenance, Table
from dubito.table.provenance import CARRIED
from dubito.types import BaseProbe, Classifier, Images, Probe

_LOCK = ".lock"


def extract(  # noqa: PLR0913 (one call that users type; everything after `to` is optional)
    model: Classifier,
    images: Any,
    to: str | Path,
    *,
    labels: Any = None,
    label_space: LabelSpace | None = None,
    targets: Any = None,
    epochs: int = 1,
    augment: Augment | None = None,
    probes: Sequence[Probe] = (),
    batch_size: int | None = None,
    shard_size: int = 512,
    workers: int | None = None,
    progress: bool = True,
) -> Table:
    """Run the model over images once and keep what the scores need on disk; called again, it goes on or just opens.

    Args:
        model: From dubito.load or dubito.wrap.
        images: A folder, CSV, zip, npz, array or torch Dataset: whatever dubito.open_images takes.
        to: The cache's folder: new, empty, or a cache of the same model and images.
        labels: Labels for images that bring none: a CSV, a mapping or a sequence.
        label_space: "model" if labels are the model's classes, "own" if they are another set's; by default decided
            from class names, integers being the model's.
        targets: What the task loss compares the logits with where that is not the class: an array (n, ...), one row
            an image, such as (n, c) of zeros and ones for Forward(task_loss="bce"); or an .npy or .npz file of it.
        epochs: How often every image comes, each time augmented anew; with one, images come as they are.
        augment: The settings of the augmentation, Augment() by default; given, one epoch is augmented too.
        probes: Further probes, one of a name; the forward probe always runs. Pass Forward(...) to change its settings.
        batch_size: Images through the model at once; by default fit for the device.
        shard_size: Images a shard: what a kill can cost at most.
        workers: Processes that decode; by default one a core, and none for ready arrays.
        progress: Show a bar when a terminal is watching.
    """
    sizes = {"batch_size": batch_size, "shard_size": shard_size, "epochs": epochs, "workers": workers}
    _check_call(model, label_space, sizes)
    photos = open_images(images, labels)
    opened = photos if epochs == 1 and augment is None else _augmented(photos, model, epochs, augment or Augment())
    compared = None if targets is None else to_targets(targets, opened)
    stored, space = resolve_labels(opened, model, label_space)
    chosen = _by_name(probes)
    base, comparable = chosen[base_probe().name], stored if space == "model" else None
    if isinstance(base, BaseProbe):
        base.check_targets(comparable if compared is None else compared, None)
    folder = Path(to)
    with _alone(folder):
        manifest = Manifest(
            identity=identity(model, opened, stored, space, compared),
            model=model.name,
            classes=None if model.classes is None else list(model.classes),
            label_space=space,
            label_names=names_of_labels(opened, model, space),
            batch_size=batch_size or default_batch_size(model.device),
            shard_size=shard_size,
        )
        begun, stated = _begin(folder, manifest, chosen), label_space is not None
        run = Run(model, opened, stored, folder, begun, chosen, stated, compared)
        answered = run.go(default_workers(opened) if workers is None else workers, progress)
    forget_shards()
    table = table_of_cache(folder, Provenance(**{part: manifest.identity[part] for part in CARRIED}))
    if answered and compared is None and stored is not None and space == "model":
        by_place = opened.classes is not None and model.classes is None
        warn_of_order(table, begun.shard_size, opened.name, by_place=by_place)
        forget_shards()  # whoever reads them first verifies them
    if table.skipped:
        listed = f"All are listed in '{table.name}/{FILE}'."
        warnings.warn(f"{describe_skipped(table)} {listed}", SkippedImagesWarning, stacklevel=2)
    return table


def _by_name(probes: Sequence[Probe]) -> dict[str, Probe]:
    """Shards are called after their probe, so a cache holds one of a name; Forward(...) takes the usual one's place."""
    chosen: dict[str, Probe] = {}
    for probe in probes:
        if check_name(probe.name) in chosen:
            raise CacheError(
                f"extract: probes must have different names; two are called '{probe.name}': {chosen[probe.name]} and "
                f"{probe}. Extract the second into another folder."
            )
        chosen[probe.name] = probe
    return {base_probe().name: base_probe(), **chosen}


def _augmented(images: Images, model: Classifier, epochs: int, augment: Augment) -> Augmented:
    """At the model's input size where only `Preprocess` would follow; any other transform gets images to transform."""
    size = getattr(model.transform, "size", None)
    pixels = size is not None and model.transform.describe().get("kind") == "preprocess"
    return Augmented(images, epochs, augment, size if pixels else None)


def _begin(folder: Path, manifest: Manifest, probes: dict[str, Probe]) -> Manifest:
    """The manifest to go on with: the folder's own if it fits, otherwise the new one, written before any shard."""
    before, renamed = read_manifest(folder), False
    if before is not None and not before.begun and not list_shards(folder):
        before = None  # nothing was extracted: what was asked for then does not bind
    elif before is None:
        strangers = sorted(path.name for path in folder.iterdir() if path.name != _LOCK and not is_leftover(path))
        if strangers:
            raise CacheError(
                f"to: '{folder}' holds other things ({', '.join(strangers[:3])}) and no {FILE}. "
                f"Give a new or empty folder."
            )
    else:
        check_identity(folder, before.identity, manifest.identity)
        for name, probe in probes.items():
            if name in before.probes:
                check_probe(folder, name, before.probes[name]["settings"], probe.settings())
        renamed = before.label_names != manifest.label_names
        before.label_names, manifest = manifest.label_names, before
    sweep(folder)
    new = [probe for name, probe in probes.items() if name not in manifest.probes]
    for probe in new:
        manifest.probes[probe.name] = {"settings": probe.settings(), "price": probe.price}
    if new or renamed:
        manifest.write(folder)
    return manifest


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the system lets go of it when the process dies, however it dies."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CacheError(f"to: the folder '{folder}' cannot be made ({error.strerror}). Give another place.") from error
    lock = FileLock(folder / _LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise CacheBusyError(
            f"another extraction is writing into '{folder}'. Wait until it has ended, or give another folder."
        ) from error
    except OSError as error:
        raise CacheError(f"to: '{folder}' cannot be written ({error.strerror}). Give another place.") from error
    try:
        yield
    finally:
        lock.release()


def _check_call(model: object, label_space: str | None, sizes: dict[str, int | None]) -> None:
    """Everything that can be told to be wrong before an image is looked at."""
    if not isinstance(model, Classifier):
        raise ModelError(
            f"extract: model must come from dubito.load or dubito.wrap; got {type(model).__name__}. "
            f"Wrap it: dubito.wrap(module, transform=...)."
        )
    if label_space not in (None, "model", "own"):
        raise ImagesError(f"label_space must be 'model' or 'own'; got '{label_space}'. Choose one of the two.")
    for name, value in sizes.items():
        least = 0 if name == "workers" else 1
        if value is not None and value < least:
            raise CacheError(f"extract: {name} must be at least {least}; got {value}. Leave it out for the default.")
