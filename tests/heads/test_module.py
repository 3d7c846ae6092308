"""The head's network: its formula by hand and by an independent build, its seeds, zero weights, the class start."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.heads.conftest import train_head
from torch import nn
from torch.nn.functional import leaky_relu, softplus

from dubito.errors import MissingColumnError, TableError, ValueRangeError
from dubito.heads import HeadModule, l2_loss, ranking_loss
from dubito.heads import module as module_file
from dubito.heads.module import start_at_classes
from dubito.heads.recipe import Recipe
from dubito.metrics import auroc
from dubito.table import Table


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


def test_one_hidden_layer_by_hand():
    head = HeadModule(2, width=2, depth=1)
    with torch.no_grad():
        head.layers[0].weight.copy_(torch.tensor([[1.0, 2.0], [-1.0, 0.5]]))
        head.layers[0].bias.copy_(torch.tensor([0.5, -1.0]))
        head.layers[2].weight.copy_(torch.tensor([[0.2, 3.0]]))
        head.layers[2].bias.copy_(torch.tensor([0.1]))
    # z = (1, 2): hidden 1 + 4 + 0.5 = 5.5 and -1 + 1 - 1 = -1, which LeakyReLU(0.01) makes 5.5 and -0.01
    # out: 0.2 * 5.5 + 3 * -0.01 + 0.1 = 1.17; softplus log(1 + e^1.17) + 1e-6
    expected = math.log(1 + math.exp(1.17)) + 1e-6
    assert head(torch.tensor([[1.0, 2.0]])).item() == pytest.approx(expected, rel=1e-6)


def test_the_default_is_that_of_appendix_a():
    head = HeadModule(7)
    kinds = [type(layer) for layer in head.layers]
    assert kinds == [nn.Linear, nn.LeakyReLU, nn.Linear, nn.LeakyReLU, nn.Linear, nn.Softplus]
    assert [tuple(p.shape) for p in head.parameters()] == [(512, 7), (512,), (512, 512), (512,), (1, 512), (1,)]
    assert {layer.negative_slope for layer in head.layers if isinstance(layer, nn.LeakyReLU)} == {0.01}


@settings(max_examples=25, deadline=None)
@given(features=st.integers(1, 9), width=st.integers(1, 12), depth=st.integers(0, 4), seed=st.integers(0, 2**32 - 1))
def test_against_numpy(features, width, depth, seed):
    head = HeadModule(features, width=width, depth=depth, seed=seed).double()
    z = np.random.default_rng(seed).normal(size=(5, features))
    weights = [p.detach().numpy() for p in head.parameters()]
    assert len(weights) == 2 * (depth + 1)
    a = z
    for k in range(depth + 1):
        a = a @ weights[2 * k].T + weights[2 * k + 1]
        a = np.where(a > 0, a, 0.01 * a) if k < depth else np.logaddexp(0, a) + 1e-6
    assert np.allclose(head(torch.from_numpy(z)).detach().numpy(), a[:, 0], rtol=1e-12)


def test_depth_zero_is_linear_before_the_softplus():
    head = HeadModule(3, depth=0, seed=5).double()
    z = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def logit(x):  # softplus backwards
        return torch.expm1(head(x) - 1e-6).log()

    assert torch.allclose(logit(z.mean(0)), logit(z).mean())
    deep = HeadModule(3, depth=1, seed=5).double()
    assert not torch.allclose(torch.expm1(deep(z.mean(0)) - 1e-6).log(), torch.expm1(deep(z) - 1e-6).log().mean())


@pytest.mark.parametrize("shape", [(6,), (1, 6), (4, 6), (2, 3, 6), (0, 6)])
def test_one_number_a_row_for_any_leading_axes(shape):
    head = HeadModule(6, width=4)
    z = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    u = head(z)
    assert u.shape == shape[:-1]
    assert torch.allclose(u.flatten(), torch.stack([head(row) for row in z.reshape(-1, 6)]) if z.numel() else u)


def test_u_stays_positive_where_softplus_underflows():
    head = HeadModule(1, depth=0)
    nn.init.constant_(head.layers[0].weight, -1000.0)
    # softplus(-1000) is 0 in float32; what remains is the constant
    assert head(torch.ones(1, 1)).item() == pytest.approx(1e-6, rel=1e-6)


def test_a_seed_is_a_head_and_the_global_stream_goes_on_undisturbed():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first = HeadModule(4, width=8, seed=1)
    assert torch.equal(torch.rand(3), expected)
    again, other = HeadModule(4, width=8, seed=1), HeadModule(4, width=8, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_default_weights_are_torch_s_own():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        reference = nn.Sequential(nn.Linear(5, 8), nn.LeakyReLU(0.01), nn.Linear(8, 1), nn.Softplus())
    head = HeadModule(5, width=8, depth=1, seed=3)
    z = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head(z), reference(z)[:, 0] + 1e-6)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_zero_init_has_no_gradient_but_at_the_last_bias(depth):
    head = HeadModule(3, width=4, depth=depth, init="zero")
    z = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head(z), torch.full((4,), F.softplus(torch.zeros(1)).item() + 1e-6))  # log 2
    l2_loss(head(z), torch.tensor([0.1, 1.0, 2.0, 5.0])).backward()
    *rest, bias = head.parameters()
    assert all(bool((p.grad == 0).all()) for p in rest)
    # u = log 2 everywhere, the mean loss is 2.025; du/db = sigmoid(0) = 1/2: 2 (0.693148 - 2.025) / 2
    assert bias.grad.item() == pytest.approx(math.log(2) + 1e-6 - 2.025, rel=1e-5)


@pytest.mark.parametrize("init", ["zero", "default"])
def test_zero_init_never_leaves_a_constant_function(init):
    head = HeadModule(2, width=8, depth=2, init=init)
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(64, 2, generator=draw)
    losses = z[:, 0].exp()
    step = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(40):
        step.zero_grad()
        (ranking_loss(head(z), losses) + l2_loss(head(z), losses)).backward()
        step.step()
    u = head(z).detach()
    assert (len(u.unique()) == 1) == (init == "zero")
    if init == "default":
        assert torch.corrcoef(torch.stack([u, losses]))[0, 1] > 0.5


@pytest.mark.parametrize("wrong", [{"features": 0}, {"width": 0}, {"depth": -1}])
def test_sizes_that_are_none(wrong):
    sizes = {"features": 3, "width": 4, "depth": 1} | wrong
    ((name, size),) = wrong.items()
    with pytest.raises(ValueRangeError, match=rf"^head: {name} must be a whole number, at least \d; got {size}\."):
        HeadModule(**sizes)


def test_features_of_another_width_are_refused():
    with pytest.raises(TableError, match=r"features must be 3 wide, .* got 4. Use the head of this model, or train"):
        HeadModule(3)(torch.zeros(2, 4))


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
    other_logits = Table(feature=table.feature, logit=classified(seed=3).logit, loss=table.loss, name="cache/train")
    with pytest.raises(
        TableError,
        match=r"^head\.fit with init='classes': logits must be linear in the features; a linear layer misses those of "
        r"cache/train by (9\d|10\d)% of their deviation\. Pass features and logits of the same layer and model, or use "
        r"init='default'\.$",
    ):
        train_head(other_logits, recipe=Recipe(init="classes"), width=8, depth=1)


@torch.no_grad()
def test_with_no_more_rows_than_features_nobody_can_tell_and_the_head_starts():
    subset = classified(7)  # six features and a bias explain any seven rows
    module = started(Table(feature=subset.feature, logit=classified(7, seed=3).logit, loss=subset.loss), 8)
    assert module(subset.feature).isfinite().all()


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
    monkeypatch.setattr(module_file, "_ROWS", 100)
    monkeypatch.setattr(module_file, "_ROWS_AT_ONCE", 30)
    assert torch.cat(module_file._blocks(70)).sort().values.tolist() == list(range(70))
    blocks = module_file._blocks(1000)
    assert [len(rows) for rows in blocks] == [25] * 4
    assert all(int(rows.min()) < 50 and int(rows.max()) > 950 for rows in blocks)
    many = torch.cat(module_file._blocks(2**25))
    assert int(many.max()) == 2**25 - 1  # beyond what float32 counts exactly


def test_it_learns_more_from_few_images_than_a_random_start():
    subset, unseen = classified(60, d=30, classes=20), classified(1000, d=30, classes=20, seed=5)
    doubtful = unseen.loss > unseen.loss.median()
    result = {
        init: train_head(subset, recipe=Recipe(init=init, lr=3e-4, batch=20, rows=2_000), width=20, depth=1)
        for init in ("classes", "default")
    }
    with torch.no_grad():
        value = {init: auroc(one.head.module(unseen.feature), doubtful) for init, one in result.items()}
    assert value["classes"] > value["default"] + 0.1


def test_a_stopped_training_ends_as_one_that_was_not(tmp_path):
    table, recipe = classified(), Recipe(init="classes", batch=20, rows=400)
    straight = train_head(table, recipe=recipe, width=8, depth=1, folder=tmp_path / "one")
    again = train_head(table, recipe=recipe, width=8, depth=1, folder=tmp_path / "one")
    fresh = train_head(table, recipe=recipe, width=8, depth=1)
    assert (straight.updates, again.updates) == (20, 0)
    for other in (again, fresh):
        pairs = zip(straight.head.module.parameters(), other.head.module.parameters(), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


@torch.no_grad()
def test_one_image_is_enough_to_start():
    one = classified(1)
    u = started(one, 8)(one.feature)
    assert u.isfinite().all()


def test_too_many_classes_to_share_units_are_refused(monkeypatch):
    monkeypatch.setattr(module_file, "_MOST_MERGED", 3)
    with pytest.raises(ValueRangeError, match=r"share units must be a number in \[1, 3\]; got 4\. Use width=4"):
        started(classified(), 2)


def test_a_feature_that_is_no_number_is_an_error():
    table = classified()
    table.feature[7, 1] = float("inf")
    with pytest.raises(ValueRangeError, match=r"head\.fit with init='classes': features of table in memory: 1 of"):
        started(table, 8)


def test_a_logit_that_is_no_number_is_an_error():
    table = classified()
    table.logit[7, 1] = float("nan")
    with pytest.raises(ValueRangeError, match=r"head\.fit with init='classes': logits of table in memory: 1 of"):
        started(table, 8)


@pytest.mark.parametrize("depth", [0, 2])
def test_another_depth_is_refused(depth):
    with pytest.raises(ValueRangeError, match=rf"depth must be 1; got {depth}\. Use depth=1, or init='default'"):
        train_head(classified(), recipe=Recipe(init="classes"), width=8, depth=depth)


def test_without_logits_it_says_what_is_missing():
    table = classified().select("feature", "loss")
    with pytest.raises(MissingColumnError, match="logit"):
        train_head(table, recipe=Recipe(init="classes"), width=8, depth=1)
