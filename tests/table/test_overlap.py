"""Images that two tables share are found by content, through other batch sizes, precisions and names."""

import pytest
import torch
from torch import Tensor

from dubito import Table
from dubito.errors import TableError
from dubito.table import overlap as _shared
from dubito.table.overlap import example, shared_rows
from dubito.validate import check_disjoint


def features(n: int, seed: int, width: int = 96) -> Tensor:
    """Columns of different sizes, half of them as behind a ReLU, one almost dead and one constant."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=draw) * torch.linspace(0.1, 5, width)
    x[:, ::2] = x[:, ::2].relu()
    x[:, -1], x[:, -2] = 1.0, x[:, -2] * 1e-6
    return x


def again(x: Tensor, how: str) -> Tensor:
    """What another extraction of the same images would have."""
    noise = 1e-6 * torch.randn(x.shape, generator=torch.Generator().manual_seed(99))
    if how == "half":
        return (x * (1 + noise)).half().float()
    return x * (1 + noise) if how == "relative" else x + x.abs().amax(1, keepdim=True) * noise.clamp(-2e-6, 2e-6)


@pytest.mark.parametrize("how", ["relative", "absolute", "half"])
@pytest.mark.parametrize("width", [8, 96])
@pytest.mark.parametrize("column", ["feature", "logit"])
def test_the_same_images_are_found_in_another_order(how: str, width: int, column: str) -> None:
    x = features(200, 0, width)
    bank = torch.cat([features(150, 1, width), again(x, how)[:50].flip(0)])
    result = shared_rows(Table(**{column: x}), Table(**{column: bank}))
    assert result.here.tolist() == list(range(50))
    assert result.there.tolist() == list(range(199, 149, -1))


def test_both_kept_in_half_precision_may_differ_by_a_step() -> None:
    x = features(100, 0)
    result = shared_rows(Table(feature=x.half()), Table(feature=again(x * (1 + 1e-4), "half").half()))
    assert len(result.here) == 100


def test_columns_that_are_seldom_above_zero_may_differ_by_a_step_of_half_precision() -> None:
    x = features(2000, 0)
    x[:, 0] = 0.0
    x[7, 0] = 2.0 + 2**-10  # half-way between two steps, and 45 standard deviations from the mean
    less, more = x.clone(), x.clone()
    less[7, 0], more[7, 0] = 2.0, 2.0 + 2**-9
    assert shared_rows(Table(feature=less.half()[7:8]), Table(feature=more.half())).there.tolist() == [7]
    assert len(shared_rows(Table(feature=less.half()), Table(feature=more.half())).here) == 2000


@pytest.mark.parametrize("half", [False, True])
def test_values_far_from_zero_do_not_make_images_alike(half: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x = 100 + 0.05 * torch.randn(300, 16, generator=draw)
    x = x.half() if half else x
    assert not len(shared_rows(Table(feature=x[:150]), Table(feature=x[150:])).here)
    assert len(shared_rows(Table(feature=x[:150]), Table(feature=x[100:])).here) == 50


@pytest.mark.parametrize("width", [2, 3, 4, 8])
@pytest.mark.parametrize("half", [False, True])
def test_few_columns_raise_no_false_alarm(width: int, half: bool) -> None:
    for seed in range(3):
        x = torch.randn(21_000, width, generator=torch.Generator().manual_seed(seed))
        x = x.half().float() if half else x
        assert not len(shared_rows(Table(logit=x[:1000]), Table(logit=x[1000:])).here)


@pytest.mark.parametrize("width", [2, 3, 4, 8])
def test_in_few_columns_shared_images_are_found_beside_those_that_are_near_by_chance(width: int) -> None:
    x = torch.randn(21_000, width, generator=torch.Generator().manual_seed(0))
    result = shared_rows(Table(logit=x[:1000]), Table(logit=again(x[800:], "relative")))
    assert 200 <= len(result.here) < 215
    assert set(range(800, 1000)) <= set(result.here.tolist())


def test_constant_zero_and_broken_rows_are_never_the_same() -> None:
    for value in (0.0, 1.0, float("nan"), float("inf")):
        flat = Table(feature=torch.full((5, 8), value))
        assert not len(shared_rows(flat, flat).here)
        x = features(20, 0, 8)
        mixed = torch.cat([torch.full((5, 8), value), x])
        assert shared_rows(Table(feature=mixed), Table(feature=mixed)).here.tolist() == list(range(5, 25))
    single = Table(logit=torch.arange(5.0)[:, None])
    assert not len(shared_rows(single, single).here)


@pytest.mark.parametrize("sizes", [(300, 70), (70, 300), (64, 64), (33, 32)])
def test_in_blocks_the_same_rows_are_found(sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = features(sizes[0], 0), features(sizes[1], 1)
    shared = min(sizes) // 3
    y[: 3 * shared : 3] = again(x[:shared].flip(0), "relative")
    y[1] = y[0]  # two rows of one image: either is right
    whole = shared_rows(Table(feature=x), Table(feature=y))
    assert whole.here.tolist() == list(range(shared))
    monkeypatch.setattr(_shared, "_AT_ONCE", 8)
    monkeypatch.setattr(_shared, "_BLOCK", 32)
    result = shared_rows(Table(feature=x), Table(feature=y))
    assert torch.equal(result.here, whole.here)
    assert ((result.there == whole.there) | (result.there <= 1)).all()


@pytest.mark.parametrize("larger", ["table", "other"])
def test_of_the_larger_table_a_block_is_in_memory(larger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subset, many = Table(feature=features(40, 0)), Table(feature=features(500, 1))
    searched = []
    nearest_rows = _shared._nearest_rows

    def watched(queries: Tensor, bank: Tensor) -> tuple[Tensor, Tensor]:
        searched.append((len(queries), len(bank)))
        return nearest_rows(queries, bank)

    monkeypatch.setattr(_shared, "_nearest_rows", watched)
    monkeypatch.setattr(_shared, "_AT_ONCE", 32)
    monkeypatch.setattr(_shared, "_BLOCK", 64)
    shared_rows(*((many, subset) if larger == "table" else (subset, many)))
    blocks = [64] * 7 + [52]
    assert searched == [(one, 40) if larger == "table" else (40, one) for one in blocks]


def test_tables_that_cannot_be_compared_share_nothing() -> None:
    table = Table(feature=features(5, 0))
    assert not len(shared_rows(table, Table(logit=features(5, 0))).here)
    assert not len(shared_rows(table, Table(feature=features(5, 0)[:, :7])).here)
    assert not len(shared_rows(table, table.rows([])).here)
    assert not len(shared_rows(table.rows([]), table).here)


def test_logits_are_compared_where_features_have_another_width() -> None:
    logit = features(30, 3, 10)
    one, other = Table(feature=features(30, 0), logit=logit), Table(feature=features(30, 0, 5), logit=logit)
    assert len(shared_rows(one, other).here) == 30


def test_ids_only_name_an_example() -> None:
    x = features(3, 0)
    one, other = Table(feature=x, id=["tench/1.jpg", "2", "3"]), Table(feature=x, id=["1.jpg", "2", "3"])
    result = shared_rows(one, other)
    assert result.here.tolist() == [0, 1, 2]
    assert example(one, other, result) == " (such as 'tench/1.jpg', there '1.jpg')"
    assert example(one, one, result) == " (such as 'tench/1.jpg')"
    assert example(one, Table(feature=x), result) == " (such as 'tench/1.jpg')"
    assert example(Table(feature=x), other, result) == ""
    assert not len(shared_rows(one, Table(feature=features(3, 1), id=["tench/1.jpg", "2", "3"])).here)


def test_images_that_were_extracted_anew_in_other_batches_are_refused() -> None:
    x = features(200, 0)
    table = Table(feature=x, name="mine", id=[f"a/{i}" for i in range(200)])
    train = Table(feature=torch.cat([features(100, 1), again(x[:3], "relative")]), name="theirs")
    with pytest.raises(TableError, match=r"at least 3 of the 200 images of mine are also in train \(theirs\)"):
        check_disjoint(table, train, by="fit", what="train", harm="No.")
    check_disjoint(table, train.rows(range(102)), by="fit", what="train", harm="No.")
