"""Whether labels are classes."""

import pytest
import torch

from dubito.errors import ValueRangeError
from dubito.probes._classes import as_classes


def test_whole_numbers_in_range_are_classes():
    assert as_classes(torch.tensor([0, 2], dtype=torch.int16), 3).tolist() == [0, 2]
    assert as_classes(torch.empty(0, dtype=torch.long), 3).shape == (0,)


@pytest.mark.parametrize(
    "label", [None, torch.tensor([0.0, 1.0]), torch.tensor([True, False]), torch.ones(2, 3, dtype=torch.long)]
)
def test_other_targets_are_none(label):
    assert as_classes(label, 3) is None


@pytest.mark.parametrize("label", [[-1, 0], [0, 3]])
def test_whole_numbers_out_of_range_are_an_error(label):
    with pytest.raises(ValueRangeError, match=r"classes of the members, 0 to 2; got .*\. Give targets"):
        as_classes(torch.tensor(label), 3)
