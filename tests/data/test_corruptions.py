from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image

from dubito.data import ArrayImages, Subset, open_images
from dubito.data import corruptions as module
from dubito.data.corruptions import CORRUPTIONS, STAND_INS, Corrupted, CorruptedCopies, corrupt
from dubito.errors import ImagesError, ValueRangeError
from dubito.types import Images

KINDS = list(dict.fromkeys((*CORRUPTIONS, *STAND_INS)))
PIXELS = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
IMAGE = Image.fromarray(PIXELS)
# A slope that zoom flattens, with an edge that blur softens.
SLOPE = np.indices((60, 90)).sum(0) + 100 * (np.arange(90) >= 45)
GRADIENT = Image.fromarray(SLOPE.astype(np.uint8)).convert("RGB")


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(float)


@pytest.mark.parametrize("kind", KINDS)
def test_severity_0_changes_nothing_and_no_severity_changes_the_original(kind: str):
    image = IMAGE.copy()
    np.testing.assert_array_equal(pixels(corrupt(image, kind, 0)), PIXELS)
    for severity in range(1, 6):
        corrupted = corrupt(image, kind, severity)
        assert (corrupted.mode, corrupted.size) == ("RGB", (90, 60))
    np.testing.assert_array_equal(pixels(image), PIXELS)


@pytest.mark.parametrize("kind", CORRUPTIONS)
@pytest.mark.parametrize("seed", [0, 7])
def test_each_severity_is_worse(kind: str, seed: int):
    distance = [np.abs(pixels(corrupt(GRADIENT, kind, s, seed)) - pixels(GRADIENT)).mean() for s in range(6)]
    assert distance[0] == 0
    assert all(a < b for a, b in pairwise(distance))


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind: str):
    first, again, other = (corrupt(IMAGE, kind, 3, seed).tobytes() for seed in (1, 1, 2))
    assert first == again
    assert (first == other) == (kind == "blur")


@pytest.mark.parametrize(("severity", "share"), list(enumerate([0, 0.1, 0.25, 0.4, 0.6, 0.8])))
def test_box_covers_its_share(severity: int, share: float):
    white = Image.new("RGB", (300, 200), "white")
    covered = (pixels(corrupt(white, "box", severity)) == 128).all(-1).mean()
    assert covered == pytest.approx(share, abs=0.005)


@pytest.mark.parametrize(("severity", "sigma"), list(enumerate([0, 0.04, 0.08, 0.16])))
def test_noise_has_its_deviation(severity: int, sigma: float):
    grey = Image.new("RGB", (200, 200), (128, 128, 128))
    noise = pixels(corrupt(grey, "noise", severity)) - 128
    # 120,000 values: the standard error of the deviation is 0.2 %; clipping at 3 sigma costs little.
    assert noise.std() == pytest.approx(255 * sigma, rel=0.02, abs=0.01)
    assert abs(noise.mean()) <= 0.5


