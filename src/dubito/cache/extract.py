"""Extraction: the probes' columns of images into a folder, resumable at any instant.

Images are cut into blocks of `shard_size`. For each block there is one shard of rows (ids, labels, hashes of the
images' contents) and one per probe; a block whose shard is there and whole is never done again. Batches never cross a
block, so a resumed extraction gives the same bytes as an undisturbed one.

Each image is read from the disk once: the hash of its content comes from the bytes that were read for decoding, and the
hash of all contents is written down in the end. So on resuming, images that this run decodes are compared with the
hashes of their block's rows, and all others are read for the comparison alone. Exceptions: images of a user's own class
have a digest of the whole only, which is computed first; a torch Dataset that does not list its labels is read for
them; images that are mixed or augmented anew are read for each row; a zip archive's hashes come from its directory.
"""

import copy
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from dubito.cache.column import forget_shards
from dubito.cache.labels import check_count, check_range, names_of_labels, resolve_labels, to_targets
from dubito.cache.manifest import FILE, Manifest, check_identity, check_probe, identity, read_manifest
from dubito.cache.open import table_of_cache
from dubito.cache.order import warn_of_order
from dubito.cache.runner import (
    Batch,
    Columns,
    ProbeRunner,
    default_batch_size,
    default_workers,
    describe_skipped,
    in_batches,
    inputs_of,
    joined,
    open_stream,
)
from dubito.cache.shard import HEAD, ROWS, Shard, check_name, is_leftover, list_shards, pack_strings, sweep, write_shard
from dubito.choices import LabelSpace
from dubito.data import Augment, Augmented, open_images
from dubito.data.digest import SIZE, hash_images
from dubito.data.image_set import ImageSet
from dubito.errors import (
    CacheBusyError,
    CacheError,
    ImagesError,
    ModelError,
    RepairedShardWarning,
    SkippedImagesWarning,
    StaleCacheError,
)
from dubito.probes import base_probe
from dubito.probes.forward import Mixed
from dubito.storage import LOCK, locked
from dubito.table import Provenance, Table
from dubito.table.provenance import CARRIED
from dubito.types import BaseProbe, Classifier, Images, Json, NotingProbe, Probe


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
    """Run the model over images once and keep what the scores need on disk; called again, it resumes or just opens.

    Args:
        model: From dubito.load or dubito.wrap.
        images: A folder, CSV, zip, npz, array or torch Dataset: whatever dubito.open_images takes.
        to: Folder of the cache: new, empty, or a cache of the same model and images.
        labels: Labels for images that have none: a CSV, a mapping or a sequence.
        label_space: "model" if labels are the model's classes, "own" if they are another set's; by default decided
            from class names, integers being the model's.
        targets: What the task loss compares the logits with where that is not the class: an array (n, ...), one row
            per image, such as (n, c) of zeros and ones for binary cross-entropy; or an .npy or .npz file of it.
        epochs: How often every image is extracted, each time augmented anew; with one epoch, images are not augmented.
        augment: Settings of the augmentation, Augment() by default; with it, a single epoch is augmented too.
        probes: Further probes, of different names; features and logits are always there.
        batch_size: Images through the model at once; by default as fits the device.
        shard_size: Images per shard: what a kill can cost at most.
        workers: Processes that decode; by default one per core, and none for ready arrays.
        progress: Show a bar when a terminal is watching.
    """
    sizes = {"batch_size": batch_size, "shard_size": shard_size, "epochs": epochs, "workers": workers}
    _check_call(model, label_space, sizes)
    plain = open_images(images, labels)
    opened = plain if epochs == 1 and augment is None else _augmented(plain, model, epochs, augment or Augment())
    compared = None if targets is None else to_targets(targets, opened)
    stored, space = resolve_labels(opened, model, label_space)
    chosen = _by_name(probes)
    values = compared if compared is not None else stored if space == "model" else None
    base = next((probe for probe in chosen.values() if isinstance(probe, BaseProbe)), None)
    if base is not None:
        base.check_targets(values, None)
    folder = Path(to)
    with locked(folder, busy=CacheBusyError, refused=CacheError):
        manifest = Manifest(
            identity=identity(model, opened, stored, space, compared),
            model=model.name,
            classes=None if model.classes is None else list(model.classes),
            label_space=space,
            label_names=names_of_labels(opened, model, space),
            task_loss=None if base is None or values is None else base.recorded_loss,
            batch_size=batch_size or default_batch_size(model.device),
            shard_size=shard_size,
        )
        begun, previous = _begin(folder, manifest, chosen)
        extraction = _Extraction(model, opened, folder, begun, chosen, base, stored, values, label_space is not None)
        try:
            anew = extraction.run(default_workers(opened) if workers is None else workers, progress)
        except StaleCacheError:
            extraction.undo(previous)
            raise
    forget_shards()
    table = table_of_cache(folder, Provenance(**{part: manifest.identity[part] for part in CARRIED}))
    if anew and compared is None and stored is not None and space == "model":
        by_place = opened.classes is not None and model.classes is None
        warn_of_order(table, begun.shard_size, opened.name, by_place=by_place)
        forget_shards()  # whoever reads them first verifies them
    if table.skipped:
        listed = f"All are listed in '{table.name}/{FILE}'."
        warnings.warn(f"{describe_skipped(table)} {listed}", SkippedImagesWarning, stacklevel=2)
    return table


