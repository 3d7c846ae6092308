"""Any task loss: other targets than labels, from arrays and files, in the identity, repeated over epochs."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dubito
from dubito.data import Augment, Augmented
from dubito.errors import ImagesError, StaleCacheError, TableError, ValueRangeError
from tests.cache.conftest import contents, image_folder

SEVERAL = np.random.default_rng(0).integers(0, 2, (7, 3))


@pytest.fixture
def photos(tmp_path):
    """No class folders, so no labels."""
    folder = image_folder(tmp_path / "photos", count=7)
    (tmp_path / "flat").mkdir()
    for path in sorted(folder.glob("*/*.png")):
        path.rename(tmp_path / "flat" / path.name)
    return tmp_path / "flat"


def extract(model, images, to, *, loss="cross_entropy", loss_name=None, **options):
    probes = [dubito.probes.Forward(task_loss=loss, loss_name=loss_name)]
    return dubito.extract(
        model, images, to, **{"batch_size": 4, "shard_size": 8, "workers": 0, "probes": probes, **options}
    )


def first(logit, target):
    return logit[:, 0] - target[:, 0]


def test_several_labels_an_image(model, photos, tmp_path):
    table = extract(model, photos, tmp_path / "cache", loss="bce", targets=SEVERAL)
    assert "label" not in table
    reference = F.binary_cross_entropy_with_logits(table.logit, torch.tensor(SEVERAL).float(), reduction="none").mean(1)
    torch.testing.assert_close(table.loss, reference)


@pytest.mark.parametrize("strong", [None, "cutmix"])
def test_targets_repeat_with_the_epochs_and_are_mixed(model, photos, tmp_path, strong):
    augment = Augment(strong=strong, strong_share=1.0)
    table = extract(model, photos, tmp_path / "cache", loss="bce", targets=SEVERAL, epochs=3, augment=augment)
    target = torch.tensor(SEVERAL).float()
    partner, weight = Augmented(dubito.open_images(photos), 3, augment).mixing(range(21))
    # Binary cross-entropy is linear in its targets: the mixture of losses is the loss of the mixed target.
    mixed = weight[:, None] * target.repeat(3, 1) + (1 - weight[:, None]) * target[partner]
    reference = F.binary_cross_entropy_with_logits(table.logit, mixed.float(), reduction="none").mean(1)
    torch.testing.assert_close(table.loss, reference)


def test_the_table_knows_its_task_loss(model, photos, tmp_path):
    table = extract(model, photos, tmp_path / "bce", loss="bce", targets=SEVERAL)
    assert table.provenance.task_loss == "bce"
    target = torch.arange(14.0).reshape(7, 2)
    assert extract(model, photos, tmp_path / "own", loss=first, targets=target).provenance.task_loss == "first"
    assert extract(model, photos, tmp_path / "none").provenance.task_loss is None
    with pytest.raises(TableError, match=r"^head.fit with target 'mixed' .* come from 'bce'\. Train with"):
        dubito.UncertaintyHead(recipe=dubito.heads.Recipe(target="mixed")).fit(table)


def test_a_callable_gets_logits_and_targets(model, photos, tmp_path):
    target = torch.arange(14.0).reshape(7, 2)
    table = extract(model, photos, tmp_path / "cache", loss=first, targets=target)
    torch.testing.assert_close(table.loss, table.logit[:, 0] - torch.arange(0.0, 14, 2))


def test_a_callable_without_targets_gets_the_labels(model, folder, tmp_path):
    smooth = partial(F.cross_entropy, reduction="none", label_smoothing=0.2)
    table = extract(model, folder, tmp_path / "cache", loss=smooth, loss_name="smooth")
    torch.testing.assert_close(table.loss, smooth(table.logit, table.label))


def test_targets_beside_labels(model, folder, tmp_path):
    table = extract(model, folder, tmp_path / "cache", targets=[2] * 23)
    assert table.label[0] == 0, "labels are kept as they are"
    torch.testing.assert_close(table.loss, F.cross_entropy(table.logit, torch.full((23,), 2), reduction="none"))
    own = extract(model, folder, tmp_path / "own", label_space="own", targets=[2] * 23)
    assert (own.label_space, torch.equal(own.loss, table.loss)) == ("own", True)


def test_soft_labels(model, photos, tmp_path):
    votes = torch.softmax(torch.randn(7, 3, generator=torch.Generator().manual_seed(0)), 1)
    table = extract(model, photos, tmp_path / "cache", targets=votes)
    torch.testing.assert_close(table.loss, -(votes * F.log_softmax(table.logit, 1)).sum(1))


def test_files(model, photos, tmp_path):
    np.save(tmp_path / "t.npy", SEVERAL)
    np.savez(tmp_path / "one.npz", whatever=SEVERAL)
    np.savez(tmp_path / "two.npz", targets=SEVERAL, other=SEVERAL[:2])
    expected = extract(model, photos, tmp_path / "array", loss="bce", targets=SEVERAL)
    for name in ("t.npy", "one.npz", "two.npz"):
        table = extract(model, photos, tmp_path / f"{name}.cache", loss="bce", targets=tmp_path / name)
        assert torch.equal(table.loss, expected.loss)
        assert contents(tmp_path / f"{name}.cache") == contents(tmp_path / "array")


def test_files_that_cannot_be_read(model, photos, tmp_path):
    def refused(name, message):
        with pytest.raises(ImagesError, match=message):
            extract(model, photos, tmp_path / "cache", targets=tmp_path / name)
        assert not (tmp_path / "cache").exists()

    refused(
        "nowhere.npy", r"targets file '.*nowhere\.npy' must be an \.npy or \.npz file of plain numbers.*No such file"
    )
    np.save(tmp_path / "pickle.npy", np.array([{"a": 1}] * 7, dtype=object), allow_pickle=True)
    refused("pickle.npy", r"must be an \.npy or \.npz file.*allow_pickle")
    (tmp_path / "text.npy").write_text("1 2 3")
    refused("text.npy", r"must be an \.npy or \.npz file of plain numbers")
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04cut")
    refused("cut.npz", r"must be an \.npy or \.npz file of plain numbers")
    with (tmp_path / "huge.npy").open("wb") as file:
        header = {"descr": "<f8", "fortran_order": False, "shape": (10**15,)}
        np.lib.format.write_array_header_1_0(file, header)
    refused("huge.npy", r"must be an \.npy or \.npz file of plain numbers; .*[Uu]nable to allocate")
    np.savez(tmp_path / "two.npz", a=SEVERAL, b=SEVERAL)
    refused("two.npz", r"must hold one array, or one called 'targets'; it has 'a', 'b'\. Rename")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (SEVERAL[:6], r"targets must have one row per image.*got shape \(6, 3\) for the 7 images of .*\(7, \.\.\.\)"),
        (3.0, r"got shape \(\) for the 7 images"),
        (["a"] * 7, "targets must be numbers in an array; got list"),
    ],
)
def test_targets_that_are_not_one_an_image(model, photos, tmp_path, targets, message):
    with pytest.raises(ImagesError, match=message):
        extract(model, photos, tmp_path / "cache", loss="bce", targets=targets)


def test_all_targets_are_checked_before_the_first_shard(model, photos, tmp_path):
    wrong = SEVERAL.astype(float)
    wrong[6, 2] = 1.5  # in the last batch
    with pytest.raises(
        ValueRangeError, match=r"'bce' needs .*\(n, 3\); got torch\.float64 of shape \(7, 3\) from 0 to 1\.5"
    ):
        extract(model, photos, tmp_path / "cache", loss="bce", targets=wrong, shard_size=4)
    assert not list((tmp_path / "cache").glob("forward-*"))
    assert len(extract(model, photos, tmp_path / "cache", loss="bce", targets=SEVERAL)) == 7


def test_a_loss_that_has_nothing_to_compare_with(model, photos, folder, tmp_path):
    with pytest.raises(ImagesError, match=r"Forward\(task_loss='bce'\) needs something to compare .* Pass targets="):
        extract(model, photos, tmp_path / "cache", loss="bce")
    with pytest.raises(ImagesError, match=r"Forward\(task_loss='first'\) needs something to compare"):
        extract(model, folder, tmp_path / "cache", loss=first, label_space="own")
    with pytest.raises(
        ValueRangeError, match=r"'bce' needs targets that are shares.*int64 of shape \(23,\) from 0 to 2"
    ):
        extract(model, folder, tmp_path / "cache", loss="bce")


def test_a_loss_that_is_not_finite_names_the_image(model, photos, tmp_path):
    target = torch.zeros(7, 1)
    target[5] = float("inf")
    with pytest.raises(
        ValueRangeError, match=r"image '005\.png': the task loss is -inf\. Look at task_loss, at the target"
    ):
        extract(model, photos, tmp_path / "cache", loss=first, targets=target)


def refused(model, images, cache, message, **options):
    before = contents(cache)
    with pytest.raises(StaleCacheError, match=message):
        extract(model, images, cache, **options)
    assert contents(cache) == before


def test_other_targets_and_losses_are_refused(model, photos, tmp_path):
    cache = tmp_path / "cache"
    extract(model, photos, cache, loss="bce", targets=SEVERAL)
    extract(model, photos, cache, loss="bce", targets=torch.tensor(SEVERAL))
    refused(model, photos, cache, r"the targets of the task loss \(\w{8} there, \w{8} here\)", loss="bce",
            targets=1 - SEVERAL)  # fmt: skip
    refused(model, photos, cache, r"the targets of the task loss \(\w{8} there, none here\)")
    refused(model, photos, cache, r"the settings of the forward probe \(task_loss=bce there, none here\)",
            targets=SEVERAL)  # fmt: skip
    refused(model, photos, cache, r"task_loss=bce there, first here", loss=first, targets=SEVERAL)


def test_a_loss_of_another_name_is_refused(model, photos, tmp_path):
    def second(logit, target):
        return logit[:, 1]

    extract(model, photos, tmp_path / "cache", loss=first, targets=SEVERAL)
    extract(model, photos, tmp_path / "cache", loss=first, targets=SEVERAL)
    refused(model, photos, tmp_path / "cache", "task_loss=first there, second here", loss=second, targets=SEVERAL)


def test_other_probes_are_given_the_targets(model, photos, tmp_path):
    class Sum:
        name, price = "sum", "nothing"

        def run(self, model, x, label):
            return {"sum": label.sum(1)}

        def settings(self):
            return {}

    table = extract(model, photos, tmp_path / "cache", targets=SEVERAL.astype(np.float32), loss="bce", epochs=2,
                    probes=[dubito.probes.Forward(task_loss="bce"), Sum()])  # fmt: skip
    assert table.whole("sum").tolist() == SEVERAL.sum(1).tolist() * 2
