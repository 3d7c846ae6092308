"""Joint training: with the stop-gradient, everything but the head is as if there were no head, bit for bit."""

import copy
from itertools import pairwise

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from tests.heads.conftest import Cnn, batches, same
from torch import Tensor, nn

from dubito.errors import TableError, ValueRangeError
from dubito.heads import HeadModule
from dubito.heads.joint import joint_loss, with_uncertainty


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


def timm_model(name: str):
    return lambda: timm.create_model(name, pretrained=False, num_classes=5, drop_rate=0.2)


ARCHITECTURES = {
    "cnn": (Cnn, 16),
    "resnet": (timm_model("test_resnet"), 64),
    "vit": (timm_model("test_vit"), 160),
    "convnext": (timm_model("test_convnext"), 64),
    "efficientnet": (timm_model("test_efficientnet"), 64),
    "mobilenet": (lambda: torchvision.models.mobilenet_v3_small(weights=None, num_classes=5), 32),
}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ARCHITECTURES[name][0]()


def trained_alone(module: nn.Module, data, optimizer: str, mean=F.cross_entropy) -> list[dict[str, Tensor]]:
    """State dicts after every step, of a loop that has never heard of heads."""
    torch.manual_seed(7)
    step, states = OPTIMIZERS[optimizer](module.parameters()), []
    for x, y in data:
        step.zero_grad()
        mean(module(x), y).backward()
        step.step()
        states.append(copy.deepcopy(module.state_dict()))
    return states


def trained_jointly(module: nn.Module, data, optimizer: str, *, loss="ranking", stop_gradient=True, **result):
    torch.manual_seed(7)
    model = with_uncertainty(module, width=16, stop_gradient=stop_gradient, **result)
    step, states = OPTIMIZERS[optimizer](model.parameters()), []
    for x, y in data:
        step.zero_grad()
        logit, u = model(x)
        joint_loss(F.cross_entropy(logit, y, reduction="none"), u, loss=loss).backward()
        step.step()
        states.append(copy.deepcopy(module.state_dict()))
    return states, model


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_with_the_stop_gradient_the_whole_trajectory_is_bit_identical(name, optimizer):
    data = batches(ARCHITECTURES[name][1])
    alone = trained_alone(built(name), data, optimizer)
    jointly, model = trained_jointly(built(name), data, optimizer)
    assert all(same(a, b) for a, b in zip(alone, jointly, strict=True))
    # the test can fail: weights and buffers do move, and so does the head
    assert not any(same(a, b) for a, b in pairwise(alone))
    assert not same(model.head_module.state_dict(), HeadModule(model.head_module.features, width=16).state_dict())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_without_it_the_head_changes_the_backbone(name):
    data = batches(ARCHITECTURES[name][1], steps=2)
    alone = trained_alone(built(name), data, "sgd")
    jointly, model = trained_jointly(built(name), data, "sgd", stop_gradient=False)
    weights = {key for key, _ in model.module.named_parameters()}
    last = {key for key in weights if model.module.get_submodule(model.layer) is _owner(model.module, key)}
    changed = {key for key in weights if not torch.equal(alone[0][key], jointly[0][key])}
    assert changed
    assert not changed & last  # in the first step; the classifying layer itself is not on the head's way
    assert not same(alone[1], jointly[1])


def _owner(module: nn.Module, key: str) -> nn.Module:
    return module.get_submodule(key.rpartition(".")[0])


@pytest.mark.parametrize("loss", ["ranking", "l2", "l1", "log_l2", "variance_nll"])
@pytest.mark.parametrize("result", ["layer", "example", "last"])
def test_every_loss_and_every_way_to_find_the_layer_is_without_interference(loss, result):
    data = batches(16)
    how = {"layer": {"layer": "fc"}, "example": {"example": data[0][0]}, "last": {}}[result]
    jointly, model = trained_jointly(built("cnn"), data, "adamw", loss=loss, **how)
    assert model.layer == "fc"
    assert same(trained_alone(built("cnn"), data, "adamw")[-1], jointly[-1])


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("stop_gradient", [True, False])
@pytest.mark.parametrize("name", ["cnn", "vit"])
def test_gradients_are_the_same_if_and_only_if_they_are_stopped(name, stop_gradient, autocast):
    x, y = batches(ARCHITECTURES[name][1])[0]
    alone, module = built(name), built(name)
    model = with_uncertainty(module, stop_gradient=stop_gradient)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        torch.manual_seed(7)
        F.cross_entropy(alone(x), y).backward()
        torch.manual_seed(7)
        logit, u = model(x)
        joint_loss(F.cross_entropy(logit, y, reduction="none"), u, weight=5.0).backward()
    equal = [torch.equal(a.grad, b.grad) for a, b in zip(alone.parameters(), module.parameters(), strict=True)]
    assert all(equal) == stop_gradient
    assert all(bool(parameter.grad.abs().sum() > 0) for parameter in model.head_module.parameters())


def test_clipping_by_norm_interferes_unless_it_is_given_the_module_s_parameters_alone():
    x, y = batches(16)[0]

    def clipped(model: nn.Module, parameters) -> float:
        logit, u = model(x)
        joint_loss(F.cross_entropy(logit, y, reduction="none"), u, weight=100.0).backward()
        return float(nn.utils.clip_grad_norm_(parameters, 1e-3))

    alone = built("cnn").eval()
    F.cross_entropy(alone(x), y).backward()
    norm = float(nn.utils.clip_grad_norm_(alone.parameters(), 1e-3))
    model, other = (with_uncertainty(built("cnn").eval()) for _ in range(2))
    assert clipped(model, model.module.parameters()) == norm
    assert clipped(other, other.parameters()) > norm


