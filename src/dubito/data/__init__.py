"""Images from folders, files, archives, arrays and data sets, each read as the same simple contract."""

from dubito.data.archive import ArchiveImages
from dubito.data.arrays import ArrayImages
from dubito.data.augment import Augment
from dubito.data.augmented import Augmented
from dubito.data.dataset import DatasetImages
from dubito.data.files import FileImages
from dubito.data.open import open_images
from dubito.data.views import Labelled, Subset

__all__ = [
    "ArchiveImages",
    "ArrayImages",
    "Augment",
    "Augmented",
    "DatasetImages",
    "FileImages",
    "Labelled",
    "Subset",
    "open_images",
]
