"""Labels for a finished cache, without running the model again.

Rows get their labels and, where these are the model's classes, the task loss that follows from the stored logits. New
shards are written beside the old ones, then the manifest names them in one step, then the old ones are removed: killed
at any instant, the cache is whole, with its previous labels or with the new ones. In the end it has the same bytes as
one that was extracted with these labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast, final, get_args

from jaxtyping import Int
from torch import Tensor

from dubito.cache import disk
from dubito.cache.disk import Manifest
from dubito.cache.extract import summary
from dubito.cache.labels import (
    RecordedImages,
    check_model_classes,
    compared_rows,
    names_of_labels,
    resolve_labels,
    warn_of_order,
)
from dubito.cache.shards import Shard, forget_shards, unpack_strings, write_shard
from dubito.choices import LabelSpace
from dubito.data.augment import Augment, Augmented
from dubito.data.labels import Labels, with_labels
from dubito.errors import CacheBusyError, CacheError
from dubito.probes import base_probe
from dubito.storage import Place, locked, to_place
from dubito.table import Table
from dubito.types import Images, Json
from dubito.validate import check_choice


def label_cache(folder: str | Place, labels: Labels, *, label_space: LabelSpace | None = None) -> Table:
    """Store labels in a finished cache, in place of its own if it has any; neither model nor images are needed.

    `dubito.open(folder, labels=...)` uses labels without storing them.

    Args:
        folder: The cache.
        labels: A CSV file, a frame, a mapping from image to label, or one label per image in the order of the
            extraction. Images that could not be decoded need none.
        label_space: "model" if labels are the model's classes, "own" if they are another set's; by default decided
            from class names, integers being the model's.

    Raises:
        CacheError: Other columns follow from labels too, and only the model can compute them.
    """
    folder = to_place(folder)
    if label_space is not None:
        check_choice(label_space, get_args(LabelSpace), by="label_cache", what="label_space")
    table = disk.open_cache(folder)
    if "logit" not in table:  # of a backbone that does not classify, as for `extract`
        label_space = "own"
    with locked(folder, busy=CacheBusyError, refused=CacheError):
        manifest = disk.finished_manifest(folder)
        blocks = [_Block.read(disk.named_shard(folder, entry["name"]), manifest) for entry in manifest.rows["shards"]]
        images = _labelled(folder, manifest, blocks, labels)
        values, space = cast("tuple[Tensor, LabelSpace]", resolve_labels(images, manifest, label_space))
        by_place = images.classes is not None and manifest.classes is None
        if space == "model":
            named = by_place and label_space is None
            check_model_classes(values, images, table.shape("logit")[1], by="label_cache", by_place=named)
        _relabel(folder, manifest, blocks, images, values, space)
    forget_shards()
    table = disk.open_cache(folder)
    if space == "model" and "targets" not in manifest.identity:
        warn_of_order(table, manifest.shard_size, table.name, by_place=by_place)
        forget_shards()  # whoever reads them first verifies them
    return table


@final
@dataclass(frozen=True)
class _Block:
    """A shard of rows: which images it is about, by their place in the set.

    Attributes:
        shard: The shard.
        names: Of every image of the block, also of those that could not be decoded.
        rows: Places of the images that have a row.
    """

    shard: Shard
    names: dict[int, str]
    rows: list[int]

    @classmethod
    def read(cls, shard: Shard, manifest: Manifest) -> "_Block":
        """The block of a shard, once that has proved to be whole."""
        shard.check()
        names = {index: name for index, name, _ in shard.notes()["skipped"]}
        stored = unpack_strings(shard.read())
        start = shard.index * manifest.shard_size
        rows = [index for index in range(start, start + len(stored) + len(names)) if index not in names]
        return cls(shard, names | dict(zip(rows, stored, strict=True)), rows)


def _labelled(folder: Place, manifest: Manifest, blocks: Sequence[_Block], labels: Labels) -> Images:
    """What the cache is of, with labels; augmented images have one label each."""
    names = {index: name for block in blocks for index, name in block.names.items()}
    ids, settings = [names[index] for index in range(manifest.identity["count"])], manifest.identity.get("augmentation")
    undecoded = set(range(len(ids))).difference(*(block.rows for block in blocks))
    if settings is None:
        return with_labels(RecordedImages(str(folder), ids), labels, undecoded)
    first = [name.removesuffix("@0") for name in ids]  # the rows of the first epoch
    own: Json = {
        key: tuple(value) if isinstance(value, list) else value for key, value in settings.items() if key != "epochs"
    }
    labelled = with_labels(RecordedImages(str(folder), first), labels, undecoded)
    return Augmented(labelled, settings["epochs"], Augment(**own))


def _relabel(
    folder: Place,
    manifest: Manifest,
    blocks: Sequence[_Block],
    images: Images,
    values: Int[Tensor, "n"],
    space: LabelSpace,
) -> None:
    """Write new shards, let the manifest name them, and remove those that they replace."""
    base, before = base_probe(), manifest.label_space
    manifest.label_space, manifest.label_names = space, names_of_labels(images, manifest, space)
    manifest.identity["labels"] = disk.hash_labels(values[: manifest.identity["count"]], space)
    of_labels = "targets" not in manifest.identity  # what losses are of
    if of_labels and "model" in (space, before):
        _check_losses(folder, manifest, space)
        record, written = manifest.probes[base.name], []
        compared = values if space == "model" else None
        for entry, block in zip(record["shards"], blocks, strict=True):
            shard = disk.named_shard(folder, entry["name"])
            shard.check()
            columns = {key: column for key, column in shard.read().items() if key != "loss"}
            target, mixed = compared_rows(images, compared, block.rows)
            if target is not None and block.rows:
                columns["loss"] = base.loss(columns["logit"], target, mixed)
            written.append(_write(folder, manifest, shard, columns))
        record |= summary(written)
        manifest.task_loss = base.recorded_loss if space == "model" else None
    manifest.rows = summary(
        [_write(folder, manifest, block.shard, {**block.shard.read(), "label": values[block.rows]}) for block in blocks]
    )
    manifest.write(folder)
    disk.remove_replaced(folder, manifest)
    disk.remove_leftovers(folder)


def _write(folder: Place, manifest: Manifest, shard: Shard, columns: dict[str, Tensor]) -> Shard:
    """A shard like another one, with other columns."""
    notes = shard.notes() | {"origin": disk.origin_of(manifest, shard.kind)}
    return write_shard(folder, shard.kind, shard.index, columns, notes)


def _check_losses(folder: Place, manifest: Manifest, space: LabelSpace) -> None:
    """Raise CacheError where losses do not follow from the stored logits."""
    base = base_probe()
    record = manifest.probes[base.name]
    why = None
    if others := [name for name, probe in manifest.probes.items() if name != base.name and probe["uses_labels"]]:
        why = f"columns of the {others[0]} probe depend on labels too"
    elif extra := record["settings"].keys() - base.settings().keys():
        why = f"its losses are of a function, {record['settings'][extra.pop()]}"
    elif space == "model" and "logit" not in record["columns"]:
        why = "losses follow from logits, which it does not store"
    if why:
        raise CacheError(
            f"label_cache: labels cannot be stored in '{folder}' without the model: {why}. Extract again with "
            f"labels=... into another folder, or use them for one table: dubito.open('{folder}', labels=...)."
        )
