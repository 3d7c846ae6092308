"""Members on disk, by index, and as models of the members probe."""

from types import SimpleNamespace

import pytest
import torch
from tests.ensembles.conftest import clusters, learned, mlp

from dubito.ensembles import ImplicitEnsemble, MaskRecipe, extract_members
from dubito.errors import ArtefactError, ModelError
from dubito.metrics import SUMMARY, decompose
from dubito.models import wrap
from dubito.probes import Members


@pytest.fixture(scope="module")
def found():
    x, y = clusters()
    return extract_members(learned(mlp(), x, y), x, y, members=4, recipe=MaskRecipe(steps=30, batch=80))


@torch.no_grad()
def test_masks_come_back_from_disk(found, tmp_path):
    path = found.save(tmp_path / "new" / "masks.safetensors")
    assert path.stat().st_size < 4 * (12 + 40 + 40 + 20 + 20) + 2000  # a byte for each unit and member
    again = ImplicitEnsemble.load(path, found.model.module)
    x, _ = clusters(seed=3)
    for ours, theirs in zip(found, again, strict=True):
        assert torch.equal(ours(x), theirs(x))
    first = again.classifiers()[0]  # of a model that has seen no image yet
    torch.testing.assert_close(first.logits(first.features(x)), found[0](x))
    assert repr(again) == "ImplicitEnsemble(4 members of 'Sequential'; layers 0, 3, 5)"


def test_relaxed_masks_come_back_exactly(found, tmp_path):
    x, y = clusters()
    soft = extract_members(found.model, x, y, members=2, recipe=MaskRecipe(steps=3, batch=20, binarise=False))
    again = ImplicitEnsemble.load(soft.save(tmp_path / "soft.safetensors"), found.model)
    assert torch.equal(again.masks["3"].rows, soft.masks["3"].rows)


def test_members_state_can_be_saved_by_itself(found):
    state = found[0].state_dict()
    other = found[0]
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    other.load_state_dict(state)


def test_any_classifier_will_do(found, tmp_path):
    """One that dubito has not made: all that counts is what the protocol has."""
    names = ("name", "module", "transform", "classes", "device", "features", "logits", "feature_map", "head")
    plain = SimpleNamespace(**{key: getattr(found.model, key) for key in (*names, "fingerprint")})
    again = ImplicitEnsemble.load(found.save(tmp_path / "masks.safetensors"), plain)
    assert torch.equal(again[2][5].weight, found[2][5].weight)
    x, y = clusters()
    assert len(extract_members(plain, x, y, members=2, recipe=MaskRecipe(steps=2, batch=20))) == 2


def test_other_weights_are_refused(found, tmp_path):
    path = found.save(tmp_path / "masks.safetensors")
    with pytest.raises(ModelError, match=r"were learned on other weights than those of Sequential"):
        ImplicitEnsemble.load(path, mlp())


def test_files_that_are_no_masks_are_refused(found, tmp_path):
    (tmp_path / "broken").write_bytes(b"no tensors")
    for name in ("absent", "broken"):
        with pytest.raises(ArtefactError, match=rf"masks in '.*{name}' cannot be read"):
            ImplicitEnsemble.load(tmp_path / name, found.model)


def test_members_by_index(found):
    assert len(found) == len(list(found)) == 4
    torch.testing.assert_close(found[-1][5].weight, found[3][5].weight)
    with pytest.raises(IndexError, match=r"members are 0 to 3; got 4"):
        found[4]


def test_what_is_kept_is_counted(found):
    mask = found.masks["3"]
    expected = sum(float(r.mean() * c.mean()) for r, c in zip(mask.rows, mask.columns, strict=True)) / 4
    assert found.kept()["3"] == pytest.approx(expected)
    assert found.kept()["5"] == pytest.approx(float(found.masks["5"].columns.mean()))


@torch.no_grad()
def test_the_members_probe_takes_them(found):
    x, _ = clusters(9, seed=4)
    probs = torch.stack([member(x) for member in found]).softmax(-1)
    told = Members(found.classifiers()).run(wrap(found.model.module), x, None)["members"]
    epistemic = told[:, SUMMARY.index("epistemic")].double()
    torch.testing.assert_close(epistemic, decompose(probs).epistemic, atol=1e-5, rtol=0)
