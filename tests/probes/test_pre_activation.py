"""Features before the last non-linearity: found in every kind of network, exact, and refused where there are none."""

import pickle

import pytest
import timm
import torch
from torch import nn

import dubito
from dubito.errors import ModelError, ValueRangeError
from dubito.probes import PreActivation

X = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def network(*layers: nn.Module):
    torch.manual_seed(0)
    return dubito.wrap(nn.Sequential(*layers), transform=dubito.Preprocess((32, 32)))


def before(model, x=X) -> torch.Tensor:
    return PreActivation(dtype="float32").run(model, x, None)["pre_activation"]


def mlp(activation: nn.Module):
    return network(nn.Flatten(), nn.Linear(3072, 8), activation, nn.Linear(8, 4))


@pytest.mark.parametrize(
    "activation",
    [
        nn.ReLU(),
        nn.ReLU(inplace=True),
        nn.ReLU6(),
        nn.Tanh(),
        nn.GELU(),
        nn.SiLU(inplace=True),
        nn.LeakyReLU(),
        nn.ELU(),
    ],
    ids=lambda one: type(one).__name__ + ("_inplace" if getattr(one, "inplace", False) else ""),
)
def test_it_is_what_the_activation_reads(activation):
    model = mlp(activation)
    with torch.no_grad():
        expected = model.module[1](X.flatten(1))
    torch.testing.assert_close(before(model), expected)
    torch.testing.assert_close(activation(before(model).clone()), model.features(X))


@pytest.mark.parametrize("inplace", [True, False])
def test_a_map_is_pooled_as_the_feature_is(inplace):
    conv = nn.Conv2d(3, 6, 3)
    model = network(
        conv, nn.ReLU(inplace=inplace), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(6, 4)
    )
    with torch.no_grad():
        expected = conv(X).mean((2, 3))
    torch.testing.assert_close(before(model), expected)
    assert bool((before(model) < model.features(X)).all())  # a ReLU only raises


def test_the_last_of_several_activations_is_taken():
    model = network(
        *(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU()),
        *(nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(6, 4)),
    )
    with torch.no_grad():
        expected = model.module[2](model.module[1](model.module[0](X))).amax((2, 3))
    torch.testing.assert_close(before(model), expected)


@pytest.mark.parametrize("name", ["test_resnet", "test_efficientnet"])
def test_real_architectures(name):
    model = dubito.wrap(timm.create_model(name, num_classes=7), transform=dubito.Preprocess((96, 96)))
    x = torch.randn(3, 3, 96, 96, generator=torch.Generator().manual_seed(1))
    result = before(model, x)
    assert result.shape == model.features(x).shape
    assert bool((result < 0).any())


def test_it_is_a_column_of_a_cache(tmp_path):
    model = mlp(nn.ReLU())
    pixels = torch.randint(0, 256, (9, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    table = dubito.extract(model, pixels, tmp_path / "cache", probes=[PreActivation()])
    torch.testing.assert_close(
        table.whole("pre_activation").relu().float(), table.feature.float(), atol=2e-3, rtol=2e-3
    )


def test_a_model_that_ends_with_a_normalisation_has_nothing_before_it():
    model = network(nn.Flatten(), nn.Linear(3072, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4))
    with pytest.raises(ModelError, match=r"none of the 1 activations that the model calls outputs its features"):
        before(model)


def test_a_model_that_changes_its_way_is_refused():
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(3072, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 2:
                x = x.relu()
            return self.head(self.layer(x.flatten(1)).relu())

    model = dubito.wrap(Moody(), transform=dubito.Preprocess((32, 32)))
    with pytest.raises(ModelError, match="does not call its activations in the same order"):
        before(model)


def test_what_does_not_fit_into_float16_is_an_error():
    model = mlp(nn.ReLU())
    with torch.no_grad():
        model.module[1].bias.fill_(-1e6)
        model.module[1].bias[0] = 1.0
    with pytest.raises(
        ValueRangeError, match=r"beyond float16's 65504\. Extract with probes=\[PreActivation\(dtype='float32'\)\]"
    ):
        PreActivation().run(model, X, None)


def test_the_module_is_left_as_it_was():
    model = mlp(nn.ReLU(inplace=True))
    state = {key: value.clone() for key, value in model.module.state_dict().items()}
    before(model)
    assert all(torch.equal(value, state[key]) for key, value in model.module.state_dict().items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.module.modules())


def test_it_can_be_sent_to_another_process():
    probe = PreActivation(dtype="float32")
    probe.run(mlp(nn.ReLU()), X, None)
    assert pickle.loads(pickle.dumps(probe)) == probe  # noqa: S301 (made here)


def test_another_type_is_refused():
    probe = PreActivation()
    object.__setattr__(probe, "dtype", "int8")  # past the type checks of the tests
    with pytest.raises(ValueRangeError, match="dtype must be one of float16, float32; got 'int8'"):
        probe.__post_init__()