def test_zoom_magnifies():
    # Stripes 10 px wide, zoomed 2.5 times: a change of colour every 25 px instead of every 10.
    stripes = np.repeat((np.arange(200) // 10 % 2 * 255).astype(np.uint8)[None, :], 200, 0)
    zoomed = pixels(corrupt(Image.fromarray(stripes).convert("RGB"), "zoom", 3))[100, :, 0] > 127
    changes = np.flatnonzero(np.diff(zoomed.astype(int)))
    np.testing.assert_allclose(np.diff(changes), 25, atol=1)


def test_blur_of_an_edge_has_its_deviation():
    # The slope of a blurred edge is a Gaussian; severity 4 of a 200 px image has sigma 0.04 * 200 = 8 px.
    edge = np.repeat(np.where(np.arange(300) < 150, 0, 255).astype(np.uint8)[None, :], 200, 0)
    profile = pixels(corrupt(Image.fromarray(edge).convert("RGB"), "blur", 4))[100, :, 0]
    slope, x = np.diff(profile), np.arange(299)
    mean = (slope * x).sum() / slope.sum()
    assert ((slope * (x - mean) ** 2).sum() / slope.sum()) ** 0.5 == pytest.approx(8, rel=0.03)


def test_jigsaw_shuffles_whole_pieces():
    # 8 x 8 pieces of 9 x 6 px, each of a grey of its own: the same 64 greys, each in one whole piece, in other places.
    greys = np.arange(64, dtype=np.uint8).reshape(8, 8)
    before = np.repeat(greys.repeat(6, 0).repeat(9, 1)[..., None], 3, -1)
    after = np.asarray(corrupt(Image.fromarray(before), "jigsaw", 5))
    pieces = after[..., 0].reshape(8, 6, 8, 9)
    assert (pieces == pieces[:, :1, :, :1]).all()
    shuffled = pieces[:, 0, :, 0]
    assert sorted(shuffled.flatten()) == list(range(64))
    assert (shuffled != greys).mean() > 0.9
    # One whose sides cannot be divided: pieces are stretched, and none is left empty.
    assert np.asarray(corrupt(Image.new("RGB", (37, 21), "white"), "jigsaw", 5)).min() == 255


def test_scramble_keeps_amplitudes_and_mean_and_loses_the_places():
    # Grey values far from 0 and 255, so that nothing is clipped; the rest is rounding.
    before = 128 + 4 * np.random.default_rng(1).standard_normal((64, 48))
    image = Image.fromarray(np.repeat(np.rint(before)[..., None], 3, -1).astype(np.uint8))
    after, start = pixels(corrupt(image, "scramble", 5))[..., 0], pixels(image)[..., 0]
    assert after.mean() == pytest.approx(start.mean(), abs=0.1)
    spectra = [np.abs(np.fft.fft2(one)).flatten() for one in (start, after)]
    assert np.corrcoef(*spectra)[0, 1] > 0.99
    assert abs(np.corrcoef(start.flatten(), after.flatten())[0, 1]) < 0.1
    # Less of it leaves more of the image.
    likeness = [
        np.corrcoef(start.flatten(), pixels(corrupt(image, "scramble", s))[..., 0].flatten())[0, 1] for s in range(6)
    ]
    assert all(a > b for a, b in pairwise(likeness))


def test_tiny_images():
    for kind in KINDS:
        assert corrupt(Image.new("RGB", (1, 1)), kind, 5).size == (1, 1)


@pytest.mark.parametrize("severity", [-1, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_severity_out_of_range(kind: str, severity: int):
    with pytest.raises(
        ValueRangeError,
        match=rf"corrupt: severity must be a whole number in \[0, 5\]; got {severity}\. 0 leaves images unchanged",
    ):
        corrupt(IMAGE, kind, severity)


def test_unknown_kind():
    with pytest.raises(
        ValueRangeError, match=r"kind must be one of blur, box, zoom, noise, jigsaw, scramble; got 'fog'"
    ):
        corrupt(IMAGE, "fog", 1)


@pytest.fixture
def images() -> ArrayImages:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 24, 24, 3), dtype=np.uint8)
    return ArrayImages(images=pixels, labels=["a", "b", "a", "b"])


def read(images, index: int) -> np.ndarray:
    return np.asarray(images.read(index))


@pytest.mark.parametrize("kind", KINDS)
def test_reads_what_corrupt_makes_with_some_seed(images, kind):
    corrupted = Corrupted(images, kind, 3)
    assert isinstance(corrupted, Images)
    result = read(corrupted, 1)
    assert (result == read(corrupted, 1)).all()
    assert (result != read(images, 1)).any()
    if kind == "blur":  # nothing random in it, so any seed will do
        assert (result == np.asarray(corrupt(images.read(1), "blur", 3))).all()
    assert corrupted.ids == images.ids
    assert corrupted.labels.tolist() == [0, 1, 0, 1]
    assert corrupted.classes == ("a", "b")
    assert corrupted.name == f"images in memory ({kind} 3)"


def test_severity_zero_changes_nothing(images):
    for kind in KINDS:
        assert (read(Corrupted(images, kind, 0), 2) == read(images, 2)).all()


def test_every_image_has_a_seed_of_its_own_that_depends_on_its_id_alone():
    same = np.full((3, 24, 24, 3), 100, np.uint8)
    corrupted = Corrupted(ArrayImages(images=same), "noise", 3)
    assert (read(corrupted, 0) != read(corrupted, 1)).any()
    turned = Corrupted(Subset(ArrayImages(images=same), [2, 0]), "noise", 3)
    assert (read(turned, 1) == read(corrupted, 0)).all()
    assert (read(Corrupted(corrupted.images, "noise", 3, seed=1), 0) != read(corrupted, 0)).any()


def test_severities_of_one_image_share_the_place_of_the_box(images):
    white = ArrayImages(images=np.full((1, 40, 40, 3), 255, np.uint8))
    small, large = (read(Corrupted(white, "box", severity), 0)[..., 0] == 128 for severity in (2, 4))
    assert 0 < small.sum() < large.sum()
    assert (large[small]).mean() > 0.8  # the larger box lies over the smaller one, up to rounding


def test_digest_covers_images_kind_severity_and_seed(images):
    views = [
        Corrupted(images, "blur", 2),
        Corrupted(images, "blur", 3),
        Corrupted(images, "noise", 2),
        Corrupted(images, "blur", 2, seed=1),
        Corrupted(Subset(images, [0, 1, 2]), "blur", 2),
        images,
    ]
    assert len({view.digest() for view in views}) == len(views)
    assert Corrupted(images, "blur", 2).digest() == views[0].digest()
    assert Subset(views[0], [0, 1, 2]).digest() == views[4].digest()


def test_digest_notices_another_definition_of_the_severities(images, monkeypatch):
    before = Corrupted(images, "blur", 2).digest()
    monkeypatch.setattr(module, "_BLUR", (0.0, 0.005, 0.03, 0.04, 0.05, 0.08))
    assert Corrupted(images, "blur", 2).digest() != before


def test_images_of_a_user_s_own_serve_too():
    class Own:
        name, ids, labels, classes = "own", ("x", "y"), None, None

        def __len__(self) -> int:
            return 2

        def read(self, index: int) -> Image.Image:
            return Image.new("RGB", (8, 8), "white")

        def digest(self) -> str:
            return "d"

    corrupted = Corrupted(Own(), "box", 5)
    assert corrupted.read(0).getpixel((4, 4)) == (128, 128, 128)
    assert corrupted.digest() != Corrupted(Own(), "box", 4).digest()


def test_errors(images):
    with pytest.raises(
        ValueRangeError, match="kind must be one of blur, box, zoom, noise, jigsaw, scramble; got 'fog'"
    ):
        Corrupted(images, "fog", 1)
    with pytest.raises(ValueRangeError, match=r"severity must be a whole number in \[0, 5\]"):
        Corrupted(images, "blur", 6)
    ready = Corrupted(open_images(torch.zeros(2, 3, 8, 8)), "blur", 1)
    with pytest.raises(ImagesError, match=r"corruption needs images; '000001' of images in memory is a model input"):
        ready.read(1)


def test_copies_are_every_image_once_per_corruption():
    images = ArrayImages(images=np.stack([PIXELS, 255 - PIXELS]), labels=[1, 0])
    copies = CorruptedCopies(images, seed=3)
    assert list(CorruptedCopies(np.stack([PIXELS, 255 - PIXELS])).ids) == list(copies.ids)
    assert list(STAND_INS) == ["blur", "zoom", "noise", "jigsaw", "scramble"]
    assert list(copies.ids) == [f"{kind}-5/00000{i}" for kind in STAND_INS for i in (0, 1)]
    assert copies.labels is not None
    assert copies.labels.tolist() == [1, 0] * 5
    for row, kind in enumerate(STAND_INS):
        level = Corrupted(images, kind, 5, seed=3)
        for i in (0, 1):
            np.testing.assert_array_equal(pixels(copies.read(2 * row + i)), pixels(level.read(i)))
            image, content = copies.read_hashed(2 * row + i)
            np.testing.assert_array_equal(pixels(image), pixels(level.read(i)))
            assert [content] == copies.contents([2 * row + i]) == level.contents([i])
    assert copies.digest() != CorruptedCopies(images, seed=4).digest() != CorruptedCopies(images, severity=4).digest()


def test_copies_of_inputs_and_of_no_severity():
    ready = open_images(torch.zeros(2, 3, 8, 8))
    with pytest.raises(ImagesError, match=r"corruption needs images; '000001' of .* is a model input already"):
        CorruptedCopies(ready).read(3)
    with pytest.raises(ValueRangeError, match=r"CorruptedCopies: severity must be a whole number in \[1, 5\]; got 0"):
        CorruptedCopies(ready, severity=0)
