"""Labels for a finished cache: which columns change, what is refused, and kills at any instant."""

import contextlib
import itertools

import pytest
import torch

import dubito
from dubito.cache import label_cache
from dubito.cache.shards import forget_shards
from dubito.data import Augment
from dubito.errors import CacheError, ImagesError, StaleCacheError
from tests.cache.conftest import contents, small_network

LABELS = [number * 5 % 3 for number in range(9)]
OPTIONS = {"workers": 0, "shard_size": 4, "batch_size": 3}
SPACES = [({}, "model"), ({"label_space": "own"}, "own")]


@pytest.fixture
def x():
    return torch.randn(9, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def pixels():
    return torch.randint(0, 256, (9, 20, 20, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("options", "space"), SPACES)
def test_labels_of_either_space_replace_those_of_the_other(model, x, tmp_path, options, space):
    before = {"labels": [0] * 9, "label_space": "own" if space == "model" else "model"}
    dubito.extract(model, x, tmp_path / "cache", **OPTIONS, **before)
    dubito.extract(model, x, tmp_path / "expected", labels=LABELS, **OPTIONS, **options)
    table = label_cache(tmp_path / "cache", LABELS, **options)
    assert table.label.tolist() == LABELS
    assert table.label_space == space
    assert ("loss" in table) == (space == "model")
    assert contents(tmp_path / "cache") == contents(tmp_path / "expected")


@pytest.mark.parametrize("strong", [None, "mixup"])
def test_augmented_epochs_and_mixed_images(model, pixels, tmp_path, strong):
    options = {**OPTIONS, "epochs": 2, "augment": Augment(strong=strong)}
    dubito.extract(model, pixels, tmp_path / "expected", labels=LABELS, **options)
    dubito.extract(model, pixels, tmp_path / "cache", **options)
    with pytest.raises(CacheError, match=r"augmented images .* Store them: dubito\.cache\.label_cache"):
        dubito.open(tmp_path / "cache", labels=LABELS)
    label_cache(tmp_path / "cache", LABELS)
    assert contents(tmp_path / "cache") == contents(tmp_path / "expected")


def test_losses_of_targets_stay(model, x, tmp_path):
    options = {**OPTIONS, "targets": torch.eye(3)[[0, 1, 2] * 3], "probes": [dubito.probes.Forward(task_loss="bce")]}
    dubito.extract(model, x, tmp_path / "expected", labels=LABELS, **options)
    loss = dubito.extract(model, x, tmp_path / "cache", **options).loss
    assert torch.equal(dubito.open(tmp_path / "cache", labels=LABELS).loss, loss)
    label_cache(tmp_path / "cache", LABELS)
    assert contents(tmp_path / "cache") == contents(tmp_path / "expected")


def test_probes_that_ignore_labels_keep_their_shards(model, x, tmp_path):
    options = {**OPTIONS, "probes": [dubito.probes.Gradient()]}
    dubito.extract(model, x, tmp_path / "expected", labels=LABELS, **options)
    dubito.extract(model, x, tmp_path / "cache", **options)
    label_cache(tmp_path / "cache", LABELS)
    assert contents(tmp_path / "cache") == contents(tmp_path / "expected")


def squared(logit, target):
    return logit.gather(1, target[:, None])[:, 0] ** 2


@pytest.mark.parametrize(
    ("probe", "first", "why"),
    [
        (dubito.probes.Views(), None, "columns of the views probe depend on labels too"),
        (dubito.probes.Forward(store_logit=False), None, "losses follow from logits, which it does not store"),
        (dubito.probes.Forward(task_loss=squared), [0] * 9, "its losses are of a function, squared"),
    ],
)
def test_losses_that_only_the_model_can_compute(model, x, tmp_path, probe, first, why):
    dubito.extract(model, x, tmp_path / "cache", labels=first, probes=[probe], **OPTIONS)
    before = contents(tmp_path / "cache")
    with pytest.raises(CacheError, match=rf"cannot be stored in .*: {why}\. Extract again .* dubito\.open\("):
        label_cache(tmp_path / "cache", LABELS)
    assert contents(tmp_path / "cache") == before
    table = dubito.open(tmp_path / "cache", labels=LABELS)
    assert table.label.tolist() == LABELS
    assert not [column for column in table.columns if column.endswith("_loss")]


def test_labels_for_one_table(model, x, tmp_path):
    expected = dubito.extract(model, x, tmp_path / "expected", labels=LABELS, **OPTIONS)
    dubito.extract(model, x, tmp_path / "cache", **OPTIONS)
    before = contents(tmp_path / "cache")
    table = dubito.open(tmp_path / "cache", labels=LABELS)
    assert table.columns == expected.columns
    assert torch.equal(table.loss, expected.loss)
    assert torch.equal(table.rows([7, 2]).loss, expected.loss[[7, 2]])
    assert "loss" not in dubito.open(tmp_path / "cache", labels=LABELS, label_space="own")
    assert contents(tmp_path / "cache") == before


def test_labels_of_a_backbone_that_does_not_classify(x, tmp_path):
    backbone = dubito.wrap(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 4)), output="features")
    dubito.extract(backbone, x, tmp_path / "expected", labels=LABELS, **OPTIONS)
    dubito.extract(backbone, x, tmp_path / "cache", **OPTIONS)
    opened = dubito.open(tmp_path / "cache", labels=LABELS)
    for table in (opened, label_cache(tmp_path / "cache", LABELS)):
        assert (table.label.tolist(), table.label_space) == (LABELS, "own")
    assert contents(tmp_path / "cache") == contents(tmp_path / "expected")


