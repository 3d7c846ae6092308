"""Other transforms: which there are, what they do, and when one is better than the own."""

import numpy as np
import pytest
import torch
from PIL import Image

import dubito
from dubito.audit.alternatives import OWN, SWAPPED, alternatives, guessed, measured
from dubito.audit.sample import Answers, Sample
from dubito.audit.transforms import check_transform
from dubito.models.transform import FunctionTransform, NoTransform
from tests.audit.drawn import numbers


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


@pytest.mark.parametrize("channels", ["RGB", "BGR"])
def test_the_scale_of_a_transform_is_measured(channels):
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    for transform in (
        dubito.Preprocess((32, 32), 40, mean=mean, std=std, channels=channels),
        dubito.Preprocess((600, 600), mean=mean, std=std, channels=channels),  # larger than the test picture
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
    ways = {way.name: way for way in alternatives(x, measured(own))}
    assert torch.equal(ways[OWN](x), x)
    rgb_mean, rgb_std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    imagenet = dubito.Preprocess((4, 4), mean=rgb_mean[::-1], std=rgb_std[::-1], channels="BGR")
    assert torch.allclose(ways["ImageNet mean and std"](x), imagenet.finish(pixels), atol=1e-4)
    assert torch.allclose(ways["pixels 0..255"](x), pixels.flip(-1).permute(0, 3, 1, 2).float(), atol=1e-3)
    swapped = dubito.Preprocess((4, 4), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6), channels="RGB")
    assert torch.allclose(ways[SWAPPED](x), swapped.finish(pixels), atol=1e-4)


def test_an_alternative_that_is_the_own_transform_is_left_out():
    own = dubito.Preprocess((4, 4))
    ways = alternatives(torch.zeros(1, 3, 4, 4), measured(own))
    assert "ImageNet mean and std" not in [way.name for way in ways]
    assert len(ways) == 6
    assert [way.name for way in alternatives(torch.zeros(1, 1, 4, 4), measured(own))] == [OWN]
    assert [way.name for way in alternatives(torch.zeros(1, 3, 4, 4), None)] == [OWN, SWAPPED]


def test_ready_inputs_have_a_scale_only_if_they_look_like_pixels():
    x = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert guessed(x).slope.tolist() == [1, 1, 1]
    assert guessed(255 * x).slope.tolist() == [255, 255, 255]
    assert guessed(2 * x - 1) is None


def answers(way: int, logit: torch.Tensor, norm: float = 1.0) -> Answers:
    found = Answers(alternatives(torch.zeros(1, 3, 4, 4), measured(dubito.Preprocess((4, 4))))[way])
    found.add(torch.full((len(logit), 1), norm), logit, torch.ones(len(logit), dtype=torch.bool))
    return found


def sampled(*ways: Answers, n: int, c: int) -> Sample:
    model = dubito.wrap(torch.nn.Linear(2, 2))
    return Sample(model, torch.arange(n), torch.zeros(1, 3, 4, 4), torch.zeros(n, 1), torch.zeros(n, c), [*ways], True)


def test_information_by_hand():
    # Two sure and different answers tell log 2; two equal ones tell nothing.
    sure = torch.tensor([[100.0, 0], [0, 100.0]])
    assert answers(0, sure).information == pytest.approx(np.log(2))
    assert answers(0, sure[[0, 0]]).information == pytest.approx(0, abs=1e-9)


def test_without_labels_sure_and_telling_is_suspicious_but_sure_alone_is_not():
    n, c = 100, 5
    label = torch.arange(n) % c
    clear, vague = 4 * torch.eye(c)[label], torch.eye(c)[label]
    own = answers(0, vague)
    [finding] = check_transform(sampled(own, answers(1, clear), n=n, c=c), None)
    assert finding.severity == "suspicious"
    assert finding.evidence["confidence_then"] > finding.evidence["confidence"] + 0.3
    assert "Labels would decide it." in finding.what
    one_class = 4 * torch.eye(c)[torch.zeros(n, dtype=torch.long)]
    assert check_transform(sampled(own, answers(1, one_class), n=n, c=c), None) == []
    assert check_transform(sampled(own, answers(1, clear, norm=4.0), n=n, c=c), None) == []
    assert check_transform(sampled(answers(0, clear), answers(1, vague), n=n, c=c), None) == []


def test_with_labels_a_few_images_more_are_not_enough():
    n, c = 100, 5
    label = torch.arange(n) % c
    wrong = (label + 1) % c

    def right_on(count: int) -> torch.Tensor:
        return torch.eye(c)[torch.where(torch.arange(n) < count, label, wrong)]

    own = answers(0, right_on(60))
    # Seven images more and none fewer: 2^-7 = 0.008, below 0.01 alone, but not after two tries; twelve are enough.
    other = answers(2, right_on(60))
    assert check_transform(sampled(own, answers(1, right_on(67)), other, n=n, c=c), label) == []
    [finding] = check_transform(sampled(own, answers(1, right_on(72)), other, n=n, c=c), label)
    assert finding.evidence["p"] == pytest.approx(2 * 2**-12)
    assert (
        "accuracy is 72.0 % instead of 60.0 % on the same 100 images (McNemar's exact test, p < 0.001)" in finding.what
    )


def test_an_alternative_without_finite_logits_is_not_right_by_accident():
    """The largest of NaN is class 0, which would be right on every image of class 0."""
    n, c = 100, 5
    label = torch.zeros(n, dtype=torch.long)
    own = answers(0, torch.eye(c)[label + 1])
    assert check_transform(sampled(own, answers(1, torch.full((n, c), float("nan"))), n=n, c=c), label) == []
