"""One suite over every registered score."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dubito.errors import MissingColumnError, NotFittedError, ValueRangeError
from dubito.heads import Recipe
from dubito.metrics.streaming import MemberStream, VarianceStream
from dubito.scores import SCORES, MutualInformation, load_score, make_score, save_score
from dubito.scores.last_layer_gradient import grad_norm, last_layer_gradient
from dubito.table import Table, writer_of
from dubito.types import Score

C, D = 6, 8
OTHER_SETTINGS = {
    "scaled_entropy": {"scale": 0.3},
    "energy": {"temperature": 2.0},
    "neighbours": {"k": 3, "bank_size": 50, "seed": 7},
    "density": {
        "components": 6,
        "covariance": "tied",
        "space": "log",
        "offset": 20.0,
        "regularisation": 1e-4,
        "start": "free",
        "max_iterations": 20,
        "tolerance": 1e-6,
        "neurons": 7,
        "seed": 3,
        "memory": 1.0,
        "nonlinearity": "after",
    },
    "mahalanobis": {"relative": True, "regularisation": 1e-4},
    "gen": {"gamma": 0.5, "top": 3},
    "residual": {"dimension": 6},
    "vim": {"dimension": 3, "alpha": 2.0},
    "nci": {"alpha": 0.1},
    "react": {"percentile": 0.95},
    "scale": {"percentile": 0.5},
    "ash": {"percentile": 0.5},
    "mahalanobis_pp": {"power": "choose", "relative": True, "regularisation": 1e-4, "seed": 3},
    "layer_mahalanobis": {
        "combine": "max",
        "power": 0.5,
        "regularisation": 1e-4,
        "widths": (D, 5),
        "seed": 3,
    },
    "nnguide": {"k": 3, "bank_size": 50, "seed": 7},
    "laplace": {"structure": "diagonal", "prior_precision": 3.0},
    "vbll": {"prior_precision": 2.0, "epochs": 30, "lr": 0.05, "tolerance": 0.2, "seed": 3},
    "deup": {
        "inputs": ("feature", "density"),
        "aleatoric": "none",  # less the entropy, images that are known to be ambiguous have lower values
        "width": 16,
        "depth": 1,
        "seed": 5,
        "recipe": Recipe(loss="l2", batch=50, rows=12_000),
    },
    "temperature": {"score_of": make_score("scaled_entropy", scale=0.4)},
    "mutual_information": {"of": "views"},
    "weighted_mutual_information": {"by": "sum", "over": "pooled", "of": "dropout"},
    "expected_entropy": {"of": "views"},
    "variation_ratio": {"of": "views"},
    "predictive_entropy": {"of": "views"},
    "regrad": {"weighting": "root", "layers": (0.0, 2.0, 0.5), "beta": 2.0, "of": "noisy"},
    "predicted_gradient": {"layers": "uniform", "beta": 1.0, "of": "noisy"},
    "last_layer_gradient": {"weighting": "expected_l1", "bias": False},
    "grad_norm": {"of": "gradient", "bias": True, "layers": "kept"},
    "perturbation_variance": {"of": "views"},
    "head": {"width": 16, "depth": 1, "seed": 5, "recipe": Recipe(target="expected", batch=50, rows=12_000)},
}
"""Away from the defaults, for scores that have settings."""
TOLERANCE = {"head": 1e-5, "deup": 1e-4, "residual": 1e-5, "vim": 1e-5, "laplace": 1e-5}
"""Of what is computed from the same rows in other company: products in float32 sum in another order."""
CROSSES_ZERO = {"vim"}
"""Scores whose values are differences, so that rounding is relative to the larger ones."""
NOT_OF_CLASSES = {"residual", "ash"}
"""Scores to which a tie of classes means nothing, or not with eight features, of which one is kept."""
OF_DIRECTIONS = {"neighbours", "mahalanobis_pp", "layer_mahalanobis", "nnguide", "prototypes"}
"""Scores of features at length one, which zeros do not have."""
QUICK = {
    "head": {"width": 64, "recipe": Recipe(batch=50, rows=12_000)},
    "layer_mahalanobis": {"widths": (D, 5)},
    "deup": {"width": 16, "recipe": Recipe(loss="log_l2", batch=50, rows=30_000)},
    "vbll": {"epochs": 100},
}
"""Instead of the defaults, for scores that learn for seconds, or whose column needs an explanation."""
COUNTS = {"variation_ratio"}
"""Scores that count something small, so that many rows are equal."""


def data(n: int, seed: int = 0) -> Table:
    """Rows of six classes: features around their class's direction, none negative; their logits; some labels wrong."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(C, (n,), generator=generator)
    feature = (torch.eye(C, D)[label] * 3 + torch.randn(n, D, generator=generator)).relu()
    logit = 2 * feature[:, :C] + 0.3 * torch.randn(n, C, generator=generator)
    table = Table(feature=feature, logit=logit, label=label, loss=F.cross_entropy(logit, label, reduction="none"))
    return with_layers(with_members(table, logit[:, None] + torch.randn(n, 5, C, generator=generator)))


