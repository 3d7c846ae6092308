"""Noisy copies of an image: which noise, the same for every image and batch, and what the model says of it."""

import math

import pytest
import torch
from torch import nn

import dubito
from dubito.errors import ValueRangeError
from dubito.metrics.streaming import SUMMARY
from dubito.probes import Views
from dubito.probes.noise import Noise, noise
from dubito.scores import MutualInformation, PerturbationVariance

X = torch.randn(5, 3, 16, 24, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(one_thread):
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))
    return dubito.wrap(nn.Sequential(*layers), transform=dubito.Preprocess((16, 24)), name="net")


def test_noise_is_normal_and_its_own():
    e = noise((3, 100, 100), 0, 0)
    assert abs(float(e.mean())) < 0.03
    assert float(e.std()) == pytest.approx(1, abs=0.02)
    assert torch.equal(e, noise((3, 100, 100), 0, 0))
    for other in (noise((3, 100, 100), 0, 1), noise((3, 100, 100), 1, 0)):
        assert abs(float((e * other).mean())) < 0.03
    state = torch.get_rng_state()
    noise((3,), 0, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_members_are_the_models_answers(model):
    columns = Noise(4, 0.2, 7, keep="logits").run(model, X, torch.tensor([0, 1, 2, 3, 0]))
    assert set(columns) == {"noise", "noise_between", "noise_loss", "noise_logit", "noise_variance"}
    assert columns["noise"].shape == (5, len(SUMMARY))
    with torch.no_grad():
        for copy in range(4):
            said = model.module(X + 0.2 * noise((3, 16, 24), 7, copy))
            torch.testing.assert_close(columns["noise_logit"][:, copy], said)
    expected = columns["noise_logit"].double().softmax(-1).var(1, correction=0).sum(-1)
    torch.testing.assert_close(columns["noise_variance"].double(), expected, rtol=1e-5, atol=0)


def test_a_row_does_not_know_its_batch(model):
    whole = Noise().run(model, X, None)
    backwards = Noise().run(model, X.flip(0), None)
    alone = Noise().run(model, X[3:4], None)
    for column in ("noise", "noise_variance"):
        torch.testing.assert_close(backwards[column].flip(0), whole[column], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(alone[column][0], whole[column][3], rtol=1e-4, atol=1e-6)


def test_other_seeds_and_amounts(model):
    def variance(**settings):
        return Noise(**settings).run(model, X, None)["noise_variance"]

    assert torch.equal(variance(), variance(copies=8, sigma=0.05, seed=0))
    assert not torch.allclose(variance(seed=1), variance())
    assert (variance(sigma=0.4) > variance(sigma=0.05)).all()


def test_the_input_stays(model):
    x = X.clone()
    Noise().run(model, x, None)
    assert torch.equal(x, X)


def test_settings_and_price():
    probe = Noise(4, 0.1, 3)
    assert probe.settings() == {
        "copies": 4,
        "sigma": 0.1,
        "seed": 3,
        "keep": "summary",
        "temperature": 1.0,
        "variance": True,
    }
    assert (probe.name, probe.price, len(probe)) == ("noise", "4 forward passes", 4)
    assert "variance" not in Views().settings()  # caches of before stay what they are


def test_any_ensemble_may_have_a_variance(model):
    columns = Noise(3, 0.3, variance=True, temperature=2.0, keep="logits").run(model, X, None)
    expected = (columns["noise_logit"].double() / 2).softmax(-1).var(1, correction=0).sum(-1)
    torch.testing.assert_close(columns["noise_variance"].double(), expected, rtol=1e-5, atol=0)
    assert "noise_variance" not in Noise(variance=False).run(model, X, None)


def test_half_precision_and_flat_inputs():
    torch.manual_seed(0)
    flat = dubito.wrap(nn.Linear(6, 3).bfloat16(), name="flat")
    x = torch.randn(2, 6).bfloat16()
    columns = Noise(sigma=0.5).run(flat, x, None)
    assert (columns["noise_variance"] > 0).all()
    with pytest.raises(ValueRangeError, match=r"noise: sigma=1e-05 changes nothing of the inputs of flat, which are "):
        Noise(sigma=1e-5).run(flat, 1 + x.abs(), None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"copies": 1}, "noise: copies must be a whole number, at least 2; got 1"),
        ({"sigma": 0.0}, "noise: sigma must be a number, above 0; got 0.0"),
        ({"sigma": -1.0}, "noise: sigma must be a number, above 0; got -1.0"),
        ({"sigma": math.nan}, "noise: sigma must be a number, above 0; got nan"),
    ],
)
def test_what_cannot_be(settings, said):
    with pytest.raises(ValueRangeError, match=said):
        Noise(**settings)


def test_extracted(model, tmp_path):
    def extracted(x, to, size):
        return dubito.extract(model, x, tmp_path / to, probes=[Noise(4, 0.3)], batch_size=size)

    table, again = extracted(X, "one", 2), extracted(X[[4, 2, 0, 1, 3]], "two", 5)
    settings = Noise(4, 0.3).settings()
    assert table.provenance.probes["noise"]["settings"] == settings
    for score in (PerturbationVariance(), MutualInformation(of="noise")):
        torch.testing.assert_close(score.score(again), score.score(table)[[4, 2, 0, 1, 3]], rtol=1e-3, atol=1e-7)
