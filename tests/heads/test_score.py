"""The head as a score: kept and read back, and refused wherever it does not belong."""

import json
import math
import shutil

import pytest
import torch
from torch import nn

import dubito
from dubito.errors import ArtefactError, DubitoWarning, ModelError, NotFittedError, StaleCacheError, TableError
from dubito.heads import HeadModule, Recipe, shelf
from dubito.heads.checkpoint import HeadConfig, PretrainedHead, read_config, write_head
from dubito.scores import UncertaintyHead, load_score, save_score
from dubito.table import Table

QUICK = Recipe(batch=10, rows=400)
SMALL = {"width": 8, "depth": 1, "recipe": QUICK}


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """An empty shelf."""
    monkeypatch.setenv("DUBITO_HEADS", str(tmp_path / "shelf"))
    monkeypatch.setattr(shelf, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "shelf"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 3))


def extracted(module: nn.Module, to, seed: int = 0) -> tuple[dubito.models.WrappedClassifier, Table]:
    model = dubito.wrap(module, transform=None, name="tiny")
    generator = torch.Generator().manual_seed(seed)
    images, labels = torch.randn(40, 3, 2, 2, generator=generator), torch.randint(3, (40,), generator=generator)
    return model, dubito.extract(model, images, to, labels=labels, label_space="model", progress=False)


@pytest.fixture(scope="module")
def world(tmp_path_factory, _tiny):
    """A model, its table, and a head trained on it."""
    model, table = extracted(network(), tmp_path_factory.mktemp("world") / "cache")
    return model, table, UncertaintyHead(**SMALL).fit(table)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, _tiny):
    """The same model after one weight has changed."""
    module = network()
    with torch.no_grad():
        module[1].weight[0, 0] += 1e-3
    return extracted(module, tmp_path_factory.mktemp("tuned") / "cache")


def test_it_is_the_network_on_the_features(world):
    model, table, head = world
    with torch.no_grad():
        expected = head.module(table.feature)
    assert torch.equal(head.score(table), expected.double())
    x = torch.randn(5, 3, 2, 2)
    assert torch.equal(head(model.features(x)), head.module(model.features(x)).detach())
    assert not head(model.features(x)).requires_grad
    assert not any(parameter.requires_grad for parameter in head.module.parameters())


def test_what_it_says_of_its_training(world):
    _, table, head = world
    assert head.trained_["recipe"] == QUICK.to_json()
    assert (head.trained_["seed"], head.trained_["table_rows"]) == (1, 40)
    assert (head.trained_["rows_seen"], head.trained_["steps"]) == (400, 40)
    assert head.trained_["end"]["step"] == 40
    assert head.provenance_ == table.provenance
    assert head.features_ == 6


def test_targets_decide_from_what_it_learns():
    assert UncertaintyHead().learns_from == ("feature", "loss")
    assert UncertaintyHead(recipe=Recipe(target="expected")).learns_from == ("feature", "logit")
    assert UncertaintyHead(recipe=Recipe(target="mixed")).learns_from == ("feature", "loss", "logit")


def test_kept_as_a_score(world, tmp_path):
    _, table, head = world
    loaded = load_score(save_score(head, tmp_path))
    assert loaded == head
    assert torch.equal(loaded.score(table), head.score(table))
    assert (loaded.trained_, loaded.provenance_) == (head.trained_, head.provenance_)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.0), ("float16", 2e-3)])
def test_kept_as_a_pretrained_head(world, tmp_path, dtype, tolerance):
    _, table, head = world
    folder = head.save_pretrained(
        tmp_path / "mine", dtype=dtype, licence="Apache-2.0", measured={"auroc": 0.7}, trained={"corpus": "Noise."}
    )
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    for name in (folder, str(folder)):
        loaded = UncertaintyHead.from_pretrained(name)
        assert loaded == head
        torch.testing.assert_close(loaded.score(table), head.score(table), rtol=tolerance, atol=0)
        assert loaded.trained_ == head.trained_ | {"corpus": "Noise."}
    config = read_config(folder)
    assert (config.model, config.licence, config.measured) == ("tiny", "Apache-2.0", {"auroc": 0.7})
    assert "Noise." in (folder / "README.md").read_text()
    again = loaded.save_pretrained(tmp_path / "again", dtype=dtype)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_head_without_training_is_not_kept(tmp_path):
    with pytest.raises(NotFittedError, match="was called before fit"):
        UncertaintyHead().save_pretrained(tmp_path)


def test_a_fine_tuned_backbone_is_refused_everywhere(world, tuned, tmp_path):
    model, table, head = world
    other_model, other = tuned
    kept = UncertaintyHead.from_pretrained(head.save_pretrained(tmp_path / "head"))
    for one in (head, kept, load_score(save_score(head, tmp_path / "score"))):
        with pytest.raises(TableError) as error:
            one.score(other)
        assert str(error.value).startswith(
            f"head.score: {other.name} was made by another model than the head was trained on: its weights differ ("
        )
        assert str(error.value).endswith(
            "): the backbone was fine-tuned or is another one. Train a head on a table of this model, or extract with "
            "the model that the head belongs to."
        )
        one.check_model(model)
        with pytest.raises(
            ModelError, match=r"^head: tiny is not the model that the head was trained on: its weights d"
        ):
            one.check_model(other_model)
    with pytest.raises(StaleCacheError, match=r"does not match: the model's weights \("):
        dubito.open(table.name, model=other_model)
    assert len(dubito.open(table.name, model=model)) == 40


