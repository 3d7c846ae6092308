"""The gradient probe: all columns against torch.func.jacrev, random ones against their theory, and what it refuses."""

import itertools

import pytest
import torch
from tests.gradients import reference
from tests.gradients.reference import classifier, error, inputs
from tests.gradients.zoo import KINDS, SIZES, TIMM, C, made, rows
from torch import nn

import dubito
from dubito.errors import GradientFallbackWarning, ModelError, UnusedLayersWarning, ValueRangeError
from dubito.gradients.sweep import Cotangents, Prepared, Sweep, signs
from dubito.probes.gradient import Gradient
from dubito.scores.last_layer_gradient import grad_norm, last_layer_gradient
from dubito.types import NotingProbe, Probe

pytestmark = pytest.mark.usefixtures("one_thread")
ALL = {"weightings": ("root", "expected_l1"), "uniform": True}
SMALL = "batch_norm_of_rows"


@pytest.fixture(scope="module")
def model(one_thread):
    return classifier(made(SMALL))


@pytest.fixture(scope="module")
def x():
    return inputs(5, 3, 4, 4)


def check_columns(module, probe: Gradient, model, images, close: float = 1e-4):
    ours = probe.run(model, torch.stack([one[0] for one in images]), None)
    truth = reference.columns(module, images, probe.notes()["layers"])
    assert set(ours) == set(truth)
    for name, column in truth.items():
        assert ours[name].dtype == torch.float32
        assert error(ours[name], column) < close, name


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_kind_against_jacrev(kind):
    module, size = made(kind), SIZES[kind]
    check_columns(module, Gradient("exact", **ALL), classifier(module), list(inputs(3, 1, 3, size, size)))


@pytest.mark.parametrize("kind", TIMM)
def test_real_models_against_jacrev(kind):
    module = made(kind)
    check_columns(module, Gradient("exact", **ALL), classifier(module), list(inputs(2, 1, 3, 32, 32)))


@pytest.mark.parametrize(
    "kind", ["conv_stride_padding", "depthwise_5", "encoder_class_token_first", "shared", "pixels"]
)
def test_copies_are_averaged_before_the_norm(kind):
    module, size = made(kind), SIZES[kind]
    probe = Gradient("exact", **ALL, copies=2, sigma=0.3, seed=4)
    together = probe._with_copies(inputs(3, 3, size, size)).unflatten(0, (3, 3))
    assert not torch.equal(together[:, 0], together[:, 1])
    check_columns(module, probe, classifier(module), list(together))


def test_noise_is_normal_and_the_same_for_all_images(x):
    together = Gradient(copies=40, sigma=0.3)._with_copies(x).unflatten(0, (5, 41))
    assert torch.equal(together[:, 0], x)
    noise = together[:, 1:] - x[:, None]
    torch.testing.assert_close(noise[0], noise[3], rtol=0, atol=1e-6)
    assert float(noise[0].std()) == pytest.approx(0.3, rel=0.05)
    assert not torch.equal(together, Gradient(copies=40, sigma=0.3, seed=1)._with_copies(x).unflatten(0, (5, 41)))


def test_the_last_layer_is_the_closed_form(model, x):
    probe = Gradient("exact", **ALL)
    result = probe.run(model, x, None)
    assert probe.notes()["layers"][-1] == "4"
    z = model.features(x)
    logits = model.logits(z)
    for end, weighting in (("", "fisher"), ("_root", "root"), ("_l1", "expected_l1")):
        closed = last_layer_gradient(z, logits, weighting)
        torch.testing.assert_close(result[f"gradient{end}"][:, -1].double(), closed, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        result["gradient_uniform"][:, -1].double(), grad_norm(z, logits, bias=True), rtol=1e-5, atol=0
    )


def by_seed(model, x, count: int, **settings) -> list[dict[str, torch.Tensor]]:
    """The columns under several seeds, of a model that is made ready once."""
    first = Gradient(**settings)
    first.run(model, x, None)
    result = []
    for seed in range(count):
        probe = Gradient(**settings, seed=seed)
        probe._models.update(first._models)
        result.append(probe.run(model, x, None))
    return result


@pytest.mark.parametrize("settings", [{"method": "signs", "draws": 2}, {"classes": 1, "draws": 1}, {"draws": 3}])
def test_random_signs_are_unbiased(model, x, settings):
    exact = Gradient("exact").run(model, x, None)["gradient"].double()
    drawn = torch.stack([result["gradient"].double() for result in by_seed(model, x, 49, **settings)])
    spread = drawn.std(0) / 7  # of the mean of 49
    assert float((spread / exact)[:, 0].min()) > 1e-4  # the last layer has none where its error is known
    assert ((drawn.mean(0) - exact).abs() < 4 * spread + 1e-5 * exact).all()


