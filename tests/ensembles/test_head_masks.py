"""Masks of the last layer from columns alone."""

import pytest
import torch
from tests.ensembles.conftest import clusters, learned, mlp
from torch import nn

import dubito
from dubito.ensembles import HeadMasks, MaskRecipe
from dubito.errors import ArtefactError, MissingColumnError, NotFittedError, TableError
from dubito.metrics import SUMMARY, decompose
from dubito.storage import read_tensors, write_tensors
from dubito.table import Table
from dubito.table.views import chosen_rows

RECIPE = MaskRecipe(steps=60, batch=90)


def table_of(n: int = 300, seed: int = 0, **more) -> Table:
    """Features of which any half tells the class, and the logits of a linear layer."""
    feature, label = clusters(n, d=24, seed=seed)
    weight, bias = layer()
    return Table(feature=feature, logit=feature @ weight.T + bias, label=label, **more)


def layer():
    x, y = clusters(d=24)
    torch.manual_seed(0)
    linear = learned(nn.Linear(24, 3), x, y)
    return linear.weight.detach(), linear.bias.detach()


@pytest.fixture(scope="module")
def fitted():
    return HeadMasks(members=4, recipe=RECIPE).fit(table_of(), layer())


def test_members_read_different_features_and_know_the_classes(fitted):
    assert set(fitted.masks_.unique().tolist()) == {0.0, 1.0}
    assert len({tuple(mask.tolist()) for mask in fitted.masks_}) == 4
    unseen = table_of(seed=7)
    output = fitted.logits(unseen.feature)
    assert float((output.argmax(-1) == unseen.label[:, None]).float().mean()) > 0.95


def test_logits_are_the_masked_layer(fitted):
    z = table_of(5, seed=1).feature
    weight, bias = layer()
    for member, mask in enumerate(fitted.masks_):
        kept = mask.bool()
        torch.testing.assert_close(fitted.logits(z)[:, member], z[:, kept] @ weight[:, kept].T + bias)


def test_columns_are_computed_on_request(fitted, monkeypatch):
    table = fitted.extend(table_of(1100, seed=2))
    probs = table.whole("masks_logit").softmax(-1).transpose(0, 1)
    summary = table.whole("masks")
    epistemic = summary[:, SUMMARY.index("epistemic")].double()
    torch.testing.assert_close(epistemic, decompose(probs).epistemic, atol=1e-5, rtol=0)
    expected = -probs.double().mean(0)[torch.arange(1100), table.label].log()
    torch.testing.assert_close(table.whole("masks_loss").double(), expected, atol=1e-4, rtol=1e-3)
    some = chosen_rows(table, torch.tensor([700, 3, 3]))
    assert torch.equal(table.whole("masks"), summary)
    # Not to the bit: BLAS sums a product of 3 rows in another order than one of 512 (5e-7 apart in the logits).
    torch.testing.assert_close(some.whole("masks"), summary[[700, 3, 3]])
    assert table.rows(slice(0, 0)).shape("masks_logit") == (0, 4, 3)
    monkeypatch.setattr(
        "dubito.ensembles.head_masks._NUMBERS", 4 * 3 * 7
    )  # seven rows of four members of three classes
    sizes = []
    monkeypatch.setattr(fitted, "logits", lambda z: sizes.append(len(z)) or HeadMasks.logits(fitted, z))
    torch.testing.assert_close(fitted.extend(table).rows(slice(0, 20)).whole("masks"), summary[:20])
    assert max(sizes) == 7


def test_the_layer_is_found_from_logits():
    ours = HeadMasks(members=3, recipe=RECIPE).fit(table_of())
    z = table_of(20, seed=3).feature
    weight, bias = layer()
    expected = torch.stack([(z * mask) @ weight.T + bias for mask in ours.masks_], 1)
    torch.testing.assert_close(ours.logits(z).softmax(-1), expected.softmax(-1), atol=1e-3, rtol=1e-2)


