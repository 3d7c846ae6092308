"""Which image each row of a table shows, and folds of rows: all rows of one image are in the same fold.

Several augmented rows of an image are alike. What is fitted on some of them and measured on the others looks better
than it is on new images.
"""

import re

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from dubito.table.table import Table


def images_of(table: Table) -> Int[Tensor, "n"]:
    """Which image each row shows: rows whose ids differ only in the epoch at their end show the same one.

    Positions (`image_index`) start anew in each of several joined tables, so they count only where there are no ids.

    >>> images_of(Table(id=["cat@0", "cat@1", "dog@0"])).tolist()
    [0, 0, 1]
    """
    if "id" in table:
        names = [re.sub(r"@\d+$", "", str(name)) for name in table.id]
        return torch.from_numpy(np.unique(names, return_inverse=True)[1].reshape(-1))
    position: Tensor = table.whole("image_index") if "image_index" in table else torch.arange(len(table))
    return position


def folds_of(table: Table, folds: int, *, seed: int) -> Int64[Tensor, "n"]:
    """The fold of every row, from 0 on; images are drawn at random, into folds of about the same number of images.

    Of fewer images than folds, each is a fold of its own. Ids are held in memory, other columns are not.

    >>> folds_of(Table(image_index=[0, 0, 1, 1, 2, 2]), 3, seed=0).tolist()
    [2, 2, 0, 0, 1, 1]
    """
    images, place = torch.unique(images_of(table), return_inverse=True)
    return (torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)) % folds)[place]
