import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Subset as TorchSubset
from torch.utils.data import TensorDataset, random_split
from torchvision.datasets import FakeData, ImageFolder
from torchvision.transforms import ToTensor

from dubito.data.arrays import ArrayImages
from dubito.data.dataset import DatasetImages
from dubito.data.image_set import Subset
from dubito.data.labels import with_labels
from dubito.errors import BrokenImageError, ImagesError
from dubito.types import Images

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 4, 5, 3), dtype=np.uint8)


class Pictures:
    """A map-style data set that counts how often it is read."""

    def __init__(self, items, **attributes) -> None:
        self.items = items
        self.reads = 0
        for key, value in attributes.items():
            setattr(self, key, value)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int):
        self.reads += 1
        return self.items[index]


def labels(images: DatasetImages) -> list[int] | None:
    return None if images.labels is None else images.labels.tolist()


def test_pil_images_with_labels_in_items():
    dataset = Pictures([(Image.fromarray(pixels), i % 2) for i, pixels in enumerate(PIXELS)])
    images = DatasetImages(dataset)
    assert dataset.reads == 0
    assert (len(images), images.ids[5], images.name) == (6, "000005", "data set Pictures")
    assert labels(images) == [0, 1, 0, 1, 0, 1]
    assert labels(images) == [0, 1, 0, 1, 0, 1]
    assert dataset.reads == 6  # once, not at every question
    np.testing.assert_array_equal(np.asarray(images.read(3)), PIXELS[3])
    assert isinstance(images, Images)


def test_modes_are_read_right():
    images = DatasetImages(
        [Image.new("RGBA", (2, 2), (0, 0, 0, 0)), Image.fromarray(np.full((2, 2), 65535, np.uint16))]
    )
    for i in range(2):
        image = images.read(i)
        assert isinstance(image, Image.Image)
        assert (image.mode, image.getpixel((0, 0))) == ("RGB", (255, 255, 255))


@pytest.mark.parametrize("pixels", [PIXELS[0], PIXELS[0, :, :, 0]])
def test_uint8_arrays_are_pixels(pixels):
    image = DatasetImages([pixels]).read(0)
    assert isinstance(image, Image.Image)
    expected = pixels if pixels.ndim == 3 else np.repeat(pixels[..., None], 3, 2)
    np.testing.assert_array_equal(np.asarray(image), expected)


def test_float_tensors_are_model_inputs():
    x = torch.randn(3, 3, 4, 4)
    read = DatasetImages(TensorDataset(x)).read(2)
    assert isinstance(read, Tensor)
    torch.testing.assert_close(read, x[2])


@pytest.mark.parametrize(
    ("item", "described"),
    [
        (torch.zeros(3, 4, 4, dtype=torch.uint8), r"a Tensor of torch\.uint8 and shape \(3, 4, 4\)"),
        (np.zeros((4, 4, 3), np.float32), r"a ndarray of float32 and shape \(4, 4, 3\)"),
        (np.zeros((3, 4, 4), np.uint8), r"a ndarray of uint8 and shape \(3, 4, 4\)"),
        ({"image": 1, "label": 0}, "a dict with keys image, label"),
        (7, "a int"),
    ],
)
def test_other_items(item, described):
    for value in (item, (item, 0)):
        with pytest.raises(
            ImagesError,
            match=rf"items of data set list must begin with a PIL .*; item 0 has {described}\. Ch",
        ):
            DatasetImages([value]).read(0)


@pytest.mark.parametrize("attribute", ["targets", "labels"])
@pytest.mark.parametrize("values", [[2, 0, 1], np.array([2, 0, 1]), torch.tensor([2, 0, 1])])
def test_labels_are_known_without_reading(attribute, values):
    dataset = Pictures(list(PIXELS[:3]), **{attribute: values})
    assert labels(DatasetImages(dataset)) == [2, 0, 1]
    assert dataset.reads == 0


def test_target_transform_is_applied():
    dataset = Pictures(list(PIXELS[:3]), targets=[2, 0, 1], target_transform=lambda label: label + 10)
    assert labels(DatasetImages(dataset)) == [12, 10, 11]


@pytest.mark.parametrize("targets", [["a", "b", "c"], [{}, {}, {}], [[1], [1, 2], []], [-1, -1, -1], [0.5, 1.0, 2.0]])
def test_targets_that_are_no_classes_mean_no_labels(targets):
    assert labels(DatasetImages(Pictures(list(PIXELS[:3]), targets=targets))) is None


@pytest.mark.parametrize("targets", [{0: "a", 1: "b", 2: "c"}, 3, lambda: [0, 1, 2], [0, 1], None])
def test_attributes_that_are_no_sequence_of_labels_are_passed_over(targets):
    images = DatasetImages(Pictures([(pixels, 9) for pixels in PIXELS[:3]], targets=targets))
    assert labels(images) == [9, 9, 9]


def test_items_without_labels():
    dataset = Pictures(list(PIXELS))
    assert labels(DatasetImages(dataset)) is None
    assert dataset.reads == 1  # the first item settles it
    assert labels(DatasetImages([(pixels, "a text") for pixels in PIXELS])) is None


