"""Members that solve the task and differ, from a module that stays as it was; on disk, by index, in a probe."""

from types import SimpleNamespace

import pytest
import timm
import torch
from tests.ensembles.conftest import by_weights, clusters, learned, mlp
from torch import nn

from dubito.ensembles import ImplicitEnsemble, MaskRecipe, extract_members
from dubito.errors import ArtefactError, ModelError, TableError, ValueRangeError
from dubito.metrics import SUMMARY, decompose
from dubito.models import wrap
from dubito.probes import Members

QUICK = MaskRecipe(steps=8, batch=60)


@pytest.fixture(scope="module")
def trained():
    x, y = clusters()
    return learned(mlp(hidden=64), x, y)


def test_members_solve_the_task_and_differ(trained):
    x, y = clusters()
    result = extract_members(trained, x, y, members=5, recipe=MaskRecipe(steps=150, batch=150))
    unseen, classes = clusters(seed=5)
    with torch.no_grad():
        right = [float((member(unseen).argmax(1) == classes).float().mean()) for member in result]
    assert min(right) > 0.93
    assert 0.3 < result.diversity < 1
    assert len({str([int(part) for part in mask.columns.sum(1)]) for mask in result.masks.values()}) > 1
    assert result.masks["5"].rows is None  # classes stay


def test_without_weight_members_are_more_alike(trained):
    x, y = clusters()
    apart, alike = (
        extract_members(trained, x, y, members=4, recipe=MaskRecipe(steps=100, batch=80, diversity_weight=w)).diversity
        for w in (2.0, 0.0)
    )
    assert apart > 1.3 * alike


@torch.no_grad()
def test_members_are_the_masked_model(trained):
    x, y = clusters()
    for recipe in (QUICK, MaskRecipe(steps=8, batch=60, binarise=False)):
        result = extract_members(trained, x, y, members=3, recipe=recipe)
        for number, member in enumerate(result):
            torch.testing.assert_close(member(x), by_weights(trained, result.masks, number)(x), atol=1e-5, rtol=1e-4)


