"""One way in for every source of images: `open_images`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int
from PIL import Image
from torch import Tensor
from torch.utils.data import IterableDataset

from dubito.choices import nearest
from dubito.data.archives import ArchiveImages
from dubito.data.arrays import ArrayImages, open_npz
from dubito.data.dataset import DatasetImages
from dubito.data.files import SUFFIXES, FileImages, files_below, is_image, listed_ids, open_folder
from dubito.data.frames import is_hugging_face, is_saved, open_frame, open_hugging_face, open_saved
from dubito.data.image_set import ImageSet, some
from dubito.data.labels import Labels, is_frame, is_series, read_csv, to_labels, with_labels
from dubito.data.parquet import PARQUETS, open_parquet
from dubito.data.streams import is_stream, open_streaming
from dubito.data.tars import TARS, TarImages
from dubito.errors import ImagesError
from dubito.storage.locations import Place, RemotePath, expand, is_pattern, is_web, join, names_of, to_place
from dubito.types import Images

_ACCEPTED = (
    "a folder, an image, a URL, a .csv, .tsv, .zip, .tar, .parquet or .npz file, a list of paths, an array, a tensor, "
    "a DataFrame, a Hugging Face data set, or a torch Dataset with a length"
)
_SHARDS: dict[tuple[str, ...], Callable[..., Images]] = {TARS: TarImages, PARQUETS: open_parquet}
"""By the endings of files that make up a set together, what opens them."""


def open_images(source: Any, labels: Labels | None = None) -> Images:
    """An ordered set of images from wherever they are.

    Args:
        source: One of

            - a folder of images, flat or with one sub-folder per class;
            - one image: its file, its URL, or a Pillow image;
            - a list of paths and URLs, or of pairs (path, label);
            - a .csv or .tsv of paths and labels, a .zip or .tar of images, a .parquet of images or paths, an .npz of
              arrays ("file.npz#test" is one part);
            - tar shards, as WebDataset writes them, or .parquet files: a folder of them, a list, or a pattern such as
              "train-{0000..0099}.tar" or "data/*.parquet";
            - the address of any of these, such as "s3://bucket/photos", if fsspec has a file system for it;
            - a DataFrame of pandas or polars, or a Hugging Face data set, also a streaming one or the folder that one
              was saved in, with a column of paths or images and perhaps one of labels;
            - a uint8 array or tensor (n,h,w,3) or (n,h,w) of pixels, or a float one (n,...) of model inputs;
            - a map-style torch Dataset, or another sequence of images;
            - anything that fulfils `Images` already, which is returned as it is.
        labels: Labels for the images instead of the source's own: a CSV file, a DataFrame, a mapping from id, file name
            or stem to label, or one label per image in order. Labels are class indices or class names.

    Raises:
        ImagesError: There is no such place, it holds no images, or labels do not match.

    >>> images = open_images(np.zeros((2, 8, 8, 3), np.uint8), labels=["dog", "cat"])
    >>> len(images), images.labels.tolist(), images.classes
    (2, [1, 0], ('cat', 'dog'))
    """
    images = _open(source)
    return images if labels is None else with_labels(images, labels)


def one_or_many(source: Any) -> tuple[Images, bool]:
    """Whatever `open_images` takes, and also a single array (h,w,3) or input (3,h,w); and whether it is one image."""
    if isinstance(source, (str, Path)):
        place = to_place(source)
        one = is_image(str(source)) or (is_web(place) and not _opener(str(source), None))
        several = place.is_dir() if isinstance(place, Path) and place.exists() else is_pattern(str(source))
        return open_images(source), one and not several
    if isinstance(source, (np.ndarray, Tensor)) and not _is_text(source):
        single = _is_one_array(source)
        return open_images(source[None] if single else source), single
    return open_images(source), isinstance(source, Image.Image)


def open_csv(path: Place) -> FileImages:
    """The image files that a CSV lists, in its order, by paths relative to its folder, or by URL.

    Columns are found by their names: see `path_column` and `label_column` in `labels.py`.
    """
    table = read_csv(path)
    column, folder = table.label, path.parent
    repair = (
        f"Paths are relative to '{folder}'; "
        f"if the CSV only labels images that are elsewhere, open those and pass it as labels=."
    )
    what = f"column '{table.header[table.paths]}' of {table.name}"
    ids = listed_ids(folder, table.column(table.paths), what, repair)
    labels = () if column is None else to_labels(table.column(column), f"column '{table.header[column]}' of '{path}'")
    return FileImages(folder, ids, *labels, name=str(path))


def _open(source: Any) -> Images:
    if is_series(source) or _is_text(source):
        source = source.to_list() if is_series(source) else source.tolist()
    for fits, opener in _OPENERS.items():
        if fits(source) and (images := opener(source)) is not None:
            return images
    if isinstance(source, IterableDataset):
        raise ImagesError(
            f"images must be readable in any order; got {type(source).__name__}, an IterableDataset, which is read "
            f"from front to back only. Pass a map-style Dataset, or list(dataset) if it fits in memory."
        )
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, (dict, bytes)):
        return DatasetImages(source)
    got = f"got {type(source).__name__}. Pass one of those (of a DataLoader, its dataset)."
    raise ImagesError(f"images must come from {_ACCEPTED}; {got}")


def _open_files(source: Sequence[Any]) -> Images | None:
    """The files of a list of paths and URLs, or of pairs (path, label); None for a list of anything else."""
    pairs = all(isinstance(one, tuple) and len(one) == 2 for one in source)
    paths = [one[0] for one in source] if pairs else source
    if not source or not all(isinstance(path, (str, Path)) for path in paths):
        return None
    labels = to_labels([label for _, label in source], "labels of a list of files") if pairs else ()
    return _open_list(list(map(str, paths)), *labels)


def _open_list(
    paths: Sequence[str],
    labels: Int[Tensor, "n"] | None = None,
    classes: Sequence[str] | None = None,
    *,
    name: str = "a list of files",
) -> Images:
    if labels is None and (images := _open_shards([to_place(path) for path in paths], name)) is not None:
        return images
    ids = listed_ids(Path(), paths, name, "Relative paths start where you are.")
    return FileImages(Path(), ids, labels, classes, name=name)


def _open_shards(places: Sequence[Place], name: str) -> Images | None:
    """Tar or Parquet files as one set; None for other files."""
    for endings, opener in _SHARDS.items():
        if all(str(place).lower().endswith(endings) for place in places):
            return opener(*places, shards=names_of(places), name=name)
    return None


def _open_folder(folder: Place) -> Images:
    """The images in a folder, or, where it has none, those in its tar or Parquet files, or a saved data set's."""
    paths = files_below(folder)
    if not any(map(is_image, paths)):
        if is_saved(paths):
            return open_saved(folder)
        for endings in _SHARDS:
            shards = [join(folder, path) for path in paths if path.lower().endswith(endings)]
            if shards and (images := _open_shards(shards, str(folder))) is not None:
                return images
    return open_folder(folder, paths)


