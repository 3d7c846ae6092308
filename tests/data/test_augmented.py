import itertools
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from dubito.data import ArrayImages, Augment, Augmented, Labelled, Subset, open_images
from dubito.errors import BrokenImageError, ImagesError
from dubito.types import Images

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
    found = rows()
    assert isinstance(found, Images)
    assert len(found) == len(found.ids) == 15
    assert list(found.ids)[:7] == ["a@0", "b@0", "c@0", "d@0", "e@0", "a@1", "b@1"]
    assert (found.ids[-1], found.ids[4:6]) == ("e@2", ["e@0", "a@1"])
    assert found.labels.tolist() == [0, 1, 0, 1, 2] * 3
    assert found.classes == ("x", "y", "z")
    assert found.epoch.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert found.photo.tolist() == [0, 1, 2, 3, 4] * 3
    assert [part.tolist() for part in found.place([7, 14])] == [[1, 2], [2, 4]]
    assert Augmented(ArrayImages(images=PIXELS), 2, Augment()).labels is None


def test_pixels_come_at_the_model_s_size():
    found = rows().read(11)
    assert (found.dtype, tuple(found.shape)) == (torch.uint8, (8, 6, 3))
    expected = Augment().plain(photos().read(1), (8, 6), epoch=2, photo=1)
    assert torch.equal(found, torch.from_numpy(np.array(expected)))


def test_without_a_size_images_keep_theirs():
    found = rows(size=None).read(6)
    assert isinstance(found, Image.Image)
    assert found.size == (10, 12)
    assert found.tobytes() == Augment().plain(photos().read(1), (12, 10), epoch=1, photo=1).tobytes()


@pytest.mark.parametrize("strong", [None, "augmix", "cutmix", "mixup", "blur", "crop", "box"])
def test_a_row_is_the_same_in_any_order_and_process(strong):
    found = rows(strong=strong)
    forward = [found.read(row) for row in range(15)]
    copy = pickle.loads(pickle.dumps(found))  # noqa: S301 (our own bytes)
    torch.manual_seed(7)
    backward = [copy.read(row) for row in reversed(range(15))][::-1]
    assert all(torch.equal(one, other) for one, other in zip(forward, backward, strict=True))
    assert len({one.numpy().tobytes() for one in forward}) == 15, "no two rows are alike"


def test_a_mixed_row_shows_what_mixing_tells():
    for strong, size in itertools.product(("mixup", "cutmix"), ((60, 40), None)):
        found = rows(FLAT, 8, size, strong=strong, jitter=0.0)
        partners, weights = found.mixing(range(40))
        assert 10 < (weights < 1).sum() < 30
        assert (partners[weights == 1] == found.photo[weights == 1]).all()
        for row in range(40):
            pixels = np.asarray(found.read(row))[..., 0].astype(float)
            own, other, weight = float(COLOURS[row % 5]), float(COLOURS[partners[row]]), float(weights[row])
            if strong == "mixup":
                assert np.abs(pixels - (weight * own + (1 - weight) * other)).max() <= 0.5
            else:
                assert set(np.unique(pixels)) <= {own, other}
                edge = 1 / 40 + 1 / 60 if size else 1 / 10 + 1 / 12  # at most a pixel of each side is rounded away
                assert abs((pixels == other).mean() - (1 - weight)) <= edge or weight == 1


def test_a_partner_is_augmented_as_in_its_own_row():
    found = rows(strong="mixup", strong_share=1.0)
    partners, weights = found.mixing([5])
    alone = rows()  # the same seed without mixing
    expected = weights[0] * alone.read(5).double() + (1 - weights[0]) * alone.read(5 + int(partners[0])).double()
    assert (found.read(5).double() - expected).abs().max() <= 0.5


def test_a_single_photo_has_nobody_to_mix_with():
    one = ArrayImages(images=PIXELS[:1], ids=["a"])
    for strong in ("cutmix", "mixup"):
        alone = Augmented(one, 4, Augment(strong=strong, strong_share=1.0), (8, 6))
        assert [part.tolist() for part in alone.mixing(range(4))] == [[0] * 4, [1.0] * 4]
        plain = Augmented(one, 4, Augment(), (8, 6))
        assert all(torch.equal(alone.read(row), plain.read(row)) for row in range(4))


def test_the_digest_tells_photos_settings_epochs_and_places():
    def digest(found):
        return found.digest()

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
    assert len({digest(found) for found in (*variants, photos())}) == len(variants) + 1
    assert digest(rows()) == digest(rows())
    relabelled = Labelled(photos(), torch.tensor([0, 0, 0, 0, 0]))
    assert digest(Augmented(relabelled, 3, Augment(), (8, 6))) == digest(rows())


def test_a_part_s_digest_depends_on_what_its_rows_are_made_of():
    other = PIXELS.copy()
    other[4] ^= 1
    assert rows().digest_rows([0, 6]) == rows(other).digest_rows([0, 6])
    assert rows().digest_rows([0, 9]) != rows(other).digest_rows([0, 9])
    assert rows().digest_rows([0, 6]) != rows().digest_rows([6, 0])
    assert rows().digest_rows([1]) != rows().digest_rows([6])  # the same photo in another epoch
    mixed, otherwise = rows(strong="mixup"), rows(other, strong="mixup")
    assert mixed.digest_rows([0, 6]) != otherwise.digest_rows([0, 6]), "any photo may be a partner"
    assert Subset(rows(), [0, 6]).digest() == rows().digest_rows([0, 6])


def test_ready_inputs_cannot_be_augmented():
    message = r"augmentation needs images; {} is a model input already.*Give files or uint8 pixels as images"
    with pytest.raises(ImagesError, match=message.format("images in memory")):
        Augmented(open_images(torch.zeros(2, 3, 4, 4)), 2, Augment())
    items = Augmented(open_images(TensorDataset(torch.zeros(2, 3, 4, 4))), 2, Augment())
    with pytest.raises(ImagesError, match=message.format("'000001' of data set TensorDataset")):
        items.read(3)


def test_no_epochs():
    with pytest.raises(ImagesError, match="epochs must be at least 1; got 0"):
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
