import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import ImageNetInfo
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from torchvision.models import ResNet18_Weights

import dubito
from dubito.cache.labels import (
    NO_CLASS,
    _better_order,
    _by_name,
    _spread,
    cross_fitted,
    exchanged,
    matched,
    resolve_labels,
)
from dubito.data import ArrayImages
from dubito.errors import ImagesError, LabelOrderWarning, OwnLabelsWarning, StaleCacheError
from tests.cache.conftest import edit_manifest, small_network

INFO = ImageNetInfo("imagenet-1k")
TIMM = [INFO.index_to_description(index) for index in range(1000)]
TORCHVISION = ResNet18_Weights.DEFAULT.meta["categories"]


def resolve(classes, ours, space=None):
    """One image a class, in the order of the classes."""
    images = ArrayImages(inputs=torch.zeros(len(classes), 2), labels=torch.arange(len(classes)), classes=classes)
    network = small_network(2 if ours is None else len(ours))
    model = dubito.wrap(network, transform=dubito.Preprocess((16, 16), 16), classes=ours)
    labels, result = resolve_labels(images, model, space)
    return labels.tolist(), result


@pytest.mark.parametrize("ours", [TIMM, TORCHVISION], ids=["timm", "torchvision"])
def test_folders_named_by_wordnet_ids(ours):
    # https://image-net.org: the tench is n01440764 and class 0, the goldfish n01443537 and 1, toilet tissue the last
    assert resolve(["n01443537", "n01440764", "n15075141"], ours) == ([1, 0, 999], "model")
    everything = [INFO.index_to_label_name(index) for index in range(1000)]
    assert resolve(everything, ours) == (list(range(1000)), "model")


def test_wordnet_ids_and_names_may_be_mixed():
    assert resolve(["n02012849", "n03126707", "tench"], TIMM) == ([134, 517, 0], "model")


def test_wordnet_ids_beyond_imagenet():
    with pytest.raises(ImagesError, match="1 of 2 class folders are classes of the model, but not n00000001"):
        resolve(["n00000001", "n01440764"], TIMM)


@pytest.mark.parametrize("ours", [["tench", "cat"], ["cat", *TIMM[1:]]], ids=["few", "no tench"])
def test_wordnet_ids_say_nothing_to_other_models(ours):
    with pytest.warns(OwnLabelsWarning):
        assert resolve(["n01440764", "n01443537"], ours) == ([0, 1], "own")


def test_synonyms_case_and_underscores():
    assert _by_name(["Tinca_tinca", "TENCH, tinca tinca", "Carassius auratus"], TIMM) == [0, 0, 1]


def test_a_synonym_of_two_classes_is_refused():
    with pytest.raises(
        ImagesError,
        match=r"class folder 'crane' stands for 2 classes of the model, 134 'crane' and 517 'crane'\. Rename it to the "
        r"full name of one of them \(of an ImageNet class also to its WordNet id\), give labels= as "
        r"class indices, or pass label_space='own' if these are classes of another set\.$",
    ):
        resolve(["crane", "tench"], TIMM)
    with pytest.raises(ImagesError, match="'b' stands for 2 classes of the model, 0 'a, b' and 1 'b, c'"):
        _by_name(["b"], ["a, b", "b, c"])
    assert resolve(["crane", "tench"], TIMM, "own") == ([0, 1], "own")


def test_a_whole_name_wins_over_a_synonym():
    assert _by_name(["b", "a, b"], ["a, b", "b"]) == [1, 0]
    assert _by_name(["maillot"], TIMM) == [638]  # 639 is "maillot, tank suit"


def test_every_full_name_but_the_cranes_is_its_own_class():
    names = {name: index for index, name in enumerate(TIMM) if name != "crane"}
    assert _by_name(list(names), TIMM) == list(names.values())


def test_names_that_the_model_does_not_know_are_reported():
    message = (
        r"the 2 class names of 'images in memory' \('p', 'q'\) are none of the model's 1000 classes: labels are kept "
        r"as their own, without loss and accuracy\. Pass label_space='own' to say so, or name"
    )
    with pytest.warns(OwnLabelsWarning, match=message):
        assert resolve(["p", "q"], TIMM) == ([0, 1], "own")


