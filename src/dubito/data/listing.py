"""Image files listed in a CSV: one column of paths, and perhaps one of labels."""

from pathlib import Path

from dubito.data.csv_table import read_csv
from dubito.data.files import FileImages
from dubito.data.image_set import some
from dubito.data.labels import to_labels
from dubito.errors import ImagesError


def open_listing(path: Path) -> FileImages:
    """The image files that a CSV lists, in its order.

    Paths stand in the column path, file, filename, image or id, else in the first; they are relative to the CSV's
    folder. Labels stand in the column label, else in the other one of two columns; else the set has no labels.
    """
    table = read_csv(path)
    ids = [Path(cell).as_posix() for cell in table.column(table.paths)]
    root = path.parent
    missing = [key for key in ids if not (root / key).is_file()]
    if missing:
        raise ImagesError(
            f"CSV file '{path}' must list files that are there; {len(missing)} of {len(ids)} in column "
            f"'{table.header[table.paths]}' are not: {some(missing)}. Paths are relative to '{root}'; "
            f"if the CSV only labels images that are elsewhere, open those and give it as labels=."
        )
    if table.label is None:
        return FileImages(root, ids, name=str(path))
    labels, classes = to_labels(table.column(table.label), f"column '{table.header[table.label]}' of '{path}'")
    return FileImages(root, ids, labels, classes, name=str(path))
