import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from scipy.special import expit, log_softmax

from dubito.errors import TableError, ValueRangeError
from dubito.probes.forward import Forward, as_classes, check_target, task_loss

LOGIT = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0], [0.0, 0.0, 0.0], [-2.0, 1.0, 1.0]])
SEVERAL = torch.tensor([[1, 0, 1], [0, 0, 1], [0, 0, 0], [1, 1, 1]])


def test_cross_entropy_of_classes_and_of_shares():
    label = torch.tensor([0, 2, 1, 0])
    result = task_loss("cross_entropy", LOGIT, label)
    expected = -log_softmax(LOGIT.numpy(), axis=1)
    assert result.tolist() == pytest.approx([row[y] for row, y in zip(expected, label, strict=True)], rel=1e-5)
    assert result[2].item() == pytest.approx(math.log(3))  # three equal logits
    sure = F.one_hot(label, 3).double()
    torch.testing.assert_close(task_loss("cross_entropy", LOGIT, sure), result)
    half = torch.full((4, 3), 1 / 3)
    assert task_loss("cross_entropy", LOGIT, half).tolist() == pytest.approx(expected.mean(1), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.float64])
def test_bce_is_the_mean_over_classes(dtype):
    result = task_loss("bce", LOGIT, SEVERAL.to(dtype))
    s, y = expit(LOGIT.double().numpy()), SEVERAL.numpy()
    by_hand = -(y * torch.tensor(s).log().numpy() + (1 - y) * torch.tensor(1 - s).log().numpy()).mean(1)
    assert result.tolist() == pytest.approx(by_hand, rel=1e-5)
    reference = F.binary_cross_entropy_with_logits(LOGIT, SEVERAL.float(), reduction="none").mean(1)
    torch.testing.assert_close(result, reference)
    assert result[2].item() == pytest.approx(math.log(2))  # every class at probability one half


def test_any_callable():
    def top(logit, target):
        return logit.max(1).values - target[:, 0]

    class Scaled:
        def __init__(self, factor):
            self.factor = factor

        def __call__(self, logit, target):
            return self.factor * top(logit, target)

    target = torch.tensor([[1.0, 9.0], [2.0, 9.0], [3.0, 9.0], [4.0, 9.0]])
    assert task_loss(top, LOGIT, target).tolist() == [1.0, 1.0, -3.0, -3.0]  # 2 - 1, 3 - 2, 0 - 3, 1 - 4
    assert task_loss(Scaled(2), LOGIT, target).tolist() == [2.0, 2.0, -6.0, -6.0]
    assert task_loss(lambda logit, _: logit[:, 0].double(), LOGIT, target).dtype == torch.float32
    smooth = partial(F.cross_entropy, reduction="none", label_smoothing=0.1)
    label = torch.tensor([0, 2, 1, 0])
    expected = 0.9 * task_loss("cross_entropy", LOGIT, label) + 0.1 * -F.log_softmax(LOGIT, 1).mean(1)
    torch.testing.assert_close(task_loss(smooth, LOGIT, label), expected)


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (F.cross_entropy, r"got torch\.float32 of shape \(\) from .* for logits of shape \(4, 3\)"),
        (lambda logit, target: logit, r"got torch\.float32 of shape \(4, 3\) from -2 to 3 for"),
        (lambda logit, target: 1.5, r"got float 1\.5 for logits of shape \(4, 3\) and targets of shape \(4,\)"),
        (lambda logit, target: None, "got NoneType None for"),
    ],
)
def test_a_callable_must_return_one_number_per_image(loss, got):
    with pytest.raises(
        ValueRangeError, match=r"task_loss must return one number per image, a tensor of shape \(4,\); "
    ):
        task_loss(loss, LOGIT, torch.tensor([0, 2, 1, 0]))
    with pytest.raises(ValueRangeError, match=got):
        task_loss(loss, LOGIT, torch.tensor([0, 2, 1, 0]))


