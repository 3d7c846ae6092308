"""Several augmented epochs in one cache: rows, columns, identity; resumed and by workers the same bytes."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import Compose, Resize, ToTensor

import dubito
from dubito.cache.block import BlockRunner
from dubito.data import Augment, Augmented
from dubito.errors import ImagesError, SkippedImagesWarning, StaleCacheError, TableError, ValueRangeError
from tests.cache.conftest import contents, image_folder


@pytest.fixture
def photos(tmp_path):
    return image_folder(tmp_path / "photos", count=7)


def extract(model, images, to, **options):
    return dubito.extract(model, images, to, **{"batch_size": 4, "shard_size": 8, "workers": 0, **options})


def expected(model, network, images, augment, rows):
    """Logits of augmented rows by hand: the transform only normalises what comes at the model's size."""
    result = Augmented(dubito.open_images(images), 3, augment, (16, 16))
    x = model.transform.finish(torch.stack([result.read(row) for row in rows]))
    with torch.no_grad():
        return network.eval()(x)


def test_rows_are_epochs_times_photos(model, network, photos, tmp_path):
    table = extract(model, photos, tmp_path / "cache", epochs=3)
    ids = list(dubito.open_images(photos).ids)
    assert len(table) == 21
    assert list(table.id) == [f"{name}@{epoch}" for epoch in range(3) for name in ids]
    assert table.whole("epoch").tolist() == [0] * 7 + [1] * 7 + [2] * 7
    assert table.whole("image_index").tolist() == list(range(7)) * 3
    assert (table.whole("epoch").dtype, table.whole("image_index").dtype) == (torch.int64, torch.int64)
    label = dubito.open_images(photos).labels.repeat(3)
    assert torch.equal(table.label, label)
    logit = expected(model, network, photos, Augment(), range(21))
    torch.testing.assert_close(table.logit, logit)
    torch.testing.assert_close(table.loss, F.cross_entropy(logit, label, reduction="none"))
    assert len(table.logit.unique(dim=0)) == 21, "every row is another picture"


def test_workers_and_the_size_of_batches_do_not_change_a_picture(model, photos, tmp_path):
    augment = Augment(strong="cutmix", seed=3)
    extract(model, photos, tmp_path / "alone", epochs=3, augment=augment)
    torch.manual_seed(5)
    extract(model, photos, tmp_path / "helped", epochs=3, augment=augment, workers=2)
    assert contents(tmp_path / "alone") == contents(tmp_path / "helped")
    table = extract(model, photos, tmp_path / "other", epochs=3, augment=augment, batch_size=7, shard_size=5)
    torch.testing.assert_close(table.logit, dubito.open(tmp_path / "alone").logit)


def test_one_epoch_without_augmentation_is_as_ever(model, photos, tmp_path):
    plain = extract(model, photos, tmp_path / "plain")
    extract(model, photos, tmp_path / "said", epochs=1, augment=None)
    assert contents(tmp_path / "plain") == contents(tmp_path / "said")
    manifest = json.loads((tmp_path / "plain" / "manifest.json").read_text())
    assert not {"augmentation", "targets"} & set(manifest["identity"])
    assert manifest["probes"]["forward"]["settings"] == {"feature_dtype": "float16", "store_logit": True}
    assert not {"epoch", "image_index"} & set(plain.columns)
    with pytest.raises(
        TableError, match=r"needs column 'image_index'.*an extraction of augmented epochs \(epochs=\.\.\., aug"
    ):
        plain.whole("image_index")


def test_one_augmented_epoch(model, network, photos, tmp_path):
    table = extract(model, photos, tmp_path / "cache", augment=Augment(seed=1))
    assert table.whole("epoch").tolist() == [0] * 7
    torch.testing.assert_close(table.logit, expected(model, network, photos, Augment(seed=1), range(7)))


