"""A model by its name, wherever a model is accepted: the same as the model that was loaded before."""

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

import dubito
from dubito.ensembles import extract_members
from dubito.errors import ModelError, StaleCacheError
from dubito.explain import structure
from dubito.guard import Guard
from dubito.probes import Members

NET = """
import dubito
import torch
from torch import nn

def make(seed=7):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.ReLU(), nn.Linear(5, 3))
    return dubito.wrap(module, transform=dubito.Preprocess(2))

def other():
    return make(8)
"""
X = torch.randn(300, 3, 2, 2, generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def name(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("models") / "nets_by_name.py"
    file.write_text(NET)
    return f"python:{file}:make"


@pytest.fixture(scope="module")
def model(name: str):
    return dubito.load(name)


@pytest.fixture(scope="module")
def table(model):
    label = model.logits(model.features(X)).argmax(1)
    return dubito.extract(model, X, labels=label, progress=False)


def test_extract(name: str, table, tmp_path: Path) -> None:
    for to in (None, tmp_path / "cache"):
        named = dubito.extract(name, X, to, progress=False)
        assert torch.equal(named.logit, table.logit)
        assert named.model_id == table.model_id
    assert len(dubito.open(tmp_path / "cache", model=name)) == 300
    with pytest.raises(StaleCacheError, match="weights"):
        dubito.open(tmp_path / "cache", model=name.replace(":make", ":other"))


def test_a_guard_is_fitted_and_loaded(name: str, model, table, tmp_path: Path) -> None:
    guard = Guard.fit(name, table, risk=0.3, scores="entropy")
    expected = Guard.fit(model, table, risk=0.3, scores="entropy")(X[:9]).to_dict()
    assert guard(X[:9]).to_dict() == expected
    guard.save(tmp_path / "guard")
    assert Guard.load(tmp_path / "guard", name)(X[:9]).to_dict() == expected
    with pytest.raises(ModelError, match="belongs to another model"):
        Guard.load(tmp_path / "guard", name.replace(":make", ":other"))


def test_the_audit(name: str, model) -> None:
    assert dubito.audit(name, X, progress=False).to_dict() == dubito.audit(model, X, progress=False).to_dict()


def test_whatever_else_takes_a_model(name: str, model) -> None:
    assert structure(name).distance == structure(model).distance
    pair = Members([name, name.replace(":make", ":other")])
    assert [one.name for one in pair.models] == [name, name.replace(":make", ":other")]
    assert len(extract_members(name, X, [0, 1, 2] * 100, members=2, progress=False)) == 2
    with pytest.raises(ModelError, match=f"no head for {name}"):
        dubito.UncertaintyHead.for_model(name)


@pytest.mark.parametrize("call", [dubito.extract, dubito.audit], ids=["extract", "audit"])
def test_what_names_no_model(call, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"a model is named 'source:name' .* got 'resnet50'. Did you mean 'timm:resnet50"
    ):
        call("resnet50", X)
    with pytest.raises(
        ModelError, match=r"That is a folder. If it holds images, the model comes first and images seco"
    ):
        call(str(tmp_path), "timm:resnet50")


def test_what_is_no_model_at_all() -> None:
    extract = inspect.unwrap(dubito.extract)  # past the type checks of the tests
    with pytest.raises(
        ModelError, match=r"extract: model must be a name such as .*; got Linear. Wrap a module: dubito"
    ):
        extract(nn.Linear(12, 3), X, "cache")
