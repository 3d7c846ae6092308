"""Images kept apart: R-AUROC and order against references, one row per image, and shares of images."""

import math

import pytest
import torch
from tests.heads.conftest import learnable

from dubito import metrics
from dubito.errors import DubitoError, TableError, ValueRangeError
from dubito.heads import held_out
from dubito.heads.held_out import HeldOut, beside_softmax, split
from dubito.heads.module import HeadModule
from dubito.heads.recipe import Recipe
from dubito.table import Table
from dubito.table.views import concat


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


def test_r_auroc_is_the_metric():
    table, module = learnable(300), HeadModule(8, width=8)
    with torch.no_grad():
        u = module(table.feature)
    result = HeldOut.of(table, Recipe()).measure(module)
    assert result["r_auroc"] == metrics.r_auroc(u, table.feature, table.label)


def test_order_is_the_share_of_pairs():
    table, module = learnable(400), HeadModule(8, width=8)
    with torch.no_grad():
        u = module(table.feature)
    first, second = torch.combinations(torch.arange(400)).T
    right = (u[first] - u[second]) * (table.loss[first] - table.loss[second]) > 0
    # A sample of 3,990 of all pairs: within three standard deviations.
    expected = right.double().mean().item()
    result = HeldOut.of(table, Recipe()).measure(module)["order"]
    assert result == pytest.approx(expected, abs=3 * math.sqrt(0.25 / 3990))


def test_ties_of_u_count_half_and_ties_of_losses_nothing():
    losses = torch.tensor([1.0, 2.0, 2.0])
    assert held_out._order(torch.tensor([0.0, 0.0, 0.0]), losses) == 0.5
    assert held_out._order(torch.tensor([0.0, 1.0, 5.0]), losses) == 1.0
    assert held_out._order(torch.tensor([3.0, 1.0, 0.0]), losses) == 0.0


def test_only_what_can_be_had_is_measured():
    module, table = HeadModule(8, width=8), learnable(100)
    assert HeldOut.of(table.select("feature", "loss"), Recipe()).measure(module).keys() == {"order"}
    assert HeldOut.of(table.select("feature", "label"), Recipe()).measure(module).keys() == {"r_auroc"}
    one_class = table.extended(label=torch.zeros(100, dtype=torch.long))
    assert HeldOut.of(one_class, Recipe()).measure(module).keys() == {"order"}
    expected = table.select("feature", "label").extended(logit=table.feature[:, :3])
    assert HeldOut.of(expected, Recipe()).measure(module).keys() == {"r_auroc"}
    assert HeldOut.of(expected, Recipe(target="expected")).measure(module).keys() == {"r_auroc", "order"}


def test_nothing_to_measure():
    with pytest.raises(TableError) as error:
        HeldOut.of(learnable(20).select("feature"), Recipe())
    assert str(error.value) == (
        "held_out: table in memory has neither labels, some with and some without a neighbour of the same label, nor "
        "losses to rank. Extract it with labels, or train without held-out images."
    )


@pytest.mark.parametrize("rows", [1, 3])
def test_one_image_has_no_order(rows):
    table = Table(feature=torch.randn(rows, 8), label=[0] * rows, loss=torch.rand(rows), image_index=[0] * rows)
    with pytest.raises(TableError) as error:
        HeldOut.of(table, Recipe())
    assert str(error.value) == (
        "held_out: an order needs at least two images; table in memory holds 1 out. Hold out more of them (a "
        "larger share, another table), or train without held_out."
    )


def augmented(photos: int = 30, epochs: int = 3) -> Table:
    """Rows as an extraction of augmented epochs has them; the crops of an image lie close together."""
    base = learnable(photos)
    near = 0.01 * torch.randn(photos * epochs, 8, generator=torch.Generator().manual_seed(0))
    return Table(
        feature=base.feature.repeat(epochs, 1) + near,
        label=base.label.repeat(epochs),
        loss=base.loss.repeat(epochs),
        image_index=torch.arange(photos).repeat(epochs),
        epoch=torch.arange(epochs).repeat_interleave(photos),
    )


def test_of_several_epochs_one_row_per_image():
    table = augmented()
    rows = HeldOut.of(table, Recipe())
    assert torch.equal(rows.features, table.feature[:30])
    assert rows.mismatch is not None
    assert torch.equal(rows.mismatch, ~metrics.neighbour_matches(table.feature[:30], table.label[:30]))
    later = table.rows(slice(30, 90))  # epochs 1 and 2
    assert torch.equal(HeldOut.of(later, Recipe()).features, table.feature[30:60])
    assert torch.equal(HeldOut.of(learnable(5), Recipe()).features, learnable(5).feature)


def test_at_most_so_many_rows(monkeypatch):
    monkeypatch.setattr(held_out, "_MOST", 10)
    assert torch.equal(HeldOut.of(learnable(25), Recipe()).features, learnable(25).feature[::3])
    assert len(HeldOut.of(learnable(10), Recipe()).features) == 10