def test_a_transform_of_ones_own_gets_images_of_the_photo_s_size(network, photos, tmp_path):
    model = dubito.wrap(network, transform=Compose([Resize((16, 16)), ToTensor()]))
    table = extract(model, photos, tmp_path / "cache", epochs=2)
    result = Augmented(dubito.open_images(photos), 2, Augment())
    assert result.read(0).size == (20, 20)
    x = torch.stack([model.transform.prepare(result.read(row)) for row in range(14)])
    torch.testing.assert_close(table.logit, network.eval()(x).detach())


def test_a_size_of_another_meaning_is_not_taken_for_the_input_s(network, photos, tmp_path):
    class Sized:
        size = 5

        def prepare(self, image):
            return ToTensor()(image.resize((16, 16)))

        def finish(self, batch):
            return batch

        def describe(self):
            return {"kind": "sized"}

    assert len(extract(dubito.wrap(network, transform=Sized()), photos, tmp_path / "cache", epochs=2)) == 14


def refused(model, images, cache, message, **options):
    before = contents(cache)
    with pytest.raises(StaleCacheError, match=message) as caught:
        extract(model, images, cache, **options)
    assert contents(cache) == before
    return str(caught.value)


def test_another_augmentation_is_refused_by_name(model, photos, tmp_path):
    cache = tmp_path / "cache"
    extract(model, photos, cache, epochs=3)
    before = contents(cache)
    extract(model, photos, cache, epochs=3, augment=Augment())
    assert contents(cache) == before, "the default, said or not, is the same"
    message = refused(model, photos, cache, r"the augmentation \(epochs=3 there, 2 here\)", epochs=2)
    assert "the images" not in message
    refused(model, photos, cache, r"the augmentation \(seed=0 there, 4 here\)", epochs=3, augment=Augment(seed=4))
    refused(model, photos, cache, r"the augmentation \(strong=none there, box here\)", epochs=3,
            augment=Augment(strong="box"))  # fmt: skip
    refused(model, photos, cache, r"does not match: the augmentation \(.*\"epochs\": 3, .* there, none here\)")
    extract(model, photos, tmp_path / "plain")
    refused(model, photos, tmp_path / "plain", r"the augmentation \(none there, .*\"epochs\": 2, .* here\)", epochs=2)
    (photos / "a" / "000.png").write_bytes((photos / "b" / "001.png").read_bytes())
    refused(model, photos, cache, r"the contents of the images", epochs=3)


@pytest.mark.parametrize("strong", [None, "mixup"])
def test_stopped_between_shards_it_goes_on_to_the_same_bytes(model, photos, tmp_path, monkeypatch, strong):
    augment = Augment(strong=strong)
    extract(model, photos, tmp_path / "undisturbed", epochs=3, augment=augment)
    usual, calls = BlockRunner._write, []

    def write(self, *arguments):
        calls.append(arguments[:2])
        if len(calls) == 4:
            raise KeyboardInterrupt
        return usual(self, *arguments)

    monkeypatch.setattr(BlockRunner, "_write", write)
    with pytest.raises(KeyboardInterrupt):
        extract(model, photos, tmp_path / "cache", epochs=3, augment=augment)
    extract(model, photos, tmp_path / "cache", epochs=3, augment=augment)
    begun = [("rows", 0), ("forward", 0), ("rows", 1), ("forward", 1)]
    assert calls == [*begun, ("forward", 1), ("rows", 2), ("forward", 2)], "finished shards are not done again"
    assert contents(tmp_path / "cache") == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("strong", ["mixup", "cutmix"])
def test_a_mixed_row_s_loss_is_that_of_both_photos(model, network, photos, tmp_path, strong):
    augment = Augment(strong=strong, strong_share=0.7)
    table = extract(model, photos, tmp_path / "cache", epochs=3, augment=augment)
    logit = expected(model, network, photos, augment, range(21))
    torch.testing.assert_close(table.logit, logit)
    label = dubito.open_images(photos).labels
    partner, weight = Augmented(dubito.open_images(photos), 3, augment).mixing(range(21))
    assert 10 <= (weight < 1).sum() < 21
    surprise = -F.log_softmax(logit, 1)
    for row in range(21):
        first, second = surprise[row, label[row % 7]].item(), surprise[row, label[partner[row]]].item()
        by_hand = weight[row].item() * first + (1 - weight[row].item()) * second
        assert table.loss[row].item() == pytest.approx(by_hand, rel=1e-4)
    assert torch.equal(table.label, label.repeat(3)), "the label is the first photo's"