def test_signs_over_all_signs_are_the_exact_value(model, x, monkeypatch):
    """The mean over every one of the 2^4 mixtures, instead of some: no chance is left."""
    exact = Gradient("exact").run(model, x, None)["gradient"]
    every = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=C))).double()
    monkeypatch.setattr("dubito.probes.gradient.signs", lambda *_: every)
    for settings in ({"method": "signs"}, {"classes": 1}, {"classes": 2}):
        result = Gradient(**settings, draws=16).run(model, x, None)["gradient"]
        torch.testing.assert_close(result, exact, rtol=1e-5, atol=0)


def test_combined_is_closer_than_signs(model, x):
    exact = Gradient("exact").run(model, x, None)["gradient"]

    def spread(**settings):
        drawn = torch.stack([result["gradient"] for result in by_seed(model, x, 15, **settings)])
        return float(((drawn - exact) / exact).square().mean())

    assert spread(method="combined", classes=2, draws=2) < 0.5 * spread(method="signs", draws=4)


def test_the_bound_covers_what_top_leaves_out(model, x):
    exact = Gradient("exact").run(model, x, None)
    result = by_seed(model, x, 50, method="top", classes=1, draws=2)
    rest = exact["gradient"] - result[0]["gradient"]
    assert float((rest / exact["gradient"]).min()) > 0.05  # there is something to bound
    covered = torch.stack([one["gradient_bound"] >= rest for one in result]).double().mean((0, 1))
    assert float(covered.mean()) > 0.93
    assert set(result[0]) == {"gradient", "gradient_predicted", "gradient_bound"}


def test_top_of_all_classes_is_exact_with_nothing_left(model, x):
    exact = Gradient("exact", **ALL).run(model, x, None)
    for classes in (C, C + 3):
        result = Gradient("top", classes=classes, draws=1, **ALL).run(model, x, None)
        assert not result.pop("gradient_bound").any()
        for name, column in exact.items():
            torch.testing.assert_close(result[name], column)
    result = Gradient("combined", classes=C).run(model, x, None)
    torch.testing.assert_close(result["gradient"], exact["gradient"])
    one = Gradient("top", classes=1, draws=0, weightings=["root", "expected_l1"]).run(model, x, None)
    p = model.logits(model.features(x)).double().softmax(1).amax(1)
    torch.testing.assert_close(one["gradient"].double(), p[:, None] * exact["gradient_predicted"].double())
    torch.testing.assert_close(
        one["gradient_root"].double(), (p[:, None] * exact["gradient_predicted"].double()).sqrt()
    )
    assert "gradient_bound" not in one


def test_columns(model, x):
    def columns(*args, **settings):
        return set(Gradient(*args, **settings).run(model, x, None))

    assert columns() == {"gradient", "gradient_predicted"}
    assert columns("signs", uniform=True) == {"gradient", "gradient_uniform"}
    assert columns("exact", weightings=["root"], name="mine") == {"mine", "mine_root", "mine_predicted"}
    assert isinstance(Gradient(), Probe)
    assert isinstance(Gradient(), NotingProbe)


@pytest.mark.parametrize("kind", ["encoder_class_token_first", "instance_norm", "shared"])
@pytest.mark.parametrize("settings", [{}, {"method": "exact"}, {"copies": 2}])
def test_a_row_does_not_know_its_batch(kind, settings):
    model, x = classifier(made(kind)), inputs(7, 3, 4, 4)
    probe = Gradient(**settings)
    whole = probe.run(model, x, None)
    for some in (slice(2, 3), slice(0, 2), slice(1, 6)):
        for name, column in probe.run(model, x[some], None).items():
            torch.testing.assert_close(column, whole[name][some], rtol=1e-4, atol=0)
    alone = Gradient(**settings).run(model, x[4:5], None)  # the first batch that it sees is a single image
    torch.testing.assert_close(alone["gradient"][0], whole["gradient"][4], rtol=1e-4, atol=0)


def test_truncated(model, x):
    whole = Gradient("exact", **ALL)
    columns = whole.run(model, x, None)
    assert whole.notes() == {"layers": ["1", "2", "4"], "depth": [0, 1, 2], "of": 3}
    # weights are exp(beta (depth / 3 - 1)): e^-2, e^-1 and 1 for beta 3
    for settings, kept in (
        ({"last": 2}, 2),
        ({"last": 9}, 3),
        ({"beta": 3.0, "tolerance": 0.3}, 2),
        ({"beta": 3.0, "tolerance": 0.1}, 3),
        ({"beta": 3.0, "tolerance": 1.0}, 1),
        ({"beta": 0.0}, 3),
    ):
        probe = Gradient("exact", **ALL, **settings)
        result = probe.run(model, x, None)
        assert probe.notes() == {"layers": ["1", "2", "4"][-kept:], "depth": [0, 1, 2][-kept:], "of": 3}
        for name, column in columns.items():
            torch.testing.assert_close(result[name], column[:, -kept:], rtol=1e-5, atol=0)