def test_labels_that_do_not_fit(model, x, tmp_path):
    dubito.extract(model, x, tmp_path / "cache", **OPTIONS)
    for add in (label_cache, lambda folder, labels: dubito.open(folder, labels=labels)):
        with pytest.raises(ImagesError, match="got 2 labels for the 9 images"):
            add(tmp_path / "cache", [0, 1])
        with pytest.raises(ImagesError, match="labels must be classes from 0 to 2; got 7"):
            add(tmp_path / "cache", [7] + [0] * 8)
    with pytest.raises(CacheError, match="no cache in"):
        label_cache(tmp_path / "nowhere", LABELS)
    assert not (tmp_path / "nowhere").exists()


def test_extract_names_the_way_to_other_labels(model, x, tmp_path):
    dubito.extract(model, x, tmp_path / "cache", **OPTIONS)
    with pytest.raises(StaleCacheError, match=r"the labels .*without running the model: dubito\.cache\.label_cache\("):
        dubito.extract(model, x, tmp_path / "cache", labels=LABELS, **OPTIONS)


def test_killed_at_any_write_the_cache_is_whole(model, x, tmp_path, monkeypatch):
    dubito.extract(model, x, tmp_path / "expected", labels=LABELS, **OPTIONS)
    first = dubito.extract(model, x, tmp_path / "first", labels=[0] * 9, **OPTIONS)
    dubito.extract(model, x, tmp_path / "cache", labels=[0] * 9, **OPTIONS)
    for steps in itertools.count():
        try:
            with _killed_after(monkeypatch, type(tmp_path), steps):
                label_cache(tmp_path / "cache", LABELS)
            break
        except KeyboardInterrupt:
            forget_shards()
            table = dubito.open(tmp_path / "cache")
            assert table.label.tolist() in ([0] * 9, LABELS)
            assert torch.equal(table.logit, first.logit)
    assert steps > 7  # three shards of rows and of columns, and the manifest; then the old ones are removed
    assert contents(tmp_path / "cache") == contents(tmp_path / "expected")


@contextlib.contextmanager
def _killed_after(monkeypatch, path_type, steps):
    """The first files are renamed and removed, then the process ends."""
    left = iter(range(steps))

    def counted(action):
        def step(*arguments, **options):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return action(*arguments, **options)

        return step

    with monkeypatch.context() as patch:
        for name in ("replace", "unlink"):
            patch.setattr(path_type, name, counted(getattr(path_type, name)))
        yield


def test_leftovers_of_a_kill_are_removed_by_the_next_extraction(model, x, tmp_path, monkeypatch):
    dubito.extract(model, x, tmp_path / "cache", labels=[0] * 9, **OPTIONS)
    before = contents(tmp_path / "cache")
    monkeypatch.setattr("dubito.cache.disk.Manifest.write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        label_cache(tmp_path / "cache", LABELS)
    monkeypatch.undo()
    assert contents(tmp_path / "cache") != before
    dubito.extract(dubito.wrap(small_network(), transform=model.transform, name="small"), x, tmp_path / "cache",
                   labels=[0] * 9, **OPTIONS)  # fmt: skip
    assert contents(tmp_path / "cache") == before
