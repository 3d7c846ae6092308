"""Which images of a set a page shows, by their names."""

from collections.abc import Sequence

from dubito.errors import TableError
from dubito.types import Images


def match_images(ids: Sequence[str], images: Images, *, by: str) -> dict[int, int]:
    """By place among the ids, which image of the set it is; TableError if none of them is one."""
    row_of = {name: row for row, name in enumerate(images.ids)}
    matched = {place: row_of[name] for place, name in enumerate(ids) if name in row_of}
    if len(ids) and not matched:
        raise TableError(
            f"{by}: ids must be images of {images.name}, such as '{images.ids[0]}'; got '{ids[0]}' and others, none of "
            f"which is. Open the same images."
        )
    return matched
