"""Twins among pictures, against brute force."""

import numpy as np

from dubito.data import ArrayImages
from dubito.diagnosis.checks.duplicates import find_pairs, take_prints
from tests.diagnosis.checks.drawn import draw


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