def test_gradients_by_hand():
    """Feature z = x w, logits z, task losses L = (z, 2 z): everything is small enough for a pencil."""
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for stop, expected in ((True, 4.5), (False, 1.5)):
        for part in module:
            nn.init.ones_(part.weight)
        model = with_uncertainty(module, width=1, depth=0, stop_gradient=stop)
        nn.init.constant_(model.head_module.layers[0].weight, 100.0)  # softplus is the identity there: u = 100 z
        nn.init.zeros_(model.head_module.layers[0].bias)
        module.zero_grad()
        logit, u = model(torch.tensor([[1.0], [4.0]]))
        losses = logit[:, 0] * torch.tensor([1.0, 2.0])  # 1 and 8
        joint_loss(losses, u, margin=301.0, weight=0.01).backward()
        # task: d mean(w, 8 w)/dw = 4.5; head: L_1 < L_2, so 0.01 max(0, 301 + 100 w - 400 w), by w: 0.01 * -300 = -3
        assert module[0].weight.grad.item() == pytest.approx(expected, rel=1e-6)


def test_joint_loss_by_hand():
    losses, u = torch.tensor([1.0, 3.0, 2.0, 2.5]), torch.tensor([0.5, 0.4, 0.1, 0.3])
    # mean 8.5 / 4 = 2.125; pairs: 0.1 + 0.1 (wrong order) and max(0, 0.1 - 0.2) = 0: mean 0.1
    assert joint_loss(losses, u).item() == pytest.approx(2.125 + 0.1)
    assert joint_loss(losses, u, weight=3.0).item() == pytest.approx(2.125 + 0.3)
    # margin 0.3: 0.4 and 0.1, mean 0.25; leeway 0.5 leaves the second pair without order: (0.2 + 0.1) / 2
    assert joint_loss(losses, u, margin=0.3).item() == pytest.approx(2.125 + 0.25)
    assert joint_loss(losses, u, leeway=0.5).item() == pytest.approx(2.125 + 0.15)
    # squares: 0.25 + 6.76 + 3.61 + 4.84 = 15.46, by four: 3.865; distances: 0.5 + 2.6 + 1.9 + 2.2 = 7.2, by four: 1.8
    assert joint_loss(losses, u, loss="l2").item() == pytest.approx(2.125 + 3.865)
    assert joint_loss(losses, u, loss="l1").item() == pytest.approx(2.125 + 1.8)


def test_joint_loss_sends_only_the_task_s_gradient_into_the_losses():
    losses = torch.tensor([1.0, 3.0], requires_grad=True)
    joint_loss(losses, torch.tensor([2.0, 2.0]), loss="l2", weight=10.0).backward()
    assert losses.grad.tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    ("losses", "u", "loss", "error", "text"),
    [
        (torch.ones(()), torch.ones(3), "l2", TableError, r'got shapes \(\) and \(3,\)\..*reduction="none"'),
        (torch.ones(2), torch.ones(3), "l2", TableError, r"shapes \(2,\) and \(3,\)"),
        (torch.ones(3), torch.ones(3), "l3", ValueRangeError, "ranking, l2, l1, log_l2, variance_nll; got 'l3'"),
        (torch.ones(1), torch.ones(1), "ranking", TableError, "at least 2; got 1 and 1. A single image has no order"),
    ],
)
def test_what_joint_loss_refuses(losses, u, loss, error, text):
    with pytest.raises(error, match=text):
        joint_loss(losses, u, loss=loss)


def test_autocast_keeps_the_head_in_full_precision():
    module, (x, y) = built("cnn"), batches(16)[0]
    model = with_uncertainty(module)
    with torch.autocast("cpu", torch.bfloat16):
        logit, u = model(x)
        joint_loss(F.cross_entropy(logit, y, reduction="none"), u).backward()
    assert logit.dtype == torch.bfloat16
    assert u.dtype == torch.float32
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, torch.float64), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)],
)
def test_the_head_has_the_precision_of_the_layer_but_no_less_than_float32(dtype, expected):
    before, after = with_uncertainty(built("cnn").to(dtype)), with_uncertainty(built("cnn"))
    x = batches(16)[0][0]
    weights = after.head_module.state_dict()
    after.to(dtype)
    for model in (before, after):
        logit, u = model(x.to(dtype))
        assert (logit.dtype, u.dtype) == (dtype, expected)
        # Nothing of the head was rounded on the way, and it can go back.
        assert all(
            torch.equal(value, weights[key].to(expected)) for key, value in model.head_module.state_dict().items()
        )
        assert model.float()(x).u.dtype == torch.float32


def test_a_bfloat16_module_has_a_head_that_can_tell_near_images_apart():
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).to(torch.bfloat16)
    for part in module:
        nn.init.ones_(part.weight)
    model = with_uncertainty(module, width=1, depth=0)
    nn.init.constant_(model.head_module.layers[0].weight, 0.01)
    nn.init.constant_(model.head_module.layers[0].bias, 10.0)
    # u = 10 + 0.01 z: between 8 and 16, bfloat16 has steps of 0.0625, and all four would be 10.
    u = model(torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.bfloat16)).u
    assert u.tolist() == pytest.approx([10.01, 10.02, 10.03, 10.04], abs=1e-4)


def test_in_bfloat16_too_the_module_trains_as_if_there_were_no_head():
    data = [(x.to(torch.bfloat16), y) for x, y in batches(16)]
    alone = trained_alone(built("cnn").to(torch.bfloat16), data, "sgd")
    jointly, _ = trained_jointly(built("cnn").to(torch.bfloat16), data, "sgd")
    assert all(same(a, b) for a, b in zip(alone, jointly, strict=True))
