"""Folds of rows: by image, reproducible, of even size."""

import torch

from dubito.table import Table, concat
from dubito.table.folds import folds_of, images_of


def test_rows_of_one_image_share_their_fold():
    image = torch.arange(23).repeat(4)
    by_position = Table(image_index=image, loss=torch.zeros(92))
    by_name = Table(id=[f"{one:02d}@{place}" for place, one in enumerate(image.tolist())])
    for table in (by_position, by_name):
        fold = folds_of(table, 5, seed=3).view(4, 23)
        assert bool((fold == fold[0]).all())
        assert sorted(fold[0].bincount().tolist()) == [4, 4, 5, 5, 5]
        assert not torch.equal(fold[0], folds_of(table, 5, seed=4)[:23])


def test_without_names_every_row_is_an_image():
    expected = torch.randperm(7, generator=torch.Generator().manual_seed(1)) % 3
    assert torch.equal(folds_of(Table(loss=torch.zeros(7)), 3, seed=1), expected)


def test_positions_start_anew_in_joined_tables():
    parts = [Table(id=[f"{name}{i}@{i}" for i in range(3)], image_index=[0, 1, 2]) for name in "ab"]
    assert images_of(concat(parts)).tolist() == [0, 1, 2, 3, 4, 5]


def test_fewer_images_than_folds():
    assert folds_of(Table(image_index=[7, 7, 9]), 5, seed=0).unique().tolist() == [0, 1]
