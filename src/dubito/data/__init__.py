"""Images from folders, files, archives, arrays and data sets, each read as the same simple contract."""

from dubito.data.arrays import ArrayImages
from dubito.data.augment import Augment, Augmented
from dubito.data.files import FileImages
from dubito.data.image_set import Labelled, Subset
from dubito.data.open import open_images

__all__ = ["ArrayImages", "Augment", "Augmented", "FileImages", "Labelled", "Subset", "open_images"]