def with_members(table: Table, logits: torch.Tensor) -> Table:
    """With ensembles: three that are summed up, and one as the logits of its members."""
    columns = {"dropout_logit": logits.double()}
    for name, members in {"members": logits, "views": logits[:, 1:], "noise": logits[:, :4]}.items():
        stream, spread = MemberStream(), VarianceStream()
        stream.add(members)
        spread.add(members)
        columns |= {name: stream.summary().float(), f"{name}_variance": spread.variance().float()}
    return table.extended(**columns)


def with_layers(table: Table) -> Table:
    """With what a gradient probe and a layers probe would write; the first layer is the feature, the second like it."""
    return with_gradients(table.extended(layers=torch.cat([table.feature, 2 + table.feature[:, :5]], dim=1)))


def with_gradients(table: Table) -> Table:
    """With what two gradient probes would write of three layers, which differ in size and a little in order."""
    ways = {
        "": last_layer_gradient(table.feature, table.logit),
        "_root": last_layer_gradient(table.feature, table.logit, "root"),
        "_predicted": last_layer_gradient(table.feature, table.logit) + 1 - table.logit.softmax(1).amax(1),
        "_uniform": grad_norm(table.feature, table.logit),
    }
    layers = torch.tensor([3.0, 1.0, 0.5])
    columns = {end: (norm[:, None] * layers + 0.01 * table.feature[:, :3].abs()).float() for end, norm in ways.items()}
    return table.extended(**{name + end: column for end, column in columns.items() for name in ("gradient", "noisy")})


OTHERS = list(OTHER_SETTINGS.items())
LINE_UP = [
    *((name, QUICK.get(name, {})) for name in SCORES),
    *OTHERS,
    ("temperature", {"score_of": MutualInformation(of="dropout")}),
]


@pytest.fixture(scope="module", params=LINE_UP, ids=lambda pair: f"{pair[0]}{'*' if pair in OTHERS else ''}")
def once(request, one_thread) -> Score:
    name, settings = request.param
    return make_score(name, **settings).fit(data(400))


@pytest.fixture
def fitted(once) -> Score:
    return copy.deepcopy(once)


def close(u: torch.Tensor, expected: torch.Tensor, score: Score) -> bool:
    tolerance = TOLERANCE.get(score.name, 1e-6)
    scale = float(expected.abs().mean()) if score.name in CROSSES_ZERO else 0.0
    return torch.allclose(u, expected, rtol=tolerance, atol=tolerance * scale)


def without(table: Table, column: str) -> Table:
    return table.select(*(name for name in table.columns if name != column))


def replaced(table: Table, column: str, value: float) -> Table:
    changed = table.whole(column).clone()
    changed[..., 1] = value  # in a column of one axis, one row
    return table.extended(**{column: changed})


@pytest.mark.parametrize("name", SCORES)
def test_says_what_it_is(name):
    score = SCORES[name]
    assert score.name == name
    assert score.kind in ("aleatoric", "epistemic", "total")
    assert score.needs
    assert all(writer_of(column) for column in (*score.needs, *score.learns_from))
    assert all(attribute.endswith("_") for attribute in score.learned)
    assert bool(score.learned) == bool(score.learns_from)
    assert score.__doc__
    assert dataclasses.is_dataclass(score)