def test_no_warning_where_the_user_chose_the_label_space():
    assert resolve(["p", "q"], TIMM, "own") == ([0, 1], "own")
    assert resolve(["p", "q"], TIMM, "model") == ([0, 1], "model")
    assert resolve(["p", "q"], None) == ([0, 1], "model")


@pytest.mark.parametrize(
    ("ours", "space", "names"),
    [
        (["cat", "dog"], "own", ["q", "p"]),
        (None, None, ["q", "p"]),  # as many names as outputs: the folder's names serve
        (["q", "p"], None, ["q", "p"]),
    ],
)
def test_labels_keep_their_names(tmp_path, ours, space, names):
    model = dubito.wrap(small_network(2), transform=dubito.Preprocess((16, 16), 16), classes=ours)
    images = ArrayImages(inputs=torch.zeros(2, 3, 16, 16), labels=torch.arange(2), classes=["q", "p"])
    table = dubito.extract(model, images, tmp_path / "cache", label_space=space, workers=0)
    assert list(table.label_names) == list(dubito.open(tmp_path / "cache").label_names) == names
    assert table.classes == ours


def test_new_names_of_the_same_labels_are_taken_over(model, tmp_path):
    for names in (["p", "q"], ["ape", "quail"]):
        images = ArrayImages(inputs=torch.zeros(2, 3, 16, 16), labels=torch.arange(2), classes=names)
        table = dubito.extract(model, images, tmp_path / "cache", label_space="own", workers=0)
        assert table.label_names == dubito.open(tmp_path / "cache").label_names == names


def test_a_cache_from_before_labels_had_names_opens(model, tmp_path):
    dubito.extract(model, torch.zeros(2, 3, 16, 16), tmp_path / "cache", labels=[5, 7], label_space="own", workers=0)
    edit_manifest(tmp_path / "cache", lambda entries: entries.pop("label_names"))
    assert dubito.open(tmp_path / "cache").label_names is None


class Counted(Dataset):
    """300 inputs with labels in the items only."""

    def __init__(self):
        self.x = torch.randn(300, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        self.reads = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.reads += 1
        return self.x[index], index % 3


@pytest.mark.parametrize("labels", [None, [0] * 300], ids=["from items", "given"])
def test_a_data_set_is_read_once_for_its_identity_and_once_for_the_model(model, tmp_path, labels):
    dataset = Counted()
    table = dubito.extract(model, dataset, tmp_path / "cache", labels=labels, workers=0)
    assert table.label.tolist() == (labels or [index % 3 for index in range(300)])
    assert dataset.reads == 600
    dubito.extract(model, dataset, tmp_path / "cache", labels=labels, workers=0)
    assert dataset.reads == 900


@pytest.mark.parametrize("kind", ["items", "tensors"])
def test_one_changed_item_makes_the_cache_stale(model, tmp_path, kind):
    dataset = Counted()
    source = dataset if kind == "items" else TensorDataset(dataset.x, torch.arange(300) % 3)
    dubito.extract(model, source, tmp_path / "cache", workers=0)
    dataset.x[1] += 100
    with pytest.raises(StaleCacheError, match=r"does not match: the contents of the images"):
        dubito.extract(model, source, tmp_path / "cache", workers=0)


COUNT = 60
NAMES = ("blue", "green", "red")
"""As folders are sorted: the model's outputs are red, green and blue."""


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


@pytest.fixture
def folder(tmp_path):
    """Twenty pictures of each colour, in class folders."""
    rng = np.random.default_rng(0)
    for number in range(COUNT):
        pixels = rng.integers(0, 100, (8, 8, 3), dtype=np.uint8)
        pixels[..., number % 3] += 100
        path = tmp_path / "photos" / NAMES[2 - number % 3] / f"{number:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return tmp_path / "photos"


def brightest(classes=None):
    """Which colour is the brightest: red, green, blue."""
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3, bias=False))
    nn.init.eye_(net[2].weight)
    return dubito.wrap(net, transform=dubito.Preprocess((8, 8), mean=(0.0,) * 3, std=(1.0,) * 3), classes=classes)


