"""A table with tiles whose members disagree on hard images."""

import torch

from dubito.evaluate.rejection_result import UNCERTAINTIES
from dubito.metrics import MemberStream
from dubito.table import Table

C = 6
QUICK = {"resamples": 40}
ALL = tuple(name for name in UNCERTAINTIES if name != "entropy")


def data(n: int = 120, seed: int = 0, grids: tuple[int, ...] = (2, 3), keep: bool = True, **more) -> Table:
    """Labelled images with tiles whose members disagree on hard ones."""
    draw = torch.Generator().manual_seed(seed)
    label = torch.randint(C, (n,), generator=draw)
    hard = torch.rand(n, 1, generator=draw)
    logit = 3 * torch.eye(C)[label] * (1 - hard) + torch.randn(n, C, generator=draw)
    columns = {}
    for k in grids:
        members = logit[:, None] + 2 * hard[:, None] * torch.randn(n, k * k, C, generator=draw)
        stream = MemberStream()
        stream.add(members)
        columns |= {f"tiles_{k}": stream.summary().float(), f"tiles_{k}_loss": stream.loss(label).float()}
        columns |= {f"tiles_{k}_logit": members} if keep else {}
    ids = [f"{seed}/{row}" for row in range(n)]
    columns |= {"logit": 1.5 * logit, "label": label, "id": ids, **more}
    return Table(name=f"set {seed}", **columns)