def test_trained_further_in_place_the_model_is_another_one(world):
    _, _, head = world
    module = network()
    model = dubito.wrap(module, transform=None, name="tiny")
    head.check_model(model)
    with torch.no_grad():
        module[3].bias[0] += 1
    with pytest.raises(ModelError, match="its weights differ"):
        head.check_model(dubito.wrap(module, transform=None, name="tiny"))


def test_another_activation_under_the_same_weights_is_refused(world, tmp_path):
    _, _, head = world
    module = network()
    module[2] = nn.GELU()
    kept = UncertaintyHead.from_pretrained(head.save_pretrained(tmp_path / "head"))
    model, table = extracted(module, tmp_path / "cache")
    with pytest.raises(ModelError, match=r"its operations differ \(ReLU there, GELU\(approximate='none'\) here\)"):
        kept.check_model(model)
    with pytest.raises(TableError, match="its operations differ"):
        kept.score(table)


def test_features_of_another_width():
    head = UncertaintyHead(**SMALL).fit(Table(feature=torch.randn(20, 6), loss=torch.rand(20)))
    with pytest.raises(
        TableError, match=r"^head: features must be 6 wide, as those that the head was trained on; got 7"
    ):
        head.score(Table(feature=torch.randn(3, 7)))


def test_a_head_of_an_unknown_model_warns(world, tmp_path):
    _, table, head = world
    module = HeadModule(6, width=8, depth=1)
    folder = write_head(tmp_path / "stray", PretrainedHead(module, HeadConfig(features=6, width=8, depth=1)))
    stray = UncertaintyHead.from_pretrained(folder)
    with pytest.warns(DubitoWarning) as warned:
        stray.score(table)
    assert [str(one.message) for one in warned] == [
        f"head.score: the head does not record its model, so whether it fits {table.name}, made by tiny, cannot be "
        f"checked."
    ]
    stray.score(Table(feature=table.feature))  # of arrays nothing is known: no warning
    head.score(Table(feature=table.feature))


def test_for_model(world, tuned, own):
    model, table, head = world
    with pytest.raises(ModelError) as error:
        UncertaintyHead.for_model(model)
    assert str(error.value) == (
        "head: no head for tiny among `dubito list heads`. Extract images and train one: "
        "dubito.train(table), or `dubito train`."
    )
    head.save_pretrained(own / "mine")
    assert torch.equal(UncertaintyHead.for_model(model).score(table), head.score(table))
    with pytest.raises(ModelError, match=r"^head: no head for tiny"):
        UncertaintyHead.for_model(tuned[0])


def test_for_model_among_those_that_ship(world, own):
    model, table, head = world
    head.save_pretrained(own / "mine")
    with pytest.raises(ModelError) as error:
        UncertaintyHead.for_model(model, shipped_only=True)
    assert str(error.value) == (
        "head: no head for tiny among those that ship. Extract images and train one: "
        "dubito.train(table), or `dubito train`."
    )
    shipped = UncertaintyHead(seed=2, **SMALL).fit(table)
    shipped.save_pretrained(shelf.SHIPPED / "theirs")
    assert torch.equal(UncertaintyHead.for_model(model, shipped_only=True).weights_, shipped.weights_)
    assert torch.equal(UncertaintyHead.for_model(model).weights_, head.weights_)


@pytest.mark.parametrize(
    "trained",
    [
        {"seed": "one"},
        {"seed": [1]},
        {"seed": math.inf},
        {"recipe": 3},
        {"recipe": {"lr": "fast"}},
        {"recipe": {"lr": -1.0}},
        {"recipe": {"betas": 3}},
        {"recipe": {"loss": {"a": "b"}}},
        {"recipe": {"__class__": "x"}},
        {"recipe": {"episodes": None}},
    ],
)
def test_a_hostile_config_is_refused(world, tmp_path, trained):
    _, _, head = world
    folder = head.save_pretrained(tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    del config["digest"]  # as of the first heads
    (folder / "config.json").write_text(json.dumps(config | {"trained": trained}))
    with pytest.raises(ArtefactError) as error:
        UncertaintyHead.from_pretrained(folder)
    assert str(error.value).startswith("head: the entry 'trained' of its config.json cannot be used (")
    assert str(error.value).endswith("). Save the head again.")


def test_a_hostile_saved_score_is_refused(world, tmp_path):
    _, table, head = world
    folder = save_score(head, tmp_path / "score")
    described = json.loads((folder / "score.json").read_text())
    del described["digest"]  # as of the first scores

    def changed(part, **changes):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(folder, tmp_path / "bad")
        text = json.dumps(described | {part: described[part] | changes})
        (tmp_path / "bad" / "score.json").write_text(text)
        return tmp_path / "bad"

    for recipe in ({"lr": "fast"}, {"speed": 3}, "ranking", None):
        with pytest.raises(ArtefactError, match=r"cannot be read \("):
            load_score(changed("settings", recipe=recipe))
    with pytest.raises(ArtefactError) as error:
        load_score(changed("settings", width=9)).score(table)
    # 6 * 9 + 9 + 9 + 1 = 73, and with a width of 8: 6 * 8 + 8 + 8 + 1 = 65
    assert str(error.value) == ("head: 6 features, width 9 and depth 1 make 73 weights; got 65. Save the head again.")
