import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dubito.errors import TableError, ValueRangeError
from dubito.metrics import auroc, interval, nearest, neighbour_matches, r_auroc, recall_at_1, retrieval


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of four rows, so that a few rows take many of them, the last one partly filled."""
    monkeypatch.setattr(retrieval, "_BLOCK", 4)


def brute_force(features):
    """A loop over rows: the lowest index among the cosines that agree with the highest."""
    z = np.asarray(features, dtype=np.float64)
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    result = []
    for i, row in enumerate(z):
        cosine = z @ row
        cosine[i] = -np.inf
        result.append(int(np.flatnonzero(cosine >= cosine.max() - 1e-12)[0]))
    return result


def clustered(n=150, d=8, classes=12, seed=0):
    rng = np.random.default_rng(seed)
    label = rng.integers(classes, size=n)
    return (rng.normal(size=(classes, d))[label] + 0.6 * rng.normal(size=(n, d))).astype(np.float32), label


def test_nearest_by_hand():
    # angles 0, 10, 25 and 90 degrees; norms must not count, though the last vector is the longest
    angle = np.deg2rad([0.0, 10.0, 25.0, 90.0])
    features = np.stack([np.cos(angle), np.sin(angle)], 1) * np.array([[1.0], [0.5], [1.0], [100.0]])
    assert nearest(features).tolist() == [1, 0, 1, 2]


def test_recall_and_r_auroc_by_hand():
    angle = np.deg2rad([0.0, 10.0, 25.0, 90.0])
    features, labels = np.stack([np.cos(angle), np.sin(angle)], 1), [5, 5, 9, 9]
    # neighbours 1, 0, 1, 2 have the labels 5, 5, 5, 9: row 2 alone is wrong
    assert neighbour_matches(features, labels).tolist() == [True, True, False, True]
    assert recall_at_1(features, labels) == 3 / 4
    # its score 0.5 is above 0.1 and tied with 0.5, and below 0.9: (1 + 1/2 + 0) / 3
    assert r_auroc([0.1, 0.5, 0.5, 0.9], features, labels) == 0.5


def test_duplicates_find_each_other_but_never_themselves():
    # rows 0, 2 and 3 are the same: taking "the second of the two nearest" can give a row itself
    features = [[1.0, 2.0], [5.0, -1.0], [1.0, 2.0], [1.0, 2.0]]
    assert nearest(features).tolist() == [2, 0, 0, 0]
    assert recall_at_1(features, [1, 2, 1, 3]) == 2 / 4


@pytest.mark.usefixtures("small_blocks")
def test_duplicates_in_other_blocks_and_of_other_lengths_go_to_the_lowest_index():
    rng = np.random.default_rng(0)
    features = rng.normal(size=(30, 16))
    for row, scale in ((5, 1.0), (13, 3.0), (14, 1 / 3), (29, 0.7)):
        features[row] = scale * features[2]
    result = nearest(features)
    assert result[2] == 5
    assert result[[5, 13, 14, 29]].tolist() == [2, 2, 2, 2]
    assert result.tolist() == brute_force(features)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 9, 150])
def test_nearest_is_the_brute_force(n):
    features, _ = clustered(n)
    assert nearest(features).tolist() == brute_force(features)


@pytest.mark.usefixtures("small_blocks")
@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(-2, 2), st.just(1)), min_size=2, max_size=20))
@settings(deadline=None, max_examples=60)
def test_nearest_with_many_ties_is_the_brute_force(rows):
    assert nearest(np.array(rows, dtype=np.float32)).tolist() == brute_force(rows)


@pytest.mark.usefixtures("small_blocks")
def test_cosines_closer_than_float32_are_distinguished():
    # 1 - cos is 5e-13 · k²: all are 1 in float32, and the differences to the next are above 1e-12
    step = 1e-6 * np.array([0.0, 7.0, 3.0, 50.0, 44.0, 12.0, 20.0, 30.0])
    features = np.stack([np.ones(8), step], 1)
    assert nearest(features).tolist() == [2, 2, 0, 4, 3, 1, 5, 6]


def test_blocks_beyond_the_first_size_grow(monkeypatch):
    monkeypatch.setattr(retrieval, "_BLOCK", 2)
    monkeypatch.setattr(retrieval, "_MOST_BLOCKS", 3)
    features, _ = clustered(50)
    assert len(retrieval._Directions(features).blocks) == 3
    assert nearest(features).tolist() == brute_force(features)


def test_more_rows_than_one_block():
    features, labels = clustered(2500, 16, 300)
    result = nearest(features)
    assert result.tolist() == brute_force(features)
    assert recall_at_1(features, labels) == (labels[result.numpy()] == labels).mean()


def test_r_auroc_is_the_auroc_of_wrong_neighbours():
    features, labels = clustered()
    scores = np.random.default_rng(1).integers(9, size=150)
    wrong = labels[brute_force(features)] != labels
    assert 0 < wrong.mean() < 1
    assert r_auroc(scores, features, labels) == auroc(scores, wrong)
    assert recall_at_1(features, labels) == pytest.approx(1 - wrong.mean(), abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_float_type_is_read_as_it_is(dtype):
    features = torch.from_numpy(clustered()[0]).to(dtype)
    assert nearest(features).tolist() == brute_force(features.double())


def test_lists_graphs_and_read_only_maps(tmp_path):
    features, labels = clustered(40)
    np.save(tmp_path / "feature.npy", features)
    mapped = np.load(tmp_path / "feature.npy", mmap_mode="r")
    expected = recall_at_1(features, labels)
    assert type(expected) is float
    assert recall_at_1(features.tolist(), labels.tolist()) == expected
    assert recall_at_1(torch.tensor(features, requires_grad=True), torch.tensor(labels)) == expected
    assert recall_at_1(mapped, labels) == expected


class Shards:
    """Rows on disk, as far as anyone can tell: a shape, and tensors for slices and indices."""

    def __init__(self, values):
        self.shape, self.most, self._values = values.shape, 0, torch.from_numpy(values)

    def __getitem__(self, rows):
        chosen = self._values[rows]
        self.most = max(self.most, len(chosen))
        return chosen


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_column_is_read_block_by_block(dtype):
    features, labels = clustered()
    column = Shards(features.astype(dtype))
    assert nearest(column).tolist() == brute_force(features.astype(dtype))
    assert column.most == 4
    scores = np.random.default_rng(1).normal(size=150)
    assert recall_at_1(column, labels) == recall_at_1(features.astype(dtype), labels)
    assert r_auroc(scores, column, labels) == r_auroc(scores, features.astype(dtype), labels)
    assert interval(recall_at_1, column, labels, resamples=9) == interval(
        recall_at_1, features.astype(dtype), labels, resamples=9
    )


def test_a_column_that_does_not_fit_is_an_error():
    with pytest.raises(TableError, match=r"at least two rows; got shape \(1, 2\)"):
        nearest(Shards(np.ones((1, 2))))
    with pytest.raises(TableError, match="neighbour_matches needs columns of one length; features has 3, labels has 2"):
        neighbour_matches(Shards(np.ones((3, 2))), [0, 1])


@pytest.mark.usefixtures("small_blocks")
def test_order_of_rows_never_counts():
    features, labels = clustered()
    order = np.random.default_rng(1).permutation(len(labels))
    assert torch.equal(neighbour_matches(features[order], labels[order]), neighbour_matches(features, labels)[order])


def test_the_features_are_left_alone():
    features, _ = clustered()
    before = features.copy()
    nearest(features)
    assert np.array_equal(features, before)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("value", "norm"), [(0.0, "0"), (np.nan, "nan"), (np.inf, "inf"), (1e31, "1e+31")])
def test_rows_without_a_direction_are_errors(value, norm):
    features = np.ones((7, 1))
    features[5] = value
    with pytest.raises(ValueRangeError) as error:
        recall_at_1(features, np.zeros(7, dtype=int))
    assert str(error.value) == (
        f"nearest: features must be finite, with norms between 1e-30 and 1e30; row 5 has the norm {norm}. "
        "Drop such rows (a zero vector has no direction), or rescale all."
    )


def test_arguments_that_do_not_fit_are_errors():
    with pytest.raises(TableError, match=r"at least two rows; got shape \(1, 2\)\. Pass one row per image"):
        nearest([[1.0, 2.0]])
    with pytest.raises(TableError, match=r"must have the axes \(n, d\) and at least two rows; got shape \(3,\)"):
        nearest([1.0, 2.0, 3.0])
    with pytest.raises(TableError, match="neighbour_matches needs columns of one length; features has 2, labels has 3"):
        recall_at_1([[1.0], [2.0]], [0, 1, 1])
    with pytest.raises(TableError, match=r"neighbour_matches: labels must be integers; got torch\.float64"):
        recall_at_1([[1.0], [2.0]], [0.0, 1.0])
    with pytest.raises(TableError, match="auroc needs columns of one length; scores has 3, positives has 2"):
        r_auroc([1.0, 2.0, 3.0], [[1.0], [2.0]], [0, 1])
    with pytest.raises(TableError, match="auroc needs positives and negatives; got all 2 rows with positives = 0"):
        r_auroc([1.0, 2.0], [[1.0], [2.0]], [1, 1])
