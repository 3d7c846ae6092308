"""Starting a head at the classes: the classifier is found again from a table; the start is what the formula says."""

import pytest
import torch
from torch.nn.functional import leaky_relu, softplus

from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.heads import class_start
from dubito.heads.class_start import start_at_classes
from dubito.heads.module import HeadModule
from dubito.heads.recipe import Recipe
from dubito.heads.train import train_head
from dubito.metrics import auroc
from dubito.table import Table


def classified(n: int = 300, d: int = 6, classes: int = 4, seed: int = 0) -> Table:
    """Features and the logits of a linear classifier; the loss of an image is its classifier's entropy."""
    draw = torch.Generator().manual_seed(seed)
    weight, bias = _classifier(d, classes)
    feature = torch.randn(n, d, generator=draw)
    logit = feature @ weight.T + bias
    return Table(feature=feature, logit=logit, loss=-(logit.softmax(1) * logit.log_softmax(1)).sum(1))


def _classifier(d: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100)
    return 2 * torch.randn(classes, d, generator=draw), torch.randn(classes, generator=draw)


def started(table: Table, width: int) -> HeadModule:
    module = HeadModule(table.shape("feature")[1], width=width, depth=1, seed=1)
    start_at_classes(module, table)
    return module


@torch.no_grad()
def test_the_first_layer_is_the_classifier_without_its_mean():
    first = started(classified(), 4).layers[0]
    weight, bias = _classifier(6, 4)
    torch.testing.assert_close(first.weight, weight - weight.mean(0), atol=1e-4, rtol=1e-4)
    # All biases are lower by the same threshold.
    torch.testing.assert_close(first.bias - first.bias.mean(), bias - bias.mean(), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_log_probabilities_start_as_their_logits():
    # What softmax takes away is the same for all classes of an image.
    table = classified()
    other = Table(feature=table.feature, logit=table.logit.log_softmax(1), loss=table.loss)
    torch.testing.assert_close(started(other, 8)(table.feature), started(table, 8)(table.feature), atol=1e-4, rtol=1e-4)


def test_logits_of_another_head_are_refused():
    table = classified()
    foreign = Table(feature=table.feature, logit=classified(seed=3).logit, loss=table.loss, name="cache/train")
    with pytest.raises(
        TableError,
        match=r"^head\.fit with init='classes': logits must be linear in the features; a linear layer misses those of "
        r"cache/train by (9\d|10\d)% of their deviation\. Give features and logits of the same layer and model, or use "
        r"init='default'\.$",
    ):
        train_head(foreign, recipe=Recipe(init="classes"), width=8, depth=1)


@torch.no_grad()
def test_with_no_more_rows_than_features_nobody_can_tell_and_the_head_starts():
    few = classified(7)  # six features and a bias explain any seven rows
    module = started(Table(feature=few.feature, logit=classified(7, seed=3).logit, loss=few.loss), 8)
    assert module(few.feature).isfinite().all()


@pytest.mark.parametrize("width", [4, 9])
@torch.no_grad()
def test_the_start_is_the_formula(width):
    table = classified()
    centred = table.logit - table.logit.mean(dim=1, keepdim=True)
    height = centred.flatten().sort(descending=True).values[len(table)]  # as many logits above it as there are rows
    stands_out = leaky_relu(centred - height, 0.01).sum(dim=1)
    expected = softplus(6 - (stands_out - stands_out.mean()) / stands_out.std()) + 1e-6
    torch.testing.assert_close(started(table, width)(table.feature), expected, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_one_class_stands_above_the_threshold_on_average():
    table = classified()
    first = started(table, 4).layers[0]
    assert int((first(table.feature) > 0).sum()) == pytest.approx(len(table), abs=2)


@torch.no_grad()
def test_more_classes_than_units_share_them_with_their_like():
    twice = classified(classes=3)
    doubled = Table(feature=twice.feature, logit=twice.logit.repeat_interleave(2, dim=1), loss=twice.loss)
    rows = started(doubled, 3).layers[0].weight
    weight, _ = _classifier(6, 3)
    weight = weight - weight.mean(0)
    assert torch.cdist(weight, rows).min(dim=1).values.max() < 1e-3


@torch.no_grad()
def test_merged_classes_are_centred_again_so_that_an_image_without_features_is_not_sure():
    table = classified(d=20, classes=12)
    first = started(table, 5).layers[0]
    torch.testing.assert_close(first.weight.sum(dim=0), torch.zeros(20), atol=1e-4, rtol=0)


def test_blocks_are_all_rows_or_a_bounded_number_from_everywhere(monkeypatch):
    monkeypatch.setattr(class_start, "_ROWS", 100)
    monkeypatch.setattr(class_start, "_ROWS_AT_ONCE", 30)
    assert torch.cat(class_start._blocks(70)).sort().values.tolist() == list(range(70))
    blocks = class_start._blocks(1000)
    assert [len(rows) for rows in blocks] == [25] * 4
    assert all(int(rows.min()) < 50 and int(rows.max()) > 950 for rows in blocks)
    many = torch.cat(class_start._blocks(2**25))
    assert int(many.max()) == 2**25 - 1  # beyond what float32 counts exactly


def test_it_learns_more_from_few_images_than_a_random_start():
    few, unseen = classified(60, d=30, classes=20), classified(1000, d=30, classes=20, seed=5)
    doubtful = unseen.loss > unseen.loss.median()
    found = {
        init: train_head(few, recipe=Recipe(init=init, lr=3e-4, batch=20, rows=2_000), width=20, depth=1)
        for init in ("classes", "default")
    }
    with torch.no_grad():
        value = {init: auroc(one.module(unseen.feature), doubtful) for init, one in found.items()}
    assert value["classes"] > value["default"] + 0.1


def test_a_stopped_training_ends_as_one_that_was_not(tmp_path):
    table, recipe = classified(), Recipe(init="classes", batch=20, rows=400)
    straight = train_head(table, recipe=recipe, width=8, depth=1, folder=tmp_path / "one")
    again = train_head(table, recipe=recipe, width=8, depth=1, folder=tmp_path / "one")
    fresh = train_head(table, recipe=recipe, width=8, depth=1)
    assert again.went_on_from == again.steps
    for other in (again, fresh):
        pairs = zip(straight.module.parameters(), other.module.parameters(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@torch.no_grad()
def test_one_image_is_enough_to_start():
    one = classified(1)
    u = started(one, 8)(one.feature)
    assert u.isfinite().all()


def test_too_many_classes_to_share_units_are_refused(monkeypatch):
    monkeypatch.setattr(class_start, "_MOST_MERGED", 3)
    with pytest.raises(ValueRangeError, match=r"at most 3 classes share units; got 4 for a width of 2\. Use width=4"):
        started(classified(), 2)


def test_a_feature_that_is_no_number_is_an_error():
    table = classified()
    table.feature[7, 1] = float("inf")
    with pytest.raises(ValueRangeError, match=r"head\.fit: features of table in memory: 1 of"):
        started(table, 8)


def test_a_logit_that_is_no_number_is_an_error():
    table = classified()
    table.logit[7, 1] = float("nan")
    with pytest.raises(ValueRangeError, match=r"head\.fit: logits of table in memory: 1 of"):
        started(table, 8)


@pytest.mark.parametrize("depth", [0, 2])
def test_another_depth_is_refused(depth):
    with pytest.raises(ValueRangeError, match=rf"depth must be 1; got {depth}\. Use depth=1, or init='default'"):
        train_head(classified(), recipe=Recipe(init="classes"), width=8, depth=depth)


def test_without_logits_it_says_what_is_missing():
    table = classified().select("feature", "loss")
    with pytest.raises(MissingColumnError, match="logit"):
        train_head(table, recipe=Recipe(init="classes"), width=8, depth=1)
