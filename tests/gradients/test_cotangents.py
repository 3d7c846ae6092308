"""Directions in the space of logits: their mean products are the Fisher matrix, exactly."""

import itertools

import pytest
import torch

from dubito.errors import ModelError, ValueRangeError
from dubito.gradients.plan import check_logits
from dubito.gradients.sweep import LEVEL, Cotangents, bound_factor, normals, signs
from tests.gradients.reference import inputs

C = 5


def fisher(p):
    return torch.diag(p) - torch.outer(p, p)


@pytest.fixture
def cotangents():
    return Cotangents(2 * inputs(3, 1, C).double())


def test_classes_add_up_to_the_fisher_matrix(cotangents):
    """sum_y p_y (e_y - p)(e_y - p)^T = diag(p) - p p^T."""
    total = torch.zeros(3, C, C).double()
    for rank in range(C):
        c = cotangents.towards(cotangents.order[:, rank])
        total += cotangents.probability(cotangents.order[:, rank])[..., None] * c[:, :, None] * c[:, None]
    torch.testing.assert_close(total, torch.stack([fisher(p) for p in cotangents.p]))


@pytest.mark.parametrize("beyond", [0, 2])
def test_signs_are_unbiased_over_all_of_them(cotangents, beyond):
    """The mean over all 2^c signs of c c^T, with the exact part of the likeliest classes, is the Fisher matrix."""
    total = torch.zeros(3, C, C).double()
    for v in itertools.product([-1.0, 1.0], repeat=C):
        c = cotangents.mixture(torch.tensor(v).double(), beyond)
        total += c[:, :, None] * c[:, None] / 2**C
    for rank in range(beyond):
        c = cotangents.towards(cotangents.order[:, rank])
        total += cotangents.probability(cotangents.order[:, rank])[..., None] * c[:, :, None] * c[:, None]
    torch.testing.assert_close(total, torch.stack([fisher(p) for p in cotangents.p]))


@pytest.mark.parametrize("entering", [False, True])
@pytest.mark.parametrize("copies", [1, 3])
def test_the_known_error_is_none_on_average(entering, copies):
    """Over all 2^c signs, of cotangents that are averaged over copies; and as written out for one of them."""
    head = inputs(C, 7, seed=3).double()
    cotangents = Cotangents(2 * inputs(3, copies, C).double(), head)
    mixtures = [cotangents.mixture(torch.tensor(v).double(), 2) for v in itertools.product([-1.0, 1.0], repeat=C)]
    torch.testing.assert_close(cotangents.known_error(mixtures, 2, entering=entering), torch.zeros(3, 1).double())
    w = head if entering else torch.eye(C).double()

    def length(c):
        return (c.view(3, copies, C).mean(1) @ w).square().sum(1, keepdim=True)

    weighed = [cotangents.probability(y) * length(cotangents.towards(y)) for y in cotangents.order.T]
    expected = (length(mixtures[5]) - sum(weighed[2:])) / sum(weighed[:2])
    torch.testing.assert_close(cotangents.known_error(mixtures[5:6], 2, entering=entering), expected)


def test_by_hand():
    cotangents = Cotangents(torch.tensor([[[3.0, 1.0]]]).double().log())  # p = 3/4, 1/4
    assert cotangents.order.tolist() == [[0, 1]]
    torch.testing.assert_close(cotangents.towards(torch.tensor([1])), torch.tensor([[-0.75, 0.75]]).double())
    torch.testing.assert_close(cotangents.from_uniform(), torch.tensor([[0.25, -0.25]]).double())
    # sqrt(3/4) (1/4, -1/4) - sqrt(1/4) (-3/4, 3/4)
    first = 0.75**0.5 * 0.25 + 0.5 * 0.75
    torch.testing.assert_close(
        cotangents.mixture(torch.tensor([1.0, -1.0]).double()), torch.tensor([[first, -first]]).double()
    )


def test_certain_rows_keep_their_digits():
    """1 - p_y is 2e-35 here, which has no digits beside one."""
    cotangents = Cotangents(torch.tensor([[[80.0, 0.0, 0.0]]]).double())
    tiny = 2 * torch.tensor(-80.0).double().exp()
    c = cotangents.towards(cotangents.order[:, 0])
    torch.testing.assert_close(c[0, 0], tiny, rtol=1e-6, atol=0)
    torch.testing.assert_close(c.sum(), torch.zeros(()).double(), rtol=0, atol=1e-50)
    mixed = cotangents.mixture(torch.tensor([1.0, -1.0, 1.0]).double())
    w = cotangents.p.sqrt()[0] * torch.tensor([1.0, -1.0, 1.0])
    expected = w[0] * tiny - cotangents.p[0, 0] * (w[1] + w[2])
    torch.testing.assert_close(mixed[0, 0], expected, rtol=1e-6, atol=0)


def test_copies_are_differentiated_where_they_are_and_weighed_by_the_image():
    logits = inputs(2, 3, C).double()
    cotangents, p = Cotangents(logits), logits.softmax(2)
    torch.testing.assert_close(cotangents.p, p[:, 0])
    y = cotangents.order[:, 1]
    eye = torch.eye(C).double()
    expected = torch.stack([eye[y[n]] - p[n, r] for n in range(2) for r in range(3)])
    torch.testing.assert_close(cotangents.towards(y), expected)
    v = signs(1, C, 0)[0]
    mixed = sum(
        (v[k] * p[:, :1, k].sqrt())[..., None] * (eye[k] - p) for k in range(C)
    )  # weights of the image, gradients of its copies
    torch.testing.assert_close(cotangents.mixture(v), mixed.flatten(0, 1))


def test_draws_are_seeded_and_leave_the_random_state():
    state = torch.get_rng_state()
    assert set(signs(3, 100, 0).unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(signs(3, 100, 0), signs(3, 100, 0))
    assert not torch.equal(signs(3, 100, 0), signs(3, 100, 1))
    assert abs(float(normals(1, 10000, 0).std()) - 1) < 0.03
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("spectrum", [[1.0], [1.0, 0.01], [1.0, 0.7, 0.5, 0.1], [1.0] * 30])
def test_the_bound_covers_whatever_the_spectrum(draws, spectrum):
    """sum_s sum_k a_k z_sk^2 / q is below sum_k a_k as rarely as promised; for one eigenvalue just that rarely."""
    a = torch.tensor(spectrum).double()
    z = normals(draws * 20000, len(a), 7).view(20000, draws, -1)
    bound = (a * z.square()).sum((1, 2)) * bound_factor(draws)
    covered = float((bound >= a.sum()).double().mean())
    assert covered > LEVEL - 0.005  # three standard errors
    if len(a) == 1:
        assert covered < LEVEL + 0.005


def test_what_has_no_gradient():
    check_logits(torch.zeros(2, 3), "net")
    with pytest.raises(ModelError, match="net has one class"):
        check_logits(torch.zeros(2, 1), "net")
    bad = torch.zeros(6, 3)
    bad[5, 1] = float("inf")
    with pytest.raises(ValueRangeError, match="for image 8 of the batch"):
        check_logits(bad, "net", copies=3, start=7)  # the last copy of the second of these images
