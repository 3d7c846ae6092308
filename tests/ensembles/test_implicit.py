"""Members on disk, by index, as models of the members probe, and as dense modules equal to the masked model."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import timm
import torch
from tests.ensembles.conftest import by_weights, clusters, learned, mlp
from torch import nn

from dubito.ensembles import ImplicitEnsemble, MaskRecipe, extract_members
from dubito.ensembles.implicit import SubLinear, sub_model
from dubito.ensembles.layers import Watch, linear_layers, spans_of
from dubito.ensembles.masks import LayerMasks, binarised, by_layer, of_member
from dubito.errors import ArtefactError, ModelError
from dubito.metrics import SUMMARY, decompose
from dubito.models import wrap
from dubito.probes import Members


@pytest.fixture(scope="module")
def ensemble():
    x, y = clusters()
    return extract_members(learned(mlp(), x, y), x, y, members=4, recipe=MaskRecipe(steps=30, batch=80))


@torch.no_grad()
def test_masks_come_back_from_disk(ensemble, tmp_path):
    path = ensemble.save(tmp_path / "new" / "masks.safetensors")
    assert path.stat().st_size < 4 * (12 + 40 + 40 + 20 + 20) + 2000  # a byte for each unit and member
    again = ImplicitEnsemble.load(path, ensemble.model.module)
    x, _ = clusters(seed=3)
    for ours, theirs in zip(ensemble, again, strict=True):
        assert torch.equal(ours(x), theirs(x))
    first = again.classifiers()[0]  # of a model that has seen no image yet
    torch.testing.assert_close(first.logits(first.features(x)), ensemble[0](x))
    assert repr(again) == "ImplicitEnsemble(4 members of 'Sequential'; layers 0, 3, 5)"


def test_relaxed_masks_come_back_exactly(ensemble, tmp_path):
    x, y = clusters()
    soft = extract_members(ensemble.model, x, y, members=2, recipe=MaskRecipe(steps=3, batch=20, binarise=False))
    again = ImplicitEnsemble.load(soft.save(tmp_path / "soft.safetensors"), ensemble.model)
    assert torch.equal(again.masks["3"].rows, soft.masks["3"].rows)


def test_members_state_can_be_saved_by_itself(ensemble):
    state = ensemble[0].state_dict()
    other = ensemble[0]
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    other.load_state_dict(state)


def test_any_classifier_will_do(ensemble, tmp_path):
    """One that dubito has not made: all that counts is what the protocol has."""
    names = ("name", "module", "transform", "classes", "device", "features", "logits", "feature_map", "head")
    plain = SimpleNamespace(**{key: getattr(ensemble.model, key) for key in (*names, "fingerprint")})
    again = ImplicitEnsemble.load(ensemble.save(tmp_path / "masks.safetensors"), plain)
    assert torch.equal(again[2][5].weight, ensemble[2][5].weight)
    x, y = clusters()
    assert len(extract_members(plain, x, y, members=2, recipe=MaskRecipe(steps=2, batch=20))) == 2


def test_other_weights_are_refused(ensemble, tmp_path):
    path = ensemble.save(tmp_path / "masks.safetensors")
    with pytest.raises(ModelError, match=r"were learned on other weights than those of Sequential"):
        ImplicitEnsemble.load(path, mlp())


def test_files_that_are_no_masks_are_refused(ensemble, tmp_path):
    (tmp_path / "broken").write_bytes(b"no tensors")
    for name in ("absent", "broken"):
        with pytest.raises(ArtefactError, match=rf"masks in '.*{name}' cannot be read"):
            ImplicitEnsemble.load(tmp_path / name, ensemble.model)


def test_members_by_index(ensemble):
    assert len(ensemble) == len(list(ensemble)) == 4
    torch.testing.assert_close(ensemble[-1][5].weight, ensemble[3][5].weight)
    with pytest.raises(IndexError, match=r"members are 0 to 3; got 4"):
        ensemble[4]


def test_what_is_kept_is_counted(ensemble):
    mask = ensemble.masks["3"]
    expected = sum(float(r.mean() * c.mean()) for r, c in zip(mask.rows, mask.columns, strict=True)) / 4
    assert ensemble.kept()["3"] == pytest.approx(expected)
    assert ensemble.kept()["5"] == pytest.approx(float(ensemble.masks["5"].columns.mean()))


@torch.no_grad()
def test_the_members_probe_takes_them(ensemble):
    x, _ = clusters(9, seed=4)
    probs = torch.stack([member(x) for member in ensemble]).softmax(-1)
    summary = Members(ensemble.classifiers()).run(wrap(ensemble.model.module), x, None)["members"]
    epistemic = summary[:, SUMMARY.index("epistemic")].double()
    torch.testing.assert_close(epistemic, decompose(probs).epistemic, atol=1e-5, rtol=0)


class Residual(nn.Module):
    """Its hidden layer is added to what follows it, so that nothing can be left out of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 20), nn.Linear(20, 20, bias=False)
        self.last = nn.Linear(20, 3)

    def forward(self, x):
        h = self.first(x).relu()
        return self.last(self.second(h).sigmoid() + h)


