"""Batches from a table: every row once a pass, in an order that depends on the seed and the step alone."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dubito
from dubito.errors import ValueRangeError
from dubito.heads import stream
from dubito.heads.stream import Stream


@pytest.fixture(scope="module", autouse=True)
def _tiny(one_thread):
    return one_thread


@pytest.fixture
def small(monkeypatch):
    """Buffers of at most 48 rows, in blocks of 4."""
    _small(monkeypatch)


def _small(monkeypatch):
    monkeypatch.setattr(stream, "_BUFFER_ROWS", 48)
    monkeypatch.setattr(stream, "_BLOCK", 4)


def stream_of(n: int, batch: int, seed: int = 1) -> Stream:
    """Row i has the feature (i, -i) and the loss i."""
    number = torch.arange(n, dtype=torch.float32)
    return Stream(torch.stack([number, -number], 1), number.clone(), batch, seed)


def numbers(original: Stream, start: int, stop: int) -> list[list[int]]:
    result = []
    for rows, losses in original.batches(start, stop):
        assert torch.equal(rows, torch.stack([losses, -losses], 1)), "features and losses of different rows"
        result.append(losses.int().tolist())
    return result


def check_passes(n: int, batch: int) -> None:
    original = stream_of(n, batch)
    a_pass = original.batches_per_pass
    batches = numbers(original, 0, 3 * a_pass)
    assert len(batches) == 3 * a_pass
    for number in range(3):
        pass_ = batches[number * a_pass : (number + 1) * a_pass]
        seen = Counter(row for one in pass_ for row in one)
        assert seen == Counter(range(n))
        assert [len(one) for one in pass_[:-1]] == [min(batch, n)] * (a_pass - 1)
        assert len(pass_[-1]) == (n % batch if n % batch > 1 else batch + n % batch)
    for step in range(3 * a_pass + 1):
        assert original.rows_until(step) == sum(len(one) for one in batches[:step])


@pytest.mark.parametrize("n", [2, 3, 47, 48, 49, 50, 96, 97, 98, 101, 200])
@pytest.mark.parametrize("batch", [2, 4, 5, 16, 48, 50, 64])
def test_every_row_once_a_pass(small, n, batch):
    check_passes(n, batch)


def test_a_single_row_behind_the_last_buffer_is_seen_in_every_pass(small):
    original = stream_of(2 * 48 + 1, 16)
    batches = numbers(original, 0, 3 * original.batches_per_pass)
    assert [len(one) for one in batches] == [16, 16, 16, 16, 16, 17] * 3
    assert [sum(96 in one for one in batches[start : start + 6]) for start in (0, 6, 12)] == [1, 1, 1]


@settings(max_examples=150, deadline=None)
@given(n=st.integers(2, 300), batch=st.integers(2, 80))
def test_odd_sizes(n, batch):
    with pytest.MonkeyPatch.context() as patch:
        _small(patch)
        check_passes(n, batch)


@pytest.mark.parametrize(("n", "batch"), [(40, 8), (203, 8), (131, 5)])
def test_a_step_has_the_same_batch_wherever_one_begins(small, n, batch):
    last = 3 * stream_of(n, batch).batches_per_pass
    whole = numbers(stream_of(n, batch), 0, last)
    for start in range(last):
        assert numbers(stream_of(n, batch), start, start + 1) == whole[start : start + 1]
    assert numbers(stream_of(n, batch), 7, last) == whole[7:]
    original = stream_of(n, batch)
    assert numbers(original, last - 2, last) == whole[-2:]  # the same stream, back and forth
    assert numbers(original, 0, 3) == whole[:3]
    assert numbers(original, 3, 3) == []


@pytest.mark.parametrize("n", [40, 203])
def test_passes_and_seeds_have_orders_of_their_own(small, n):
    original = stream_of(n, 8)
    a_pass = original.batches_per_pass
    first, second = numbers(original, 0, a_pass), numbers(original, a_pass, 2 * a_pass)
    other = numbers(stream_of(n, 8, seed=2), 0, a_pass)
    assert first != second
    assert first != other
    assert numbers(stream_of(n, 8), 0, a_pass) == first
    assert first != [sorted(one) for one in first]


def test_buffers_mix_rows_from_everywhere(small):
    batches = numbers(stream_of(4000, 16), 0, 250)
    # A batch of 16 out of a buffer of 12 blocks: neighbours in the table rarely meet in a batch.
    spread = [max(one) - min(one) for one in batches]
    assert sum(spread) / len(spread) > 2000
    ends = Counter(row for one in batches[:125] for row in one)
    assert 0.4 < sum(row < 2000 for row in ends) / len(ends) < 0.6


def test_a_table_that_fits_is_shuffled_wholly():
    batches = numbers(stream_of(1000, 100), 0, 10)
    assert all(max(one) - min(one) > 800 for one in batches)


def test_wide_features_make_smaller_buffers(monkeypatch):
    monkeypatch.setattr(stream, "_BUFFER_BYTES", 4 * 10 * 64)  # 64 rows of 10
    monkeypatch.setattr(stream, "_BLOCK", 8)
    original = Stream(torch.arange(2000.0).reshape(200, 10), torch.arange(200.0), 16, 1)
    sizes = []
    filled = Stream._filled

    def watched(self, *which):
        rows, losses = filled(self, *which)
        sizes.append(len(rows))
        return rows, losses

    monkeypatch.setattr(Stream, "_filled", watched)
    seen = torch.cat([losses for _, losses in original.batches(0, original.batches_per_pass)])
    assert sizes == [64, 64, 64, 8]
    assert sorted(seen.tolist()) == list(range(200))


def test_columns_on_disk_give_the_same_batches(small, tmp_path):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    inputs = torch.randn(150, 3, 2, 2)
    table = dubito.extract(
        dubito.wrap(network, transform=None), inputs, tmp_path / "cache", batch_size=16, shard_size=32, progress=False
    )
    losses = torch.rand(150)
    disk = Stream(table.column("feature"), losses, 8, 1)
    memory = Stream(table.feature, losses, 8, 1)
    for ours, theirs in zip(disk.batches(0, 40), memory.batches(0, 40), strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_without_meaning(small, bad):
    features = torch.zeros(100, 2)
    features[90, 1] = bad
    original = Stream(features, torch.zeros(100), 8, 1, "cache/train")
    with pytest.raises(
        ValueRangeError, match=r"^head.fit: features of cache/train: 1 of \d+ values are NaN or infinite"
    ):
        list(original.batches(0, original.batches_per_pass))


def test_the_global_generator_is_left_alone(small):
    before = torch.get_rng_state()
    numbers(stream_of(100, 8), 0, 30)
    assert torch.equal(torch.get_rng_state(), before)
