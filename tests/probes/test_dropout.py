"""Monte-Carlo dropout from outside: what a module in training mode would drop, and nothing else changes."""

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

import dubito
from dubito.errors import ModelError, ValueRangeError
from dubito.metrics.streaming import SUMMARY
from dubito.probes import Dropout
from dubito.probes.dropout import pass_seed
from dubito.storage import tensors_digest

X = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0))
EPISTEMIC = SUMMARY.index("epistemic")
DROPS = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention)

pytestmark = pytest.mark.usefixtures("one_thread")


def network(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    end = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(8, 4))
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), *middle, *end)


def wrapped(module: nn.Module):
    return dubito.wrap(module, transform=dubito.Preprocess((16, 16)), name="net")


def members(model, x=X, **settings) -> torch.Tensor:
    return Dropout(keep="logits", **settings).run(model, x, None)["dropout_logit"]


def in_training(module: nn.Module, member: int, *, kinds=DROPS, seed: int = 0, x=X) -> torch.Tensor:
    """The module's own dropout, switched on as in training, after the seed of that pass."""
    for part in module.eval().modules():
        part.training = isinstance(part, kinds)
    torch.manual_seed(pass_seed(seed, member, tensors_digest({"x": x})))
    with torch.no_grad():
        output = module(x)
    module.eval()
    return output


@pytest.mark.parametrize(
    "middle",
    [
        (),
        (nn.Dropout(0.3),),
        (nn.Dropout(0.3, inplace=True),),
        (nn.Dropout2d(0.3),),
        (nn.AlphaDropout(0.3),),
        (nn.FeatureAlphaDropout(0.3),),
        (nn.Flatten(2), nn.Dropout1d(0.3), nn.Unflatten(2, (14, 14))),
        (nn.Unflatten(1, (4, 2)), nn.Dropout3d(0.3), nn.Flatten(1, 2)),
    ],
    ids=lambda middle: "+".join(type(one).__name__ for one in middle) or "head",
)
def test_against_training_mode(middle):
    module = network(*middle)
    result = members(wrapped(module), passes=3)
    for member in range(3):
        torch.testing.assert_close(result[:, member], in_training(module, member))
    assert not torch.allclose(result[:, 0], result[:, 1])


class Calls(nn.Module):
    """Calls dropout as a function."""

    def __init__(self, drop) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head, self.drop = nn.Linear(768, 8), nn.Linear(8, 4), drop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.layer(x.flatten(1)), self.training))


@pytest.mark.parametrize(
    "drop",
    [
        lambda z, on: F.dropout(z, 0.4, on),
        lambda z, on: F.dropout(z, training=on),
        lambda z, on: torch.dropout(z, 0.4, on),
        lambda z, on: torch.dropout(z, p=0.4, train=on),
        lambda z, on: F.alpha_dropout(z, 0.4, training=on),
    ],
    ids=["functional", "default rate", "torch", "torch by name", "alpha"],
)
def test_functions_count_as_well(drop):
    module = Calls(drop)
    result = members(wrapped(module), passes=2)
    torch.testing.assert_close(result[:, 1], in_training(module, 1, kinds=Calls))


class Attending(nn.Module):
    def __init__(self, *, own: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.3, batch_first=True) if own else None
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.mean(1)  # tokens (n, 16, 16)
        if self.attention is None:
            rate = 0.3 if self.training else 0.0
            return self.head(F.scaled_dot_product_attention(x, x, x, dropout_p=rate).mean(1))
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


def test_attention():
    module = Attending(own=True)
    result = members(wrapped(module), passes=2)
    torch.testing.assert_close(result[:, 1], in_training(module, 1))
    # In eval mode this one asks for no dropout, and its own rate is not to be seen: only a given one turns it on.
    plain = Attending(own=False)
    with pytest.raises(ModelError, match="net has 1 calls of dropout, none with a rate above 0"):
        members(wrapped(plain))
    original = members(wrapped(plain), passes=2, rate=0.3)
    torch.testing.assert_close(original[:, 1], in_training(plain, 1, kinds=Attending))


def test_a_given_rate_replaces_the_models_own():
    module = network()
    result = members(wrapped(module), passes=2, rate=0.2)
    assert not torch.allclose(result[:, 0], in_training(module, 0))
    module[-2].p = 0.2
    torch.testing.assert_close(result[:, 0], in_training(module, 0))
    module[-2].p = 0.0
    torch.testing.assert_close(members(wrapped(module), passes=2, rate=0.2), result)


@pytest.mark.parametrize("kind", ["timm", "torchvision row", "torchvision batch"])
def test_stochastic_depth(kind):
    drop = timm.layers.DropPath(0.4) if kind == "timm" else torchvision.ops.StochasticDepth(0.4, kind.split()[1])
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 8, 3), drop, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    result = members(wrapped(module), passes=3)
    torch.testing.assert_close(result[:, 2], in_training(module, 2, kinds=type(drop)))
    assert not any(part._forward_hooks for part in module.modules())


