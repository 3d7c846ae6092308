import dataclasses
import functools
import inspect
import re

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torchvision import models as zoo
from torchvision import transforms as T

import dubito
from dubito.errors import BrokenImageError, ModelError, ValueRangeError
from dubito.models.from_timm import transform_of
from dubito.models.transform import FunctionTransform, NoTransform, Preprocess
from dubito.types import Transform

SIZES = [(301, 413), (413, 301), (97, 61), (224, 224), (500, 225), (33, 400)]


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth shades with an edge and some grain, so that every interpolation gives other pixels."""
    y, x = np.mgrid[0:height, 0:width]
    grain = np.random.default_rng(seed).normal(0, 12, (height, width, 3))
    shade = np.stack([90 + 70 * np.sin(x / 17), 120 + 60 * np.cos(y / 11), 255 * (x + y > (width + height) / 2)], -1)
    return Image.fromarray((shade + grain).clip(0, 255).astype(np.uint8))


def whole(transform: Transform, image: Image.Image) -> torch.Tensor:
    return transform.finish(transform.prepare(image)[None])[0]


@pytest.mark.parametrize(
    "name", ["test_vit", "resnet50.a1_in1k", "resnet18.a1_in1k", "tf_efficientnet_lite0", "efficientnet_b0.ra_in1k"]
)
def test_equals_timm(name):
    module = timm.create_model(name, pretrained=False)
    ours = transform_of(module, {})
    theirs = create_transform(**resolve_model_data_config(module), is_training=False)
    assert isinstance(ours, Preprocess)
    for size in SIZES:
        image = photo(*size)
        assert torch.allclose(whole(ours, image), theirs(image), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["resnet50", "efficientnet_b1", "shufflenet_v2_x0_5", "mobilenet_v3_small"])
def test_equals_torchvision(name):
    ours = dubito.load(f"torchvision:{name}", weights=None).transform
    theirs = zoo.get_model_weights(name).DEFAULT.transforms()
    for size in SIZES:
        image = photo(*size)
        assert torch.equal(whole(ours, image), theirs(image))


def test_crop_modes_beyond_a_centre_crop_are_timm_s_own():
    module = timm.create_model("test_vit", pretrained=False)
    module.pretrained_cfg = {**module.pretrained_cfg, "crop_mode": "border"}
    theirs = create_transform(**resolve_model_data_config(module), is_training=False)
    ours = dubito.wrap(module, transform=transform_of(module, {})).transform
    image = photo(61, 97)
    assert isinstance(ours, FunctionTransform)
    assert torch.equal(whole(ours, image), theirs(image))


def test_an_img_size_reaches_the_transform():
    square = dubito.load("timm:test_vit", weights=None, img_size=64)
    assert square.transform.size == (64, 64)
    assert square.transform.resize == 67  # floor(64 / 0.95)
    oblong = dubito.load("timm:test_vit", weights=None, img_size=(64, 32))
    assert whole(oblong.transform, photo(97, 61)).shape == (3, 64, 32)
    small = dubito.load("torchvision:vit_b_16", weights=None, image_size=32)
    assert (small.transform.size, small.transform.resize) == ((32, 32), 37)  # 256 * 32 / 224 = 36.6


def test_by_hand():
    # one pixel of 51, 102, 204: (0.2 - 0.1) / 0.5, (0.4 - 0.2) / 0.5, (0.8 - 0.3) / 0.5
    transform = Preprocess((1, 1), mean=(0.1, 0.2, 0.3), std=(0.5, 0.5, 0.5))
    pixel = Image.new("RGB", (1, 1), (51, 102, 204))
    prepared = transform.prepare(pixel)
    assert (prepared.dtype, tuple(prepared.shape)) == (torch.uint8, (1, 1, 3))
    assert whole(transform, pixel).flatten().tolist() == pytest.approx([0.2, 0.4, 1.0], abs=1e-6)


def test_bgr_turns_the_pixels_before_mean_and_std():
    settings = {"mean": (0.1, 0.2, 0.3), "std": (0.5, 0.25, 0.5)}
    turned = Preprocess((1, 1), channels="BGR", **settings)
    # 204, 102, 51: (0.8 - 0.1) / 0.5, (0.4 - 0.2) / 0.25, (0.2 - 0.3) / 0.5
    got = whole(turned, Image.new("RGB", (1, 1), (51, 102, 204))).flatten().tolist()
    assert got == pytest.approx([1.4, 0.8, -0.2], abs=1e-6)
    image = photo(40, 30)
    blue_first = Image.merge("RGB", image.split()[::-1])
    plain = Preprocess((20, 20), 24, **settings)
    assert torch.equal(whole(Preprocess((20, 20), 24, channels="BGR", **settings), image), whole(plain, blue_first))


def test_a_resize_to_both_sides_ignores_the_shape_and_none_keeps_the_size():
    image = photo(60, 31)
    squashed = Preprocess((10, 20), resize=(10, 20), interpolation="bilinear").prepare(image)
    expected = T.functional.resize(image, [10, 20], T.InterpolationMode.BILINEAR)
    assert np.array_equal(squashed.numpy(), np.asarray(expected))
    untouched = Preprocess((31, 60), resize=None).prepare(image)
    assert np.array_equal(untouched.numpy(), np.asarray(image))


def test_a_batch_of_ready_floats_passes():
    ready = torch.randn(2, 3, 4, 4)
    assert torch.equal(Preprocess((4, 4)).finish(ready), ready)
    assert torch.equal(NoTransform().finish(ready), ready)


def test_each_setting_shows_in_the_description():
    base = Preprocess((8, 8), 9)
    others = [
        Preprocess((8, 7), 9),
        Preprocess((8, 8), 10),
        Preprocess((8, 8), (9, 9)),
        Preprocess((8, 8), None),
        Preprocess((8, 8), 9, "bilinear"),
        Preprocess((8, 8), 9, mean=(0.0, 0.0, 0.0)),
        Preprocess((8, 8), 9, std=(1.0, 1.0, 1.0)),
        Preprocess((8, 8), 9, channels="BGR"),
    ]
    output = [str(transform.describe()) for transform in (base, *others)]
    assert len(set(output)) == 9
    assert Preprocess((8, 8), 9).describe() == base.describe()


def compose(size: int = 16) -> T.Compose:
    return T.Compose([T.Resize(size), T.CenterCrop(size), T.ToTensor()])


def test_a_callable_is_known_by_what_it_does():
    assert FunctionTransform(compose()).describe() == FunctionTransform(compose()).describe()
    assert FunctionTransform(compose()).describe() != FunctionTransform(compose(17)).describe()
    first = FunctionTransform(lambda image: T.functional.to_tensor(image) * 0.5).describe()
    second = FunctionTransform(lambda picture: T.functional.to_tensor(picture) / 2).describe()
    darker = FunctionTransform(lambda image: T.functional.to_tensor(image) * 0.4).describe()
    assert first == second
    assert first["acts"] != darker["acts"]


def test_a_callable_s_address_is_not_part_of_it():
    class Resizer:
        def __call__(self, image):
            return T.functional.to_tensor(image)

    one, other = Resizer(), Resizer()
    assert repr(one) != repr(other)
    assert FunctionTransform(one).describe() == FunctionTransform(other).describe()
    bound = [FunctionTransform(functools.partial(Resizer.__call__, resizer)) for resizer in (one, other)]
    assert bound[0].describe() == bound[1].describe()


@pytest.mark.parametrize("augmentation", [T.RandomHorizontalFlip(), T.RandomResizedCrop(16), T.ColorJitter(0.5)])
def test_random_augmentation_is_refused(augmentation):
    torch.manual_seed(0)
    transform = FunctionTransform(T.Compose([augmentation, T.ToTensor()]))
    for _ in range(5):  # a flip does nothing half of the time, and must be found out all the same
        with pytest.raises(ModelError) as error:
            transform.describe()
        assert str(error.value) == (
            "transform gives two different tensors for one image, so nothing computed from it could be reproduced. "
            "Leave random augmentation out of it."
        )


def test_a_callable_that_returns_no_tensor_is_reported():
    with pytest.raises(
        ModelError, match=r"transform must turn an image into a tensor; got Image\. End it with .*ToTensor\(\)"
    ):
        FunctionTransform(T.Resize(8)).prepare(photo(20, 20))


def test_without_a_transform_images_are_refused():
    model = dubito.wrap(torch.nn.Linear(3, 2))
    with pytest.raises(
        ModelError,
        match=r"wrapped without a transform; got an image of 40x30 pixels\. Pass transform=\.\.\. to dubito\.wrap",
    ):
        model.transform.prepare(photo(40, 30))
    assert model.fingerprint()["transform"] == {"kind": "none"}


def test_all_kinds_keep_the_contract():
    for transform in (Preprocess((4, 4)), FunctionTransform(compose()), NoTransform()):
        assert isinstance(transform, Transform)


def test_pixels_of_another_size_are_refused():
    with pytest.raises(ModelError, match=r"pixels must come as 32x32, the model's input size; got 8x16"):
        Preprocess((32, 32)).finish(torch.zeros(2, 8, 16, 3, dtype=torch.uint8))


def unchecked(*args, **settings) -> Preprocess:
    """As where people work: under test, types are checked before anything else is."""
    made = Preprocess.__new__(Preprocess)
    inspect.unwrap(Preprocess.__init__)(made, *args, **settings)
    return made


def test_one_number_is_a_square():
    image = photo(60, 31)
    for square in (Preprocess(20), Preprocess([20, 20]), unchecked(np.int64(20)), unchecked(torch.Size([20, 20]))):
        assert square == Preprocess((20, 20))
        assert square.size == (20, 20)
        assert square.describe() == Preprocess((20, 20)).describe()
        assert torch.equal(square.prepare(image), Preprocess((20, 20)).prepare(image))
    assert Preprocess(20, [24, 22]).resize == (24, 22)
    assert Preprocess(20, 24).resize == 24  # the short side, no square
    assert dataclasses.replace(Preprocess((20, 20), 24), size=16) == Preprocess((16, 16), 24)


@pytest.mark.parametrize("size", [0, -3, (48, 0), (48, -1), (1, 2, 3), (48,), True])
def test_sizes_that_are_none(size):
    with pytest.raises(ValueRangeError) as error:
        Preprocess(size)
    assert str(error.value) == (
        f"Preprocess: size must be (height, width), or one number for a square, in whole pixels from 1 on; "
        f"got {size!r}. Say Preprocess(size=(224, 224), resize=256)."
    )
    with pytest.raises(ValueRangeError, match=r"^Preprocess: resize must be the short side, \(height, width\) or None"):
        Preprocess(48, size)


@pytest.mark.parametrize("size", [48.0, (48.0, 48), "48", None])
def test_sizes_of_another_kind(size):
    with pytest.raises(ValueRangeError, match=rf"size must be .*; got {re.escape(repr(size))}\. Say Preprocess"):
        unchecked(size)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"mean": (0.5, 0.5)},
            r"mean must be three numbers, one per channel; got \(0\.5, 0\.5\)\. Say mean=\(0\.5, 0\.5, 0",
        ),
        ({"mean": (0.5, float("nan"), 0.5)}, "mean must be three numbers"),
        (
            {"std": (1.0, 0.0, 1.0)},
            r"std must be three numbers other than zero, one per channel; got \(1\.0, 0\.0, 1\.0\)",
        ),
        ({"mean": 0.5}, r"mean must be three numbers, one per channel; got 0\.5"),
        ({"channels": "bgr"}, r"channels must be one of RGB, BGR; got 'bgr'\."),
        ({"interpolation": "cubic"}, r"interpolation must be one of nearest, .*, bicubic, .*; got 'cubic'"),
    ],
)
def test_other_settings_that_have_no_meaning(settings, message):
    with pytest.raises(ValueRangeError, match=f"^Preprocess: {message}"):
        unchecked(8, **settings)


def test_images_that_resizing_would_blow_up_are_refused():
    thin = Image.new("RGB", (20_000, 2))
    with pytest.raises(BrokenImageError, match=r"an image of 20000x2 pixels is too long and thin: with 256 pixels"):
        Preprocess(224, 256).prepare(thin)
    with pytest.raises(BrokenImageError, match="2x20000"):
        Preprocess(224, 256).prepare(thin.transpose(Image.Transpose.ROTATE_90))
    assert Preprocess(224, (256, 256)).prepare(thin).shape == (224, 224, 3)  # an exact size has no such images
    assert Preprocess(224, 256).prepare(Image.new("RGB", (2_000, 2))).shape == (224, 224, 3)
