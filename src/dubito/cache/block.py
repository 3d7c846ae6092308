"""One block of images: probes run over it, and its shards are written. Engines run this wherever they like.

Everything that a block needs is in `BlockRunner`, which can be pickled: the same block gives the same bytes in every
process that computes with the same number of threads. Blocks are idempotent: the name of a shard has the checksum of
its bytes, and a shard appears under its name in one step, so a block may be run twice, also at the same time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from itertools import islice
from typing import final

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from dubito.cache import runner
from dubito.cache.disk import FILE
from dubito.cache.labels import check_model_classes, compared_rows
from dubito.cache.probe_runner import Columns, ProbeRunner
from dubito.cache.shards import ROWS, Shard, each, pack_strings, read_whole, write_shard
from dubito.data import Augmented
from dubito.data.image_set import Hashes, ImageSet
from dubito.engines import Block
from dubito.errors import CacheError, DubitoError, EngineError, ImagesError, StaleCacheError, StoreError
from dubito.storage import Place
from dubito.threads import torch_threads
from dubito.types import BaseProbe, Classifier, Images, Json, NotingProbe, Probe


@final
@dataclass
class BlockRunner:
    """What an extraction does with its blocks: the `BlockWork` of engines.

    Attributes:
        folder: Folder or address of the cache. It has a manifest, and every process that runs blocks must see it.
        probes: By name.
        base: The probe that compares logits with values, if it is among the probes.
        owners: Columns that exist already, with the name of the probe that writes each.
        labels: One per image, or None.
        values: What the task loss compares the logits with: targets, or labels that are the model's classes.
        model_labels: Labels are the model's classes.
        classes_by_position: Class names are taken as the model's classes in order, so there must be as many.
        batch_size: Images through the model at once.
        threads: Threads of torch.
        origins: By kind, what its shards are made from, as a hash.
        rows: The shards of rows that are there already, by number of the block.
    """

    model: Classifier
    images: Images
    folder: Place
    probes: dict[str, Probe]
    base: BaseProbe | None
    owners: dict[str, str]
    labels: Int[Tensor, "n"] | None
    values: Shaped[Tensor, "rows ..."] | None
    model_labels: bool
    classes_by_position: bool
    batch_size: int
    threads: int
    origins: dict[str, str]
    rows: dict[int, Shard] = field(default_factory=dict)
    _values_checked: bool = False
    _sample: tuple[int, bytes | None] | None = None
    _current: Sequence[int] = ()

    def __post_init__(self) -> None:
        # The images themselves, of which augmented rows are several each.
        self.originals = self.images.images if isinstance(self.images, Augmented) else self.images
        # Whether hashes of the contents come from the reading that decodes.
        self.hashed = isinstance(self.images, ImageSet) and self.images.hashed_reads
        self._probing = ProbeRunner(self.model, self.probes, self.owners, steady=False)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    def run(
        self, blocks: Sequence[Block], *, workers: int | None = None, progress: bool = False
    ) -> Iterator[tuple[Block, list[Shard]]]:
        """Do all blocks in this process, one after the other, as one stream that decodes ahead."""
        groups = {block.number: self._groups(block) for block in blocks}
        order = [group for of_block in groups.values() for group in of_block]
        workers = runner.default_workers(self.images) if workers is None else workers
        if isinstance(self.images, ImageSet) and self.images.forward_only:
            workers = min(workers, 1)
        options: Json = {"hashed": self.hashed, "workers": workers, "progress": progress, "title": self._title}
        with (
            torch_threads(self.threads),
            runner.open_stream(self.images, self.model.transform, order, **options) as stream,
        ):
            for block in blocks:
                yield block, self._extract(block, islice(stream, len(groups[block.number])))

    def check(self, block: Block) -> bool:
        """Raise an error unless model, labels and probes fit together, which the first batch that can be read shows.

        Returns whether there is one in this block.
        """
        stream = runner.batches(self.images, self.model.transform, self._groups(block), 0, hashed=self.hashed)
        with torch_threads(self.threads), closing(stream):
            for batch in stream:
                if batch.inputs is not None:
                    self._probe(batch, [kind for kind in block.kinds if kind != ROWS])
                    self._sample = batch.indices[0], batch.contents.get(batch.indices[0])
                    return True
        return False

    def start(self, device: str | None) -> None:
        """Prepare a copy in a worker: raise an error unless folder and images are there, move models to a device.

        An image that a node cannot see would pass for one that cannot be decoded.
        """
        if not (self.folder / FILE).is_file():
            raise CacheError(
                f"the folder '{self.folder}' of the cache cannot be seen there. Choose a folder that all nodes "
                f"share, or an object store."
            )
        self._check_sample(ImagesError)
        if device is not None:
            members = [member for probe in self.probes.values() for member in getattr(probe, "models", ())]
            for model in (self.model, *members):
                model.module.to(device)

    def bar(self, blocks: Sequence[Block], *, show: bool) -> AbstractContextManager[runner.Advance]:
        """A progress bar of images, at which those of no block count as done."""
        total = len(self.images)
        return runner.bar(self._title, total, done=total - sum(len(block.images) for block in blocks), show=show)

    def describe_current(self) -> str:
        """Which probe runs on which images at the moment, for errors."""
        probe = f"probe {self._probing.current}, " if self._probing.current else ""
        return probe + self._describe(self._current)

    def describe(self, block: Block) -> str:
        """The images of a block in words, for errors."""
        return self._describe(block.images)

    def leave_out(self, block: Block, why: str) -> list[Shard]:
        """Write a block down as images that are skipped: rows with a reason for each, and empty shards."""
        if ROWS not in block.kinds:
            raise EngineError(
                f"{self.describe(block)} have rows already and cannot be left out: {why}. Repair what failed, and run "
                f"the same call again."
            )
        contents: dict[int, bytes] = {}
        if self.hashed and isinstance(self.images, ImageSet):
            contents = dict(zip(block.images, self.images.contents(block.images), strict=True))
        broken = [
            (index, f"image '{self.images.ids[index]}' is in a block that failed: {why}") for index in block.images
        ]
        return self._extract(block, [runner.Batch(broken=broken, contents=contents)])

    def recorded(self, images: range, rows: Shard) -> dict[int, bytes]:
        """By position, the hash of the content of every image behind a shard of rows."""
        if not self.hashed:
            return {}
        return {row % len(self.originals): one for row, one in zip(images, contents_of([rows]), strict=True)}

    def check_content(self, image: int, content: bytes, recorded: Mapping[int, bytes] | Hashes) -> None:
        """Raise StaleCacheError for an image whose content is not what was recorded."""
        if recorded[image] != content:
            raise StaleCacheError(
                f"cache '{self.folder}' does not match: the contents of the images "
                f"('{self.originals.ids[image]}' has changed). Extract into another folder, or delete this one."
            )

    @property
    def _title(self) -> str:
        return f"extract {self.images.name}"

    def _describe(self, images: Sequence[int]) -> str:
        first, *others = [self.images.ids[index] for index in (images[0], images[-1])] if images else ["none"]
        return f"images '{first}' to '{others[0]}'" if len(images) > 1 else f"image '{first}'"

    def _groups(self, block: Block) -> list[Sequence[int]]:
        """A block's images in batches; once its rows are there, only those that can be decoded."""
        rows = self.rows.get(block.number)
        skipped = {index for index, *_ in rows.notes()["skipped"]} if rows else set()
        # A batch keeps the images it had at first, also without those that broke: the same rows go through together.
        groups = runner.in_batches(block.images, self.batch_size)
        return [[index for index in group if index not in skipped] for group in groups] if skipped else groups

    def _check_sample(self, error: type[DubitoError]) -> None:
        """Raise an error where the image that the driver has read cannot be read as it was there."""
        if self._sample is None:
            return
        index, content = self._sample
        (batch,) = runner.batches(self.images, self.model.transform, [[index]], 0, hashed=self.hashed)
        if batch.broken or batch.contents.get(index) != content:
            reason = batch.broken[0][1] if batch.broken else "its content is another"
            raise error(
                f"image '{self.images.ids[index]}' cannot be seen there as it is here: {reason} "
                f"Put the images where all nodes see them under the same path."
            )

    def _extract(self, block: Block, stream: Iterable[runner.Batch]) -> list[Shard]:
        """Run the missing probes over one block and write its missing shards, the rows first."""
        names = [kind for kind in block.kinds if kind != ROWS]
        recorded = None if ROWS in block.kinds else self.recorded(block.images, self.rows[block.number])
        parts: dict[str, list[Columns]] = {name: [] for name in names}
        rows = runner.Batch()
        for batch in stream:
            if recorded is not None:
                self._check_unchanged(batch, recorded)
            rows.indices += batch.indices
            rows.broken += batch.broken
            rows.contents |= batch.contents
            for name, columns in self._probe(batch, names).items():
                parts[name].append(columns)
        if rows.broken:
            self._check_sample(StoreError)  # a node whose disk is gone would leave out all images
        shards = [self._write_rows(block, rows)] if recorded is None else []
        for name in names:
            probe = self.probes[name]
            notes = {"notes": probe.notes()} if isinstance(probe, NotingProbe) and rows.indices else {}
            shards.append(self._write(name, block.number, runner.concat_columns(parts[name]), notes))
        return shards

    def _probe(self, batch: runner.Batch, names: list[str]) -> dict[str, Columns]:
        """The columns of each probe for one batch; none where no image of it could be decoded."""
        self._current = batch.indices or [index for index, _ in batch.broken]
        x = runner.inputs_of(batch, self.model)
        if x is None:
            return {}
        target, mixed = compared_rows(self.images, self.values, batch.indices)
        if target is not None and not self._values_checked:
            self._check_values(x)
        ids = [self.images.ids[index] for index in batch.indices]
        return self._probing.run(x, ids, names=names, target=target, mixed=mixed)

    def _check_unchanged(self, batch: runner.Batch, recorded: dict[int, bytes]) -> None:
        """Raise an error for images that are not what they were when their rows were written."""
        for index, content in batch.contents.items():
            self.check_content(index % len(self.originals), content, recorded)
        for index, why in batch.broken:
            raise ImagesError(
                f"image '{self.images.ids[index]}' was readable before and is not now: {why} "
                f"Put it back, or extract into another folder."
            )

    def _check_values(self, x: Tensor) -> None:
        """All of them at once, before the first batch is paid for: one image shows how many classes there are."""
        count = self.model.logits(self.model.features(x[:1])).shape[1]
        if self.labels is not None and self.model_labels:
            by_place = self.classes_by_position
            check_model_classes(self.labels, self.images, count, by="extract", by_place=by_place)
        if self.base is not None:
            self.base.check_targets(self.values, count)
        self._values_checked = True

    def _write_rows(self, block: Block, rows: runner.Batch) -> Shard:
        columns: Columns = pack_strings([self.images.ids[index] for index in rows.indices])
        if self.labels is not None:
            columns["label"] = self.labels[rows.indices]
        if isinstance(self.images, Augmented):
            columns["epoch"], columns["image_index"] = self.images.place(rows.indices)
        if self.hashed:
            data = b"".join(rows.contents[index] for index in block.images)
            columns["content"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        skipped = [[index, self.images.ids[index], why] for index, why in rows.broken]
        return self._write(ROWS, block.number, columns, {"skipped": skipped})

    def _write(self, kind: str, number: int, columns: Columns, notes: Json) -> Shard:
        return write_shard(self.folder, kind, number, columns, {**notes, "origin": self.origins[kind]})


def contents_of(rows: Sequence[Shard]) -> Hashes:
    """The hash of the content of every image, also of those that could not be decoded."""
    hashes = Hashes()
    for part in each(lambda shard: read_whole(shard)["content"].numpy().tobytes(), rows):
        hashes.append(part)
    return hashes
