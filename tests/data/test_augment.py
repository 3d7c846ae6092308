"""Augmentation is what the paper says, drawn from its own seed, and touches nobody else's random numbers."""

import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torch.utils.data import TensorDataset
from torchvision import transforms
from torchvision.transforms import functional as pixels

from dubito.data import ArrayImages, Augment, Augmented, Labelled, Subset, open_images
from dubito.data.augment import Mix
from dubito.data.corruptions import corrupt
from dubito.errors import BrokenImageError, ImagesError, ValueRangeError
from dubito.types import Images

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8))
STILL = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "flip": 0.0, "jitter": 0.0}
"""The whole of a square image, and nothing else."""


def flat(colour, size=(8, 8)):
    return Image.new("RGB", size, colour)


def array(image):
    return np.asarray(image).astype(int)


def plain(augment, image, size=(16, 16), epoch=0, index=0):
    return augment.plain(image, size, epoch=epoch, index=index)


def ramps(side=256):
    """Red tells the column, green the row: what is left of them tells where a crop was."""
    y, x = np.mgrid[0:side, 0:side]
    return Image.fromarray(np.stack([x, y, 0 * x], -1).astype(np.uint8))


def test_crops_are_spread_as_those_of_torchvision():
    image, size = ramps(), 64
    augment = Augment(flip=0.0, jitter=0.0)
    result = []
    for photo in range(800):
        out = array(plain(augment, image, (size, size), index=photo))
        # Away from the border, where bicubic resizing bends the ramp: size - 3 of the size steps across the crop.
        w = (out[size // 2, -2, 0] - out[size // 2, 1, 0]) * size / (size - 3)
        h = (out[-2, size // 2, 1] - out[1, size // 2, 1]) * size / (size - 3)
        result.append((w * h, w / h, out[size // 2, size // 2 - 1 : size // 2 + 1, 0].mean() + 0.5))
    torch.manual_seed(0)
    drawn = [transforms.RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(800)]
    expected = [(h * w, w / h, left + w / 2) for top, left, h, w in drawn]
    for ours, theirs in zip(zip(*result, strict=True), zip(*expected, strict=True), strict=True):
        assert stats.ks_2samp(ours, theirs).pvalue > 0.01
    assert min(area for area, *_ in result) < 0.12 * 256**2
    assert stats.ks_2samp([area for area, *_ in result], [1.2 * area for area, *_ in expected]).pvalue < 1e-3


def test_a_crop_is_resized_bilinearly_or_bicubically_at_random():
    image = NOISE.crop((0, 0, 24, 24))
    modes = (transforms.InterpolationMode.BILINEAR, transforms.InterpolationMode.BICUBIC)
    bilinear, bicubic = (array(pixels.resize(image, [16, 16], mode)) for mode in modes)
    out = [array(plain(Augment(**STILL), image, index=photo)) for photo in range(200)]
    soft = sum(np.array_equal(one, bilinear) for one in out)
    hard = sum(np.array_equal(one, bicubic) for one in out)
    assert soft + hard == 200
    assert 75 <= soft <= 125


def test_flips():
    image = NOISE.crop((0, 0, 24, 24))
    still, always = Augment(**STILL), Augment(**{**STILL, "flip": 1.0})
    usual = Augment(**{**STILL, "flip": 0.5})
    flips = 0
    for photo in range(200):
        straight = array(plain(still, image, index=photo))
        np.testing.assert_array_equal(array(plain(always, image, index=photo)), straight[:, ::-1])
        flips += np.array_equal(array(plain(usual, image, index=photo)), straight[:, ::-1])
    assert 75 <= flips <= 125


def test_two_of_five_images_are_jittered():
    image = flat((90, 120, 150))
    outs = (plain(Augment(), image, (2, 2), index=photo) for photo in range(1000))
    assert 350 <= sum(out.getpixel((0, 0)) != (90, 120, 150) for out in outs) <= 450


def test_a_jitter_multiplies_by_factors_from_06_to_14():
    for name in ("brightness", "contrast", "saturation"):
        others = {other: (1.0, 1.0) for other in ("brightness", "contrast", "saturation") if other != name}
        augment = Augment(**{**STILL, "jitter": 1.0}, **others)
        # Half 50, half 150, grey 100: contrast moves both away from the mean 100. Saturation leaves grey alone.
        image = Image.fromarray(np.repeat([[[50], [150]]], 3, axis=2).repeat(2, axis=0).astype(np.uint8))
        values = np.array([array(plain(augment, image, (2, 2), index=photo))[0, :, 0] for photo in range(300)])
        dark = {"brightness": (30, 70), "contrast": (70, 30), "saturation": (50, 50)}[name]  # 50 * 0.6, 100 - 50 * 0.6
        assert abs(values[:, 0].min() - min(dark)) <= 1
        assert abs(values[:, 0].max() - max(dark)) <= 1
        assert abs(values[:, 0].mean() - np.mean(dark)) <= 3


def test_jitters_come_in_every_order_and_leave_the_hue():
    steps = {"brightness": 1.4, "contrast": 0.6, "saturation": 0.7}
    augment = Augment(**{**STILL, "jitter": 1.0}, **{name: (factor, factor) for name, factor in steps.items()})
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    expected = set()
    for order in itertools.permutations(steps):
        out = image
        for name in order:
            out = getattr(pixels, f"adjust_{name}")(out, steps[name])
        expected.add(out.tobytes())
    assert {plain(augment, image, index=photo).tobytes() for photo in range(100)} == expected
    assert len(expected) == 6
    for photo in range(50):
        out = array(plain(Augment(jitter=1.0), flat((120, 120, 120)), index=photo))
        assert (out == out[..., :1]).all(), "grey has no hue and stays grey"


@pytest.mark.parametrize("strong", [None, "augmix", "cutmix", "mixup", "blur", "crop", "box"])
def test_nobody_elses_random_numbers_matter_or_change(strong):
    augment = Augment(strong=strong, strong_share=1.0)

    def whole():
        out = augment.strengthen(plain(augment, NOISE, epoch=3, index=5), epoch=3, index=5)
        return out.tobytes(), augment.mix(epoch=3, index=5, n=9)

    random.seed(0)
    torch.manual_seed(0)
    first = whole()
    torch.manual_seed(1)
    random.seed(1)  # whose state cannot be compared: type checking while tests run draws from it
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    assert whole() == first
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002


def test_seed_epoch_and_photo_each_change_the_image():
    seen = [plain(Augment(seed=seed), NOISE, epoch=epoch, index=photo).tobytes()
            for seed, epoch, photo in itertools.product(range(3), repeat=3)]  # fmt: skip
    assert len(set(seen)) == 27


def test_half_of_the_rows_are_blurred_or_covered():
    for kind in ("blur", "box", "noise"):
        augment, changed = Augment(strong=kind), 0
        for photo in range(200):
            image = plain(augment, NOISE, (20, 20), index=photo)
            out = augment.strengthen(image, epoch=0, index=photo)
            if out.tobytes() != image.tobytes():
                changed += 1
            if kind == "box":
                grey = (array(out) == 128).all(-1).sum()
                # Sides of 20 pixels times the roots of 0, 0.1, 0.25, 0.4, 0.6, 0.8: 0, 6, 10, 13, 15, 18.
                assert grey in {0, 36, 100, 169, 225, 324}
        assert 75 <= changed <= 125


def test_blurs_are_those_of_corruptions():
    augment = Augment(strong="blur", strong_share=1.0)
    corrupted = [corrupt(NOISE, "blur", severity).tobytes() for severity in range(1, 6)]
    result = {augment.strengthen(NOISE, epoch=0, index=photo).tobytes() for photo in range(60)}
    assert result == set(corrupted)


def test_augmix_changes_half_of_the_rows():
    augment = Augment(strong="augmix")
    outs = [augment.strengthen(NOISE, epoch=0, index=photo) for photo in range(40)]
    changed = [out for out in outs if out.tobytes() != NOISE.tobytes()]
    assert 10 <= len(changed) <= 30
    assert len({out.tobytes() for out in changed}) > len(changed) // 2
    assert {(out.mode, out.size) for out in outs} == {("RGB", NOISE.size)}


def test_small_crops_keep_at_most_a_quarter():
    image = ramps()
    augment = Augment(flip=0.0, jitter=0.0, strong="crop", strong_share=1.0)
    for photo in range(50):
        out = array(plain(augment, image, (64, 64), index=photo))
        w, h = np.ptp(out[..., 0]) * 64 / 63, np.ptp(out[..., 1]) * 64 / 63
        assert 0.06 < w * h / 256**2 < 0.28
        assert augment.strengthen(NOISE, epoch=0, index=photo) is NOISE


def test_mixup_draws_partners_and_weights():
    mixes = [Augment(strong="mixup", strong_share=1.0).mix(epoch=epoch, index=2, n=5) for epoch in range(1000)]
    counts = np.bincount([mix.partner for mix in mixes], minlength=5)
    assert counts[2] == 0, "nobody is mixed with itself"
    assert (counts[[0, 1, 3, 4]] > 200).all()
    assert stats.kstest([mix.weight for mix in mixes], stats.beta(0.8, 0.8).cdf).pvalue > 0.01
    assert {mix.box for mix in mixes} == {None}
    usual = [Augment(strong="mixup").mix(epoch=epoch, index=2, n=5) for epoch in range(1000)]
    assert 450 <= sum(mix is None for mix in usual) <= 550


def test_cutmix_s_weight_is_what_the_box_leaves():
    augment = Augment(strong="cutmix", strong_share=1.0)
    mixes = [augment.mix(epoch=0, index=photo, n=1000) for photo in range(500)]
    for mix in mixes:
        left, top, right, bottom = mix.box
        assert 0 <= left <= right <= 1
        assert 0 <= top <= bottom <= 1
        assert mix.weight == pytest.approx(1 - (right - left) * (bottom - top))
    # The border cuts boxes, so more than the drawn mean 1/2 is left.
    assert 0.6 < np.mean([mix.weight for mix in mixes]) < 0.8


def test_blending_by_hand():
    blended = Mix(1, 0.25, None).blend(flat((100, 0, 9), (2, 1)), flat((200, 1, 9), (2, 1)))
    assert blended.getpixel((1, 0)) == (175, 1, 9)  # 25 + 150, 0.75 rounded, 9
    pasted = array(Mix(1, 0.75, (0.5, 0.0, 1.0, 0.5)).blend(flat("white", (4, 4)), flat("black", (4, 4))))[..., 0]
    assert pasted.tolist() == [[255, 255, 0, 0], [255, 255, 0, 0], [255] * 4, [255] * 4]


def test_others_have_nothing_to_mix():
    assert Augment(strong="blur", strong_share=1.0).mix(epoch=0, index=0, n=5) is None
    assert not Augment(strong="blur").mixes
    assert Augment(strong="cutmix").mixes
    assert Augment(strong="cutmix", strong_share=1.0).mix(epoch=0, index=0, n=1) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"flip": 1.5}, r"augment: flip must be a number in \[0, 1\]; got 1\.5"),
        ({"strong_share": -0.1}, r"strong_share must be a number in \[0, 1\]"),
        ({"jitter": float("nan")}, r"jitter must be a number in \[0, 1\]; got nan"),
        (
            {"scale": (0.5, 1.5)},
            r"two growing positive numbers up to 1; got \(0\.5, 1\.5\)\. The default is \(0\.08, 1\.0\)",
        ),
        ({"scale": (0.0, 1.0)}, "scale must be two growing positive numbers"),
        ({"ratio": (2.0, 1.0)}, r"ratio must be two growing positive numbers; got \(2\.0, 1\.0\)"),
        ({"contrast": (-1.0, 1.0)}, "contrast must be two growing positive numbers"),
        ({"seed": -1}, r"seed must be a whole number in \[0, 4294967295\]; got -1"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(ValueRangeError, match=message):
        Augment(**settings)


def test_an_unknown_strong_augmentation():
    augment = Augment()
    object.__setattr__(augment, "strong", "fog")  # as it comes where types are not checked
    with pytest.raises(
        ValueRangeError, match="strong must be one of augmix, cutmix, mixup, blur, crop, box, noise; got 'fog'"
    ):
        augment.__post_init__()


PIXELS = np.random.default_rng(0).integers(0, 256, (5, 12, 10, 3), dtype=np.uint8)
NAMES = ["a", "b", "c", "d", "e"]
COLOURS = np.array([0, 40, 110, 160, 250], dtype=np.uint8)
FLAT = np.tile(COLOURS[:, None, None, None], (1, 12, 10, 3))
"""Photos of one grey each: no crop and no flip changes them, so a mixed row shows its parts."""


def photos(pixels=PIXELS):
    return ArrayImages(images=pixels, ids=NAMES, labels=[0, 1, 0, 1, 2], classes=["x", "y", "z"])


def rows(pixels=PIXELS, epochs=3, size=(8, 6), **settings):
    return Augmented(photos(pixels), epochs, Augment(**settings), size)


def test_rows_are_epochs_times_photos():
    result = rows()
    assert isinstance(result, Images)
    assert len(result) == len(result.ids) == 15
    assert list(result.ids)[:7] == ["a@0", "b@0", "c@0", "d@0", "e@0", "a@1", "b@1"]
    assert (result.ids[-1], result.ids[4:6]) == ("e@2", ["e@0", "a@1"])
    assert result.labels.tolist() == [0, 1, 0, 1, 2] * 3
    assert result.classes == ("x", "y", "z")
    assert result.epoch.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert result.image_index.tolist() == [0, 1, 2, 3, 4] * 3
    assert [part.tolist() for part in result.place([7, 14])] == [[1, 2], [2, 4]]
    assert Augmented(ArrayImages(images=PIXELS), 2, Augment()).labels is None


def test_pixels_come_at_the_model_s_size():
    result = rows().read(11)
    assert (result.dtype, tuple(result.shape)) == (torch.uint8, (8, 6, 3))
    expected = Augment().plain(photos().read(1), (8, 6), epoch=2, index=1)
    assert torch.equal(result, torch.from_numpy(np.array(expected)))


def test_without_a_size_images_keep_theirs():
    result = rows(size=None).read(6)
    assert isinstance(result, Image.Image)
    assert result.size == (10, 12)
    assert result.tobytes() == Augment().plain(photos().read(1), (12, 10), epoch=1, index=1).tobytes()


@pytest.mark.parametrize("strong", [None, "augmix", "cutmix", "mixup", "blur", "crop", "box"])
def test_a_row_is_the_same_in_any_order_and_process(strong):
    result = rows(strong=strong)
    forward = [result.read(row) for row in range(15)]
    copy = pickle.loads(pickle.dumps(result))  # noqa: S301 (our own bytes)
    torch.manual_seed(7)
    backward = [copy.read(row) for row in reversed(range(15))][::-1]
    assert all(torch.equal(one, other) for one, other in zip(forward, backward, strict=True))
    assert len({one.numpy().tobytes() for one in forward}) == 15, "no two rows are alike"


def test_a_mixed_row_shows_what_mixing_reports():
    for strong, size in itertools.product(("mixup", "cutmix"), ((60, 40), None)):
        result = rows(FLAT, 8, size, strong=strong, jitter=0.0)
        partners, weights = result.mixing(range(40))
        assert 10 < (weights < 1).sum() < 30
        assert (partners[weights == 1] == result.image_index[weights == 1]).all()
        for row in range(40):
            pixels = np.asarray(result.read(row))[..., 0].astype(float)
            own, other, weight = float(COLOURS[row % 5]), float(COLOURS[partners[row]]), float(weights[row])
            if strong == "mixup":
                assert np.abs(pixels - (weight * own + (1 - weight) * other)).max() <= 0.5
            else:
                assert set(np.unique(pixels)) <= {own, other}
                edge = 1 / 40 + 1 / 60 if size else 1 / 10 + 1 / 12  # at most a pixel of each side is rounded away
                assert abs((pixels == other).mean() - (1 - weight)) <= edge or weight == 1


def test_a_partner_is_augmented_as_in_its_own_row():
    result = rows(strong="mixup", strong_share=1.0)
    partners, weights = result.mixing([5])
    alone = rows()  # the same seed without mixing
    expected = weights[0] * alone.read(5).double() + (1 - weights[0]) * alone.read(5 + int(partners[0])).double()
    assert (result.read(5).double() - expected).abs().max() <= 0.5


def test_a_single_photo_has_nobody_to_mix_with():
    one = ArrayImages(images=PIXELS[:1], ids=["a"])
    for strong in ("cutmix", "mixup"):
        alone = Augmented(one, 4, Augment(strong=strong, strong_share=1.0), (8, 6))
        assert [part.tolist() for part in alone.mixing(range(4))] == [[0] * 4, [1.0] * 4]
        plain = Augmented(one, 4, Augment(), (8, 6))
        assert all(torch.equal(alone.read(row), plain.read(row)) for row in range(4))


def test_the_digest_reports_photos_settings_epochs_and_places():
    def digest(result):
        return result.digest()

    other = PIXELS.copy()
    other[4] ^= 1
    variants = [
        rows(),
        rows(other),
        rows(epochs=2),
        rows(size=None),
        rows(size=(6, 8)),
        rows(seed=1),
        rows(flip=0.4),
        rows(strong="box"),
        rows(strong="blur"),
        rows(strong="box", strong_share=0.2),
    ]
    assert len({digest(result) for result in (*variants, photos())}) == len(variants) + 1
    assert digest(rows()) == digest(rows())
    relabelled = Labelled(photos(), torch.tensor([0, 0, 0, 0, 0]))
    assert digest(Augmented(relabelled, 3, Augment(), (8, 6))) == digest(rows())


def test_a_part_s_digest_depends_on_what_its_rows_are_made_of():
    other = PIXELS.copy()
    other[4] ^= 1
    assert Subset(rows(), [0, 6]).digest() == Subset(rows(other), [0, 6]).digest()
    assert Subset(rows(), [0, 9]).digest() != Subset(rows(other), [0, 9]).digest()
    assert Subset(rows(), [0, 6]).digest() != Subset(rows(), [6, 0]).digest()
    assert Subset(rows(), [1]).digest() != Subset(rows(), [6]).digest()  # the same photo in another epoch
    mixed = rows(strong="mixup", strong_share=1.0)
    partners = mixed.mixing(range(15))[0].tolist()
    other = PIXELS.copy()
    other[partners[0]] ^= 1
    changed = rows(other, strong="mixup", strong_share=1.0)
    differing = [row for row in range(15) if Subset(mixed, [row]).digest() != Subset(changed, [row]).digest()]
    assert differing == [row for row in range(15) if partners[0] in (row % 5, partners[row])]
    assert Subset(rows(), [0, 6]).digest() == Subset(rows(), [0, 6]).digest()


def test_ready_inputs_cannot_be_augmented():
    message = r"augmentation needs images; {} is a model input already.*Pass files or uint8 pixels as images"
    with pytest.raises(ImagesError, match=message.format("'000000' of images in memory")):
        Augmented(open_images(torch.zeros(2, 3, 4, 4)), 2, Augment())
    items = Augmented(open_images(TensorDataset(torch.zeros(2, 3, 4, 4))), 2, Augment())
    with pytest.raises(ImagesError, match=message.format("'000001' of data set TensorDataset")):
        items.read(3)


def test_no_epochs():
    with pytest.raises(ValueRangeError, match="epochs must be a whole number, at least 1; got 0"):
        rows(epochs=0)


def test_a_row_is_broken_if_one_of_its_photos_is(tmp_path):
    for index, name in enumerate("ab"):
        Image.fromarray(PIXELS[index]).save(tmp_path / f"{name}.png")
    (tmp_path / "b.png").write_bytes(b"no image")
    alone = Augmented(open_images(tmp_path), 1, Augment(), (8, 6))
    assert alone.read(0).shape == (8, 6, 3)
    with pytest.raises(BrokenImageError, match=r"b\.png"):
        alone.read(1)
    with pytest.raises(BrokenImageError, match=r"b\.png"):
        Augmented(open_images(tmp_path), 1, Augment(strong="mixup", strong_share=1.0), (8, 6)).read(0)


@pytest.mark.parametrize("strong", [None, "mixup"])
def test_a_hashed_read_gives_the_row_and_the_hash_of_the_image_behind_it(strong):
    augmented = rows(strong=strong)
    behind = photos().contents(range(5))
    for row in range(15):
        image, content = augmented.read_hashed(row)
        assert torch.equal(image, augmented.read(row))
        assert content == behind[row % 5]
