"""Arrays in an .npz file as a table, for whoever has logits or features from elsewhere: commands take it as a cache.

Keys are columns: `logit` (n, c), `feature` (n, d), `label` (n), `id` (n) and others with one row per image; `classes`
are the names of the classes. Without ids, images are named by their positions. Pickled objects are never loaded.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.lib.npyio import NpzFile

from dubito.errors import CacheError
from dubito.storage import Place, reading
from dubito.table import Table
from dubito.table.table import usual_name

_REPAIR = "Write plain arrays with numpy.savez(path, logit=..., feature=..., label=...)."
_PIXELS = ("images", "inputs")
"""How keys end that hold images."""


def is_npz(place: Place) -> bool:
    """Whether a place is an .npz file."""
    return place.name.lower().endswith(".npz") and not place.is_dir()


def holds_columns(path: Place) -> bool:
    """Whether an .npz file holds columns of a table, rather than images."""
    with _opened(path) as file:
        return not any(key.endswith(_PIXELS) for key in file.files)


def open_npz_table(path: Place) -> Table:
    """The table of an .npz file, in memory."""
    with _opened(path) as file:
        columns = {key: file[key] for key in file.files}
    if misspelt := next((key for key in columns if usual_name(key) not in (None, *columns)), None):
        raise CacheError(f"'{path}': the array '{misspelt}' must be called '{usual_name(misspelt)}'. Rename it.")
    if not columns.keys() & {"logit", "feature"}:
        images = f"Run a model over images first: dubito.extract(model, '{path}', to='cache')."
        repair = images if any(key.endswith(_PIXELS) for key in columns) else _REPAIR
        raise CacheError(f"'{path}' must hold arrays logit or feature; it has {', '.join(columns) or 'none'}. {repair}")
    classes = columns.pop("classes", None)
    if classes is not None and "logit" in columns and len(classes) != columns["logit"].shape[-1]:
        raise CacheError(
            f"'{path}': classes must be one name per logit; got {len(classes)} for logits of shape "
            f"{columns['logit'].shape}. Put them in the order of the logits, or leave them out."
        )
    names = None if classes is None else classes.astype(str).tolist()
    columns.setdefault("id", np.array([f"{row:06d}" for row in range(len(next(iter(columns.values()))))]))
    return Table(name=str(path), classes=names).with_only(columns)


@contextmanager
def _opened(path: Place) -> Iterator[NpzFile]:
    with reading(f"'{path}'", _REPAIR, error=CacheError), path.open("rb") as stream:
        yield NpzFile(stream, allow_pickle=False)
