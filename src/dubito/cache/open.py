"""Open a finished cache as a Table: only the manifest is read, rows are read from the disk when they are needed."""

from pathlib import Path
from typing import Any

from dubito.cache.column import HeadColumn, ShardedColumn, id_column
from dubito.cache.manifest import FILE, Manifest, check_identity, model_identity, read_manifest
from dubito.cache.shard import HEAD, Shard, shard_named
from dubito.errors import CacheError, DamagedShardError
from dubito.table import Column, Provenance, Table
from dubito.table.provenance import CARRIED
from dubito.types import Classifier, Json


def open_cache(folder: str | Path, *, model: Classifier | None = None) -> Table:
    """The table of a finished cache.

    Args:
        folder: The folder that was passed to extract as `to`.
        model: Refuse a cache that another model made.
    """
    return table_of_cache(Path(folder), None if model is None else model_identity(model))


def table_of_cache(folder: Path, known: Provenance | None) -> Table:
    """The table of a finished cache that a known model made, by its `model_identity`; None takes any cache.

    Raises:
        StaleCacheError: The cache's weights or transform are not this model's.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise CacheError(
            f"no cache in '{folder}': there is no {FILE}. Make one with dubito.extract(model, images, to='{folder}')."
        )
    if not manifest.finished:
        raise CacheError(f"cache '{folder}' is not finished. Run the same extract again: it goes on where it stopped.")
    if known is not None:
        check_identity(folder, manifest.identity, manifest.identity | known.model_parts)
    rows = _shards(folder, manifest.rows)
    columns: dict[str, Any] = {"id": id_column(rows)} | _columns(rows, manifest.rows)
    for probe in manifest.probes.values():
        columns |= _columns(_shards(folder, probe), probe)
        if HEAD in probe:
            columns["logit"] = _rebuilt(columns["feature"], shard_named(folder, probe[HEAD]))
    return Table(
        name=str(folder),
        classes=manifest.classes,
        label_space=manifest.label_space or "model",
        label_names=manifest.label_names,
        skipped=[(name, why) for name, why in manifest.skipped],
        provenance=_provenance(manifest, known),
        **dict(sorted(columns.items(), key=lambda column: (column[0] != "id", column[0]))),
    )


def _provenance(manifest: Manifest, known: Provenance | None) -> Provenance:
    """The model part by part, the task loss if there are losses, and every probe's settings and notes.

    A model in hand whose weights agree fills in what the cache has not recorded, or recorded in another form.
    """
    parts: Json = {part: manifest.identity.get(part) for part in CARRIED}
    provenance = Provenance(
        model=manifest.model,
        **parts,
        task_loss=manifest.task_loss,
        probes={
            name: {"settings": probe["settings"], **({"notes": probe["notes"]} if "notes" in probe else {})}
            for name, probe in manifest.probes.items()
        },
    )
    return provenance if known is None else provenance.with_model(known)


def _shards(folder: Path, kind: Json) -> list[tuple[Shard, int]]:
    """The shards with their rows; each must be there in its full size."""
    shards = []
    for entry in kind["shards"]:
        shard = shard_named(folder, entry["name"])
        size = shard.path.stat().st_size if shard.path.exists() else None
        if size != entry["bytes"]:
            damage = "is missing" if size is None else f"has {size} bytes, {entry['bytes']} were written"
            raise DamagedShardError(
                f"shard {shard.name} in '{folder}' {damage}. "
                f"Run the same extract again: it redoes this shard and nothing else."
            )
        if entry["rows"]:
            shards.append((shard, entry["rows"]))
    return shards


def _columns(shards: list[tuple[Shard, int]], kind: Json) -> dict[str, Any]:
    return {key: ShardedColumn(shards, key, tuple(value["shape"])) for key, value in kind["columns"].items()}


def _rebuilt(feature: Column, shard: Shard) -> HeadColumn:
    shard.check()
    head = shard.read()
    return HeadColumn(feature, head["weight"], head.get("bias"))