@pytest.mark.parametrize("name", SCORES)
def test_settings_are_attributes_and_fit_leaves_them_alone(name):
    settings = OTHER_SETTINGS.get(name, {})
    score = make_score(name, **settings)
    before = repr(score)
    assert {field.name for field in dataclasses.fields(score) if field.init} == set(settings)
    assert score.fit(data(300)) is score
    assert repr(score) == before
    assert score == make_score(name, **settings)  # equal by settings
    if settings:
        assert score != make_score(name)
    assert all(hasattr(score, attribute) for attribute in score.learned)


def test_gives_one_finite_float64_a_row(fitted):
    u = fitted.score(data(57, seed=1))
    assert u.shape == (57,)
    assert u.dtype == torch.float64
    assert bool(u.isfinite().all())
    assert len(u.unique()) > (1 if fitted.name in COUNTS else 50)
    assert not u.requires_grad


def test_fit_and_score_leave_the_table_alone(fitted):
    table = data(40, seed=1)
    before = {column: table.whole(column).clone() for column in table.columns}
    copy.deepcopy(fitted).fit(data(400))
    fitted.score(table)
    assert table.columns == tuple(before)
    assert all(torch.equal(table.whole(column), before[column]) for column in before)


def test_asks_only_for_the_columns_it_names(fitted):
    table = data(30, seed=1)
    assert torch.equal(fitted.score(table.select(*fitted.needs)), fitted.score(table))
    again = copy.deepcopy(fitted)
    again.fit(data(400).select(*fitted.learns_from))
    assert torch.equal(again.score(table), fitted.score(table))


def test_one_row_and_none(fitted):
    table = data(20, seed=1)
    alone = fitted.score(table.rows(slice(3, 4)))
    assert alone.shape == (1,)
    whole = fitted.score(table)
    assert close(torch.cat([whole[:3], alone, whole[4:]]), whole, fitted)
    none = fitted.score(table.rows(slice(0, 0)))
    assert (none.shape, none.dtype) == ((0,), torch.float64)


def test_rows_do_not_know_of_each_other(fitted):
    table = data(200, seed=1)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(3))
    assert close(fitted.score(table.rows(order)), fitted.score(table)[order], fitted)


def test_a_row_of_zeros_has_a_finite_value_and_changes_no_other(fitted):
    """Dead units: of one image in a batch, every feature is zero."""
    table = data(40, seed=1)
    dead = {name: table.whole(name).clone() for name in ("feature", "layers")}
    for column in dead.values():
        column[7] = 0
    u, expected = fitted.score(table.extended(**dead)), fitted.score(table)
    assert bool(u.isfinite().all())
    others = torch.arange(40) != 7
    assert close(u[others], expected[others], fitted)
    if fitted.name in OF_DIRECTIONS:
        assert float(u[7]) == float(u.max())


def test_batches_do_not_matter(fitted, monkeypatch):
    table, train = data(200, seed=1), data(80)
    whole = fitted.fit(train).score(table)
    batches = Table.batches
    sizes = []

    def in_sevens(self, *columns, **_):
        for batch in batches(self, *columns, size=7):
            sizes.append(len(batch))
            yield batch

    monkeypatch.setattr(Table, "batches", in_sevens)
    assert close(fitted.score(table), whole, fitted)
    assert sizes == [7] * 28 + [4]
    assert close(fitted.fit(train).score(table), whole, fitted)


def test_arrays_and_lists_are_as_good_as_tensors(fitted):
    table = data(30, seed=1)
    arrays = Table(**{column: table.whole(column).numpy() for column in table.columns})
    lists = Table(**{column: table.whole(column).tolist() for column in table.columns})
    expected = fitted.score(table)
    assert torch.equal(fitted.score(arrays), expected)
    # Python's floats arrive as float64: the same numbers, computed more exactly.
    assert close(fitted.score(lists), expected, fitted)
    halves = Table(**{name: np.asarray(table.whole(name), dtype=np.float16) for name in fitted.needs})
    assert torch.allclose(fitted.score(halves), expected, rtol=0.02, atol=0.02)


def test_a_confident_row_scores_lower_than_an_ambiguous_one(fitted):
    if fitted.name in NOT_OF_CLASSES:
        pytest.skip("by design")
    # One class far ahead, in the middle of its cluster, against two that tie, between the clusters. There, the members
    # of an ensemble are for the one or the other in turn.
    feature = torch.zeros(2, D)
    feature[0, 0] = 3.0
    feature[1, :2] = 1.5
    logit = torch.zeros(2, C)
    logit[0, 0] = 9.0
    logit[1, :2] = 1.0
    members = logit[:, None].repeat(1, 5, 1)
    members[1] += torch.eye(C)[[0, 1, 0, 1, 0]]
    table = with_layers(with_members(Table(feature=feature, logit=logit), members))
    sure, unsure = fitted.score(table).tolist()
    assert sure < unsure


