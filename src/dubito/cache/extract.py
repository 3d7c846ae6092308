"""Extraction: the probes' columns of images into a folder, resumable at any instant.

Images are cut into blocks of `shard_size`. For each block there is one shard of rows (ids, labels, hashes of the
images' contents) and one per probe; a block whose shard is there and whole is never done again. Batches never cross a
block, so a resumed extraction gives the same bytes as an undisturbed one.

Each image is read from the disk once: the hash of its content comes from the bytes that were read for decoding, and the
hash of all contents is written down in the end. So on resuming, images that this run decodes are compared with the
hashes of their block's rows, and all others are read for the comparison alone. docs/design/cache.md has the exceptions.
"""

import contextlib
import copy
import errno
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from dubito.cache import disk, runner
from dubito.cache.block import BlockRunner, contents_of
from dubito.cache.disk import Manifest
from dubito.cache.labels import names_of_labels, resolve_labels, to_targets, warn_of_order
from dubito.cache.shards import HEAD, ROWS, Shard, each, forget_shards, list_shards, remove_shard, write_shard
from dubito.choices import EngineName, LabelSpace
from dubito.data import Augment, Augmented, open_images
from dubito.data.image_set import ImageSet, hash_images
from dubito.engines import Block, ExtractionEngine, as_engine
from dubito.errors import CacheBusyError, CacheError, ImagesError, RepairedShardWarning, StaleCacheError
from dubito.models.load import as_classifier
from dubito.probes import base_probe
from dubito.storage import Place, locked, sizes_in, to_place
from dubito.table import Provenance, Table
from dubito.table.provenance import CARRIED
from dubito.types import BaseProbe, Classifier, Images, Json, Probe
from dubito.validate import check_choice, check_model_first, check_number


def extract(  # noqa: PLR0913 (one call that users type; everything after `to` is optional)
    model: Classifier | str,
    images: Any,
    to: str | Place | None = None,
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
    threads: int | None = None,
    engine: EngineName | ExtractionEngine = "local",
    progress: bool = True,
) -> Table:
    """Run the model over images once and keep what the scores need on disk; called again, it resumes or just opens.

    Args:
        model: From dubito.load or dubito.wrap; a name, such as "timm:resnet50", is loaded.
        images: A folder, a list of paths, a CSV, zip, tar or npz file, a DataFrame, an array, a data set of torch or
            Hugging Face: whatever dubito.open_images takes.
        to: Folder of the cache, or its address in an object store: new, empty, or a cache of the same model and
            images. None for a table in memory, of not too many images.
        labels: Labels for images that have none: a CSV, a DataFrame, a mapping or a sequence.
            `dubito.cache.label_cache` adds them later.
        label_space: "model" if labels are the model's classes, "own" if they are another set's; by default decided
            from class names, integers being the model's.
        targets: What the task loss compares the logits with where that is not the class: an array (n, ...), one row
            per image, such as (n, c) of zeros and ones for binary cross-entropy; or an .npy or .npz file of it.
        epochs: How often every image is extracted, each time augmented anew; with one epoch, images are not augmented.
        augment: Settings of the augmentation, Augment() by default; with it, a single epoch is augmented too.
        probes: Further probes, of different names; features and logits are always there.
        batch_size: Images through the model at once; by default as fits the device.
        shard_size: Images per shard: what a kill can cost at most.
        workers: Processes that decode; by default one per core, and none for ready arrays. On Ray, beside each worker;
            by default none on CPUs.
        threads: Threads of torch that the model computes with, in each worker of an engine; by default as torch is set,
            and one on Ray. A cache keeps the number that it was begun with, because it changes the last bits.
        engine: Where the model runs: "local" for this process, "ray" for a Ray cluster, or `dubito.engines.RayEngine`
            with its address and other settings.
        progress: Show a bar when a terminal is watching.
    """
    check_model_first(model, images, by="extract", what="images")
    if to is None:
        return _in_memory(**locals())
    _check_call(
        label_space, batch_size=batch_size, shard_size=shard_size, epochs=epochs, workers=workers, threads=threads
    )
    runs_on = as_engine(engine, by="extract")
    model = as_classifier(model, by="extract")
    plain = open_images(images, labels)
    opened = plain if epochs == 1 and augment is None else _augmented(plain, model, epochs, augment or Augment())
    compared = None if targets is None else to_targets(targets, opened)
    stored, space = resolve_labels(opened, model, label_space)
    chosen = _by_name(probes)
    values = compared if compared is not None else stored if space == "model" else None
    base = next((probe for probe in chosen.values() if isinstance(probe, BaseProbe)), None)
    if base is not None:
        base.check_targets(values, None)
    folder = to_place(to)
    with locked_if_writable(folder):
        initial = Manifest(
            identity=disk.identity(model, opened, stored, space, compared),
            model=model.name,
            classes=None if model.classes is None else list(model.classes),
            label_space=space,
            label_names=names_of_labels(opened, model, space),
            task_loss=None if base is None or values is None else base.recorded_loss,
            batch_size=batch_size or runner.default_batch_size(model.device),
            shard_size=shard_size,
            threads=threads or runs_on.default_threads,
        )
        manifest, previous = _resume_manifest(folder, initial, chosen)
        by_place = opened.classes is not None and model.classes is None
        work = BlockRunner(
            model=model,
            images=opened,
            folder=folder,
            probes=chosen,
            base=base,
            owners={column: name for name, one in manifest.probes.items() for column in one.get("columns", ())},
            labels=stored,
            values=values,
            model_labels=manifest.label_space == "model",
            classes_by_position=by_place and label_space is None,
            batch_size=manifest.batch_size,
            threads=manifest.threads or runs_on.default_threads,
            origins={kind: disk.origin_of(manifest, kind) for kind in (ROWS, *chosen)},
        )
        extraction = _Extraction(work, manifest)
        try:
            first_time = extraction.run(runs_on, workers, progress)
        except StaleCacheError:
            extraction.undo(previous)
            raise
    forget_shards()
    table = disk.open_cache(folder, model=Provenance(**{part: initial.identity[part] for part in CARRIED}))
    if first_time and compared is None and stored is not None and space == "model":
        warn_of_order(table, manifest.shard_size, opened.name, by_place=by_place)
        forget_shards()  # whoever reads them first verifies them
    runner.warn_skipped(table, " All are listed in table.skipped.")
    return table