@dataclass
class _Extraction:
    """One extraction into one folder, which is locked and whose manifest fits.

    Attributes:
        base: The probe that compares logits with values, if it is among the probes.
        labels: One per image, or None.
        values: What the task loss compares the logits with: targets, or labels that are the model's classes.
        stated: The user stated whose classes the labels are.
        have: The shards that are whole, by kind and block.
        new: Those that this run has written.
    """

    model: Classifier
    images: Images
    folder: Path
    manifest: Manifest
    probes: dict[str, Probe]
    base: BaseProbe | None
    labels: Int[Tensor, "n"] | None
    values: Shaped[Tensor, "rows ..."] | None
    stated: bool
    have: dict[tuple[str, int], Shard] = field(default_factory=dict)
    new: list[Shard] = field(default_factory=list)
    _checked: bool = False

    @property
    def behind(self) -> Images:
        """The images themselves, of which augmented rows are several each."""
        return self.images.images if isinstance(self.images, Augmented) else self.images

    @property
    def hashed(self) -> bool:
        """Whether hashes of the contents come from the reading that decodes."""
        return isinstance(self.images, ImageSet) and self.images.hashed_reads

    def run(self, workers: int, progress: bool) -> bool:
        """Do every missing block, then finish the manifest; whether images were extracted for the first time."""
        self.have = self._whole_shards()
        blocks = range(-(-len(self.images) // self.manifest.shard_size))
        missing = {block: kinds for block in blocks if (kinds := self._missing(block))}
        anew = any(ROWS in kinds for kinds in missing.values())
        self._verify([block for block in blocks if block not in missing], whole=anew or not missing)
        if missing:
            groups = {block: self._groups(block) for block in missing}
            order = [group for of_block in groups.values() for group in of_block]
            runner = ProbeRunner(self.model, self.probes, self._owners())
            options: Json = {"hashed": self.hashed, "workers": workers, "progress": progress}
            title = f"extract {self.images.name}"
            with open_stream(self.images, self.model.transform, order, title=title, **options) as stream:
                for block, kinds in missing.items():
                    self._do(block, kinds, islice(stream, len(groups[block])), runner)
        if missing or not self.manifest.finished:
            self._finish(blocks)
        return anew

    def undo(self, previous: Manifest | None) -> None:
        """Leave a finished cache as it was: what a new probe has written for images that have changed is removed."""
        if previous is not None:
            for shard in self.new:
                shard.path.unlink(missing_ok=True)
            previous.write(self.folder)

    def _whole_shards(self) -> dict[tuple[str, int], Shard]:
        """The shards that are there and whole; damaged ones are removed, named, and done again."""
        whole: dict[tuple[str, int], Shard] = {}
        kinds = (self.manifest.rows, *self.manifest.probes.values())
        lost = {shard["name"] for kind in kinds for shard in kind.get("shards", ())}
        for shard in list_shards(self.folder):
            lost.discard(shard.name)
            damage = shard.damage()
            if damage:
                shard.path.unlink()
                _warn_repair(f"{shard.name} {damage}", self.folder)
            else:
                whole[shard.kind, shard.index] = shard
        for name in sorted(lost):
            _warn_repair(f"{name} is missing", self.folder)
        return whole

    def _missing(self, block: int) -> list[str]:
        """The kinds of shards that a block lacks; without its rows, it is unknown which images the others are of."""
        if (ROWS, block) not in self.have:
            return [ROWS, *self.probes]
        return [name for name in self.probes if (name, block) not in self.have]

    def _verify(self, complete: list[int], *, whole: bool) -> None:
        """Raise StaleCacheError if images that this run does not decode have changed.

        Args:
            complete: Blocks that lack nothing.
            whole: Rows are missing, or nothing at all: of a finished cache, the hash of all contents is compared.
        """
        if not self.hashed:
            return
        if whole and self.manifest.identity["images"] is not None:
            now = {**self.manifest.identity, "images": self.behind.digest()}
            check_identity(self.folder, self.manifest.identity, now)
        elif isinstance(self.behind, ImageSet):
            recorded = {image: content for block in complete for image, content in self._recorded(block).items()}
            for image, content in zip(recorded, self.behind.contents(list(recorded)), strict=True):
                self._check_content(image, content, recorded)

    def _recorded(self, block: int) -> dict[int, bytes]:
        """By position, the hash of the content of every image behind a block's rows."""
        if not self.hashed:
            return {}
        data, first = _contents([self.have[ROWS, block]]), block * self.manifest.shard_size
        return {(first + row) % len(self.behind): content for row, content in enumerate(data)}

    def _check_content(self, image: int, content: bytes, recorded: dict[int, bytes]) -> None:
        if recorded[image] != content:
            raise StaleCacheError(
                f"cache '{self.folder}' was made from something else: the contents of the images "
                f"('{self.behind.ids[image]}' has changed). Extract into another folder, or delete this one."
            )

    def _indices(self, block: int) -> range:
        size = self.manifest.shard_size
        return range(block * size, min((block + 1) * size, len(self.images)))

    def _groups(self, block: int) -> list[list[int]]:
        """A block's images in batches; once its rows are there, only those that can be decoded."""
        rows = self.have.get((ROWS, block))
        skipped = {name for name, _ in rows.notes()["skipped"]} if rows else set()
        # A batch keeps the images it had at first, also without those that broke: the same rows go through together.
        groups = in_batches(self._indices(block), self.manifest.batch_size)
        return [[index for index in group if self.images.ids[index] not in skipped] for group in groups]

    def _owners(self) -> dict[str, str]:
        """Columns that probes of an earlier run have written."""
        return {column: name for name, probe in self.manifest.probes.items() for column in probe.get("columns", ())}

    def _do(self, block: int, kinds: list[str], stream: Iterable[Batch], runner: ProbeRunner) -> None:
        """Run the missing probes over one block and write its missing shards, the rows first."""
        names = [kind for kind in kinds if kind != ROWS]
        recorded = None if ROWS in kinds else self._recorded(block)
        parts: dict[str, list[Columns]] = {name: [] for name in names}
        rows = Batch([], None, [], {})
        for batch in stream:
            if recorded is not None:
                self._check_unchanged(batch, recorded)
            rows.indices += batch.indices
            rows.broken += batch.broken
            rows.contents |= batch.contents
            x = inputs_of(batch, self.model)
            if x is not None:
                target, mixed = self._compared(batch.indices)
                if target is not None and not self._checked:
                    self._check_values(x)
                ids = [self.images.ids[index] for index in batch.indices]
                for name, columns in runner.run(x, ids, names=names, target=target, mixed=mixed).items():
                    parts[name].append(columns)
        if recorded is None:
            self._write_rows(block, rows)
        for name in names:
            probe = self.probes[name]
            notes = {"notes": probe.notes()} if isinstance(probe, NotingProbe) and rows.indices else {}
            self._write(name, block, joined(parts[name]), notes)

    def _check_unchanged(self, batch: Batch, recorded: dict[int, bytes]) -> None:
        """Raise an error for images that are not what they were when their rows were written."""
        for index, content in batch.contents.items():
            self._check_content(index % len(self.behind), content, recorded)
        for index, why in batch.broken:
            raise ImagesError(
                f"image '{self.images.ids[index]}' was readable before and is not now: {why} "
                f"Put it back, or extract into another folder."
            )

    def _compared(self, indices: list[int]) -> tuple[Shaped[Tensor, "n ..."] | None, Mixed | None]:
        """What the task loss compares rows with; where images are mixed, also the other one's and the weight."""
        if self.values is None or not isinstance(self.images, Augmented):
            return None if self.values is None else self.values[indices], None
        own = self.values[self.images.place(indices)[1]]
        if not self.images.augment.mixes:
            return own, None
        partners, weight = self.images.mixing(indices)
        return own, (self.values[partners], weight)

    def _check_values(self, x: Tensor) -> None:
        """All of them at once, before the first batch is paid for: one image shows how many classes there are."""
        count = self.model.logits(self.model.features(x[:1])).shape[1]
        if self.labels is not None and self.manifest.label_space == "model":
            check_range(self.labels, count, self.images.ids)
            if self.images.classes is not None and self.model.classes is None and not self.stated:
                check_count(self.images.classes, count)
        if self.base is not None:
            self.base.check_targets(self.values, count)
        self._checked = True

    def _write_rows(self, block: int, rows: Batch) -> None:
        columns: Columns = pack_strings([self.images.ids[index] for index in rows.indices])
        if self.labels is not None:
            columns["label"] = self.labels[rows.indices]
        if isinstance(self.images, Augmented):
            columns["epoch"], columns["image_index"] = self.images.place(rows.indices)
        if self.hashed:
            data = b"".join(rows.contents[index] for index in self._indices(block))
            columns["content"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self._write(ROWS, block, columns, {"skipped": [[self.images.ids[index], why] for index, why in rows.broken]})

    def _write(self, kind: str, block: int, columns: Columns, notes: Json) -> None:
        shard, before = write_shard(self.folder, kind, block, columns, notes), self.have.get((kind, block))
        if before is not None and before != shard:
            before.path.unlink()
        self.have[kind, block] = shard
        self.new.append(shard)

    def _finish(self, blocks: range) -> None:
        """Write down columns, shards and skipped images: from now on the cache can be opened."""
        rows = [self.have[ROWS, block] for block in blocks]
        self.manifest.rows = _summary(rows)
        for name in self.probes:
            self.manifest.probes[name] |= _summary([self.have[name, block] for block in blocks])
        self.manifest.skipped = [entry for shard in rows for entry in shard.notes()["skipped"]]
        if len(self.manifest.skipped) == len(self.images):
            raise ImagesError(
                f"none of the {len(self.images)} images in {self.images.name} could be decoded; "
                f"the first: {self.manifest.skipped[0][1]}"
            )
        if self.hashed:
            self.manifest.identity["images"] = self._digest(rows)
        for name, probe in self.probes.items():
            if isinstance(probe, BaseProbe) and probe.keeps_head:
                self.manifest.probes[name][HEAD] = self._keep_head().name
        self.manifest.write(self.folder)

    def _digest(self, rows: list[Shard]) -> str:
        """The hash of all contents; augmented images must have been the same in every epoch."""
        contents, n = _contents(rows), len(self.behind)
        recorded = dict(enumerate(contents[:n]))
        for row, content in enumerate(contents[n:]):
            self._check_content(row % n, content, recorded)
        return hash_images(self.behind.ids, contents[:n])

    def _keep_head(self) -> Shard:
        kept = self.have.get((HEAD, 0))
        if kept is None:
            weight, bias = self.model.head()
            columns = {"weight": weight.float().cpu()} | ({} if bias is None else {"bias": bias.float().cpu()})
            kept = write_shard(self.folder, HEAD, 0, columns, {})
        return kept


def _by_name(probes: Sequence[Probe]) -> dict[str, Probe]:
    """Shards are called after their probe, so names differ; a base probe of the user's takes the usual one's place."""
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


def _begin(folder: Path, manifest: Manifest, probes: dict[str, Probe]) -> tuple[Manifest, Manifest | None]:
    """The manifest to go on with, written before any shard; and a copy of the folder's own, if that was finished."""
    before, previous = read_manifest(folder), None
    if before is not None and not before.begun and not list_shards(folder):
        before = None  # nothing was extracted: settings of that attempt do not bind
    elif before is None:
        others = sorted(path.name for path in folder.iterdir() if path.name != LOCK and not is_leftover(path))
        if others:
            raise CacheError(
                f"to: '{folder}' holds other things ({', '.join(others[:3])}) and no {FILE}. "
                f"Choose a new or empty folder."
            )
    else:
        # The contents of the images are compared as they are read.
        now = {"images": before.identity["images"]} if manifest.identity["images"] is None else {}
        check_identity(folder, before.identity, {**manifest.identity, **now})
        for name, probe in probes.items():
            if name in before.probes:
                check_probe(folder, name, before.probes[name]["settings"], probe.settings())
        previous = copy.deepcopy(before) if before.finished else None
        before.label_names, manifest = manifest.label_names, before
    sweep(folder)
    new = [probe for name, probe in probes.items() if name not in manifest.probes]
    for probe in new:
        manifest.probes[probe.name] = {"settings": probe.settings(), "price": probe.price}
    if new or (previous is not None and previous.label_names != manifest.label_names):
        manifest.write(folder)
    return manifest, previous


def _check_call(model: object, label_space: str | None, sizes: dict[str, int | None]) -> None:
    """Raise an error for arguments that are wrong whatever the images are."""
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


def _contents(rows: Sequence[Shard]) -> list[bytes]:
    """The hash of the content of every image, also of those that could not be decoded."""
    data = b"".join(shard.read()["content"].numpy().tobytes() for shard in rows)
    return [data[start : start + SIZE] for start in range(0, len(data), SIZE)]


def _summary(shards: Sequence[Shard]) -> Json:
    """Columns with type and row shape, every shard with its rows and size, and the probe's notes."""
    columns: Json = {}
    listed = []
    for shard in shards:
        hidden = ("__metadata__", "id.bytes", "content")
        header = {key: value for key, value in shard.header().items() if key not in hidden}
        rows = next(iter(header.values()))["shape"][0] if header else 0
        listed.append({"name": shard.name, "rows": rows, "bytes": shard.path.stat().st_size})
        for key, value in header.items() if rows else ():
            if key != "id.ends":
                columns.setdefault(key, {"dtype": value["dtype"], "shape": value["shape"][1:]})
    noted = next((notes["notes"] for shard in shards if "notes" in (notes := shard.notes())), None)
    return {"columns": columns, "shards": listed} | ({} if noted is None else {"notes": noted})


def _warn_repair(damage: str, folder: Path) -> None:
    warnings.warn(f"cache '{folder}': shard {damage}; it is extracted again.", RepairedShardWarning, stacklevel=5)
