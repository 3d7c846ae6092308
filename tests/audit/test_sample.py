"""The sample of images that an audit runs the model on."""

from dubito.audit.sample import draw_subset
from dubito.data import ArrayImages
from tests.audit.drawn import draw


def test_a_smaller_draw_is_part_of_a_larger_one():
    images = ArrayImages(inputs=draw(50, 4))
    few, many = (draw_subset(images, limit, 3).ids for limit in (10, 30))
    assert set(few) < set(many)
    assert few == sorted(few)
    assert list(draw_subset(images, 100, 3).ids) == list(images.ids)