def test_a_real_architecture_with_both():
    torch.manual_seed(0)
    module = timm.create_model("test_efficientnet", num_classes=5, drop_rate=0.3, drop_path_rate=0.4)
    model, x = dubito.wrap(module, transform=dubito.Preprocess((64, 64))), torch.randn(3, 3, 64, 64)
    result = members(model, x, passes=2)
    assert type(module).__name__ == "EfficientNet"
    # timm calls F.dropout with the training mode of the whole network; its BatchNorm stays in eval mode.
    kinds = (type(module), timm.layers.DropPath)
    torch.testing.assert_close(result[:, 1], in_training(module, 1, kinds=kinds, x=x), rtol=1e-4, atol=1e-5)


def test_nothing_of_the_module_changes():
    module = network(nn.Dropout2d(0.3))
    module.train()
    state = {key: value.clone() for key, value in module.state_dict().items()}
    result = members(wrapped(module), passes=3)
    assert all(part.training for part in module.modules())
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())  # BatchNorm's too
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    torch.testing.assert_close(result[:, 0], in_training(module, 0))


def test_inputs_and_random_numbers_are_left_alone():
    module = nn.Sequential(nn.Dropout(0.5, inplace=True), *network())
    model, x = wrapped(module), X.clone()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    result = members(model, x, passes=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(x, X)
    torch.rand(3)
    assert torch.equal(members(model, x, passes=2), result)  # whatever was drawn in between


def test_seed_member_and_batch_decide():
    model = wrapped(network())
    result = members(model, passes=4)
    assert torch.equal(members(model, passes=6)[:, :4], result)  # more passes do not change the first
    assert not torch.allclose(members(model, passes=4, seed=1), result)
    # Other images have other masks: rows that are equal come out differently in another batch.
    other = members(model, torch.cat([X[:3], X[:3] + 1]), passes=4)
    assert not torch.allclose(other[:3], result[:3])
    summary = Dropout(passes=4).run(model, X, None)["dropout"]
    assert (summary[:, EPISTEMIC] > 1e-4).all()


def test_an_extraction_that_is_taken_up_again_gives_the_same_bytes(tmp_path):
    model = wrapped(network(nn.Dropout2d(0.3)))
    pixels = torch.randint(0, 256, (11, 16, 16, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))

    def run(folder, **probes):
        dubito.extract(model, pixels, folder, shard_size=4, batch_size=2, progress=False, **probes)
        return sorted(path.name for path in folder.glob("dropout-*"))  # names carry the checksum of every byte

    probes = [Dropout(passes=3, keep="logits")]
    whole = run(tmp_path / "at once", probes=probes)
    assert len(whole) == 3
    run(tmp_path / "in two", probes=[])
    assert run(tmp_path / "in two", probes=probes) == whole
    (tmp_path / "at once" / whole[1]).unlink()
    with pytest.warns(dubito.errors.RepairedShardWarning):
        assert run(tmp_path / "at once", probes=probes) == whole


def test_a_model_without_dropout():
    torch.manual_seed(0)
    model = wrapped(nn.Sequential(nn.Flatten(), nn.Linear(768, 8), nn.ReLU(), nn.Linear(8, 4)))
    with pytest.raises(ModelError) as error:
        members(model, rate=0.1)
    assert str(error.value) == (
        "dropout: net has 0 calls of dropout, none with a rate above 0, so all passes would be equal. Use "
        "Dropout(rate=0.1); where there is no call, load the model with dropout (timm: drop_rate=0.2), or use "
        "probes.Views(), probes.Tiles() or several models."
    )


def test_a_model_of_timm_that_is_loaded_with_dropout():
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    plain = dubito.load("timm:test_resnet", weights=None)
    with pytest.raises(ModelError, match="timm:test_resnet has 0 calls of dropout"):
        members(plain, x)
    result = members(dubito.load("timm:test_resnet", weights=None, drop_rate=0.2), x, passes=2)
    assert not torch.allclose(result[:, 0], result[:, 1])


def test_a_model_whose_dropout_has_rate_zero():
    module = network(nn.Dropout2d(0.0))
    module[-2].p = 0.0
    with pytest.raises(ModelError) as error:
        members(wrapped(module))
    assert str(error.value).startswith(
        "dropout: net has 2 calls of dropout, none with a rate above 0, so all passes would be equal. Use "
        "Dropout(rate=0.1); "
    )


def test_settings():
    probe = Dropout(passes=5, rate=0.1, seed=3)
    assert probe.settings() == {"passes": 5, "rate": 0.1, "seed": 3, "keep": "summary", "temperature": 1.0}
    assert (probe.name, len(probe)) == ("dropout", 5)
    for passes in (0, 1):
        with pytest.raises(ValueRangeError, match=f"dropout: passes must be a whole number, at least 2; got {passes}"):
            Dropout(passes)
    for rate in (0.0, 1.0, -0.5):
        with pytest.raises(ValueRangeError, match=rf"dropout: rate must be a number in \(0, 1\); got {rate}"):
            Dropout(rate=rate)
