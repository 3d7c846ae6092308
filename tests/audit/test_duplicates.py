"""Duplicates among images, against brute force."""

import numpy as np
import pytest

from dubito.audit import duplicates
from dubito.audit.duplicates import check_duplicates, compared, find_pairs, take_fingerprints
from dubito.data import ArrayImages
from tests.audit.drawn import draw


def printed(pixels: np.ndarray, of: int | None = None):
    return take_fingerprints(ArrayImages(images=pixels), workers=0, progress=False, of=of)


def noise(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, 16, 16, 3), dtype=np.uint8)


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
    monkeypatch.setattr(duplicates, "_BLOCK", 4)
    two = [find_pairs(printed(pixels), printed(other)), find_pairs(printed(within), None)]
    assert one == two
    assert (one[0].exact, one[0].near, one[1].near) == (3, 1, 2)


def test_flat_images_are_near_to_none_and_one_hue_is_not_one_image():
    rng = np.random.default_rng(2)
    flat = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.full((1, 16, 16, 3), 9, np.uint8)
    assert find_pairs(printed(flat), None).near == 0
    noise = rng.integers(-12, 13, (6, 16, 16, 3))
    red = (np.array([200, 40, 40]) + noise).astype(np.uint8)
    assert find_pairs(printed(red), None).near == 0


def test_inputs_that_are_not_images_have_exact_duplicates_only():
    rows = draw(6, 4)
    rows[5] = rows[0]
    prints = take_fingerprints(ArrayImages(inputs=rows), workers=0, progress=False)
    assert find_pairs(prints, None).some == [(True, 0, 5)]
    maps = draw(4, 2, 20, 20)
    assert find_pairs(take_fingerprints(ArrayImages(inputs=maps), workers=0, progress=False), None).some == []


def test_what_was_compared_is_reported_and_the_share_is_an_estimate():
    """Four of 100 have a duplicate among a tenth of the others: an estimated 40 of 100 have one among all of them."""
    pixels = noise(100, 0)
    [finding] = check_duplicates(printed(pixels), printed(np.concatenate([pixels[:4], noise(46, 1)]), of=500))
    assert finding.what.startswith("4 (4 exact, 0 near) of 100 images (4.0 %) are in the other set too")
    compared_part = (
        "50 of 500 images of the other set were compared; among all of them, an estimated 40.0 % are in both."
    )
    assert finding.what.endswith(compared_part)
    assert finding.evidence["share"] == pytest.approx(0.4)
    assert (finding.evidence["compared_with"], finding.evidence["of"]) == (50, 500)
    [whole] = check_duplicates(printed(pixels), printed(pixels[:4]))
    assert whole.evidence["share"] == pytest.approx(0.04)
    assert "compared" not in whole.what


def test_one_duplicate_in_a_small_part_is_not_enough_to_call_it_wrong():
    pixels = noise(300, 0)

    def severity(copies: int, of: int):
        [finding] = check_duplicates(printed(pixels), printed(np.concatenate([pixels[:copies], noise(10, 1)]), of=of))
        return finding.severity

    assert [severity(1, of=11), severity(1, of=1100), severity(2, of=1200)] == ["suspicious"] * 3
    assert [severity(3, of=1300), severity(3, of=13)] == ["wrong"] * 2


def test_within_a_part_of_a_set():
    """One pair in a tenth of a set of 2,000: 1 / 200 / 0.1 = 5 % have a duplicate, by an estimate."""
    pixels = noise(200, 0)
    pixels[7] = pixels[3]
    [finding] = check_duplicates(printed(pixels, of=2000))
    assert finding.evidence["share"] == pytest.approx(0.05)
    assert finding.severity == "suspicious"
    compared_part = "200 of 2,000 images of this set were compared; among all of them, an estimated 5.0 % have one."
    assert finding.what.endswith(compared_part)
    assert check_duplicates(printed(pixels))[0].severity == "note"


def test_compared_names_both_sets():
    some, all_of_it = printed(noise(3, 0), of=1_281_167), printed(noise(4, 1))
    assert compared(all_of_it, None) == compared(all_of_it, all_of_it) == ""
    assert compared(some, all_of_it) == "3 of 1,281,167 images of this set were compared"
    both = "3 of 1,281,167 images of this set and 3 of 1,281,167 images of the other set were compared"
    assert compared(some, some) == both