def test_one_photo_is_not_mixed(model, tmp_path):
    image_folder(tmp_path / "one", count=1)
    mixed = extract(model, tmp_path / "one", tmp_path / "mixed", epochs=3, label_space="model",
                    augment=Augment(strong="cutmix", strong_share=1.0))  # fmt: skip
    plain = extract(model, tmp_path / "one", tmp_path / "plain", epochs=3, label_space="model")
    assert torch.equal(mixed.logit, plain.logit)


def test_a_broken_photo_is_left_out_of_every_epoch(model, photos, tmp_path):
    (photos / "b" / "001.png").write_bytes(b"")
    with pytest.warns(SkippedImagesWarning, match="3 of 21 images could not be decoded"):
        table = extract(model, photos, tmp_path / "cache", epochs=3)
    assert [name for name, _ in table.skipped] == ["b/001.png@0", "b/001.png@1", "b/001.png@2"]
    left = [photo for photo in range(7) if photo != 3]  # a/000 a/003 a/006 b/001 ...
    assert table.whole("image_index").tolist() == left * 3
    assert table.whole("epoch").tolist() == [0] * 6 + [1] * 6 + [2] * 6


def test_an_augmented_set_can_be_given_itself(model, photos, tmp_path):
    extract(model, photos, tmp_path / "asked", epochs=2, augment=Augment(seed=2), targets=np.arange(7) % 3)
    original = Augmented(dubito.open_images(photos), 2, Augment(seed=2), (16, 16))
    extract(model, original, tmp_path / "given", targets=np.arange(7) % 3)
    assert contents(tmp_path / "asked") == contents(tmp_path / "given")


def test_a_further_probe_runs_over_the_same_pictures(model, photos, tmp_path):
    class Brightness:
        name, price = "brightness", "nothing"

        def run(self, model, x, label):
            return {"brightness": x.mean((1, 2, 3))}

        def settings(self):
            return {}

    extract(model, photos, tmp_path / "cache", epochs=2)
    table = extract(model, photos, tmp_path / "cache", epochs=2, probes=[Brightness()])
    result = Augmented(dubito.open_images(photos), 2, Augment(), (16, 16))
    x = model.transform.finish(torch.stack([result.read(row) for row in range(14)]))
    torch.testing.assert_close(table.whole("brightness"), x.mean((1, 2, 3)))


@pytest.mark.parametrize("column", ["epoch", "image_index"])
def test_epoch_and_photo_belong_to_the_extraction(model, photos, tmp_path, column):
    class Odd:
        name, price = "odd", "nothing"

        def run(self, model, x, label):
            return {column: torch.zeros(len(x))}

        def settings(self):
            return {}

    with pytest.raises(TableError, match=f"writes column '{column}', which extract writes already"):
        extract(model, photos, tmp_path / "cache", probes=[Odd()])


def test_what_cannot_be_augmented(model, photos, tmp_path):
    with pytest.raises(ImagesError, match=r"augmentation needs images; .*images in memory is a model input already"):
        extract(model, torch.zeros(3, 3, 16, 16), tmp_path / "cache", epochs=2)
    with pytest.raises(ValueRangeError, match="extract: epochs must be a whole number, at least 1; got 0"):
        extract(model, photos, tmp_path / "cache", epochs=0)
    assert not (tmp_path / "cache").exists()


def test_grey_and_tiny_images(model, tmp_path):
    (tmp_path / "odd").mkdir()
    for index, size in enumerate([(1, 1), (1, 90), (200, 3)]):
        Image.new("L", size, 90).save(tmp_path / "odd" / f"{index}.png")
    assert torch.isfinite(extract(model, tmp_path / "odd", tmp_path / "cache", epochs=4).logit).all()