def test_some_negative_labels():
    with pytest.raises(ImagesError, match="labels of data set Pictures must count classes from 0; got -1"):
        DatasetImages(Pictures(list(PIXELS[:3]), targets=[0, -1, 1]))


def test_labels_can_be_set():
    dataset = Pictures(list(PIXELS[:2]))
    images = DatasetImages(dataset)
    images.labels = torch.tensor([1, 0])
    assert labels(images) == [1, 0]
    assert dataset.reads == 0


def test_tensor_dataset():
    images = DatasetImages(TensorDataset(torch.zeros(3, 2), torch.tensor([5, 6, 7])))
    assert labels(images) == [5, 6, 7]
    assert labels(DatasetImages(TensorDataset(torch.zeros(3, 2), torch.zeros(3, 4)))) is None


def test_torch_subset_looks_below():
    dataset = Pictures(list(PIXELS), targets=[0, 1, 2, 3, 4, 5], classes=list("abcdef"))
    part = TorchSubset(TorchSubset(dataset, [5, 3, 1]), [2, 0])
    images = DatasetImages(part)
    assert (labels(images), images.classes) == ([1, 5], tuple("abcdef"))
    assert dataset.reads == 0
    np.testing.assert_array_equal(np.asarray(images.read(0)), PIXELS[1])
    first, second = random_split(dataset, [4, 2], torch.Generator().manual_seed(0))
    assert sorted(labels(DatasetImages(first)) + labels(DatasetImages(second))) == [0, 1, 2, 3, 4, 5]


def test_torchvision_image_folder(folder):
    root = folder({"cat/1.png": "red", "dog/1.png": "lime", "dog/2.png": b"broken"})
    images = DatasetImages(ImageFolder(str(root)))
    assert (labels(images), images.classes) == ([0, 1, 1], ("cat", "dog"))
    assert images.ids == ["cat/1.png", "dog/1.png", "dog/2.png"]
    image = images.read(1)
    assert isinstance(image, Image.Image)
    assert image.getpixel((0, 0)) == (0, 255, 0)
    with pytest.raises(
        BrokenImageError,
        match=r"image 'dog/2\.png' of data set ImageFolder must be readable; its data set gave: cannot identify",
    ):
        images.read(2)
    assert images.digest() == DatasetImages(ImageFolder(str(root))).digest()


def test_images_that_break_when_pillow_loads_them(tmp_path):
    path = tmp_path / "cut.png"
    Image.fromarray(PIXELS[0]).save(path)
    path.write_bytes(path.read_bytes()[:60])
    with (
        Image.open(path) as lazy,
        pytest.raises(BrokenImageError, match="its data set gave: image file is truncated"),
    ):
        DatasetImages([lazy]).read(0)


def test_torchvision_fake_data():
    dataset = FakeData(size=4, image_size=(3, 8, 8), num_classes=10)
    images = DatasetImages(dataset)
    assert labels(images) == [int(dataset[i][1]) for i in range(4)]
    np.testing.assert_array_equal(np.asarray(images.read(2)), np.asarray(dataset[2][0]))
    assert images.digest() == DatasetImages(FakeData(size=4, image_size=(3, 8, 8), num_classes=10)).digest()
    assert images.digest() != DatasetImages(FakeData(size=4, image_size=(3, 9, 8), num_classes=10)).digest()
    assert isinstance(DatasetImages(FakeData(size=4, image_size=(3, 8, 8), transform=ToTensor())).read(0), Tensor)


