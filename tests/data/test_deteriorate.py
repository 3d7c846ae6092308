from itertools import pairwise

import numpy as np
import pytest
from PIL import Image

from dubito.data.deteriorate import DETERIORATIONS, deteriorate
from dubito.errors import ValueRangeError

PIXELS = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
IMAGE = Image.fromarray(PIXELS)
# A slope that zoom flattens, with an edge that blur softens.
SLOPE = np.indices((60, 90)).sum(0) + 100 * (np.arange(90) >= 45)
GRADIENT = Image.fromarray(SLOPE.astype(np.uint8)).convert("RGB")


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(float)


@pytest.mark.parametrize("kind", DETERIORATIONS)
def test_severity_0_changes_nothing_and_no_severity_changes_the_original(kind: str):
    image = IMAGE.copy()
    np.testing.assert_array_equal(pixels(deteriorate(image, kind, 0)), PIXELS)
    for severity in range(1, 6):
        worse = deteriorate(image, kind, severity)
        assert (worse.mode, worse.size) == ("RGB", (90, 60))
    np.testing.assert_array_equal(pixels(image), PIXELS)


@pytest.mark.parametrize("kind", DETERIORATIONS)
@pytest.mark.parametrize("seed", [0, 7])
def test_each_step_is_worse(kind: str, seed: int):
    distance = [np.abs(pixels(deteriorate(GRADIENT, kind, s, seed)) - pixels(GRADIENT)).mean() for s in range(6)]
    assert distance[0] == 0
    assert all(a < b for a, b in pairwise(distance))


@pytest.mark.parametrize("kind", DETERIORATIONS)
def test_the_seed_decides(kind: str):
    first, again, other = (deteriorate(IMAGE, kind, 3, seed).tobytes() for seed in (1, 1, 2))
    assert first == again
    assert (first == other) == (kind == "blur")


@pytest.mark.parametrize(("severity", "share"), list(enumerate([0, 0.1, 0.25, 0.4, 0.6, 0.8])))
def test_box_covers_its_share(severity: int, share: float):
    white = Image.new("RGB", (300, 200), "white")
    covered = (pixels(deteriorate(white, "box", severity)) == 128).all(-1).mean()
    assert covered == pytest.approx(share, abs=0.005)


@pytest.mark.parametrize(("severity", "sigma"), list(enumerate([0, 0.04, 0.08, 0.16])))
def test_noise_has_its_deviation(severity: int, sigma: float):
    grey = Image.new("RGB", (200, 200), (128, 128, 128))
    noise = pixels(deteriorate(grey, "noise", severity)) - 128
    # 120,000 values: the standard error of the deviation is 0.2 %; clipping at 3 sigma costs little.
    assert noise.std() == pytest.approx(255 * sigma, rel=0.02, abs=0.01)
    assert abs(noise.mean()) <= 0.5


def test_zoom_magnifies():
    # Stripes 10 px wide, zoomed 2.5 times: a change of colour every 25 px instead of every 10.
    stripes = np.repeat((np.arange(200) // 10 % 2 * 255).astype(np.uint8)[None, :], 200, 0)
    zoomed = pixels(deteriorate(Image.fromarray(stripes).convert("RGB"), "zoom", 3))[100, :, 0] > 127
    changes = np.flatnonzero(np.diff(zoomed.astype(int)))
    np.testing.assert_allclose(np.diff(changes), 25, atol=1)


def test_blur_of_an_edge_has_its_deviation():
    # The slope of a blurred edge is a Gaussian; severity 4 of a 200 px image has sigma 0.04 * 200 = 8 px.
    edge = np.repeat(np.where(np.arange(300) < 150, 0, 255).astype(np.uint8)[None, :], 200, 0)
    profile = pixels(deteriorate(Image.fromarray(edge).convert("RGB"), "blur", 4))[100, :, 0]
    slope, x = np.diff(profile), np.arange(299)
    mean = (slope * x).sum() / slope.sum()
    assert ((slope * (x - mean) ** 2).sum() / slope.sum()) ** 0.5 == pytest.approx(8, rel=0.03)


def test_tiny_images():
    for kind in DETERIORATIONS:
        assert deteriorate(Image.new("RGB", (1, 1)), kind, 5).size == (1, 1)


@pytest.mark.parametrize("severity", [-1, 6])
@pytest.mark.parametrize("kind", DETERIORATIONS)
def test_severity_out_of_range(kind: str, severity: int):
    with pytest.raises(
        ValueRangeError,
        match=rf"severity must be an integer from 0 \(unchanged\) to 5; got {severity}\. Choose",
    ):
        deteriorate(IMAGE, kind, severity)


def test_unknown_kind():
    with pytest.raises(ValueRangeError, match=r"kind must be one of blur, box, zoom, noise; got 'fog'\. Choose one"):
        deteriorate(IMAGE, "fog", 1)