class Convolutional(nn.Module):
    """In the manner of AlexNet and VGG: linear layers behind a flattened map."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.classifier = nn.Sequential(
            *(nn.Dropout(), nn.Linear(36, 32), nn.ReLU(inplace=True), nn.Dropout()),
            *(nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Linear(32, 3)),
        )

    def forward(self, x):
        return self.classifier(torch.flatten(self.features(x), 1))


MODELS = {
    "relu": (mlp, (12,)),
    "sigmoid": (lambda: mlp(activation=nn.Sigmoid), (12,)),
    "softplus": (lambda: mlp(activation=nn.Softplus), (12,)),
    "normed": (lambda: nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)), (12,)),
    "no bias": (lambda: nn.Sequential(nn.Linear(12, 16), nn.Sigmoid(), nn.Linear(16, 3, bias=False)), (12,)),
    "residual": (Residual, (12,)),
    "convolutional": (Convolutional, (1, 8, 8)),
    "one layer": (lambda: nn.Linear(12, 3), (12,)),
    "vit": (lambda: timm.create_model("test_vit", num_classes=3, img_size=32), (3, 32, 32)),
}


def masked(module, x, *, soft=False, members=2, links=True):
    layers = linear_layers(module)
    spans = spans_of(layers, 3)
    q = torch.rand(members, sum(span.width for span in spans), generator=torch.Generator().manual_seed(2))
    masks = by_layer(q if soft else binarised(q, spans), spans)
    watch = Watch(layers)
    with torch.no_grad(), watch:
        module(x)
    kept = watch.links if links else {}
    return masks, [sub_model(module, layers, of_member(masks, member), kept) for member in range(members)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["binary", "relaxed", "without links"])
@torch.no_grad()
def test_a_dense_member_is_the_masked_model(name, how):
    make, shape = MODELS[name]
    torch.manual_seed(3)
    module, x = make().eval(), torch.randn(5, *shape)
    masks, members = masked(module, x, soft=how == "relaxed", links=how != "without links")
    for number, member in enumerate(members):
        expected = by_weights(module, masks, number)(x)
        torch.testing.assert_close(member(x), expected, atol=1e-5, rtol=1e-4)
        assert float((expected - module(x)).abs().max()) > 1e-3  # masks matter


def test_layers_of_an_mlp_become_smaller_and_plain():
    module = mlp()
    masks, (member, _) = masked(module, torch.randn(2, 12))
    first, second = (masks[a].rows[0].bool() & masks[b].columns[0].bool() for a, b in (("0", "3"), ("3", "5")))
    sizes = [int(masks["0"].columns[0].sum()), int(first.sum()), int(second.sum()), 3]
    assert isinstance(member[0], SubLinear)
    assert [type(member[place]) for place in (3, 5)] == [nn.Linear, nn.Linear]
    dense = [member[0].linear, member[3], member[5]]
    assert [(layer.in_features, layer.out_features) for layer in dense] == list(pairwise(sizes))
    assert [tuple(layer.weight.shape) for layer in dense] == [(b, a) for a, b in pairwise(sizes)]


@torch.no_grad()
def test_what_is_not_masked_is_shared_and_the_module_is_left_alone():
    module = Convolutional().eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x = torch.randn(2, 1, 8, 8)
    _, (member, _) = masked(module, x)
    assert member.features[0].weight is module.features[0].weight
    assert member.features is not module.features
    assert isinstance(module.classifier[1], nn.Linear)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@torch.no_grad()
def test_a_layer_that_keeps_no_unit_gives_its_bias():
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 3)).eval()
    one, none = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    masks = {"0": LayerMasks(one, torch.ones(1, 2)), "2": LayerMasks(None, none)}  # what one keeps, the other drops
    watch = Watch(linear_layers(module))
    with watch:
        module(torch.randn(2, 2))
    member = sub_model(module, linear_layers(module), masks, watch.links)
    torch.testing.assert_close(member(torch.randn(4, 2)), module[2].bias.expand(4, 3))


def test_a_member_can_be_trained_on():
    module = mlp()
    _, (member, _) = masked(module, torch.randn(2, 12))
    member(torch.randn(2, 12)).sum().backward()
    assert all(parameter.grad is not None for parameter in member.parameters())
    assert all(parameter.grad is None for parameter in module.parameters())
