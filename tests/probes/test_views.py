"""Views and noisy copies of an image: what they show, and what the model predicts for them."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dubito
from dubito.errors import ModelError, ValueRangeError
from dubito.metrics.streaming import SUMMARY
from dubito.probes.views import DEFAULT, VIEWS, Noise, Views, noise, view
from dubito.scores import MutualInformation, PerturbationVariance

X = torch.randn(4, 3, 16, 24, generator=torch.Generator().manual_seed(0))
FIVE = torch.randn(5, 3, 16, 24, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(one_thread):
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4))
    return dubito.wrap(nn.Sequential(*layers), transform=dubito.Preprocess((16, 24)), name="net")


def enlarged(part: torch.Tensor) -> torch.Tensor:
    return F.interpolate(part, (16, 24), mode="bilinear", antialias=True)


def test_what_each_view_shows():
    # Of 16 x 24 an eighth is 2 x 3; an image that is moved goes by half of it, 1 x 2 (1.5, rounded to even).
    torch.testing.assert_close(view(X, "identity"), X)
    torch.testing.assert_close(view(X, "flip"), X[..., range(23, -1, -1)])
    torch.testing.assert_close(view(X, "zoom_in"), enlarged(X[..., 1:15, 2:23]))
    torch.testing.assert_close(view(X, "top_left"), enlarged(X[..., :14, :21]))
    torch.testing.assert_close(view(X, "top_right"), enlarged(X[..., :14, 3:]))
    torch.testing.assert_close(view(X, "bottom_left"), enlarged(X[..., 2:, :21]))
    torch.testing.assert_close(view(X, "bottom_right"), enlarged(X[..., 2:, 3:]))
    torch.testing.assert_close(view(X, "shift_down")[..., 1:, :], X[..., :-1, :])
    torch.testing.assert_close(view(X, "shift_up")[..., :-1, :], X[..., 1:, :])
    torch.testing.assert_close(view(X, "shift_right")[..., 2:], X[..., :-2])
    torch.testing.assert_close(view(X, "shift_left")[..., :-2], X[..., 2:])
    torch.testing.assert_close(view(X, "shift_right")[..., :2], X[..., [2, 1]])  # the border is mirrored
    torch.testing.assert_close(view(X, "zoom_out"), enlarged(F.pad(X, (2, 2, 1, 1), mode="reflect")))
    torch.testing.assert_close(view(X, "zoom_in+flip"), view(X, "zoom_in").flip(-1))


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("amount", [0.02, 0.3])
def test_the_shape_stays_and_the_input_too(name, amount):
    x = X.clone()
    assert view(x, name, amount).shape == x.shape
    assert torch.equal(x, X)
    flat = torch.full((1, 3, 9, 7), 2.0)
    torch.testing.assert_close(view(flat, name, amount), flat)  # nothing comes in that was not there


def test_members_are_the_models_answers(model):
    columns = Views(keep="logits").run(model, X, torch.tensor([0, 1, 2, 3]))
    assert set(columns) == {"views", "views_between", "views_loss", "views_logit"}
    assert columns["views_logit"].shape == (4, 8, 4)
    with torch.no_grad():
        for place, name in enumerate(DEFAULT):
            torch.testing.assert_close(columns["views_logit"][:, place], model.module(view(X, name)))
        torch.testing.assert_close(columns["views_logit"][:, 1], model.module(X.flip(3)))


def test_a_view_that_changes_nothing_reports_nothing(model):
    same = Views(["identity", "identity"]).run(model, X, None)["views"]
    assert same[:, SUMMARY.index("epistemic")].abs().max() < 1e-6
    even = torch.cat([X, X.flip(3)], 3)[..., ::2]  # the same from both sides
    even = (even + even.flip(3)) / 2
    both = Views(["identity", "flip"]).run(model, even, None)["views"]
    assert both[:, SUMMARY.index("epistemic")].max() < 1e-6


def test_settings():
    probe = Views(["identity", "zoom_in+flip"], amount=0.2)
    assert probe.settings() == {
        "views": ["identity", "zoom_in+flip"],
        "amount": 0.2,
        "keep": "summary",
        "temperature": 1.0,
    }
    assert (probe.name, len(probe), len(Views())) == ("views", 2, 8)


def test_what_is_no_view(model):
    with pytest.raises(
        ValueRangeError, match=r"views: a view must be one of identity, flip, .*; got 'flap'\. Did you mean flip\?"
    ):
        Views(["identity", "zoom_in+flap"])
    with pytest.raises(ValueRangeError, match=r"a view must be one of identity, flip, zoom_in.*; got 'QQ'\.$"):
        Views(["QQ", "identity"])
    for views, got in (([], 0), (["flip"], 1)):
        with pytest.raises(ValueRangeError, match=f"views: their number must be .* at least 2; got {got}. Add some of"):
            Views(views)
    with pytest.raises(ValueRangeError, match=r"views must be a list of names; got 'flip'"):
        Views("flip")
    for amount in (0.0, 0.5):
        with pytest.raises(ValueRangeError, match=rf"views: amount must be a number in \(0, 0.5\); got {amount}"):
            Views(amount=amount)


def test_inputs_that_are_no_images():
    torch.manual_seed(0)
    rows = dubito.wrap(nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)), name="rows")
    with pytest.raises(ModelError, match=r"views: inputs of rows must be images, .*; got \(2, 5\)"):
        Views().run(rows, torch.zeros(2, 5), None)


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


def test_members_are_the_models_answers_with_noise(model):
    columns = Noise(4, 0.2, 7, keep="logits").run(model, FIVE, torch.tensor([0, 1, 2, 3, 0]))
    assert set(columns) == {"noise", "noise_between", "noise_loss", "noise_logit", "noise_variance"}
    assert columns["noise"].shape == (5, len(SUMMARY))
    with torch.no_grad():
        for copy in range(4):
            output = model.module(FIVE + 0.2 * noise((3, 16, 24), 7, copy))
            torch.testing.assert_close(columns["noise_logit"][:, copy], output)
    expected = columns["noise_logit"].double().softmax(-1).var(1, correction=0).sum(-1)
    torch.testing.assert_close(columns["noise_variance"].double(), expected, rtol=1e-5, atol=0)


def test_a_row_does_not_know_its_batch(model):
    whole = Noise().run(model, FIVE, None)
    backwards = Noise().run(model, FIVE.flip(0), None)
    alone = Noise().run(model, FIVE[3:4], None)
    for column in ("noise", "noise_variance"):
        torch.testing.assert_close(backwards[column].flip(0), whole[column], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(alone[column][0], whole[column][3], rtol=1e-4, atol=1e-6)


def test_other_seeds_and_amounts(model):
    def variance(**settings):
        return Noise(**settings).run(model, FIVE, None)["noise_variance"]

    assert torch.equal(variance(), variance(copies=8, sigma=0.05, seed=0))
    assert not torch.allclose(variance(seed=1), variance())
    assert (variance(sigma=0.4) > variance(sigma=0.05)).all()


def test_the_input_stays(model):
    x = FIVE.clone()
    Noise().run(model, x, None)
    assert torch.equal(x, FIVE)


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
    columns = Noise(3, 0.3, variance=True, temperature=2.0, keep="logits").run(model, FIVE, None)
    expected = (columns["noise_logit"].double() / 2).softmax(-1).var(1, correction=0).sum(-1)
    torch.testing.assert_close(columns["noise_variance"].double(), expected, rtol=1e-5, atol=0)
    assert "noise_variance" not in Noise(variance=False).run(model, FIVE, None)


def test_half_precision_and_flat_inputs():
    torch.manual_seed(0)
    flat = dubito.wrap(nn.Linear(6, 3).bfloat16(), name="flat")
    x = torch.randn(2, 6).bfloat16()
    columns = Noise(sigma=0.5).run(flat, x, None)
    assert (columns["noise_variance"] > 0).all()
    with pytest.raises(ValueRangeError, match=r"noise: sigma=1e-05 changes nothing of the inputs of flat, which are "):
        Noise(sigma=1e-5).run(flat, 1 + x.abs(), None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"copies": 1}, "noise: copies must be a whole number, at least 2; got 1"),
        ({"sigma": 0.0}, "noise: sigma must be a number, above 0; got 0.0"),
        ({"sigma": -1.0}, "noise: sigma must be a number, above 0; got -1.0"),
        ({"sigma": math.nan}, "noise: sigma must be a number, above 0; got nan"),
    ],
)
def test_what_cannot_be(settings, message):
    with pytest.raises(ValueRangeError, match=message):
        Noise(**settings)


def test_extracted(model, tmp_path):
    def extracted(x, to, size):
        return dubito.extract(model, x, tmp_path / to, probes=[Noise(4, 0.3)], batch_size=size)

    table, again = extracted(FIVE, "one", 2), extracted(FIVE[[4, 2, 0, 1, 3]], "two", 5)
    settings = Noise(4, 0.3).settings()
    assert table.provenance.probes["noise"]["settings"] == settings
    for score in (PerturbationVariance(), MutualInformation(of="noise")):
        torch.testing.assert_close(score.score(again), score.score(table)[[4, 2, 0, 1, 3]], rtol=1e-3, atol=1e-7)