def changed_at(index: int, kind: str) -> tuple[DatasetImages, DatasetImages]:
    """300 items before and after one of them changed."""
    x = torch.randn(300, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[index] += 100
    constructors = {
        "items": lambda rows: Pictures(list(rows)),
        "list": list,
        "tensors": TensorDataset,
        "subset of items": lambda rows: TorchSubset(Pictures(list(rows)), range(300)),
        "subset of tensors": lambda rows: TorchSubset(TensorDataset(rows), range(300)),
    }
    return DatasetImages(constructors[kind](x)), DatasetImages(constructors[kind](other))


@pytest.mark.parametrize("kind", ["items", "list", "tensors", "subset of items", "subset of tensors"])
@pytest.mark.parametrize("index", [0, 1, 150, 298, 299])
def test_digest_sees_every_item(kind, index):
    before, after = changed_at(index, kind)
    same, _ = changed_at(299 - index, kind)
    assert before.digest() == same.digest() != after.digest()


def test_digest_sees_a_change_of_items_that_were_hashed_before():
    dataset = Pictures([(pixels, 1) for pixels in PIXELS])
    images = DatasetImages(dataset)
    assert labels(images) == [1] * 6  # keeps hashes, but for one digest only
    digest = images.digest()
    dataset.items[4] = (PIXELS[3], 1)
    assert images.digest() != digest


def test_digest_is_of_ids_and_contents_alone():
    items = list(PIXELS)
    digest = ArrayImages(images=PIXELS).digest()
    for source in (items, Pictures(items), Pictures(items, targets=[0, 0, 0, 0, 0, 1]), [(item, 1) for item in items]):
        assert DatasetImages(source).digest() == digest
    assert DatasetImages(items[:5]).digest() != digest
    assert DatasetImages(items[::-1]).digest() != digest


def test_tensors_are_hashed_where_they_lie():
    x = torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    plain = x.detach()
    digest = DatasetImages(TensorDataset(x)).digest()
    assert digest == DatasetImages(list(plain)).digest() == ArrayImages(inputs=plain).digest()
    part = TorchSubset(TorchSubset(TensorDataset(plain), [5, 3, 1]), [2, 0])
    assert DatasetImages(part).digest() == DatasetImages([plain[1], plain[5]]).digest()
    assert DatasetImages(TensorDataset(plain.bfloat16())).digest() == DatasetImages(list(plain.bfloat16())).digest()


def test_a_class_of_tensors_that_changes_its_items_is_hashed_by_items():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            return super().__getitem__(index)[0] * 2

    x = torch.randn(3, 2)
    assert DatasetImages(Doubled(x)).digest() == DatasetImages(TensorDataset(x * 2)).digest()


@pytest.mark.parametrize("items", [[(pixels, 1) for pixels in PIXELS], list(PIXELS), [(p, "a text") for p in PIXELS]])
@pytest.mark.parametrize("labels_first", [True, False])
def test_one_reading_gives_labels_and_digest(items, labels_first):
    dataset = Pictures(items)
    images = DatasetImages(dataset)
    if labels_first:
        labels(images)
    assert images.digest() == DatasetImages(items).digest()
    assert dataset.reads == 6


@pytest.mark.parametrize("attributes", [{}, {"classes": ["x", "y"]}])
def test_given_labels_cost_no_further_reading(attributes):
    dataset = Pictures([(pixels, 1) for pixels in PIXELS], **attributes)
    labelled = with_labels(DatasetImages(dataset), [0, 1, 0, 1, 0, 1])
    assert (labelled.labels.tolist(), labelled.classes) == ([0, 1, 0, 1, 0, 1], None)
    labelled.digest()
    assert dataset.reads == 6


class Flaky(Pictures):
    """Gives (image, label); item 1 cannot be read the first time."""

    def __getitem__(self, index: int):
        item = super().__getitem__(index)
        if index == 1 and self.reads <= 2:
            raise OSError("the line is down")
        return item


def test_an_item_that_breaks_while_labels_are_read_stays_broken():
    items = [(pixels, 2) for pixels in PIXELS]
    images = DatasetImages(Flaky(items))
    assert labels(images) == [2, 0, 2, 2, 2, 2]
    broken = images.digest()
    with pytest.raises(BrokenImageError, match=r"image '000001' of data set Flaky .* gave: the line is down\. Repair"):
        images.read(1)  # readable by now, but nobody knows its label
    assert images.digest() == broken != DatasetImages(items).digest()
    images.labels = torch.tensor([2] * 6)
    assert isinstance(images.read(1), Image.Image)


def test_nothing_but_broken_items_and_broken_items_without_labels():
    class Down(Pictures):
        def __getitem__(self, index: int):
            raise OSError("the line is down")

    assert labels(DatasetImages(Down(list(PIXELS)))) is None
    without = DatasetImages(Flaky([(PIXELS[0], 2), (PIXELS[1], 2), (PIXELS[2], "a text")]))
    assert labels(without) is None
    without.dataset.reads = 9
    assert isinstance(without.read(1), Image.Image)


def test_a_data_set_that_raises_something_else():
    class Wrong(Pictures):
        def __getitem__(self, index: int):
            raise KeyError("oops")

    for ask in (DatasetImages.digest, labels):
        with pytest.raises(ImagesError, match=r"item 0 of data set Wrong must be readable; it raised KeyError: 'oops'"):
            ask(DatasetImages(Wrong([0])))


def test_subset_reads_chosen_items_only():
    dataset = Pictures(list(PIXELS), targets=list(range(6)))
    Subset(DatasetImages(dataset), [1, 2]).digest()
    assert dataset.reads == 2


def test_empty():
    with pytest.raises(ImagesError, match="data set list must hold at least one image; got none"):
        DatasetImages([])


def test_pickling():
    images = DatasetImages(TensorDataset(torch.arange(6.0).reshape(3, 2), torch.tensor([5, 6, 7])))
    copy = pickle.loads(pickle.dumps(images))  # noqa: S301 (our own bytes)
    assert (labels(copy), copy.digest()) == ([5, 6, 7], images.digest())


class Repeated(TorchSubset):
    """Every item twice: longer than its list of indices."""

    def __len__(self) -> int:
        return 2 * len(self.indices)

    def __getitem__(self, idx):
        return self.dataset[self.indices[idx % len(self.indices)]]

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def test_a_subset_that_repeats_its_items():
    images = DatasetImages(Repeated(Pictures([(pixels, i) for i, pixels in enumerate(PIXELS)]), [5, 3]))
    assert labels(images) == [5, 3, 5, 3]
    np.testing.assert_array_equal(np.asarray(images.read(3)), PIXELS[3])