def test_the_same_seed_gives_the_same_members(trained):
    x, y = clusters()
    first, again, other = (extract_members(trained, x, y, members=3, recipe=QUICK, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.masks["3"].columns, again.masks["3"].columns)
    assert not torch.equal(first.masks["3"].columns, other.masks["3"].columns)


def test_nothing_about_the_module_changes():
    x, y = clusters()
    module = nn.Sequential(nn.BatchNorm1d(12), *mlp())
    module[1].weight.requires_grad_(False)
    module.train()
    module[2].eval()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    modes, needs = [part.training for part in module.modules()], [p.requires_grad for p in module.parameters()]
    random = torch.get_rng_state()
    extract_members(module, x, y, members=3, recipe=QUICK)
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert [part.training for part in module.modules()] == modes
    assert [p.requires_grad for p in module.parameters()] == needs
    assert all(p.grad is None for p in module.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert torch.equal(torch.get_rng_state(), random)


def test_chosen_layers_alone_are_masked():
    x, y = torch.randn(12, 3, 32, 32), torch.arange(12) % 3
    module = timm.create_model("test_vit", num_classes=3, img_size=32)
    result = extract_members(
        module, x, y, members=3, layers=["blocks.0.mlp.fc?", "head"], recipe=MaskRecipe(steps=2, batch=12)
    )
    assert list(result.masks) == ["blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "head"]
    member = result[1]
    assert member.blocks[0].mlp.fc2.linear.in_features == member.blocks[0].mlp.fc1.linear.out_features < 256
    assert type(member.blocks[1].mlp.fc1) is nn.Linear
    with torch.no_grad():
        torch.testing.assert_close(member(x), by_weights(module.eval(), result.masks, 1)(x), atol=1e-5, rtol=1e-4)


class _Peeking(nn.Module):
    """Reads a hidden layer in a way that torch does not see, and counts on its width."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 20), nn.Linear(20, 8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.rand(20))

    def forward(self, x):
        h = self.a(x)
        return self.c(self.b(h.relu()).relu() + (torch.tensor(h.tolist()) @ self.scale)[:, None])


def test_a_layer_that_is_used_in_a_hidden_way_still_gives_right_members():
    x, y = clusters()
    module = _Peeking().eval()
    result = extract_members(module, x, y, members=2, recipe=QUICK)
    with torch.no_grad():
        torch.testing.assert_close(result[1](x), by_weights(module, result.masks, 1)(x), atol=1e-5, rtol=1e-4)


def test_a_classifier_gives_classifiers(trained):
    x, y = clusters()
    model = wrap(trained, classes=["a", "b", "c"], name="net", head="5")
    result = extract_members(model, x, y, members=3, layers=["0", "5"], recipe=QUICK)
    first = result.classifiers()[0]
    assert (first.name, first.classes) == ("net, member 0", ["a", "b", "c"])
    with torch.no_grad():
        torch.testing.assert_close(first.logits(first.features(x)), result[0](x))


def test_autocast_and_half_precision_are_allowed(trained):
    x, y = clusters()
    with torch.autocast("cpu", torch.bfloat16):
        result = extract_members(trained, x, y, members=3, recipe=QUICK)
    assert type(result[0][3]) is nn.Linear  # layers are joined: rounding has not decided
    half = extract_members(mlp().bfloat16(), x, y, members=3, recipe=QUICK)
    assert half[0](x.bfloat16()).dtype == torch.bfloat16


def test_one_member_and_few_rows(trained):
    x, y = clusters(7)
    assert len(extract_members(trained, x, y, members=1, recipe=QUICK)) == 1
    assert len(extract_members(trained, x, y.tolist(), members=7, recipe=QUICK)) == 7


def refusals():
    x, y = clusters()
    net = mlp()
    softmax = wrap(nn.Sequential(*mlp(), nn.Softmax(1)), output="probabilities")
    attention = _Attention()
    seen = wrap(mlp())
    seen.features(x)  # it knows its last layer, and looks no more
    yield "length", net, (x, y[:-1]), {}, TableError, r"extract_members: x has 300 rows, y has 299"
    yield "labels", net, (x, y + 1), {}, TableError, r"labels must be classes from 0 to 2; got 1 to 3"
    yield "rows", net, (x[:5], y[:5]), {}, TableError, r"masks of 10 members need at least 10 labelled rows; got 5"
    yield "members", net, (x, y), {"members": 0}, ValueRangeError, r"members must be a whole number, at least 1; got 0"
    yield "name", net, (x, y), {"layers": ["7"]}, ModelError, r"layers: Sequential has no linear layer '7'. Nearest:"
    yield "softmax", softmax, (x, y), {}, ModelError, r"Sequential must return logits"
    yield "fused", attention, (x, y), {"layers": ["mix.out_proj"]}, ModelError, r"does not call 'mix.out_proj'"
    yield "order", _TokensFirst(), (x, y), {}, ModelError, r"_TokensFirst mixes the images of a batch"
    yield "first nan", seen, (x.index_fill(0, torch.tensor([1]), torch.nan), y), {}, ValueRangeError, r"logits of Seq"
    yield "nan", net, (x.index_fill(0, torch.arange(5, 300), torch.nan), y), {}, ValueRangeError, r"masks became NaN"


class _Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix, self.last = nn.MultiheadAttention(12, 2, batch_first=True), nn.Linear(12, 3)

    def forward(self, x):
        return self.last(self.mix(x[:, None], x[:, None], x[:, None])[0][:, 0])


class _TokensFirst(nn.Module):
    """Four tokens an image, which it keeps along the first axis."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.first(x.view(-1, 4, 3).transpose(0, 1)).relu().mean(0))


@pytest.mark.parametrize("case", list(refusals()), ids=lambda case: case[0])
def test_what_cannot_be_masked_is_reported(case):
    _, module, data, options, error, message = case
    with pytest.raises(error, match=message):
        extract_members(module, *data, **{"recipe": QUICK, **options})


def test_a_model_without_linear_layers_is_reported():
    module = nn.Sequential(nn.Conv2d(1, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ModelError, match=r"calls no nn.Linear that could be masked.*dubito.probes.Tiles"):
        extract_members(module, torch.randn(30, 1, 4, 4), torch.arange(30) % 3, recipe=QUICK)


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