def _in_memory(**call: Any) -> Table:
    """An extraction into a folder that lives no longer than the call, so that the table is the same as any other."""
    with TemporaryDirectory(prefix="dubito-") as folder:
        table = extract(**{**call, "to": folder})
        table = table.rows(range(len(table)))  # copied, before the files go
    forget_shards()
    table.name = "table in memory"
    return table


@contextlib.contextmanager
def locked_if_writable(folder: Place) -> Iterator[None]:
    """Hold a folder's lock. On a read-only disk there is none to be had, and a finished cache needs none.

    Raises:
        CacheError: Something had to be written after all, and cannot be.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder, busy=CacheBusyError, refused=CacheError))
        except CacheError as error:
            if isinstance(error, CacheBusyError) or not (folder / disk.FILE).is_file():
                raise
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            raise CacheError(
                f"cache '{folder}' is not complete, and cannot be written ({error.strerror}). "
                f"Make the folder writable, or extract into another one."
            ) from error


@dataclass
class _Extraction:
    """One extraction into one folder, which is locked and whose manifest fits.

    Attributes:
        work: What is done with every block.
        shards: The shards that are whole, by kind and block.
        written: Those that this run has written.
    """

    work: BlockRunner
    manifest: Manifest
    shards: dict[tuple[str, int], Shard] = field(default_factory=dict)
    written: list[Shard] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder, self.images, self.probes = self.work.folder, self.work.images, self.work.probes

    def run(self, engine: ExtractionEngine, workers: int | None, progress: bool) -> bool:
        """Do every missing block, then finish the manifest; whether images were extracted for the first time."""
        self.shards = self._whole_shards()
        numbers = range(-(-len(self.images) // self.manifest.shard_size))
        missing = {number: kinds for number in numbers if (kinds := self._missing(number))}
        first_time = any(ROWS in kinds for kinds in missing.values())
        self._verify([number for number in numbers if number not in missing], whole=first_time or not missing)
        self._reopen(missing)
        if missing:
            self.work.rows = {number: self.shards[ROWS, number] for number in missing if (ROWS, number) in self.shards}
            blocks = [Block(number, self._indices(number), tuple(kinds)) for number, kinds in missing.items()]
            with contextlib.closing(engine.run(self.work, blocks, workers=workers, progress=progress)) as finished:
                for _, shards in finished:
                    self._add(shards)
        if missing or not self.manifest.finished:
            self._finish([self.shards[ROWS, number] for number in numbers])
        return first_time

    def undo(self, previous: Manifest | None) -> None:
        """Leave a finished cache as it was: what a new probe has written for images that have changed is removed."""
        if previous is not None:
            named = set(previous.shard_names())
            for shard in list_shards(self.folder):  # also those of workers that nobody has heard of
                if shard.name not in named:
                    remove_shard(shard)
            previous.write(self.folder)

    def _whole_shards(self) -> dict[tuple[str, int], Shard]:
        """The shards that are there and whole; all others are removed, those that are done again with a warning.

        Where the manifest names the shard of a block, no other will do: it may have other labels. Where it does not,
        and there are several, it is unknown which is right. Of shards in an object store, which checks what it stores,
        headers are read; every byte is checked when rows are read.
        """
        disk.remove_replaced(self.folder, self.manifest)
        named = [disk.named_shard(self.folder, name) for name in self.manifest.shard_names()]
        damaged = dict.fromkeys(named, "is missing")
        whole: dict[tuple[str, int], list[Shard]] = defaultdict(list)
        shards, sizes = list_shards(self.folder), {} if isinstance(self.folder, Path) else sizes_in(self.folder)
        origins = {kind: disk.origin_of(self.manifest, kind) for kind in {shard.kind for shard in shards}}

        def damage(shard: Shard) -> str | None:
            wrong = shard.damage(size=sizes.get(shard.name))
            other = wrong is None and shard.notes().get("origin", origins[shard.kind]) != origins[shard.kind]
            return "is of another extraction" if other else wrong

        for shard, wrong in zip(shards, each(damage, shards), strict=True):
            damaged.pop(shard, None)
            if wrong:
                damaged[shard] = wrong
            else:
                whole[shard.kind, shard.index].append(shard)
        for (kind, block), shards in whole.items():
            images = whole.get((ROWS, block), ())
            if len(shards) > 1:
                damaged |= dict.fromkeys(shards, f"is one of {len(shards)} of the same images")
            elif len(images) == 1 and kind != HEAD and shards[0].rows() != images[0].rows():
                damaged[shards[0]] = f"has {shards[0].rows()} rows for {images[0].rows()} images"
        for shard, wrong in damaged.items():
            if shard.kind in (ROWS, HEAD, *self.probes):  # a probe that does not run now redoes nothing
                remove_shard(shard)
                message = f"cache '{self.folder}': shard {shard.name} {wrong}; it is extracted again."
                warnings.warn(message, RepairedShardWarning, stacklevel=4)
        return {place: shards[0] for place, shards in whole.items() if shards[0] not in damaged}

    def _reopen(self, missing: dict[int, list[str]]) -> None:
        """Before shards are done again, the manifest no longer names them: the new ones may have other bytes."""
        for block, kinds in missing.items():
            for kind in kinds:
                if shard := self.shards.pop((kind, block), None):  # of a block that is done again as a whole
                    remove_shard(shard)
        redone = {kind for kinds in missing.values() for kind in kinds}
        probes = self.manifest.probes
        redone |= {name for name in probes if HEAD in probes[name] and (HEAD, 0) not in self.shards}
        before = self.manifest.shard_names()
        self.manifest.rows = {} if ROWS in redone else self.manifest.rows
        for name in redone & probes.keys():
            probes[name] = {key: probes[name][key] for key in ("settings", "price", "uses_labels")}
        if self.manifest.shard_names() != before:
            self.manifest.write(self.folder)

    def _missing(self, block: int) -> list[str]:
        """The kinds of shards that a block lacks; without its rows, it is unknown which images the others are of."""
        if (ROWS, block) not in self.shards:
            return [ROWS, *self.probes]
        return [name for name in self.probes if (name, block) not in self.shards]

    def _verify(self, complete: list[int], *, whole: bool) -> None:
        """Raise StaleCacheError if images that this run does not decode have changed.

        Args:
            complete: Blocks that lack nothing.
            whole: Rows are missing, or nothing at all: of a finished cache, the hash of all contents is compared.
        """
        originals = self.work.originals
        if not self.work.hashed:
            return
        if whole and self.manifest.identity["images"] is not None:
            now = {**self.manifest.identity, "images": originals.digest()}
            disk.check_identity(self.folder, self.manifest.identity, now)
        elif isinstance(originals, ImageSet):
            read = bytearray(len(originals))  # which images: once each, though epochs repeat them
            for block in complete:
                recorded = self.work.recorded(self._indices(block), self.shards[ROWS, block])
                images = [image for image in recorded if not read[image]]
                for image, content in zip(images, originals.contents(images), strict=True):
                    self.work.check_content(image, content, recorded)
                    read[image] = True

    def _indices(self, block: int) -> range:
        size = self.manifest.shard_size
        return range(block * size, min((block + 1) * size, len(self.images)))

    def _add(self, shards: Iterable[Shard]) -> None:
        for shard in shards:
            self.shards[shard.kind, shard.index] = shard
            self.written.append(shard)

    def _finish(self, rows: list[Shard]) -> None:
        """Write down columns, shards and skipped images: from now on the cache can be opened."""
        self.manifest.skipped = [entry[1:] for notes in each(Shard.notes, rows) for entry in notes["skipped"]]
        if len(self.manifest.skipped) == len(self.images):
            raise ImagesError(
                f"none of the {len(self.images)} images in {self.images.name} could be decoded; "
                f"the first: {self.manifest.skipped[0][1]}"
            )
        self.manifest.rows = summary(rows)
        for name, probe in self.probes.items():
            self.manifest.probes[name] |= summary([self.shards[name, shard.index] for shard in rows])
            if isinstance(probe, BaseProbe) and probe.keeps_head:
                if (HEAD, 0) not in self.shards:
                    if not self.written:  # killed before: a model knows its last layer once it has seen a batch
                        number = next(shard.index for shard in rows if shard.rows())
                        self.work.check(Block(number, self._indices(number), (name,)))
                    weight, bias = self.work.model.head()
                    columns = {"weight": weight.float().cpu()} | ({} if bias is None else {"bias": bias.float().cpu()})
                    origin = disk.origin_of(self.manifest, HEAD)
                    self._add([write_shard(self.folder, HEAD, 0, columns, {"origin": origin})])
                self.manifest.probes[name][HEAD] = self.shards[HEAD, 0].name
        if self.work.hashed:
            contents, n = contents_of(rows), len(self.work.originals)
            for row in range(n, len(contents)):  # augmented images must be the same in every epoch
                self.work.check_content(row % n, contents[row], contents)
            self.manifest.identity["images"] = hash_images(self.work.originals.ids, islice(contents, n))
        disk.remove_leftovers(self.folder)  # of workers of this run that were killed
        self.manifest.write(self.folder)


def _check_call(label_space: str | None, **sizes: int | None) -> None:
    """Raise an error for arguments that are wrong whatever the model and the images are."""
    if label_space is not None:
        check_choice(label_space, get_args(LabelSpace), by="extract", what="label_space")
    for name, value in sizes.items():
        if value is not None:
            interval = "[0, inf)" if name == "workers" else "[1, inf)"
            check_number(value, interval, by="extract", what=name, whole=True, hint="Leave it out for the default.")


def _by_name(probes: Sequence[Probe]) -> dict[str, Probe]:
    """Shards are called after their probe, so names differ; a base probe of the user's takes the usual one's place."""
    chosen: dict[str, Probe] = {}
    for probe in probes:
        if not re.fullmatch(r"[a-z_]+", probe.name) or probe.name in (ROWS, HEAD):
            raise CacheError(
                f"a probe's name must be lower-case letters and underscores, and neither '{ROWS}' nor '{HEAD}'; got "
                f"'{probe.name}'. Rename the probe."
            )
        if probe.name in chosen:
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


def _resume_manifest(folder: Place, manifest: Manifest, probes: dict[str, Probe]) -> tuple[Manifest, Manifest | None]:
    """The manifest to go on with, written before any shard; and a copy of the folder's own, if that was finished."""
    before, previous = disk.read_manifest(folder), None
    if before is None:
        disk.check_place(folder)
    elif list_shards(folder) or before.shard_names():
        # If nothing was ever extracted, settings of that attempt do not bind.
        # The contents of the images are compared as they are read.
        now = {"images": before.identity["images"]} if manifest.identity["images"] is None else {}
        disk.check_identity(folder, before.identity, {**manifest.identity, **now})
        names = {name: f"the settings of the {name} probe" for name in probes if name in before.probes}
        was = {name: before.probes[name]["settings"] for name in names}
        here = {name: probes[name].settings() for name in names}
        disk.check_identity(folder, was, here, names, "use the settings that this cache has")
        previous = copy.deepcopy(before) if before.finished else None
        before.label_names, manifest = manifest.label_names, before
    disk.remove_leftovers(folder)
    new = [probe for name, probe in probes.items() if name not in manifest.probes]
    for probe in new:
        entries: Json = {"settings": probe.settings(), "price": probe.price}
        manifest.probes[probe.name] = entries | {"uses_labels": getattr(probe, "uses_labels", True)}
    if new or (previous is not None and previous.label_names != manifest.label_names):
        manifest.write(folder)
    return manifest, previous


def summary(shards: Sequence[Shard]) -> Json:
    """Columns with type and row shape, every shard with its rows and size, and the probe's notes."""
    columns: Json = {}
    listed = []
    noted, sizes = None, sizes_in(shards[0].path.parent) if shards else {}

    def described(shard: Shard) -> tuple[int, Json, Json]:
        return shard.rows(), shard.header(), shard.notes()

    for shard, (rows, header, notes) in zip(shards, each(described, shards), strict=True):
        listed.append({"name": shard.name, "rows": rows, "bytes": sizes[shard.name]})
        noted = notes.get("notes") if noted is None else noted
        for key, value in header.items() if rows else ():
            if key not in ("__metadata__", "id.bytes", "id.ends", "content"):
                columns.setdefault(key, {"dtype": value["dtype"], "shape": value["shape"][1:]})
    return {"columns": columns, "shards": listed} | ({} if noted is None else {"notes": noted})
