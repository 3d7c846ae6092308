"""Distances to the k-th neighbour: by hand, against sklearn and brute force."""

import math

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from dubito.errors import TableError, ValueRangeError
from dubito.scores import Neighbours
from dubito.scores.neighbours import kth_distance, neighbours_among
from dubito.table import Table


def features(n: int, d: int = 7, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) + 0.5


def unit(rows: torch.Tensor) -> torch.Tensor:
    return rows.double() / rows.double().norm(dim=1, keepdim=True)


def test_by_hand():
    # Directions 0, 90 and 180 degrees; the query stands at 60: chords 2 sin(30), 2 sin(15), 2 sin(60)
    bank = Table(feature=[[2.0, 0.0], [0.0, 0.1], [-5.0, 0.0]])
    query = Table(feature=[[0.5, math.sqrt(0.75)]])
    chords = [2 * math.sin(math.radians(angle / 2)) for angle in (30, 60, 120)]
    for k, chord in enumerate(chords, start=1):
        assert Neighbours(k=k).fit(bank).score(query).item() == pytest.approx(chord, abs=1e-6)


def test_images_among_themselves_by_hand():
    # Directions 0, 30 and 90 degrees: the second nearest other of each is 90, 60 and 90 degrees away.
    table = Table(feature=[[1.0, 0.0], [math.sqrt(0.75), 0.5], [0.0, 3.0]])
    chords = [2 * math.sin(math.radians(angle / 2)) for angle in (90, 60, 90)]
    assert neighbours_among(table, 2).score(table).tolist() == pytest.approx(chords, abs=1e-6)
    assert neighbours_among(table).score(table).tolist() == pytest.approx(chords, abs=1e-6)  # there is no tenth
    assert neighbours_among(Table(feature=[[2.0, 0.0]])).score(table.rows([0])).tolist() == [0.0]


def test_images_among_themselves_are_compared_with_a_bounded_number():
    assert neighbours_among(Table(feature=features(6000, d=2))).bank_.shape == (5000, 2)


@pytest.mark.parametrize("k", [1, 4, 60])
@pytest.mark.parametrize("n", [1, 5, 130])
def test_against_brute_force_and_sklearn(k, n):
    bank, queries = features(60), 3 * features(n, seed=1)
    ours = Neighbours(k=k).fit(Table(feature=bank)).score(Table(feature=queries))
    brute = torch.cdist(unit(queries), unit(bank)).sort(dim=1).values[:, k - 1]
    assert torch.allclose(ours, brute, atol=1e-6)
    distances, _ = NearestNeighbors(n_neighbors=k).fit(unit(bank).numpy()).kneighbors(unit(queries).numpy())
    assert ours.numpy() == pytest.approx(distances[:, -1], abs=1e-6)


def test_a_training_image_is_its_own_first_neighbour():
    bank = features(300, d=64)
    u = Neighbours(k=1).fit(Table(feature=bank)).score(Table(feature=bank))
    assert u.tolist() == [0.0] * 300


def test_duplicates_count_as_neighbours():
    bank = torch.cat([features(1).repeat(3, 1), features(9, seed=5)])
    table = Table(feature=bank)
    assert Neighbours(k=3).fit(table).score(table)[0].item() == 0
    assert Neighbours(k=4).fit(table).score(table)[0].item() > 0.1


def test_small_distances_keep_their_order():
    # Chords of 1e-5 to 9e-5: their cosines differ from one by less than float32 can tell.
    angles = torch.arange(1, 10, dtype=torch.float64) * 1e-5
    queries = torch.stack([angles.cos(), angles.sin()], dim=1)
    u = Neighbours(k=1).fit(Table(feature=[[1.0, 0.0]])).score(Table(feature=queries))
    assert torch.allclose(u, angles, rtol=1e-3)
    assert bool((u.diff() > 0).all())


@pytest.mark.parametrize("scale", [1e-16, 1e-3, 1e15])
def test_the_length_of_a_feature_does_not_count(scale):
    bank, queries = Table(feature=features(50)), features(20, seed=1)
    score = Neighbours(k=3).fit(bank)
    assert torch.allclose(score.score(Table(feature=scale * queries)), score.score(Table(feature=queries)), rtol=1e-5)


