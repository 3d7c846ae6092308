"""What a head is trained on: values by hand, torch's own losses as references, and where each is lowest."""

import itertools

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from dubito.errors import TableError, ValueRangeError
from dubito.heads import l1_loss, l2_loss, log_l2_loss, ranking_loss, variance_nll
from dubito.heads.losses import DIRECT_LOSSES

ALL = {"ranking": ranking_loss, **DIRECT_LOSSES}


def doubles(*values: float, grad: bool = False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def pairs(least: int = 1, most: int = 8):
    """u and losses of an even number of rows."""
    number = st.floats(0.01, 10, allow_subnormal=False)
    return st.integers(least, most).flatmap(
        lambda k: st.tuples(
            st.lists(number, min_size=2 * k, max_size=2 * k), st.lists(number, min_size=2 * k, max_size=2 * k)
        )
    )


def test_ranking_by_hand():
    u, losses = doubles(0.5, 0.2, 0.30, 0.35, 0.1, 0.6), doubles(2, 1, 1, 2, 3, 1)
    # 0.5 above 0.2 as it should be, by more than 0.1:         0
    # 0.35 above 0.30 as it should be, but by 0.05 only:       0.1 - 0.05 = 0.05
    # 0.1 below 0.6 and should be above:                       0.1 + 0.5  = 0.6
    assert ranking_loss(u, losses).item() == pytest.approx(0.65 / 3)


def test_ranking_has_the_corrected_sign():
    """Eq. 3 as printed, max(0, s (u_1 - u_2 + m)), would push the higher loss to the lower u."""
    u, losses = doubles(0.3, 0.3, grad=True), doubles(5, 1)
    ranking_loss(u, losses).backward()
    # one pair: d/du max(0, 0.1 - (u_1 - u_2)) = (-1, 1), so descent raises u_1
    assert u.grad.tolist() == [-1.0, 1.0]
    assert ranking_loss(doubles(0.9, 0.1), losses) < ranking_loss(doubles(0.1, 0.9), losses)


@settings(deadline=None)
@given(pairs(), st.floats(0, 1))
def test_ranking_against_torch(values, margin):
    u, losses = (doubles(*column) for column in values)
    order = (losses[0::2] - losses[1::2]).sign()
    assume(bool((order != 0).all()))  # torch takes 1 and -1 only
    expected = nn.MarginRankingLoss(margin=margin)(u[0::2], u[1::2], order)
    assert ranking_loss(u, losses, margin=margin).item() == pytest.approx(expected.item(), abs=1e-12)


@settings(deadline=None)
@given(pairs(), st.floats(0, 3))
def test_ranking_against_a_loop_with_leeway(values, leeway):
    total = 0.0
    for u1, u2, l1, l2 in zip(values[0][::2], values[0][1::2], values[1][::2], values[1][1::2], strict=True):
        s = 1 if l1 - l2 > leeway else -1 if l2 - l1 > leeway else 0
        total += max(0.0, 0.1 - s * (u1 - u2))
    u, losses = (doubles(*column) for column in values)
    assert ranking_loss(u, losses, leeway=leeway).item() == pytest.approx(2 * total / len(u), abs=1e-12)


@settings(deadline=None)
@given(pairs())
def test_ranking_asks_for_order_only(values):
    u, losses = (doubles(*column) for column in values)
    expected = ranking_loss(u, losses)
    ranks = losses.unique(return_inverse=True)[1].double()
    assert ranking_loss(u, ranks).item() == expected.item()
    assert ranking_loss(u + 5, losses).item() == pytest.approx(expected.item(), abs=1e-12)
    swapped = torch.arange(len(u)).reshape(-1, 2).flip(1).flatten()
    assert ranking_loss(u[swapped], losses[swapped]).item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize(("losses", "leeway"), [((2.0, 2.0), 0.0), ((1.0, 1.5), 0.5), ((1.5, 1.0), 0.5)])
def test_a_pair_without_order_counts_the_margin_and_has_no_gradient(losses, leeway):
    u = doubles(0.9, 0.1, grad=True)
    result = ranking_loss(u, doubles(*losses), leeway=leeway)
    result.backward()
    assert result.item() == pytest.approx(0.1)
    assert u.grad.tolist() == [0.0, 0.0]


def test_leeway_ends_just_above_itself():
    u = doubles(0.1, 0.9)
    assert ranking_loss(u, doubles(1.5, 1.0), leeway=0.5).item() == pytest.approx(0.1)
    assert ranking_loss(u, doubles(1.75, 1.0), leeway=0.5).item() == pytest.approx(0.9)  # 0.1 + 0.8, the wrong order


def test_of_an_odd_number_the_last_row_is_paired_with_the_first():
    u, losses = doubles(0.5, 0.2, 0.4, grad=True), doubles(2, 1, 3)
    result = ranking_loss(u, losses)
    result.backward()
    # (0.5, 0.2) is right: 0; (0.4, 0.5) should be the other way round: 0.1 + 0.1 = 0.2; by two pairs: 0.1
    assert result.item() == pytest.approx(0.1)
    # only the second pair pulls, by half each: the third up, the first down
    assert u.grad.tolist() == [0.5, 0.0, -0.5]


@pytest.mark.parametrize("n", [0, 1])
def test_fewer_than_two_rows_have_no_order(n):
    with pytest.raises(TableError, match=f"at least 2; got {n} and {n}. A single image has no order"):
        ranking_loss(torch.ones(n), torch.ones(n))


def test_a_negative_leeway_is_refused():
    with pytest.raises(
        ValueRangeError, match=r"leeway must be a number, at least 0; got -0.5. With 0, only ties are equal"
    ):
        ranking_loss(torch.ones(2), torch.ones(2), leeway=-0.5)


def test_direct_losses_by_hand():
    u, losses = doubles(1, 2, 4), doubles(3, 2, 1)
    assert l2_loss(u, losses).item() == pytest.approx((4 + 0 + 9) / 3)
    assert l1_loss(u, losses).item() == pytest.approx((2 + 0 + 3) / 3)
    # ln 3 = 1.098612, 0, ln 4 = 1.386294; squares 1.206949 + 0 + 1.921812 = 3.128761 (1e-6 is below what is shown)
    assert log_l2_loss(u, losses).item() == pytest.approx(3.128761 / 3, rel=2e-6)
    # 3/1 + 0, 2/2 + 0.693147, 1/4 + 1.386294: 3 + 1.693147 + 1.636294 = 6.329441
    assert variance_nll(u, losses).item() == pytest.approx(6.329441 / 3, rel=1e-6)


def test_direct_losses_against_torch():
    draw = torch.Generator().manual_seed(0)
    u, losses = (torch.rand(50, generator=draw, dtype=torch.float64) + 0.01 for _ in range(2))
    assert l2_loss(u, losses).item() == pytest.approx(nn.MSELoss()(u, losses).item())
    assert l1_loss(u, losses).item() == pytest.approx(nn.L1Loss()(u, losses).item())
    assert log_l2_loss(u, losses).item() == pytest.approx(nn.MSELoss()(u.log(), (losses + 1e-6).log()).item())
    # a Gaussian of variance u at distance sqrt(L): twice torch's likelihood
    gaussian = nn.GaussianNLLLoss()(losses.sqrt(), torch.zeros_like(u), u)
    assert variance_nll(u, losses).item() == pytest.approx(2 * gaussian.item())


def test_a_loss_of_zero_has_a_logarithm():
    assert log_l2_loss(doubles(1e-6), doubles(0)).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "lowest"),
    [
        ("l2", 2.2),  # the mean of 0.5, 1, 1.5, 2, 6 is 11 / 5
        ("variance_nll", 2.2),  # so it is here
        ("l1", 1.5),  # the median
        ("log_l2", (0.5 * 1 * 1.5 * 2 * 6) ** 0.2),  # the geometric mean
    ],
)
def test_where_a_constant_u_is_lowest(name, lowest):
    losses = doubles(0.5, 1, 1.5, 2, 6)
    grid = torch.linspace(0.3, 7, 6701, dtype=torch.float64)
    result = torch.stack([DIRECT_LOSSES[name](u.expand(5), losses) for u in grid])
    assert grid[result.argmin()].item() == pytest.approx(lowest, abs=1e-3)