def test_a_classifier_and_its_cache(tmp_path):
    x, y = clusters(120)
    model = dubito.wrap(learned(mlp(), x, y))
    table = dubito.extract(model, x.numpy(), tmp_path / "cache", labels=y.numpy(), progress=False)
    masks = HeadMasks(members=3, recipe=MaskRecipe(steps=10, batch=60)).fit(table, model)
    assert masks.extend(table).shape("masks") == (120, len(SUMMARY))
    other = dubito.extract(dubito.wrap(mlp(hidden=40)), x.numpy(), tmp_path / "other", progress=False)
    with pytest.raises(
        TableError,
        match=r"^HeadMasks.extend: table \(.*other\) and .*cache must come from one model with one transform",
    ):
        masks.extend(other)


def test_seeds(fitted):
    again, other = (HeadMasks(members=4, recipe=RECIPE, seed=seed).fit(table_of(), layer()) for seed in (0, 1))
    assert torch.equal(again.masks_, fitted.masks_)
    assert not torch.equal(other.masks_, fitted.masks_)


def test_masks_come_back_from_disk(fitted, tmp_path):
    path = fitted.save(tmp_path / "head.safetensors")
    again = HeadMasks.load(path)
    z = table_of(6, seed=5).feature
    assert torch.equal(again.logits(z), fitted.logits(z))
    assert (again.members, again.recipe, again.seed) == (4, RECIPE, 0)
    with pytest.raises(ArtefactError, match=r"cannot be read"):
        HeadMasks.load(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtefactError, match=r"the masks cannot be saved in .*file' \(.*\)\. Choose another place"):
        fitted.save(tmp_path / "file" / "masks.safetensors")


def test_a_layer_without_bias(tmp_path):
    weight, _ = layer()
    masks = HeadMasks(members=2, recipe=MaskRecipe(steps=3, batch=20)).fit(table_of(), (weight, None))
    z = table_of(4, seed=6).feature
    expected = torch.stack([(z * mask) @ weight.T for mask in masks.masks_], 1)
    torch.testing.assert_close(masks.logits(z), expected)
    again = HeadMasks.load(masks.save(tmp_path / "masks.safetensors"))
    assert again.bias_ is None
    assert torch.equal(again.logits(z), masks.logits(z))


def test_masks_and_layer_of_another_width(fitted, tmp_path):
    path = fitted.save(tmp_path / "masks.safetensors")
    tensors, note = read_tensors(path)
    for change in ({"weight": torch.zeros(3, 5)}, {"columns.head": torch.zeros(24)}, {"bias": torch.zeros(7)}):
        write_tensors(path, tensors | change, note)
        with pytest.raises(ArtefactError, match=r"masks and layer must have one width; got .*\. Pass a file that save"):
            HeadMasks.load(path)


def test_refusals(fitted):
    with pytest.raises(NotFittedError, match=r"HeadMasks.extend was called before fit"):
        HeadMasks().extend(table_of())
    with pytest.raises(MissingColumnError, match=r"HeadMasks.fit needs column 'label'"):
        HeadMasks().fit(table_of().select("feature", "logit"))
    with pytest.raises(TableError, match=r"those of table in memory are another set's"):
        HeadMasks().fit(table_of(label_space="own"))
    with pytest.raises(TableError, match=r"column 'feature' of table \(table in memory\) must be 24 wide.*; got 5"):
        fitted.extend(Table(feature=torch.randn(3, 5)))
    with pytest.raises(TableError, match=r"the head reads 5 features; those of table in memory are 24 wide"):
        HeadMasks().fit(table_of(), (torch.randn(3, 5), None))
    with pytest.raises(TableError, match=r"logits must be linear in the features; a linear layer misses"):
        HeadMasks().fit(Table(feature=torch.randn(99, 4), logit=torch.randn(99, 3), label=torch.arange(99) % 3))
    with pytest.raises(TableError, match=r"the labels of table in memory must be classes from 0 to 1; got 0 to 2"):
        HeadMasks().fit(table_of(), (torch.randn(2, 24), None))