@pytest.mark.parametrize("store_logit", [True, False])
def test_folders_by_place_are_reported_once(folder, tmp_path, store_logit):
    options = {"probes": [dubito.probes.Forward(store_logit=store_logit)], "shard_size": 16, "workers": 0}
    message = (
        r"labels of '.*photos' seem to be the model's classes in another order: they agree with its predictions on "
        r"33\.3 % of 60 images, and with classes exchanged on 100\.0 % \(label 0 'blue' -> class 2, label 2 'red' -> "
        r"class 0\)\. The model does not name its classes, so class names were taken for them in sorted order\. Run "
        r"dubito\.audit\(model, images\) \(dubito audit MODEL IMAGES\), which reports what to repair\.$"
    )
    with pytest.warns(LabelOrderWarning, match=message) as warned:
        table = dubito.extract(brightest(), folder, tmp_path / "cache", **options)
    assert len(warned) == 1
    assert table.label_space == "model"
    dubito.extract(brightest(), folder, tmp_path / "cache", **options)  # warnings are errors here
    options["probes"].append(dubito.probes.Noise(2))
    dubito.extract(brightest(), folder, tmp_path / "cache", **options)


def test_names_and_integers_in_the_right_order_say_nothing(folder, tmp_path):
    dubito.extract(brightest(["red", "green", "blue"]), folder, tmp_path / "named", workers=0)
    right = {path.name: int(path.stem) % 3 for path in folder.rglob("*.png")}
    dubito.extract(brightest(), folder, tmp_path / "numbered", labels=right, workers=0)
    dubito.extract(brightest(), folder, tmp_path / "own", label_space="own", workers=0)


def test_wrong_names_of_the_model_are_reported_too(folder, tmp_path):
    with pytest.warns(LabelOrderWarning, match="another order") as caught:
        dubito.extract(brightest(["green", "red", "blue"]), folder, tmp_path / "cache", workers=0)
    assert "(label 0 'green' -> class 1 'red', label 1 'red' -> class 0 'green'). Run dubito.audit" in str(
        caught[0].message
    )


@pytest.mark.parametrize("seed", range(20))
def test_answers_at_random_have_no_better_order(seed):
    rng = torch.Generator().manual_seed(seed)
    predicted, labels = torch.randint(0, 3, (2, 200), generator=rng)
    assert _better_order(predicted, labels) is None


def test_one_answer_for_skewed_labels_is_no_order():
    """Nine tenths are of class 0, and every answer is 1: exchanged, nine tenths would be right by no merit."""
    labels = torch.zeros(100, dtype=torch.long)
    labels[:10] = 1
    assert _better_order(torch.ones(100, dtype=torch.long), labels) is None
    assert _better_order(torch.ones(100, dtype=torch.long), torch.zeros(100, dtype=torch.long)) is None


def test_a_mediocre_model_and_few_images_say_nothing():
    labels = torch.arange(3).repeat(40)
    predicted = torch.where(torch.arange(120) % 5 < 2, (labels + 1) % 3, labels)  # right on three of five
    assert _better_order(predicted, labels) is None
    assert _better_order((labels[:19] + 1) % 3, labels[:19]) is None
    assert _better_order((labels[:21] + 1) % 3, labels[:21]) == (0.0, 1.0)


def test_an_order_is_one_to_one():
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    predicted = torch.tensor([1, 1, 1, 1, 1, 2])
    mapping = matched(predicted, labels)
    assert mapping == {0: 1, 2: 2}  # label 1 has the answer 1 too, but label 0 has it oftener
    assert exchanged(labels, mapping).tolist() == [1, 1, 1, NO_CLASS, NO_CLASS, 2]


def test_an_image_is_never_judged_by_an_order_that_it_was_read_from():
    """Two images of label 0 with answers 1 and 2: each is given the other's answer."""
    assert cross_fitted(torch.tensor([1, 2]), torch.tensor([0, 0])).tolist() == [2, 1]


def test_rows_are_of_few_shards_from_the_first_to_the_last():
    assert _spread(10, 4).tolist() == list(range(10))
    rows = _spread(1_000_000, 512)
    assert len(rows) <= 4096
    shards = set((rows // 512).tolist())
    assert len(shards) == 16
    assert {0, 999_999 // 512} <= shards
    assert len(_spread(50_000, 100_000)) <= 4096
