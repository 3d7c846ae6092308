import json
import os
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from filelock import FileLock
from PIL import Image
from torch.utils.data import TensorDataset
from torchvision.transforms import ToTensor

import dubito
from dubito.cache.extract import _Extraction
from dubito.errors import (
    CacheBusyError,
    CacheError,
    ImagesError,
    OwnLabelsWarning,
    SkippedImagesWarning,
    StaleCacheError,
    ValueRangeError,
)
from tests.cache.conftest import contents, small_network


def extract(model, images, to, **options):
    return dubito.extract(model, images, to, **{"batch_size": 4, "shard_size": 8, "workers": 0, **options})


def test_columns_are_what_the_model_says(model, network, folder, tmp_path):
    table = extract(model, folder, tmp_path / "cache")
    images = dubito.open_images(folder)
    x = model.transform.finish(torch.stack([model.transform.prepare(images.read(i)) for i in range(len(images))]))
    with torch.no_grad():
        logit = network.eval()(x)
    assert len(table) == 23
    assert list(table.id) == list(images.ids)
    assert torch.equal(table.label, images.labels)
    torch.testing.assert_close(table.logit, logit)
    torch.testing.assert_close(table.feature, model.features(x), rtol=1e-3, atol=1e-4)  # float16 on disk
    torch.testing.assert_close(table.loss, F.cross_entropy(logit, images.labels, reduction="none"))


def test_worker_processes_give_the_same_bytes(model, folder, tmp_path):
    extract(model, folder, tmp_path / "alone", workers=0)
    extract(model, folder, tmp_path / "helped", workers=2)
    assert contents(tmp_path / "alone") == contents(tmp_path / "helped")


def test_a_finished_cache_is_not_made_again(model, folder, tmp_path, monkeypatch):
    first = extract(model, folder, tmp_path / "cache")
    monkeypatch.setattr("dubito.cache.runner.batches", None)  # whoever reads an image now fails
    again = extract(model, folder, tmp_path / "cache")
    assert torch.equal(first.logit, again.logit)


def test_logits_are_rebuilt_when_they_are_not_stored(model, folder, tmp_path):
    stored = extract(model, folder, tmp_path / "stored")
    rebuilt = extract(model, folder, tmp_path / "rebuilt", probes=[dubito.probes.Forward(store_logit=False)])
    manifest = json.loads((tmp_path / "rebuilt" / "manifest.json").read_text())
    assert "logit" not in manifest["probes"]["forward"]["columns"]
    torch.testing.assert_close(rebuilt.logit, stored.logit, rtol=0, atol=2e-3)
    assert torch.equal(rebuilt.loss, stored.loss)


def test_a_further_probe_adds_its_columns_to_a_finished_cache(model, folder, tmp_path):
    class Brightness:
        name, price = "brightness", "nothing"

        def run(self, model, x, label):
            return {"brightness": x.mean((1, 2, 3))}

        def settings(self):
            return {}

    extract(model, folder, tmp_path / "cache")
    before = contents(tmp_path / "cache")
    table = extract(model, folder, tmp_path / "cache", probes=[Brightness()])
    assert table.shape("brightness") == (23,)
    assert torch.isfinite(table.whole("brightness")).all()
    shards = [name for name in before if name.startswith("forward")]
    assert all(contents(tmp_path / "cache")[name] == before[name] for name in shards)


