"""Images from folders, files, archives, tables, arrays and data sets, each read as the same simple contract."""

from dubito.data.archives import ArchiveImages
from dubito.data.arrays import ArrayImages
from dubito.data.augment import Augment, Augmented
from dubito.data.corruptions import CORRUPTIONS, STAND_INS, Corrupted, CorruptedCopies, corrupt
from dubito.data.dataset import DatasetImages
from dubito.data.files import FileImages
from dubito.data.image_set import Labelled, Subset
from dubito.data.open import open_images
from dubito.data.parquet import ParquetImages
from dubito.data.tars import TarImages

__all__ = [
    "CORRUPTIONS",
    "STAND_INS",
    "ArchiveImages",
    "ArrayImages",
    "Augment",
    "Augmented",
    "Corrupted",
    "CorruptedCopies",
    "DatasetImages",
    "FileImages",
    "Labelled",
    "ParquetImages",
    "Subset",
    "TarImages",
    "corrupt",
    "open_images",
]