def test_a_missing_column_is_named_with_its_writer(fitted):
    table = data(10)
    for column in fitted.needs:
        with pytest.raises(MissingColumnError) as error:
            fitted.score(without(table, column))
        assert f"{fitted.name}.score needs column '{column}'; table in memory has " in str(error.value)
        assert str(error.value).endswith(f". It is written by {writer_of(column)}.")
    for column in fitted.learns_from:
        # Losses are computed from logits and labels; without these, they are what is missing.
        rest = table.select("feature") if column == "loss" else without(table, column)
        missing = next(name for name in fitted.learns_from if name not in rest)
        with pytest.raises(MissingColumnError, match=rf"^{fitted.name}\.fit needs column '{missing}'; table in memory"):
            fitted.fit(rest)


@pytest.mark.parametrize("name", [name for name in SCORES if SCORES[name].learned])
def test_before_fit_it_says_so(name):
    score = make_score(name)
    with pytest.raises(NotFittedError) as error:
        score.score(data(10))
    assert str(error.value) == (
        f"{name}.score was called before fit (no {', '.join(score.learned)}). "
        f"Call fit(table) first, with a table that has {', '.join(score.learns_from)}."
    )


@pytest.mark.parametrize("name", [name for name in SCORES if not SCORES[name].learned])
def test_what_learns_nothing_needs_no_fit(name):
    assert torch.equal(make_score(name).score(data(10)), make_score(name).fit(data(400)).score(data(10)))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_without_meaning_are_errors(fitted, bad):
    table = data(10, seed=1)
    for column in fitted.needs:
        with pytest.raises(ValueRangeError, match=rf"{fitted.name}\.score.* (finite|infinite)"):
            fitted.score(replaced(table, column, bad))
    for column in fitted.learns_from:
        if table.whole(column).is_floating_point():
            with pytest.raises(ValueRangeError, match=rf"{fitted.name}\.fit: .* (finite|infinite)"):
                fitted.fit(replaced(data(400), column, bad))


def test_saved_and_loaded_it_is_the_same(fitted, tmp_path):
    folder = save_score(fitted, tmp_path / "deep" / "score")
    assert sorted(path.name for path in folder.iterdir()) == ["score.json", "state.safetensors"]
    json.loads((folder / "score.json").read_text())
    loaded = load_score(folder)
    assert type(loaded) is type(fitted)
    assert loaded == fitted
    assert repr(loaded) == repr(fitted)
    table = data(50, seed=1)
    assert torch.equal(loaded.score(table), fitted.score(table))


@pytest.mark.parametrize("name", [name for name in SCORES if SCORES[name].learned])
def test_saved_before_fit_it_is_loaded_before_fit(name, tmp_path):
    loaded = load_score(save_score(make_score(name), tmp_path))
    with pytest.raises(NotFittedError, match=f"{name}.score was called before fit"):
        loaded.score(data(10))


def test_fitted_again_it_forgets(fitted):
    table, other = data(50, seed=1), data(300, seed=9)
    expected = make_score(fitted.name, **settings_of(fitted)).fit(other).score(table)
    assert torch.equal(fitted.fit(other).score(table), expected)


@pytest.mark.parametrize("name", [name for name in SCORES if SCORES[name].learned])
def test_a_fit_that_fails_leaves_nothing_of_the_one_before(name):
    score = make_score(name, **QUICK.get(name, {})).fit(data(400))
    column = next(column for column in score.learns_from if data(1).whole(column).is_floating_point())
    with pytest.raises(ValueRangeError):
        score.fit(replaced(data(400), column, float("nan")))
    assert score.provenance_ is None
    with pytest.raises(NotFittedError, match=rf"{name}\.score was called before fit"):
        score.score(data(10))


def settings_of(score: Score) -> dict[str, object]:
    return {field.name: getattr(score, field.name) for field in dataclasses.fields(score) if field.init}