def test_far_is_more_uncertain_and_the_farthest_is_two():
    bank = Table(feature=[[1.0, 0.0, 0.0]])
    queries = Table(feature=[[1.0, 0.0, 0.0], [1.0, 0.2, 0.0], [0.0, 0.0, 1.0], [-1.0, 0.0, 0.0]])
    u = Neighbours(k=1).fit(bank).score(queries)
    assert bool((u.diff() > 0).all())
    assert u[-1].item() == pytest.approx(2.0)


def test_a_larger_k_is_never_nearer():
    table, queries = Table(feature=features(80)), Table(feature=features(30, seed=1))
    u = torch.stack([Neighbours(k=k).fit(table).score(queries) for k in (1, 2, 10, 80)])
    assert bool((u.diff(dim=0) >= 0).all())


def test_the_bank_is_normalised_and_drawn_by_its_seed():
    table = Table(feature=features(100))
    whole = Neighbours(k=1).fit(table).bank_
    assert torch.allclose(whole, unit(table.feature).float(), atol=1e-6)
    some = Neighbours(k=1, bank_size=20, seed=4).fit(table).bank_
    assert torch.equal(some, Neighbours(k=1, bank_size=20, seed=4).fit(table).bank_)
    assert not torch.equal(some, Neighbours(k=1, bank_size=20, seed=5).fit(table).bank_)
    places = [int((whole == row).all(1).nonzero()[0, 0]) for row in some]
    assert places == sorted(set(places))  # rows of the table, each once, in its order
    assert torch.equal(Neighbours(k=1, bank_size=1000).fit(table).bank_, whole)


def test_the_draw_leaves_the_global_random_numbers_alone():
    before = torch.get_rng_state()
    Neighbours(k=1, bank_size=5).fit(Table(feature=features(20)))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("score", "size"),
    [(Neighbours(k=11), 10), (Neighbours(k=0), 10), (Neighbours(k=4, bank_size=3), 3), (Neighbours(bank_size=0), 0)],
)
def test_a_k_beyond_the_bank(score, size):
    with pytest.raises(
        TableError,
        match=rf"neighbours\.fit: k must be a whole number in \[1, {size}\]; got {score.k}\. .* {size} rows: fit on",
    ):
        score.fit(Table(feature=features(10)))


def test_features_of_another_width():
    score = Neighbours(k=1).fit(Table(feature=features(10)))
    with pytest.raises(
        TableError,
        match=r"neighbours\.score: features must be 7 wide, as in fit; got 5 in cache/other\. Score",
    ):
        score.score(Table(feature=features(3, d=5), name="cache/other"))


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_features_without_a_direction(bad):
    broken = features(6)
    broken[4] = bad
    message = r"features must be finite and not all zero; row 4 of the batch is not\. Look at that image's feature"
    with pytest.raises(ValueRangeError, match=rf"neighbours\.fit: {message}"):
        Neighbours(k=1).fit(Table(feature=broken))
    if bad == 0:  # of length 0, at a distance of 1 from everything of length 1
        assert Neighbours(k=3).fit(Table(feature=features(6))).score(Table(feature=broken))[4] == pytest.approx(1)
        return
    message = rf"column 'feature' must be finite; row 4 of table in memory holds {bad}\. Look at that image"
    with pytest.raises(ValueRangeError, match=rf"neighbours\.score: {message}"):
        Neighbours(k=1).fit(Table(feature=features(6))).score(Table(feature=broken))


def test_kth_distance_takes_views_and_doubles():
    bank, queries = unit(features(20)), unit(features(6, seed=1))
    expected = torch.cdist(queries, bank).sort(dim=1).values[:, 1]
    assert torch.allclose(kth_distance(queries, bank, 2), expected, atol=1e-6)
    transposed = torch.from_numpy(np.asfortranarray(bank.numpy()))
    assert torch.allclose(kth_distance(queries.flip(0), transposed, 2), expected.flip(0), atol=1e-6)
