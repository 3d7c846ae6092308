"""The checks of the audit one by one: hand-computed values, references, and data that must not raise an alarm."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import binom

import dubito
from dubito.data import ArrayImages
from dubito.diagnosis.checks.alternatives import OWN, SWAPPED, alternatives, guessed, measured
from dubito.diagnosis.checks.duplicates import find_pairs, take_prints
from dubito.diagnosis.checks.finding import NotChecked
from dubito.diagnosis.checks.labels import check_chance, check_counting, check_order
from dubito.diagnosis.checks.outputs import check_answers, check_features, check_saturation
from dubito.diagnosis.checks.sample import Answers, Sample
from dubito.diagnosis.checks.significance import below, binomial_tail, paired_p
from dubito.diagnosis.checks.transforms import check_transform
from dubito.diagnosis.checks.understand import form_of
from dubito.models.transform import FunctionTransform, NoTransform


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def numbers(n: int, high: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, (n,), generator=torch.Generator().manual_seed(seed))


# significance


@given(n=st.integers(1, 400), share=st.floats(0, 1), p=st.floats(0.001, 0.999))
@settings(max_examples=60, deadline=None)
def test_binomial_tail_is_that_of_scipy(n, share, p):
    k = round(share * n)
    assert binomial_tail(k, n, p) == pytest.approx(binom.sf(k - 1, n, p), rel=1e-8, abs=1e-300)


def test_binomial_tail_at_its_ends():
    assert binomial_tail(0, 5, 0.3) == 1
    assert binomial_tail(6, 5, 0.3) == 0
    assert binomial_tail(1, 5, 0.0) == 0
    assert binomial_tail(5, 5, 1.0) == 1


def test_paired_p_by_hand():
    # Ten discordant images, nine for the new one: (C(10,9) + C(10,10)) / 2^10 = 11 / 1024; six alternatives.
    assert paired_p(9, 1) == pytest.approx(11 / 1024)
    assert paired_p(9, 1, tests=6) == pytest.approx(66 / 1024)
    assert paired_p(0, 0) == 1
    assert below(0.0) == "p < 1e-98"


# outputs


def test_forms():
    logits = draw(20, 5)
    assert form_of(logits) is None
    assert form_of(logits.softmax(-1)) == "probabilities"
    assert form_of(logits.log_softmax(-1)) == "log_probabilities"
    assert form_of(torch.nn.functional.normalize(logits.abs(), p=2, dim=1)) is None
    one_off = logits.softmax(-1)
    one_off[3] = logits[3]
    assert form_of(one_off) is None


def test_saturation_counts_ones_and_ties():
    sure = torch.tensor([[40.0, 0, 0]]).repeat(3, 1)
    unsure = torch.tensor([[float(k) / 10, 0, 0] for k in range(7)])
    [finding] = check_saturation(torch.cat([sure, unsure]))
    assert finding.evidence["exactly_one"] == pytest.approx(0.3)
    assert finding.evidence["tied"] == pytest.approx(0.3)
    assert finding.severity == "wrong"
    assert check_saturation(torch.cat([sure[:1], unsure])) == []  # one image alone keeps its rank
    assert isinstance(check_saturation(torch.zeros(0, 3)), NotChecked)


def test_features_need_enough_images_to_be_called_dead():
    assert check_features(torch.zeros(10, 4)) == NotChecked("it takes 20 images; 10 came")
    feature = draw(30, 200)
    assert check_features(feature) == []
    feature[:, 5] = 0
    assert check_features(feature) == []  # one of 200 is below one in a hundred
    feature[:, 17] = 2.5
    [finding] = check_features(feature)
    assert finding.evidence["columns"] == [5, 17]
    assert finding.evidence["zero"] == 1


def test_one_answer_is_only_suspicious_without_labels():
    logit = torch.tensor([[0.0, 1.0]]).repeat(25, 1)
    assert check_answers(logit, None)[0].severity == "suspicious"
    assert check_answers(logit, numbers(25, 2))[0].severity == "wrong"
    assert check_answers(logit, torch.ones(25, dtype=torch.long)) == []


# labels


def test_the_best_shift_is_found_among_all():
    labels = numbers(60, 90)
    predicted = labels + 7
    predicted[:20] = numbers(20, 100, seed=1)
    found = check_counting(predicted, labels, 100, None)
    assert found.outcome[0].evidence["shift"] == 7
    assert found.outcome[0].evidence["accuracy_then"] >= 40 / 60
    assert torch.equal(found.labels, labels + 7)


@pytest.mark.parametrize("seed", range(20))
def test_answers_at_random_have_no_best_shift_and_no_order(seed):
    labels, predicted = numbers(200, 10, seed), numbers(200, 10, 100 + seed)
    assert check_counting(predicted, labels, 10, None).outcome == []
    assert check_order(predicted, labels, None).outcome == []
    assert len(check_chance(predicted, labels, 10)) <= 1


def test_one_answer_for_skewed_labels_is_no_shift():
    """Nine tenths of the labels are 1 and every answer is 3: a shift by two would be right nine times of ten."""
    labels = torch.ones(100, dtype=torch.long)
    labels[:10] = 3
    predicted = torch.full((100,), 3)
    assert check_counting(predicted, labels, 5, None).outcome == []
    assert check_order(predicted, labels, None).outcome == []
    assert check_chance(predicted, labels, 5)[0].evidence["by_chance"] == pytest.approx(0.1)


def test_a_mediocre_model_is_not_relabelled():
    """Right on six of ten, and otherwise mostly one class beside: no shift and no order is better."""
    labels = numbers(300, 10)
    predicted = labels.clone()
    predicted[:120] = (labels[:120] + 1) % 10
    assert check_counting(predicted, labels, 10, None).outcome == []
    assert check_order(predicted, labels, None).outcome == []
    assert check_chance(predicted, labels, 10) == []


def test_order_is_judged_on_images_that_it_was_not_read_from():
    """One image a class in each half would fit any answers perfectly: it must not count."""
    labels, predicted = torch.arange(50).repeat(4), numbers(200, 50, seed=3)
    assert check_order(predicted, labels, None).outcome == []
    assert isinstance(check_order(predicted[:50], labels[:50], None).outcome, NotChecked)


def test_shifted_labels_may_fall_below_zero():
    labels = torch.cat([numbers(60, 9) + 1, torch.zeros(4, dtype=torch.long)])
    shifted = check_counting((labels - 1).clamp(min=0), labels, 10, None)
    assert shifted.labels.min() == -1
    assert check_order((labels - 1).clamp(min=0), shifted.labels, None).outcome == []


def test_order_names_classes():
    labels = torch.arange(3).repeat(20)
    names = ["ant", "bee", "cow"]
    finding = check_order(torch.tensor([1, 2, 0])[labels], labels, names).outcome[0]
    assert "Label -> class: 0 -> 1 (bee), 1 -> 2 (cow), 2 -> 0 (ant)." in finding.what


def test_numbered_folders_are_read_as_numbers_only_where_that_is_another_order():
    names = sorted(str(k) for k in range(12))  # 0, 1, 10, 11, 2 ...
    labels = numbers(100, 12)
    predicted = torch.tensor([int(name) for name in names])[labels]
    finding = check_counting(predicted, labels, 12, names).outcome[0]
    assert finding.evidence["folder_numbers"]
    assert finding.evidence["shift"] == 0
    assert check_counting(labels, labels, 12, [f"{k:02}" for k in range(12)]).outcome == []


def test_labels_outside_the_classes():
    labels = torch.tensor([0, 1, 2, 3, 12] * 10)
    finding = check_counting(labels % 10, labels, 10, None).outcome[0]
    assert finding.what == "10 of 50 labels are 10 or more, up to 12; the model's are 0..9."


def test_chance_with_one_class_only():
    labels = torch.full((30,), 2)
    assert check_chance(torch.full((30,), 2), labels, 10) == []
    assert check_chance(torch.full((30,), 3), labels, 10)[0].evidence["by_chance"] == pytest.approx(0.1)


# transforms


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
    found.add(torch.full((len(logit), 1), norm), logit)
    return found


def sampled(*ways: Answers, n: int, c: int) -> Sample:
    model = dubito.wrap(torch.nn.Linear(2, 2))
    return Sample(
        model, torch.arange(n), [], torch.zeros(1, 3, 4, 4), torch.zeros(n, 1), torch.zeros(n, c), [*ways], True
    )


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


# duplicates


def printed(pixels: np.ndarray):
    return take_prints(ArrayImages(images=pixels), workers=0, progress=False)


def test_pairs_against_brute_force():
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (30, 16, 16, 3), dtype=np.uint8)
    pixels[7] = pixels[3]
    pixels[20] = np.clip(pixels[11].astype(int) + rng.integers(-4, 5, (16, 16, 3)), 0, 255)
    pairs = find_pairs(printed(pixels), None)
    assert (pairs.exact, pairs.near) == (1, 1)
    assert pairs.some == [(True, 3, 7), (False, 11, 20)]
    flat = pixels.reshape(30, 256, 3).astype(float)
    flat = (flat - flat.mean(1, keepdims=True)).reshape(30, -1)
    alike = np.argwhere(np.triu(np.corrcoef(flat), 1) > 0.995)
    assert alike.tolist() == [[3, 7], [11, 20]]


def test_pairs_are_the_same_across_blocks(monkeypatch):
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 250, (25, 16, 16, 3), dtype=np.uint8)
    other = np.concatenate([pixels[5:8], pixels[12:13] + 1, rng.integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)])
    within = np.concatenate([pixels, pixels[2:4] + 1])
    one = [find_pairs(printed(pixels), printed(other)), find_pairs(printed(within), None)]
    monkeypatch.setattr("dubito.diagnosis.checks.duplicates._BLOCK", 4)
    two = [find_pairs(printed(pixels), printed(other)), find_pairs(printed(within), None)]
    assert one == two
    assert (one[0].exact, one[0].near, one[1].near) == (3, 1, 2)


def test_flat_pictures_are_near_to_none_and_one_hue_is_not_one_picture():
    rng = np.random.default_rng(2)
    flat = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.full((1, 16, 16, 3), 9, np.uint8)
    assert find_pairs(printed(flat), None).near == 0
    noise = rng.integers(-12, 13, (6, 16, 16, 3))
    red = (np.array([200, 40, 40]) + noise).astype(np.uint8)
    assert find_pairs(printed(red), None).near == 0


def test_inputs_that_are_no_pictures_have_exact_twins_only():
    rows = draw(6, 4)
    rows[5] = rows[0]
    prints = take_prints(ArrayImages(inputs=rows), workers=0, progress=False)
    assert find_pairs(prints, None).some == [(True, 0, 5)]
    maps = draw(4, 2, 20, 20)
    assert find_pairs(take_prints(ArrayImages(inputs=maps), workers=0, progress=False), None).some == []
