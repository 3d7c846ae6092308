"""Mahalanobis over several layers: by single layers, and what the combination guarantees."""

import pytest
import torch

from dubito.errors import TableError, ValueRangeError
from dubito.metrics import auroc
from dubito.scores import LayerMahalanobis, MahalanobisPP
from dubito.scores._features import held_out
from dubito.table import Provenance, Table

WIDTHS = (3, 5)


def table(n: int = 300, seed: int = 0, move: tuple[float, float] = (0.0, 0.0), **known) -> Table:
    """Two layers, the second ten times as large as the first; moved: an axis that no class uses."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(2, (n,), generator=generator)
    parts = [
        scale
        * (2 * torch.eye(2, width)[label] + torch.randn(n, width, generator=generator) + shift * torch.eye(width)[-1])
        for width, scale, shift in zip(WIDTHS, (1.0, 10.0), move, strict=True)
    ]
    return Table(layers=torch.cat(parts, dim=1), label=label, **known)


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_by_the_distances_of_single_layers(power):
    train, rows = table(), table(40, seed=1)
    out = held_out(train, 0, "here")
    standardised = []
    for part in (slice(0, 3), slice(3, 8)):
        one = Table(feature=train.whole("layers")[:, part], label=train.label)
        single = MahalanobisPP(power, regularisation=0.01).fit(one.rows(~out))
        held = single.score(one.rows(out))
        u = single.score(Table(feature=rows.whole("layers")[:, part]))
        standardised.append((u - held.mean()) / held.std(correction=0))
    both = torch.stack(standardised)
    for combine, expected in (("sum", both.sum(0)), ("max", both.amax(0))):
        score = LayerMahalanobis(combine, power, 0.01, WIDTHS).fit(train)
        assert torch.allclose(score.score(rows), expected, rtol=1e-9)


def test_all_rows_of_an_image_are_held_out_together():
    few = table(20)
    rows = Table(
        layers=few.whole("layers").repeat(5, 1),
        label=few.label.repeat(5),
        id=[f"{image:02d}@{epoch}" for epoch in range(5) for image in range(20)],
    )
    out = held_out(rows, 0, "here").view(5, 20)
    assert bool((out == out[0]).all())
    assert int(out[0].sum()) == 4
    with pytest.raises(TableError, match=r"here: table needs at least 5 images.* has 4"):
        held_out(rows.rows(torch.arange(100) % 20 < 4), 0, "here")
    # Held-out rows whose copies were learned from are too near: then new images would have a value far above zero.
    names = [f"{image:03d}@{epoch}" for epoch in range(9) for image in range(30)]
    wide = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    copies = Table(layers=wide.repeat(9, 1), label=torch.zeros(270, dtype=torch.long), id=names)
    new = Table(layers=torch.randn(200, 20, generator=torch.Generator().manual_seed(1)))
    score = LayerMahalanobis(power=0.0, widths=[20])
    assert score.fit(copies).score(new).mean().abs().item() < 1
    assert score.fit(copies.select("layers", "label")).score(new).mean().item() > 3


def test_every_layer_counts_whatever_its_size():
    rows, truth = table(200, seed=1), torch.arange(400) >= 200
    for move in ((6.0, 0.0), (0.0, 6.0)):
        moved = table(200, seed=2, move=move)
        for combine in ("sum", "max"):
            score = LayerMahalanobis(combine, 0.0, widths=WIDTHS).fit(table())
            assert auroc(torch.cat([score.score(rows), score.score(moved)]), truth) > 0.9


def test_in_distribution_images_are_zero_on_average():
    score = LayerMahalanobis(widths=WIDTHS).fit(table(3000))
    assert score.score(table(3000, seed=1)).mean().abs().item() < 0.2


def test_widths_are_those_that_the_probe_has_recorded():
    probe = {"settings": {}, "notes": {"layers": ["a", "b"], "widths": [3, 5]}}
    recorded = table(provenance=Provenance(probes={"layers": probe}))
    score = LayerMahalanobis().fit(recorded)
    assert score.widths_.tolist() == [3, 5]
    assert torch.equal(
        score.score(table(20, seed=1)), LayerMahalanobis(widths=WIDTHS).fit(table()).score(table(20, seed=1))
    )


def test_what_cannot_be():
    with pytest.raises(
        TableError, match=r"widths of the layers must add up to the 8 columns .* no widths are recorded"
    ):
        LayerMahalanobis().fit(table())
    with pytest.raises(TableError, match=r"got widths \[3, 4\], of sum 7\. Extract with the layers probe, or pass"):
        LayerMahalanobis(widths=(3, 4)).fit(table())
    with pytest.raises(ValueRangeError, match=r"layer_mahalanobis: power must be a number in \[0, 1\]; got -1\.0"):
        LayerMahalanobis(power=-1.0)
    score = LayerMahalanobis(widths=WIDTHS).fit(table())
    with pytest.raises(TableError, match=r"layer_mahalanobis\.score: features must be 8 wide, as in fit; got 7"):
        score.score(Table(layers=torch.ones(2, 7)))
    empty = table()
    empty.whole("layers")[4, :3] = 0
    with pytest.raises(
        ValueRangeError, match=r"layer_mahalanobis\.fit: layer 0: features must be finite and not all zero"
    ):
        LayerMahalanobis(widths=WIDTHS).fit(empty)