@pytest.mark.parametrize("kind", ["npz", "dataset", "array"])
def test_ready_inputs_skip_the_transform(model, tmp_path, kind):
    inputs = torch.randn(9, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(9) % 3
    if kind == "npz":
        np.savez(tmp_path / "ready.npz", inputs=inputs.numpy(), labels=labels.numpy())
        table = extract(model, tmp_path / "ready.npz", tmp_path / "cache")
    elif kind == "dataset":
        table = extract(model, TensorDataset(inputs, labels), tmp_path / "cache")
    else:
        table = extract(model, inputs, tmp_path / "cache", labels=labels)
    torch.testing.assert_close(table.logit, model.logits(model.features(inputs)))
    assert torch.equal(table.label, labels)


def test_broken_images_are_skipped_and_listed(model, folder, tmp_path):
    whole = (folder / "a" / "000.png").read_bytes()
    (folder / "a" / "000.png").write_bytes(whole[: len(whole) // 2])
    (folder / "b" / "001.png").write_bytes(b"")
    with pytest.warns(SkippedImagesWarning, match=r"2 of 23 images could not be decoded and were skipped: .*000\.png"):
        table = extract(model, folder, tmp_path / "cache", workers=1)
    assert len(table) == 21
    assert [name for name, _ in table.skipped] == ["a/000.png", "b/001.png"]
    assert not {"a/000.png", "b/001.png"} & set(table.id)
    assert table.label.tolist() == [0] * 7 + [1] * 7 + [2] * 7
    manifest = json.loads((tmp_path / "cache" / "manifest.json").read_text())
    assert [name for name, _ in manifest["skipped"]] == ["a/000.png", "b/001.png"]
    assert "0 bytes" in manifest["skipped"][1][1]


def test_a_whole_block_of_broken_images_leaves_no_gap(model, folder, tmp_path):
    for path in sorted(folder.glob("a/*"))[:8]:
        path.write_bytes(b"not an image")
    with pytest.warns(SkippedImagesWarning, match="8 of 23"):
        table = extract(model, folder, tmp_path / "cache")
    assert len(table) == len(table.id) == len(table.logit) == 15
    assert sorted(set(table.label.tolist())) == [1, 2]


def test_nothing_but_broken_images(model, folder, tmp_path):
    for path in folder.glob("*/*.png"):
        path.write_bytes(b"")
    with pytest.raises(ImagesError, match=r"none of the 23 images in .* could be decoded; the first: .*0 bytes"):
        extract(model, folder, tmp_path / "cache")


def refused(model, images, cache, message, **options):
    before = contents(cache)
    with pytest.raises(StaleCacheError, match=message):
        extract(model, images, cache, **options)
    assert contents(cache) == before


def test_a_stale_cache_is_refused_with_the_differing_part(model, network, folder, tmp_path):
    cache = tmp_path / "cache"
    extract(model, folder, cache)
    other = small_network()
    with torch.no_grad():
        other[0].weight[0, 0, 0, 0] += 1
    transform = dubito.Preprocess((16, 16), 16)
    refused(dubito.wrap(other, transform=transform), folder, cache, r"does not match: the model's weights \(\w+ there")
    narrow = dubito.wrap(network, transform=dubito.Preprocess((16, 16), 17))
    refused(narrow, folder, cache, r"does not match: the transform \(.*resize=16 there, 17 here\)")
    refused(model, folder, cache, "the labels", labels=[0] * 23)
    refused(model, folder, cache, r"the settings of the forward probe \(store_logit=true there, false here\)",
            probes=[dubito.probes.Forward(store_logit=False)])  # fmt: skip
    (folder / "a" / "000.png").write_bytes((folder / "b" / "001.png").read_bytes())
    refused(model, folder, cache, r"does not match: the contents of the images \(\w+ there, \w+ here\)")
    (folder / "a" / "000.png").unlink()
    refused(model, folder, cache, r"the number of images \(23 there, 22 here\)")


def test_batch_statistics_are_weights_too(model, network, folder, tmp_path):
    extract(model, folder, tmp_path / "cache")
    network[1].running_mean += 1
    refused(model, folder, tmp_path / "cache", "the model's weights")


def test_a_cache_of_another_model_is_not_opened(model, folder, tmp_path):
    extract(model, folder, tmp_path / "cache")
    assert len(dubito.open(tmp_path / "cache", model=model)) == 23
    other = dubito.wrap(small_network(4), transform=model.transform)
    with pytest.raises(StaleCacheError, match="the model's weights"):
        dubito.open(tmp_path / "cache", model=other)


def test_foreign_folders_are_left_alone(model, folder, tmp_path):
    with pytest.raises(CacheError, match=r"holds other things \(a, b, c\) and no cache. Choose a new or empty folder"):
        extract(model, folder, folder)
    with pytest.raises(CacheError, match=r"no cache in .*there is no such folder"):
        dubito.open(tmp_path / "nowhere")


def test_a_folder_that_cannot_be_made(model, folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot be written"):
        extract(model, folder, tmp_path / "file" / "cache")


def test_labels_outside_the_model_are_refused_before_anything_is_written(model, folder, tmp_path):
    with pytest.raises(
        ImagesError,
        match=r"labels must be classes from 0 to 2; got 7 for image 'a/000\.png'\. Pass the model's class indices",
    ):
        extract(model, folder, tmp_path / "cache", labels=[7] + [0] * 22)
    own = extract(model, folder, tmp_path / "own", labels=[7] + [0] * 22, label_space="own")
    assert own.label_space == "own"
    assert "loss" not in own


def test_not_a_number_stops_with_the_image_named(network, folder, tmp_path):
    with torch.no_grad():
        network[5].bias[0] = float("nan")
    model = dubito.wrap(network, transform=dubito.Preprocess((16, 16), 16), head="5")
    nan = r"image 'a/000\.png': the model gives NaN or infinite values in 'logit'\. .* keeps its finished shards"
    with pytest.raises(ValueRangeError, match=nan):
        extract(model, folder, tmp_path / "cache")


def test_features_beyond_half_precision_are_refused_and_repaired(network, folder, tmp_path):
    with torch.no_grad():
        network[1].weight.fill_(1e6)
    model = dubito.wrap(network, transform=dubito.Preprocess((16, 16), 16))
    with pytest.raises(ValueRangeError, match=r"beyond float16's 65504\. Extract with probes=\[Forward"):
        extract(model, folder, tmp_path / "half")
    table = extract(model, folder, tmp_path / "full", probes=[dubito.probes.Forward(feature_dtype="float32")])
    assert table.feature.max() > 65504


def test_a_second_extraction_into_one_folder_is_refused(model, folder, tmp_path):
    (tmp_path / "cache").mkdir()
    lock = FileLock(tmp_path / "cache" / ".lock", thread_local=False)
    with lock, pytest.raises(CacheBusyError, match="another process is writing into"):
        extract(model, folder, tmp_path / "cache")
    assert len(extract(model, folder, tmp_path / "cache")) == 23


def test_inputs_of_different_shapes_are_named(network, folder, tmp_path):
    Image.new("RGB", (9, 30)).save(folder / "a" / "000.png")
    model = dubito.wrap(network, transform=ToTensor())
    with pytest.raises(ImagesError, match=r"one shape; got \(3, 30, 9\) for 'a/000\.png' and \(3, 20, 20\) for"):
        extract(model, folder, tmp_path / "cache", workers=1)


def test_an_error_in_the_transform_is_reported_in_one_sentence(network, folder, tmp_path):
    def transform(image):
        raise KeyError("oops")

    class Fixed:
        def prepare(self, image):
            return transform(image)

        def finish(self, batch):
            return batch

        def describe(self):
            return {}

    model = dubito.wrap(network, transform=Fixed())
    with pytest.raises(ImagesError, match=r"image 'a/000\.png' could not be prepared: KeyError: 'oops'"):
        extract(model, folder, tmp_path / "cache", workers=1)


def test_a_process_that_decodes_and_is_killed_is_an_error_of_ours(network, folder, tmp_path):
    driver = os.getpid()

    def transform(image):
        if os.getpid() != driver:
            os.kill(os.getpid(), signal.SIGKILL)
        return ToTensor()(image)

    model = dubito.wrap(network, transform=transform)
    with pytest.raises(ImagesError, match=r"^a process that decodes images ended by itself \(.*with fewer workers"):
        extract(model, folder, tmp_path / "cache", workers=1)


def test_an_unfinished_cache_is_not_opened(model, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(_Extraction, "_finish", lambda self, blocks: None)
    with pytest.raises(CacheError, match=r"is not finished\. Run the same extraction again"):
        extract(model, folder, tmp_path / "cache")
    monkeypatch.undo()
    assert len(extract(model, folder, tmp_path / "cache")) == 23


def test_class_folders_are_found_among_the_models_names(network, folder, tmp_path):
    model = dubito.wrap(network, transform=dubito.Preprocess((16, 16), 16), classes=["c", "A", "b, bee"])
    table = extract(model, folder, tmp_path / "cache")
    assert table.label_space == "model"
    assert table.label[0] == 1  # folder a is the model's class 1
    other = dubito.wrap(network, transform=dubito.Preprocess((16, 16), 16), classes=["x", "y", "z"])
    with pytest.warns(
        OwnLabelsWarning, match=r"3 class names of .*photos' \('a', 'b', 'c'\) are none of the model's 3"
    ):
        assert extract(other, folder, tmp_path / "own").label_space == "own"
    some = dubito.wrap(network, transform=dubito.Preprocess((16, 16), 16), classes=["a", "b", "z"])
    with pytest.raises(ImagesError, match="2 of 3 class folders are classes of the model, but not c"):
        extract(some, folder, tmp_path / "some")


def test_class_names_of_an_unnamed_model_must_be_as_many_as_its_outputs(folder, tmp_path):
    model = dubito.wrap(small_network(10), transform=dubito.Preprocess((16, 16), 16))
    with pytest.raises(ImagesError, match=r"got 3 class names for a model of 10 classes whose names are not known"):
        extract(model, folder, tmp_path / "cache")
    assert extract(model, folder, tmp_path / "first", label_space="model").label_space == "model"
    assert extract(model, folder, tmp_path / "other", label_space="own").label_space == "own"