def _open_path(source: str) -> Images:
    if not source.strip():
        raise ImagesError("images must be a folder or file; got an empty text. Pass its path.")
    place = to_place(source)
    if is_pattern(source) and not (isinstance(place, Path) and place.exists()):
        return _open_list(expand(source), name=source)
    return _open_file(place, source) if isinstance(place, Path) else _open_url(source)


def _open_file(path: Path, source: str) -> Images:
    part = None
    if not path.exists() and ".npz#" in source:
        before, part = source.rsplit("#", 1)
        path = Path(before).expanduser()
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        there = next(folder for folder in path.parents if folder.is_dir())
        missing = path.relative_to(there).parts[0]
        near = nearest(missing, [entry.name for entry in there.iterdir()], cutoff=0.6, or_first=False)
        likely = some([str(there / name) for name in near])
        hint = f"Did you mean {likely}?" if near else f"Look in '{there.resolve()}'."
        raise ImagesError(f"images must be an existing folder or file; '{path}' does not exist. {hint}")
    if is_image(path.name):
        return FileImages(path.parent, [path.name], name=source)
    if opener := _opener(path.name, part):
        if not path.is_file():
            raise ImagesError(f"images must come from a regular file; '{path}' is a pipe or device. Copy it to a file.")
        return opener(path)
    raise ImagesError(
        f"images must come from {_ACCEPTED}; got '{path}'. "
        f"Image files end in {' '.join(SUFFIXES)}; put others into one of those."
    )


def _open_url(url: str) -> Images:
    before, _, part = url.rpartition("#") if ".npz#" in url else (url, "", None)
    if opener := _opener(before, part):
        return opener(RemotePath(before))
    return FileImages(Path(), [url], name=url) if is_web(url) or is_image(url) else _open_folder(RemotePath(url))


def _opener(name: str, part: str | None) -> Callable[[Any], Images] | None:
    """What opens a file that holds or lists images, by its ending."""
    openers: dict[str, Callable[[Any], Images]] = {
        ".npz": lambda file: open_npz(file, part),
        ".csv": open_csv,
        ".tsv": open_csv,
        ".zip": ArchiveImages,
        **dict.fromkeys(TARS, TarImages),
        **dict.fromkeys(PARQUETS, open_parquet),
    }
    return next((opener for ending, opener in openers.items() if name.lower().endswith(ending)), None)


def _is_float(array: Any) -> bool:
    return array.is_floating_point() if isinstance(array, Tensor) else array.dtype.kind == "f"


def _is_text(source: Any) -> bool:
    """Whether an array holds texts, which are paths."""
    return isinstance(source, np.ndarray) and source.dtype.kind in "UO"


def _is_one_array(array: Any) -> bool:
    """Whether pixels or an input are those of one image."""
    if _is_float(array):
        return bool(array.ndim == 3)  # an input, channels first
    if array.ndim == 3 and array.shape[0] == 3 != array.shape[-1]:
        raise ImagesError(
            f"pixels of shape {tuple(array.shape)} may be one picture with channels first, or three grey ones. "
            f"Give the one as (h, w, 3), channels last; the three as a list."
        )
    # One or four channels are no stack of narrow grey pictures; `open_images` says what to do with them.
    return array.ndim == 2 or (array.ndim == 3 and array.shape[-1] in (1, 3, 4))


def _open_array(source: Any) -> ArrayImages:
    return ArrayImages(inputs=source) if _is_float(source) else ArrayImages(images=source)


def _instance_of(*kinds: Any) -> Callable[[Any], bool]:
    return lambda source: isinstance(source, kinds)


_OPENERS: dict[Callable[[Any], bool], Callable[[Any], Images | None]] = {
    _instance_of(str, Path): lambda source: _open_path(str(source)),
    _instance_of(ImageSet, Images): lambda source: source,
    is_frame: open_frame,
    is_stream: open_streaming,
    is_hugging_face: open_hugging_face,
    _instance_of(np.ndarray, Tensor): _open_array,
    _instance_of(Image.Image): lambda source: DatasetImages([source], name="a picture"),
    _instance_of(list, tuple): _open_files,
}
"""By what a source may be, what opens it, or returns None to pass it on."""
