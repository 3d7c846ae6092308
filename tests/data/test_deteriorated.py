"""Images made worse when read: the right deterioration, a seed an image, and a digest that tells them apart."""

import numpy as np
import pytest
import torch
from PIL import Image

from dubito.data import ArrayImages, Subset, open_images
from dubito.data import deteriorate as module
from dubito.data.deteriorate import DETERIORATIONS, deteriorate
from dubito.data.deteriorated import Deteriorated
from dubito.errors import ImagesError, ValueRangeError
from dubito.types import Images


@pytest.fixture
def images() -> ArrayImages:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 24, 24, 3), dtype=np.uint8)
    return ArrayImages(images=pixels, labels=["a", "b", "a", "b"])


def pixels(images, index: int) -> np.ndarray:
    return np.asarray(images.read(index))


@pytest.mark.parametrize("kind", DETERIORATIONS)
def test_reads_what_deteriorate_makes_with_some_seed(images, kind):
    worse = Deteriorated(images, kind, 3)
    assert isinstance(worse, Images)
    found = pixels(worse, 1)
    assert (found == pixels(worse, 1)).all()
    assert (found != pixels(images, 1)).any()
    if kind == "blur":  # nothing random in it, so any seed will do
        assert (found == np.asarray(deteriorate(images.read(1), "blur", 3))).all()
    assert worse.ids == images.ids
    assert worse.labels.tolist() == [0, 1, 0, 1]
    assert worse.classes == ("a", "b")
    assert worse.name == f"images in memory ({kind} 3)"


def test_severity_zero_changes_nothing(images):
    for kind in DETERIORATIONS:
        assert (pixels(Deteriorated(images, kind, 0), 2) == pixels(images, 2)).all()


def test_every_image_has_a_seed_of_its_own_that_depends_on_its_id_alone():
    same = np.full((3, 24, 24, 3), 100, np.uint8)
    worse = Deteriorated(ArrayImages(images=same), "noise", 3)
    assert (pixels(worse, 0) != pixels(worse, 1)).any()
    turned = Deteriorated(Subset(ArrayImages(images=same), [2, 0]), "noise", 3)
    assert (pixels(turned, 1) == pixels(worse, 0)).all()
    assert (pixels(Deteriorated(worse.images, "noise", 3, seed=1), 0) != pixels(worse, 0)).any()


def test_severities_of_one_image_share_the_place_of_the_box(images):
    white = ArrayImages(images=np.full((1, 40, 40, 3), 255, np.uint8))
    small, large = (pixels(Deteriorated(white, "box", severity), 0)[..., 0] == 128 for severity in (2, 4))
    assert 0 < small.sum() < large.sum()
    assert (large[small]).mean() > 0.8  # the larger box lies over the smaller one, up to rounding


def test_digest_covers_images_kind_severity_and_seed(images):
    views = [
        Deteriorated(images, "blur", 2),
        Deteriorated(images, "blur", 3),
        Deteriorated(images, "noise", 2),
        Deteriorated(images, "blur", 2, seed=1),
        Deteriorated(Subset(images, [0, 1, 2]), "blur", 2),
        images,
    ]
    assert len({view.digest() for view in views}) == len(views)
    assert Deteriorated(images, "blur", 2).digest() == views[0].digest()
    assert views[0].digest_rows([0, 1, 2]) == views[4].digest()


def test_digest_notices_another_definition_of_the_steps(images, monkeypatch):
    before = Deteriorated(images, "blur", 2).digest()
    monkeypatch.setattr(module, "_BLUR", (0.0, 0.005, 0.03, 0.04, 0.05, 0.08))
    assert Deteriorated(images, "blur", 2).digest() != before


def test_images_of_a_user_s_own_serve_too():
    class Own:
        name, ids, labels, classes = "own", ("x", "y"), None, None

        def __len__(self) -> int:
            return 2

        def read(self, index: int) -> Image.Image:
            return Image.new("RGB", (8, 8), "white")

        def digest(self) -> str:
            return "d"

    worse = Deteriorated(Own(), "box", 5)
    assert worse.read(0).getpixel((4, 4)) == (128, 128, 128)
    assert worse.digest() != Deteriorated(Own(), "box", 4).digest()


def test_errors(images):
    with pytest.raises(ValueRangeError, match="kind must be one of blur, box, zoom, noise; got 'fog'"):
        Deteriorated(images, "fog", 1)
    with pytest.raises(ValueRangeError, match="severity must be an integer from 0"):
        Deteriorated(images, "blur", 6)
    ready = Deteriorated(open_images(torch.zeros(2, 3, 8, 8)), "blur", 1)
    with pytest.raises(ImagesError, match="must be RGB images to be made worse; '000001' is a model input"):
        ready.read(1)