def test_a_mixed_row_pays_for_both_images():
    first, second = torch.tensor([0, 0, 0, 0]), torch.tensor([1, 1, 1, 0])
    weight = torch.tensor([0.25, 1.0, 0.5, 0.3], dtype=torch.float64)
    result = task_loss("cross_entropy", LOGIT, first, (second, weight))
    a, b = task_loss("cross_entropy", LOGIT, first).tolist(), task_loss("cross_entropy", LOGIT, second).tolist()
    assert result.tolist() == pytest.approx([0.25 * a[0] + 0.75 * b[0], a[1], math.log(3), a[3]], rel=1e-6)
    assert result[1].item() == a[1], "a row that is not mixed keeps its loss to the last bit"
    # Row 0 by hand: the logits are 2, 0, -1, so the second image's class costs 2 more: a + 0.75 * 2.
    assert result[0].item() == pytest.approx(a[0] + 1.5, rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "target", "message"),
    [
        (
            "bce",
            torch.tensor([0, 1, 2, 0]),
            r"targets that are shares in 0\.\.1 of shape \(n, 3\); got torch.int64 of shape \(4,\)",
        ),
        ("bce", 2 * SEVERAL, r"int64 of shape \(4, 3\) from 0 to 2. Pass them to extract as targets="),
        ("bce", torch.full((4, 3), float("nan")), r"float32 of shape \(4, 3\) from nan to nan"),
        ("bce", torch.zeros(4, 2), r"of shape \(4, 2\) from 0 to 0"),
        ("cross_entropy", torch.tensor([0, 1, 3, 0]), r"classes 0\.\.2 of shape \(n,\), or shares .*; .* from 0 to 3"),
        ("cross_entropy", torch.tensor([-1, 1, 2, 0]), "got .* from -1 to 2. Pass"),
        ("cross_entropy", torch.zeros(4), r"float32 of shape \(4,\)"),
        ("cross_entropy", SEVERAL, r"int64 of shape \(4, 3\)"),
    ],
)
def test_targets_that_do_not_fit(loss, target, message):
    with pytest.raises(ValueRangeError, match=message):
        check_target(loss, target, 3)
    with pytest.raises(ValueRangeError, match=message):
        task_loss(loss, LOGIT, target)


def test_a_callable_must_know_its_targets_itself():
    check_target(lambda logit, target: logit[:, 0], torch.full((4, 9), float("nan")), 3)


@pytest.mark.parametrize("loss", ["mse", 3, None])
def test_no_such_loss(loss):
    probe = Forward()
    object.__setattr__(probe, "task_loss", loss)  # past the type checks of the tests
    with pytest.raises(ValueRangeError, match=rf"task_loss must be 'cross_entropy' or 'bce', or a callable .*{loss!r}"):
        probe.__post_init__()


def test_settings_name_the_loss_only_where_it_is_not_the_default():
    assert Forward().settings() == {"store_logit": True, "feature_dtype": "float16"}
    assert Forward(task_loss="bce").settings()["task_loss"] == "bce"

    def first(logit, target):
        return logit[:, 0]

    assert Forward(task_loss=first).settings()["task_loss"] == "first"
    assert Forward(task_loss=first, loss_name="mine").settings()["task_loss"] == "mine"
    assert Forward(task_loss=F.cross_entropy).recorded_loss == "cross_entropy"


@pytest.mark.parametrize("loss", [lambda logit, target: logit[:, 0], partial(F.cross_entropy, reduction="none")])
def test_a_loss_without_a_name_needs_one(loss):
    with pytest.raises(
        ValueRangeError, match=r"has none\. Define it as a function .* Forward\(task_loss=\.\.\., loss_name"
    ):
        Forward(task_loss=loss)
    assert Forward(task_loss=loss, loss_name="smooth").settings()["task_loss"] == "smooth"


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
    with pytest.raises(TableError, match=r"the labels must be classes from 0 to 2; got .*\. Leave out rows"):
        as_classes(torch.tensor(label), 3)
