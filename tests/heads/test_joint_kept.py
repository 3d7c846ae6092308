"""After joint training: the head can be kept, knows its model, and is refused elsewhere."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from tests.heads.conftest import Cnn, batches, cnn, same
from torch import Tensor, nn

import dubito
from dubito.errors import ModelError, TableError
from dubito.heads import HeadModule, WithUncertainty, joint_loss, with_uncertainty
from dubito.scores import UncertaintyHead


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


def trained(**options) -> WithUncertainty:
    """After three steps, still in train mode."""
    model = with_uncertainty(cnn(), width=8, depth=1, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(16):
        optimizer.zero_grad()
        logit, u = model(x)
        joint_loss(F.cross_entropy(logit, y, reduction="none"), u).backward()
        optimizer.step()
    return model


def wrapped(module: nn.Module, **options) -> dubito.models.WrappedClassifier:
    return dubito.wrap(module, transform=None, name="mine", **options)


def test_saved_and_loaded_it_returns_the_same_as_in_training(tmp_path):
    model, x = trained(), batches(16)[0][0]
    head = UncertaintyHead.from_joint(model, wrapped(model.module))
    read = UncertaintyHead.from_pretrained(head.save_pretrained(tmp_path / "head"))
    table = dubito.extract(
        wrapped(model.module),
        x,
        tmp_path / "cache",
        probes=[dubito.probes.Forward(feature_dtype="float32")],
        progress=False,
    )
    u = model.eval()(x).u.detach()
    for one in (head, read):
        assert (one.width, one.depth, one.features_) == (8, 1, 8)
        assert one.trained_ == {"jointly": True, "stop_gradient": True}
        torch.testing.assert_close(one.score(table).float(), u)
    assert "jointly: True" in (tmp_path / "head" / "README.md").read_text()


def test_it_refuses_every_other_model(tmp_path):
    model = trained()
    head = UncertaintyHead.from_joint(model, wrapped(model.module))
    head.check_model(wrapped(copy.deepcopy(model.module)))
    with torch.no_grad():
        model.module.fc.bias[0] += 1  # trained on
    with pytest.raises(
        ModelError, match=r"^head: mine is not the model that the head was trained on: its weights diff"
    ):
        head.check_model(wrapped(model.module))
    table = dubito.extract(wrapped(model.module), batches(16)[0][0], tmp_path / "cache", progress=False)
    with pytest.raises(TableError, match="was made by another model than the head was trained on: its weights differ"):
        head.score(table)


def test_taking_it_out_changes_nothing():
    model = trained()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    kept = model.pretrained(wrapped(model.module))
    assert model.training
    assert model.module.drop.training
    assert same(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), random)
    with torch.no_grad():
        next(model.head_module.parameters()).zero_()  # trained on
    assert same(
        kept.module.state_dict(), {key.removeprefix("head_module."): before[key] for key in before if "head" in key}
    )


REFUSED = (
    r"^with_uncertainty: mine does not compute the features that the head was trained on, the input of layer "
    r"'{layer}' of {kind}\. Wrap the trained module itself, dubito\.wrap\(model\.module\); only a head on the layer "
    r"that returns the logits can be saved\.$"
)


def test_a_classifier_of_another_module_is_refused():
    model = trained()
    with pytest.raises(ModelError, match=REFUSED.format(layer="fc", kind="Cnn")):
        model.pretrained(wrapped(cnn()))  # as it was before the training
    with pytest.raises(ModelError, match=REFUSED.format(layer="fc", kind="Cnn")):
        model.pretrained(wrapped(nn.Sequential(nn.Flatten(), nn.Linear(768, 5), nn.Linear(5, 5))))  # another width


def test_a_head_that_says_the_same_of_every_image_does_not_hide_another_module():
    model = trained()
    with torch.no_grad():
        for parameter in model.head_module.parameters():
            parameter.zero_()
    torch.manual_seed(7)
    with pytest.raises(ModelError, match=REFUSED.format(layer="fc", kind="Cnn")):
        model.pretrained(wrapped(Cnn()))
    assert model.pretrained(wrapped(model.module)).config.features == 8


def test_a_copy_from_three_small_steps_ago_is_refused():
    model = trained()
    stale = copy.deepcopy(model.module)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for x, y in batches(16)[:3]:
        optimizer.zero_grad()
        logit, u = model(x)
        joint_loss(F.cross_entropy(logit, y, reduction="none"), u).backward()
        optimizer.step()
    with pytest.raises(ModelError, match=REFUSED.format(layer="fc", kind="Cnn")):
        model.pretrained(wrapped(stale))
    assert model.pretrained(wrapped(copy.deepcopy(model.module))).config.features == 8


class Hidden(Cnn):
    """A linear layer in front of the classifying one, as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.hidden(self.body(x).mean((2, 3))).relu())


def test_a_classifier_that_reads_another_layer_is_refused():
    torch.manual_seed(0)
    model = with_uncertainty(Hidden().eval(), layer="hidden", width=8)
    model(batches(16)[0][0])
    with pytest.raises(ModelError, match=REFUSED.format(layer="hidden", kind="Hidden")):
        model.pretrained(wrapped(model.module))
    model = with_uncertainty(model.module, layer="fc", width=8)
    model(batches(16)[0][0])
    assert model.pretrained(wrapped(model.module, head="fc")).config.provenance.head["layer"] == "fc"


def test_without_a_batch_an_example_is_needed():
    model = with_uncertainty(cnn(), width=8)
    with pytest.raises(ModelError) as error:
        model.pretrained(wrapped(model.module))
    assert str(error.value) == (
        "with_uncertainty: Cnn has not seen a batch yet, so the size of its inputs is not known. Pass one as example=."
    )
    assert UncertaintyHead.from_joint(model, wrapped(model.module), batches(16)[0][0]).features_ == 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_of_other_precisions_float32_is_kept(dtype):
    model = with_uncertainty(cnn().to(dtype), width=8)
    model(batches(16)[0][0].to(dtype))
    kept = model.pretrained(wrapped(model.module))
    assert {parameter.dtype for parameter in kept.module.parameters()} == {torch.float32}
    assert same(kept.module.state_dict(), HeadModule(8, width=8).state_dict())


def test_a_model_of_torchvision():
    module = torchvision.models.mobilenet_v3_small(weights=None, num_classes=5)
    model = with_uncertainty(module, width=8)
    assert model.pretrained(wrapped(module), batches(32)[0][0]).config.features == 1024