@settings(deadline=None)
@given(st.lists(st.floats(0.05, 20), min_size=1, max_size=8), st.floats(0.05, 20))
def test_variance_nll_is_never_below_that_of_the_mean(values, other):
    losses = doubles(*values)
    best = variance_nll(losses.mean().expand(len(losses)), losses)
    assert variance_nll(doubles(other).expand(len(losses)), losses) >= best - 1e-9


@pytest.mark.parametrize("name", ALL)
def test_no_gradient_reaches_the_task_losses(name):
    u, losses = doubles(0.5, 0.4, grad=True), doubles(1, 3, grad=True)
    ALL[name](u, losses).backward()
    assert losses.grad is None
    assert bool((u.grad != 0).all())


@pytest.mark.parametrize("name", ALL)
def test_gradients_against_differences(name):
    u = doubles(0.5, 0.41, 1.3, 0.2, grad=True)
    assert torch.autograd.gradcheck(lambda u: ALL[name](u, doubles(1, 3, 0.7, 2)), u)


@pytest.mark.parametrize("name", DIRECT_LOSSES)
def test_direct_losses_do_not_care_about_the_order_of_rows_or_for_their_number(name):
    u, losses = doubles(0.5, 0.4, 2), doubles(1, 3, 0.2)
    expected = DIRECT_LOSSES[name](u, losses).item()
    for order in itertools.permutations(range(3)):
        assert DIRECT_LOSSES[name](u[list(order)], losses[list(order)]).item() == pytest.approx(expected)
    alone = [DIRECT_LOSSES[name](u[i : i + 1], losses[i : i + 1]).item() for i in range(3)]
    assert sum(alone) / 3 == pytest.approx(expected)
