"""The thumbnails of a map's page: which images have one, and each as an address that holds it."""

from collections.abc import Sequence

import numpy as np

from dubito.errors import BrokenImageError, TableError, ValueRangeError
from dubito.report._thumbnail import picture, thumbnail
from dubito.report.image_map import Map
from dubito.types import Images

SIDE = 96
_QUALITY = 60


def check_thumbnails(thumbnails: int, side: int) -> None:
    """Raise ValueRangeError for a number, or a size, that cannot be."""
    if thumbnails < 0 or side < 8:
        raise ValueRangeError(
            f"write_map_page: thumbnails must not be negative and side at least 8; thumbnails={thumbnails}, "
            f"side={side} came. 2000 and 96 are usual."
        )


def matched(ids: Sequence[str], opened: Images) -> dict[int, int]:
    """By place in the map, which image of the set it is; TableError if none of them is one."""
    row_of = {name: row for row, name in enumerate(opened.ids)}
    found = {place: row_of[name] for place, name in enumerate(ids) if name in row_of}
    if len(ids) and not found:
        raise TableError(
            f"write_map_page: ids of the map must be images of {opened.name}, such as '{opened.ids[0]}'; '{ids[0]}' is "
            f"not, nor any other. Open the same images."
        )
    return found


def pictures_of(found: Map, opened: Images, most: int, *, side: int, seed: int) -> dict[int, str]:
    """By place in the map: half of at most `most` for the most uncertain images, the others drawn at random.

    Images that are not there, or cannot be read, have none.
    """
    row_of = matched(found.ids, opened)
    known = np.array(list(row_of), dtype=np.int64)
    if len(known) > most:
        order = known[np.argsort(-found.u[known], kind="stable")]
        rest = np.random.default_rng(seed).permutation(order[most - most // 2 :])
        known = np.concatenate([order[: most - most // 2], rest[: most // 2]])
    pictures = {}
    for place in known.tolist():
        try:
            image = picture(opened, row_of[place], by="write_map_page")
        except BrokenImageError:
            continue
        pictures[place] = thumbnail(image, side=side, quality=_QUALITY)
    return pictures