def test_notes_before_and_after():
    probe = Gradient()
    assert probe.notes() == {}
    probe.run(classifier(made("linear")), inputs(2, 3, 4, 4), None)
    assert probe.notes()["layers"] == ["1", "3", "5"]
    probe.run(classifier(made("conv")), inputs(2, 3, 8, 8), None)  # another model with the same probe
    assert probe.notes()["layers"] == ["0", "4"]


def test_what_falls_back_is_reported_only_where_it_is_requested():
    torch.manual_seed(0)
    module = rows(Twice(48, 6), nn.Tanh(), nn.Linear(6, C))
    model, x = classifier(module), inputs(3, 3, 4, 4)
    with pytest.warns(GradientFallbackWarning, match=r"gradient: '1\.pair' of net .* there is no rule for"):
        check_columns(module, Gradient("exact", **ALL), model, list(x[:, None]))
    assert Gradient(last=1).run(model, x, None)["gradient"].shape == (3, 1)  # without a warning


class Twice(nn.Module):
    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.down, self.pair = nn.Linear(wide, 4), nn.Bilinear(4, 4, out)

    def forward(self, x):
        z = self.down(x)
        return self.pair(z, z.tanh())


def test_layers_that_take_no_part_have_no_column():
    module = rows(nn.Linear(48, C))
    module[1].register_parameter("spare", nn.Parameter(torch.ones(2)))
    result = Gradient()
    assert result.run(classifier(module), inputs(2, 3, 4, 4), None)["gradient"].shape == (2, 1)

    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(48, C), nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x.flatten(1))

    with pytest.warns(UnusedLayersWarning, match="does not depend on 'spare'"):
        result.run(classifier(Spare()), inputs(2, 3, 4, 4), None)
    assert result.notes()["layers"] == ["used"]


def test_certain_images_keep_their_order():
    """Probabilities of 1 - 1e-15 and 1 - 1e-30 are both 1 in float32; their gradients are not."""
    module = rows(nn.Linear(48, C))
    with torch.no_grad():
        module[1].weight.zero_()
        module[1].weight[0] = 1.0
        module[1].bias.zero_()
    x = torch.ones(2, 3, 4, 4) * torch.tensor([0.75, 1.5])[:, None, None, None]
    result = Gradient("exact").run(dubito.wrap(module), x, None)["gradient"][:, 0]
    # sum_y p_y (1 - p_y) (||z||^2 + 1), of which 2 * 3 exp(-logit) is left
    expected = 6 * torch.exp(-48 * x[:, 0, 0, 0]) * (48 * x[:, 0, 0, 0] ** 2 + 1)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=0)


def test_refused_models(x):
    def refused(module, kind, text, images=x):
        with pytest.raises(kind, match=text):
            Gradient().run(dubito.wrap(module, name="net"), images, None)

    refused(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), ModelError, "net has no parameters")
    refused(rows(nn.Linear(48, 1)), ModelError, "net has one class, which is always certain")
    refused(rows(nn.Linear(48, C)), ValueRangeError, "got a batch without images", x[:0])
    mixing = rows(nn.Linear(48, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, C))
    refused(mixing, ModelError, "depends on the other images of the batch")
    refused(mixing, ModelError, "depends on the other images of the batch|gives NaN", x[:1])
    for bad in (float("nan"), float("inf")):
        late = x.clone()
        late[4, 0, 0, 0] = bad
        refused(rows(nn.Linear(48, C)), ValueRangeError, r"NaN or infinite logits for image 4 of the batch", late)
        with pytest.raises(ValueRangeError, match="for image 4 of the batch"):
            Gradient(copies=1).run(dubito.wrap(rows(nn.Linear(48, C))), late, None)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"classes": 0}, "classes must be a whole number, at least 1; got 0. For none, use method='signs'"),
        ({"draws": 0}, "draws must be a whole number, at least 1; got 0. For none, use method='top'"),
        ({"method": "top", "draws": -1}, "draws must be a whole number, at least 0; got -1"),
        ({"weightings": ["root"]}, "weighting 'root' is a sum of norms, which random signs do not estimate"),
        ({"method": "signs", "weightings": ["expected_l1"]}, "'expected_l1' is a sum of norms"),
        ({"last": 0}, "last must be a whole number, at least 1; got 0"),
        ({"last": 2, "beta": 1.0}, "pass either last or beta; got last=2 and beta=1.0"),
        ({"beta": float("nan")}, "beta must be a number, at least 0; got nan"),
        ({"beta": -1.0}, "beta must be a number, at least 0; got -1.0"),
        ({"beta": 1.0, "tolerance": 0.0}, r"tolerance must be a number in \(0, 1\]; got 0.0"),
        ({"copies": -1}, "copies must be a whole number, at least 0; got -1"),
        ({"copies": 1, "sigma": 0.0}, "sigma must be a number, above 0; got 0.0"),
        ({"sigma": 0.2}, "sigma has no effect without copies; got sigma=0.2. Pass copies as well, or leave sigma out"),
        ({"tolerance": 0.5}, "tolerance has no effect without beta; got tolerance=0.5. Pass beta as well"),
        ({"last": 3, "tolerance": 0.5}, "tolerance has no effect without beta"),
        ({"name": "My gradient"}, "name must be lower-case letters and underscores, .* got 'My gradient'"),
        ({"name": "low2"}, "name must be lower-case letters and underscores, .* got 'low2'"),
        ({"name": "forward"}, "not that of another probe or column; got 'forward'. Choose another"),
        ({"name": "noise"}, "not that of another probe or column; got 'noise'. Choose another"),
        ({"name": "loss"}, "not that of another probe or column; got 'loss'. Choose another"),
    ],
)
def test_settings_without_meaning(settings, text):
    with pytest.raises(ValueRangeError, match=text):
        Gradient(**{"method": "combined", **settings})


