"""Probes on one batch: one owner per column, and the one limit between rounding and a random answer."""

import pytest
import torch
from torch import nn

import dubito
from dubito.cache.probe_runner import ProbeRunner, is_random, logit_change
from dubito.cache.runner import predict_table
from dubito.errors import TableError


class Copy:
    """Writes a column that another probe writes."""

    name, price = "copy", "nothing"

    def run(self, model, x, label):
        return {"logit": torch.zeros(len(x))}

    def settings(self):
        return {}


def test_probes_must_not_write_the_same_column():
    model, x = dubito.wrap(nn.Sequential(nn.Flatten(), nn.Linear(12, 3))), torch.zeros(2, 3, 2, 2)
    with pytest.raises(TableError, match="probe copy writes column 'logit', which forward writes already"):
        predict_table(model, dubito.open_images(x), [Copy()])
    with pytest.raises(TableError, match="probe copy writes column 'logit', which older writes already"):
        ProbeRunner(model, {"copy": Copy()}, {"logit": "older"}).run(x, ["a", "b"])


@pytest.mark.parametrize(
    ("dtype", "step", "random"),
    [
        (torch.float64, 0.0018, False),
        (torch.float64, 0.0022, True),
        (torch.float32, 0.0018, False),
        (torch.float32, 0.0022, True),
        (torch.bfloat16, 1 / 64, False),  # one step of bfloat16 at 2 is 1 / 64
        (torch.bfloat16, 2 / 64, True),
    ],
)
def test_an_answer_is_random_where_rounding_cannot_explain_its_change(dtype, step, random):
    before = torch.tensor([[0.0, 2.0]], dtype=dtype)
    after = before + torch.tensor([[0.0, step]], dtype=dtype)
    # The mean of (0, step) is step / 2; the standard deviation of (0, 2) around 1 is 1.
    assert logit_change(before, after) == pytest.approx(step / 2, rel=1e-3)
    assert is_random(before, after) is random
