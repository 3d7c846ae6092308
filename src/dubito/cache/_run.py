"""One extraction into one folder: which blocks are missing, how one is done, what the manifest says in the end."""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from jaxtyping import Int, Shaped
from torch import Tensor

from dubito.cache.labels import check_count, check_range
from dubito.cache.loader import Batch
from dubito.cache.manifest import Manifest
from dubito.cache.runner import Columns, ProbeRunner, inputs_of, joined, open_stream
from dubito.cache.shard import Shard, list_shards, write_shard
from dubito.data.augment import Augmented
from dubito.errors import ImagesError, RepairedShardWarning
from dubito.probes.forward import Forward
from dubito.probes.task_loss import Mixed
from dubito.storage import pack_strings
from dubito.types import BaseProbe, Classifier, Images, Json, NotingProbe, Probe


@dataclass
class Run:
    """The state of an extraction; the folder is locked and the manifest fits.

    Attributes:
        labels: One an image, or None.
        targets: What the task loss compares with instead of labels, one row a photo, or None.
        stated: The user said whose classes the labels are.
        have: The shards that are whole, by probe and block.
    """

    model: Classifier
    images: Images
    labels: Int[Tensor, "n"] | None
    folder: Path
    manifest: Manifest
    probes: dict[str, Probe]
    stated: bool
    targets: Shaped[Tensor, "photos ..."] | None = None
    have: dict[tuple[str, int], Shard] = field(default_factory=dict)
    _in_range: bool = False

    def go(self, workers: int, progress: bool) -> bool:
        """Do every missing block, then finish the manifest; whether the model has answered for images anew."""
        self.have = self._whole_shards()
        blocks = range(-(-len(self.images) // self.manifest.shard_size))
        todo = [block for block in blocks if self._missing(block)]
        answered = any(Forward.name in self._missing(block) for block in todo)
        if todo:
            groups = {block: self._groups(block) for block in todo}
            order = [group for block in todo for group in groups[block]]
            runner = ProbeRunner(self.model, self.probes, self._owners())
            title = f"extract {self.images.name}"
            with open_stream(
                self.images, self.model.transform, order, workers=workers, title=title, progress=progress
            ) as stream:
                for block in todo:
                    self._do(block, islice(stream, len(groups[block])), runner)
        if todo or not self.manifest.finished:
            self._finish(blocks)
        return answered

    def _whole_shards(self) -> dict[tuple[str, int], Shard]:
        """The shards that are there and whole; damaged ones are removed, named, and done again."""
        found: dict[tuple[str, int], Shard] = {}
        lost = {shard["name"] for probe in self.manifest.probes.values() for shard in probe.get("shards", ())}
        for shard in list_shards(self.folder):
            lost.discard(shard.name)
            damage = shard.damage()
            if damage:
                shard.path.unlink()
                _tell_repair(f"{shard.name} {damage}", self.folder)
            else:
                found[shard.probe, shard.index] = shard
        for name in sorted(lost):
            _tell_repair(f"{name} is missing", self.folder)
        return found

    def _missing(self, block: int) -> list[str]:
        """The probes that still have to see a block."""
        return [name for name in self.probes if (name, block) not in self.have]

    def _groups(self, block: int) -> list[list[int]]:
        """A block's images in batches; once the forward probe has seen them, only those that can be decoded."""
        size, step = self.manifest.shard_size, self.manifest.batch_size
        indices = range(block * size, min((block + 1) * size, len(self.images)))
        seen = self.have.get((Forward.name, block))
        skipped = {name for name, _ in seen.notes()["skipped"]} if seen else set()
        # A batch keeps the images it had at first, also without those that broke: the same rows go through together.
        cut = [indices[start : start + step] for start in range(0, len(indices), step)]
        return [[index for index in group if self.images.ids[index] not in skipped] for group in cut]

    def _do(self, block: int, stream: Iterable[Batch], runner: ProbeRunner) -> None:
        """Run the missing probes over one block and write their shards."""
        missing = self._missing(block)
        parts: dict[str, list[Columns]] = {name: [] for name in missing}
        kept: list[int] = []
        broken: list[tuple[int, str]] = []
        for batch in stream:
            kept += batch.indices
            broken += batch.broken
            x = inputs_of(batch, self.model)
            if x is not None:
                target, mixed = self._compared(batch.indices)
                if target is not None and not self._in_range:
                    self._check_targets(x)
                ids = [self.images.ids[index] for index in batch.indices]
                for name, columns in runner.run(x, ids, names=missing, target=target, mixed=mixed).items():
                    parts[name].append(columns)
        for name in missing:
            self._write(name, block, joined(parts[name]), kept, broken)

    def _owners(self) -> dict[str, str]:
        """Columns that probes of an earlier run have written."""
        return {column: name for name, probe in self.manifest.probes.items() for column in probe.get("columns", ())}

    def _values(self) -> Shaped[Tensor, "rows ..."] | None:
        """Targets, or else labels that are the model's classes."""
        return self.labels if self.targets is None and self.manifest.label_space == "model" else self.targets

    def _compared(self, indices: list[int]) -> tuple[Shaped[Tensor, "n ..."] | None, Mixed | None]:
        """What the task loss compares rows with; where photos are mixed, also the other one's and the weight."""
        values = self._values()
        if values is None or not isinstance(self.images, Augmented):
            return None if values is None else values[indices], None
        photos = self.images.place(indices)[1]
        if not self.images.augment.mixes:
            return values[photos], None
        partners, weight = self.images.mixing(indices)
        return values[photos], (values[partners], weight)

    def _check_targets(self, x: Tensor) -> None:
        """All of them at once, before the first batch is paid for: one image tells how many classes there are."""
        count = self.model.logits(self.model.features(x[:1])).shape[1]
        if self.labels is not None and self.manifest.label_space == "model":
            check_range(self.labels, count, self.images.ids)
            if self.images.classes is not None and self.model.classes is None and not self.stated:
                check_count(self.images.classes, count)
        probe = self.probes[Forward.name]
        if isinstance(probe, BaseProbe):
            probe.check_targets(self._values(), count)
        self._in_range = True

    def _write(self, name: str, block: int, columns: Columns, kept: list[int], broken: list[tuple[int, str]]) -> None:
        skipped = [[self.images.ids[index], why] for index, why in broken]
        if name == Forward.name:
            columns |= pack_strings([self.images.ids[index] for index in kept])
            if self.labels is not None:
                columns["label"] = self.labels[kept]
            if isinstance(self.images, Augmented):
                columns["epoch"], columns["photo"] = self.images.place(kept)
        else:
            known = {image for image, _ in self.have[Forward.name, block].notes()["skipped"]}
            for image, why in skipped:
                if image not in known:
                    raise ImagesError(
                        f"image '{image}' was readable before and is not now: {why} "
                        f"Put it back, or extract into another folder."
                    )
            skipped = []  # the forward probe has told of them
        probe = self.probes[name]
        told = {"told": probe.notes()} if isinstance(probe, NotingProbe) and kept else {}
        self.have[name, block] = write_shard(self.folder, name, block, columns, {"skipped": skipped, **told})

    def _finish(self, blocks: range) -> None:
        """Write down columns, shards and skipped images: from now on the cache can be opened."""
        for name in self.probes:
            self.manifest.probes[name] |= _summary([self.have[name, block] for block in blocks])
        forward = [self.have[Forward.name, block] for block in blocks]
        self.manifest.skipped = [entry for shard in forward for entry in shard.notes()["skipped"]]
        if len(self.manifest.skipped) == len(self.images):
            raise ImagesError(
                f"none of the {len(self.images)} images in {self.images.name} could be decoded; "
                f"the first: {self.manifest.skipped[0][1]}"
            )
        if not self.manifest.probes[Forward.name]["settings"]["store_logit"]:
            self.manifest.probes[Forward.name]["head"] = self._keep_head().name
        self.manifest.write(self.folder)

    def _keep_head(self) -> Shard:
        found = self.have.get(("head", 0))
        if found is None:
            weight, bias = self.model.head()
            columns = {"weight": weight.float().cpu()} | ({} if bias is None else {"bias": bias.float().cpu()})
            found = write_shard(self.folder, "head", 0, columns, {})
        return found


def _summary(shards: list[Shard]) -> Json:
    """Columns with type and row shape, every shard with its rows and size, and what the probe told of them."""
    columns: Json = {}
    listed = []
    for shard in shards:
        header = {key: value for key, value in shard.header().items() if key != "__metadata__"}
        plain = {key: value for key, value in header.items() if key != "id.bytes"}
        rows = next(iter(plain.values()))["shape"][0] if plain else 0
        listed.append({"name": shard.name, "rows": rows, "bytes": shard.path.stat().st_size})
        for key, value in plain.items() if rows else ():
            columns.setdefault(key, {"dtype": value["dtype"], "shape": value["shape"][1:]})
    told = next((notes["told"] for shard in shards if "told" in (notes := shard.notes())), None)
    return {"columns": columns, "shards": listed} | ({} if told is None else {"told": told})


def _tell_repair(what: str, folder: Path) -> None:
    warnings.warn(f"cache '{folder}': shard {what}; it is extracted again.", RepairedShardWarning, stacklevel=6)