@pytest.mark.parametrize(
    ("method", "weightings", "text"),
    [
        ("all", (), "method must be one of exact, top, signs, combined; got 'all'"),
        ("exact", "root", "weightings must be a list; got 'root'"),
        ("exact", ["mean"], "weightings must be one of fisher, root, expected_l1; got 'mean'"),
    ],
)
def test_names_that_are_none(method, weightings, text):
    probe = Gradient()
    for name, value in (("method", method), ("weightings", weightings)):
        object.__setattr__(probe, name, value)  # past the type checks of the tests
    with pytest.raises(ValueRangeError, match=text):
        probe.__post_init__()


def test_settings_are_what_matters():
    assert Gradient().settings() == {
        "method": "combined",
        "classes": 2,
        "draws": 2,
        "weightings": ["fisher"],
        "uniform": False,
        "copies": 0,
        "seed": 0,
    }
    assert Gradient("exact", 7, 9, seed=1).settings() == Gradient("exact").settings()
    assert Gradient("top", draws=0, seed=1).settings() == Gradient("top", draws=0).settings()
    assert Gradient("exact", copies=1, seed=1).settings() != Gradient("exact", copies=1).settings()
    a, b = (Gradient("exact", weightings=w) for w in (["expected_l1", "root"], ["root", "expected_l1", "root"]))
    assert a.settings() == b.settings()
    for other in (
        {"last": 2},
        {"beta": 2.0},
        {"copies": 1},
        {"seed": 1},
        {"uniform": True},
        {"draws": 3},
        {"classes": 3},
        {"method": "top"},
    ):
        assert Gradient(**other).settings() != Gradient().settings()


def test_price():
    assert Gradient().price == "1 forward pass, 4 backward passes"
    assert Gradient("exact", uniform=True).price == "1 forward pass, one backward pass per class and one more"
    assert Gradient(copies=3).price == "1 forward pass, 4 backward passes, for the image and 3 copies"
    assert Gradient("signs", draws=5).price == "1 forward pass, 5 backward passes"


def test_what_is_known_of_the_error_is_taken_off():
    """At the same price, the combined estimate is closer than the likeliest classes and plain signs over the others."""
    torch.manual_seed(0)
    model = dubito.wrap(nn.Sequential(nn.Flatten(), nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 60)))
    x = inputs(20, 3, 2, 2)
    exact = Gradient("exact").run(model, x, None)["gradient"]
    top = Gradient("top", 2, 0).run(model, x, None)["gradient"]
    combined, plain = torch.zeros(2), torch.zeros(2)
    for seed in range(20):
        result = Gradient("combined", 2, 2, seed=seed).run(model, x, None)["gradient"]
        combined += (result - exact).abs().mean(0)
        with Sweep(Prepared(model, x, lambda layers: layers).plan, x, len(x)) as sweep:
            cotangents = Cotangents(sweep.logits.double()[:, None])
            rest = sum(sweep.norms(cotangents.mixture(v, 2))["squares"] for v in signs(2, 60, seed)) / 2
        plain += (top + rest - exact).abs().mean(0)
    assert combined[0] < 0.5 * plain[0]
    assert combined[1] < 1e-4 * plain[1]  # the last layer goes with the length of the cotangent: exactly
