"""Other transforms: which there are, what they do, and when one is better than the own."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

import dubito
from dubito.audit.transforms import (
    NO_CLASS,
    OWN,
    SWAPPED,
    Alternative,
    TransformedPredictions,
    alternatives,
    check_transform,
    guessed,
    measured,
)
from dubito.models.transform import FunctionTransform, NoTransform
from tests.audit.drawn import draw, numbers


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


@pytest.mark.parametrize("channels", ["RGB", "BGR"])
def test_the_scale_of_a_transform_is_measured(channels):
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    for transform in (
        dubito.Preprocess((32, 32), 40, mean=mean, std=std, channels=channels),
        dubito.Preprocess((600, 600), mean=mean, std=std, channels=channels),  # larger than the test image
    ):
        scale = measured(transform)
        assert scale.bgr == (channels == "BGR")
        assert scale.slope.tolist() == pytest.approx([1 / s for s in std])
        assert scale.start.tolist() == pytest.approx([-m / s for m, s in zip(mean, std, strict=True)])


def test_a_scale_that_cannot_be_measured():
    def stretched(image: Image.Image) -> torch.Tensor:
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()
        return (x - x.mean()) / (x.std() + 1)

    assert measured(FunctionTransform(stretched)) is None
    assert measured(NoTransform()) is None


def test_alternatives_are_what_their_own_preprocess_would_give():
    pixels = numbers(2 * 4 * 4 * 3, 256).view(2, 4, 4, 3).to(torch.uint8)
    own = dubito.Preprocess((4, 4), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), channels="BGR")
    x = own.finish(pixels)
    by_name = {way.name: way for way in alternatives(x, measured(own))}
    assert torch.equal(by_name[OWN](x), x)
    rgb_mean, rgb_std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    imagenet = dubito.Preprocess((4, 4), mean=rgb_mean[::-1], std=rgb_std[::-1], channels="BGR")
    assert torch.allclose(by_name["ImageNet mean and std"](x), imagenet.finish(pixels), atol=1e-4)
    assert torch.allclose(by_name["pixels 0..255"](x), pixels.flip(-1).permute(0, 3, 1, 2).float(), atol=1e-3)
    swapped = dubito.Preprocess((4, 4), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), channels="RGB")
    assert torch.allclose(by_name[SWAPPED](x), swapped.finish(pixels), atol=1e-4)


def test_an_alternative_that_is_the_own_transform_is_left_out():
    own = dubito.Preprocess((4, 4))
    others = alternatives(torch.zeros(1, 3, 4, 4), measured(own))
    assert "ImageNet mean and std" not in [way.name for way in others]
    assert len(others) == 6
    assert [way.name for way in alternatives(torch.zeros(1, 1, 4, 4), measured(own))] == [OWN]
    assert [way.name for way in alternatives(torch.zeros(1, 3, 4, 4), None)] == [OWN, SWAPPED]


def test_ready_inputs_have_a_scale_only_if_they_look_like_pixels():
    x = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert guessed(x).slope.tolist() == [1, 1, 1]
    assert guessed(255 * x).slope.tolist() == [255, 255, 255]
    assert guessed(2 * x - 1) is None


def predictions(place: int, logit: torch.Tensor, norm: float = 1.0) -> TransformedPredictions:
    result = TransformedPredictions(alternatives(torch.zeros(1, 3, 4, 4), measured(dubito.Preprocess((4, 4))))[place])
    result.add(torch.full((len(logit), 1), norm), logit, torch.ones(len(logit), dtype=torch.bool))
    return result


def checked(*predictions: TransformedPredictions, labels: torch.Tensor | None = None):
    return check_transform([*predictions], labels)


def test_information_by_hand():
    # Two confident and different predictions carry log 2; two equal ones nothing.
    sure = torch.tensor([[100.0, 0], [0, 100.0]])
    assert predictions(0, sure).information == pytest.approx(np.log(2))
    assert predictions(0, sure[[0, 0]]).information == pytest.approx(0, abs=1e-9)


def test_without_labels_confident_and_informative_is_suspicious_but_confident_alone_is_not():
    n, c = 100, 5
    label = torch.arange(n) % c
    clear, vague = 4 * torch.eye(c)[label], torch.eye(c)[label]
    own = predictions(0, vague)
    [finding] = checked(own, predictions(1, clear))
    assert finding.severity == "suspicious"
    assert finding.evidence["confidence_then"] > finding.evidence["confidence"] + 0.3
    assert "Labels would decide it." in finding.what
    one_class = 4 * torch.eye(c)[torch.zeros(n, dtype=torch.long)]
    assert checked(own, predictions(1, one_class)) == []
    assert checked(own, predictions(1, clear, norm=4.0)) == []
    assert checked(predictions(0, clear), predictions(1, vague)) == []


def test_with_labels_a_few_images_more_are_not_enough():
    n, c = 100, 5
    label = torch.arange(n) % c
    wrong = (label + 1) % c

    def right_on(count: int) -> torch.Tensor:
        return torch.eye(c)[torch.where(torch.arange(n) < count, label, wrong)]

    own = predictions(0, right_on(60))
    # Seven images more and none fewer: 2^-7 = 0.008, below 0.01 alone, but not after two tries; twelve are enough.
    other = predictions(2, right_on(60))
    assert checked(own, predictions(1, right_on(67)), other, labels=label) == []
    [finding] = checked(own, predictions(1, right_on(72)), other, labels=label)
    assert finding.evidence["p"] == pytest.approx(2 * 2**-12)
    assert (
        "accuracy is 72.0 % instead of 60.0 % on the same 100 images (McNemar's exact test, p < 0.001)" in finding.what
    )


def test_an_alternative_without_finite_logits_is_not_right_by_accident():
    """The largest of NaN is class 0, which would be right on every image of class 0."""
    n, c = 100, 5
    label = torch.zeros(n, dtype=torch.long)
    own = predictions(0, torch.eye(c)[label + 1])
    assert checked(own, predictions(1, torch.full((n, c), float("nan"))), labels=label) == []


NAN = float("nan")
SURE = torch.tensor([[100.0, 0], [0, 100.0]])


def gathered(logit: torch.Tensor, usable: list[bool], feature: torch.Tensor | None = None) -> TransformedPredictions:
    result = TransformedPredictions(Alternative(OWN, ""))
    result.add(torch.ones(len(logit), 1) if feature is None else feature, logit, torch.tensor(usable))
    return result


def test_rows_that_are_not_usable_do_not_count():
    logit = torch.cat([SURE, torch.full((2, 2), NAN)])
    assert gathered(logit, [True, True, False, False]).information == pytest.approx(math.log(2))
    both = TransformedPredictions(Alternative(OWN, ""))
    both.add(torch.ones(2, 1), SURE, torch.tensor([True, True]))
    both.add(torch.ones(2, 1), logit[2:], torch.tensor([False, False]))
    assert both.information == pytest.approx(math.log(2))


def test_usable_rows_that_are_not_finite_here_are_undecided():
    """Two confident and different predictions of four: H(mean) = log 2, and the mean entropy is half of log 2."""
    result = gathered(torch.cat([SURE, torch.full((2, 2), NAN)]), [True] * 4)
    assert result.information == pytest.approx(math.log(2) / 2)
    assert result.confidence.tolist() == pytest.approx([1, 1, 0.5, 0.5])
    assert result.predicted.tolist() == [0, 1, NO_CLASS, NO_CLASS]


def test_a_logit_of_minus_infinity_alone_is_not_finite_either():
    assert gathered(torch.tensor([[0.0, -math.inf], [0, 100]]), [True, True]).predicted.tolist() == [NO_CLASS, 1]


def test_length_is_that_of_finite_usable_features():
    feature = torch.tensor([[3.0, 4], [NAN, 1], [6, 8], [math.inf, 0]])
    logit = draw(4, 2)
    assert gathered(logit, [True] * 4, feature).norm == pytest.approx(7.5)
    assert gathered(logit, [True, True, False, True], feature).norm == pytest.approx(5)
    assert gathered(logit, [False] * 4, feature).norm == 0
    assert gathered(logit, [False] * 4, feature).information == 0
