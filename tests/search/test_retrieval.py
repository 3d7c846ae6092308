"""Sets: radii by matching quantiles, by hand on a line of angles, and what they promise."""

import numpy as np
import pytest

from dubito.errors import ValueRangeError
from dubito.search import SafeIndex, memory
from dubito.search.retrieval import measure_radii


def at(*degrees: float) -> np.ndarray:
    angle = np.deg2rad(degrees)
    return np.stack([np.cos(angle), np.sin(angle)], 1)


def test_a_radius_is_the_distance_at_the_same_rank(monkeypatch):
    monkeypatch.setattr("dubito.search.retrieval.REACH", 1)
    # Nearest neighbours of 0, 1, 3, 7 degrees: 1, 1, 2, 4 degrees away; uncertainties 10, 20, 30, 40.
    index = SafeIndex.build(at(0, 1, 3, 7), [10.0, 20.0, 30.0, 40.0], clean="none")
    radii = measure_radii(index.backend)
    near = 1 - np.cos(np.deg2rad([1.0, 1.0, 2.0, 4.0]))
    u = np.array([0.0, 10.0, 20.0, 30.0, 40.0, 99.0])
    # The shares 0, 1/3, 2/3 and 1 are those of the four items; levels at hundredths lie within 1/300 of a third.
    np.testing.assert_allclose(np.interp(u, *radii), near[[0, 0, 1, 2, 3, 3]], atol=2e-5)
    assert (np.diff(radii[1]) >= 0).all()


def test_a_set_is_all_that_lies_within(monkeypatch):
    monkeypatch.setattr("dubito.search.retrieval.REACH", 1)
    index = SafeIndex.build(at(0, 1, 3, 7), [10.0, 20.0, 30.0, 40.0], clean="none")
    result = index.search(at(0.5, 0.5, 0.5, 40), [10.0, 30.0, 40.0, 40.0], k=1, sets=True)
    assert result.sets is not None
    names = [one.ids for one in result.sets if one is not None]
    assert [set(one) for one in names] == [{"0", "1"}, {"0", "1"}, {"0", "1", "2"}, set()]  # 1, 2, 4 and 4 degrees
    assert names[2][2] == "2"
    assert [one.cut_off for one in result.sets if one] == [False] * 4
    subset = index.search(at(0.5, 0.5), [10.0, 40.0], k=1, sets=True, at_most=2).sets
    assert subset is not None
    assert [(len(one.ids), one.cut_off) for one in subset if one] == [(2, False), (2, True)]


def test_sets_grow_with_uncertainty_and_hold_about_ten():
    draw = np.random.default_rng(0)
    index = SafeIndex.build(draw.normal(size=(1000, 6)), draw.random(1000), clean="none")
    queries = draw.normal(size=(200, 6))
    sizes = []
    for level in (0.1, 0.5, 0.9):
        sets = index.search(queries, np.full(200, level), k=1, sets=True).sets
        assert sets is not None
        sizes.append(np.median([len(one.ids) for one in sets if one]))
    assert sizes[0] < sizes[1] < sizes[2]
    assert 7 <= sizes[1] <= 14


def test_only_the_order_of_uncertainties_counts():
    draw = np.random.default_rng(1)
    x, u = draw.normal(size=(300, 5)), draw.random(300)
    plain, other = SafeIndex.build(x, u), SafeIndex.build(x, 5 * u - 100)
    one, two = plain.search(x, u, sets=True), other.search(x, 5 * u - 100, sets=True)
    assert one.sets is not None
    assert two.sets is not None
    pairs = [(a, b) for a, b in zip(one.sets, two.sets, strict=True) if a and b]
    assert len(pairs) == 270
    assert all(a.radius == pytest.approx(b.radius, abs=1e-9) for a, b in pairs)


def test_items_that_come_move_the_radii():
    draw = np.random.default_rng(2)
    index = SafeIndex.build(draw.normal(size=(50, 5)), draw.random(50))
    query = (draw.normal(size=(1, 5)), [0.5])
    before = index.search(*query, sets=True).sets
    index.add(draw.normal(size=(500, 5)), draw.random(500))
    after = index.search(*query, sets=True).sets
    assert before is not None
    assert after is not None
    assert before[0] is not None
    assert after[0] is not None
    assert after[0].radius < before[0].radius  # neighbours are nearer where there are more


def test_an_approximation_measures_as_it_searches(monkeypatch):
    draw = np.random.default_rng(0)
    x, u = draw.normal(size=(300, 6)), draw.random(300)
    index = SafeIndex.build(x, u, clean="none")
    exact = index.search(x[:20], u[:20], k=1, sets=True).sets
    index = SafeIndex.build(x, u, clean="none")
    index.approximate("IVF4,Flat", effort=4)  # all lists: exact after all
    monkeypatch.setattr(memory, "_most_similar", None)  # to compare all items would fail
    approximate = index.search(x[:20], u[:20], k=1, sets=True).sets
    assert [one.ids for one in approximate] == [one.ids for one in exact]
    for one, other in zip(approximate, exact, strict=True):
        assert one.similarities == pytest.approx(other.similarities, abs=1e-6)
        assert one.radius == pytest.approx(other.radius, abs=1e-6)


def test_equal_uncertainties_and_few_items():
    tied = measure_radii(SafeIndex.build(at(0, 1, 3), [1.0, 1.0, 1.0]).backend)  # the third neighbour is the farthest
    np.testing.assert_allclose(tied, [[1.0], [1 - np.cos(np.deg2rad(3.0))]], atol=1e-6)  # of 0 degrees, at 3
    with pytest.raises(
        ValueRangeError, match=r"with sets, the number of searched .* at least 2; got 1\. Add items, or"
    ):
        SafeIndex.build(at(0), [1.0]).search(at(0), [1.0], k=1, sets=True)
    three = SafeIndex.build(at(0, 0, 0), [1.0, 1.0, 1.0]).search(at(0), [1.0], k=1, sets=True).sets
    assert three is not None
    assert three[0] is not None
    assert len(three[0].ids) == 3
