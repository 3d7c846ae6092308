"""Logits whose calibration is known."""

import torch

from dubito.table import Table


def sample(n=600, c=4, *, seed=0, sharpness=2.0, bias=0.0):
    """Labels are drawn from softmax(z + bias * class); the logits of the table are z * sharpness, over-confident."""
    generator = torch.Generator().manual_seed(seed)
    z = 1.5 * torch.randn(n, c, generator=generator, dtype=torch.float64)
    true = (z + bias * torch.arange(c)).softmax(1)
    label = torch.multinomial(true, 1, generator=generator)[:, 0]
    return Table(logit=sharpness * z, label=label)