def test_a_digest_knows_every_part():
    table = learnable(30)
    digests = {
        HeldOut.of(one, Recipe()).digest()
        for one in (
            table,
            table.extended(feature=table.feature + 1),
            table.extended(loss=table.loss + 1),
            table.select("feature", "loss"),
            table.select("feature", "label"),
        )
    }
    assert len(digests) == 5
    assert HeldOut.of(learnable(30), Recipe()).digest() in digests


def test_a_share_of_rows():
    table = learnable(100)
    kept, out = split(table, 0.2)
    assert (len(kept), len(out)) == (80, 20)
    rows = torch.cat([kept.feature, out.feature])
    assert torch.equal(rows[rows[:, 0].argsort()], table.feature[table.feature[:, 0].argsort()])
    assert torch.equal(split(table, 0.2)[1].feature, out.feature)
    assert not torch.equal(split(table, 0.2, seed=1)[1].feature, out.feature)


def test_crops_of_one_image_stay_together():
    kept, out = split(augmented(), 0.3)
    assert (len(kept), len(out)) == (63, 27)
    assert not set(kept.whole("image_index").tolist()) & set(out.whole("image_index").tolist())
    assert len(out.whole("image_index").unique()) == 9


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 2.0, math.nan])
def test_shares_without_meaning(share):
    message = rf"^train: held_out must be a number in \(0, 1\); got {share}\. .*0\.1 holds a tenth out"
    with pytest.raises(ValueRangeError, match=message):
        split(learnable(10), share)


@pytest.mark.parametrize(("share", "what"), [(0.01, "hold out"), (0.99, "train on")])
def test_shares_that_leave_nothing(share, what):
    with pytest.raises(DubitoError) as error:
        split(learnable(10), share)
    assert str(error.value) == (
        f"held_out: a share of {share} of the 10 images in table in memory leaves nothing to {what}. "
        f"Pass another share or more images."
    )


def joined_epochs() -> Table:
    """Ten clean images in another order than their two augmented epochs."""
    names = [f"{number}.jpg" for number in range(10)]
    shuffled = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    clean = Table(feature=torch.randn(10, 3), loss=torch.rand(10), id=[names[number] for number in shuffled.tolist()])
    augmented = Table(
        feature=torch.randn(20, 3),
        loss=torch.rand(20),
        id=[f"{name}@{epoch}" for epoch in range(2) for name in names],
        image_index=torch.arange(10).repeat(2),
        epoch=torch.arange(2).repeat_interleave(10),
    )
    return concat([clean, augmented])


def test_a_split_of_joined_tables_parts_images():
    learned, held = split(joined_epochs(), 0.3)
    photos = [{str(name).partition("@")[0] for name in table.id} for table in (learned, held)]
    assert not photos[0] & photos[1]
    assert [len(names) for names in photos] == [7, 3]
    assert (len(learned), len(held)) == (21, 9)


def test_joined_tables_show_every_image_once():
    table = joined_epochs()
    assert torch.equal(HeldOut.of(table, Recipe()).features, table.feature[:10])  # the clean ones, which come first


def with_logits(n: int = 300) -> Table:
    """Logits that are right most of the time, and flatter where they are wrong."""
    table, draw = learnable(n), torch.Generator().manual_seed(1)
    wrong = torch.rand(n, generator=draw) < 0.25
    predicted = torch.where(wrong, (table.label + 1) % 4, table.label)
    logit = torch.where(wrong, 1.0, 3.0)[:, None] * torch.eye(4)[predicted] + torch.randn(n, 4, generator=draw) / 4
    return table.extended(logit=logit)


def test_a_head_stands_beside_softmax_scores_on_the_same_rows():
    table = with_logits()
    result = beside_softmax(lambda z: z[:, 0], table)
    assert set(result) == {"r_auroc", "error_auroc"}
    entropy = torch.distributions.Categorical(logits=table.logit.double()).entropy()
    top = table.logit.double().softmax(1).amax(1)
    u = {"head": table.feature[:, 0], "max_probability": -top, "entropy": entropy}
    wrong = table.logit.argmax(1) != table.label
    for name, values in u.items():
        assert result["error_auroc"][name].value.value == pytest.approx(metrics.auroc(values, wrong), abs=1e-12)
        expected = metrics.r_auroc(values, table.feature, table.label)
        assert result["r_auroc"][name].value.value == pytest.approx(expected, abs=1e-12)
    assert result["error_auroc"]["head"].gap_to_best.surely


def test_what_cannot_be_compared_is_left_out():
    table = with_logits()
    assert beside_softmax(lambda z: z[:, 0], table.select("feature", "label")) == {}
    assert beside_softmax(lambda z: z[:, 0], table.select("feature", "logit")) == {}
    right = table.extended(label=table.logit.argmax(1))
    assert set(beside_softmax(lambda z: z[:, 0], right)) == {"r_auroc"}  # no errors to be found
    own = Table(feature=table.feature, logit=table.logit, label=table.label, label_space="own")
    assert set(beside_softmax(lambda z: z[:, 0], own)) == {"r_auroc"}
