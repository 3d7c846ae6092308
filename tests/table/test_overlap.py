"""Images that two tables share are found by content, through other batch sizes, precisions and names."""

import pytest
import torch
from torch import Tensor

from dubito import Table
from dubito.errors import TableError
from dubito.table import overlap as _shared
from dubito.table.overlap import example, shared_rows, sketch
from dubito.table.views import Computed
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
    monkeypatch.setattr(_shared, "_COMPARED", 32)
    result = shared_rows(Table(feature=x), Table(feature=y))
    assert torch.equal(result.here, whole.here)
    assert ((result.there == whole.there) | (result.there <= 1)).all()


def brute_force(x: Tensor, y: Tensor) -> list[tuple[int, int]]:
    """Every row with every other, by the definition alone; float32 rows of which none is exact in half precision."""
    x, y = x.double(), y.double()
    spread = torch.stack([x.std(0, correction=0), y.std(0, correction=0)])
    joint = (spread.square().mean(0) + (x.mean(0) - y.mean(0)) ** 2 / 4).sqrt()
    pairs = []
    for i, row in enumerate(x):
        apart = (row - y).abs()
        ratio = (apart / (1e-3 * spread.amin(0) + 3e-6 * row.abs().max())).amax(1)
        ratio[(apart / (joint + 1e-3 * joint.mean())).square().mean(1) > 0.15**2] = torch.inf
        ratio[(y == y[:, :1]).all(1)] = torch.inf
        if ratio.min() <= 1 and len(row.unique()) > 1:
            pairs.append((i, int(ratio.argmin())))
    return pairs


def tables_of(kind: str, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two sets of rows with many that differ by about the tolerance, in features as models have them."""
    y = torch.randn(700, 40, generator=draw)
    if kind == "sparse":
        y = (y - 1.3).relu()  # nine of ten values are zero
    elif kind == "correlated":
        y = y[:, :2] @ torch.randn(2, 40, generator=draw) + 0.01 * y
    elif kind == "clustered":
        y = y[torch.randint(5, (700,), generator=draw)] + 0.003 * y
    elif kind == "outliers":
        y[::9] *= 100
    x = y[torch.randperm(700, generator=draw)[:400]]
    tolerance = 1e-3 * y.std(0) + 3e-6 * x.abs().amax(1, keepdim=True)
    size = torch.rand(400, 1, generator=draw) * 2  # half of the rows are within their tolerance
    return x + size * tolerance * (2 * torch.rand(x.shape, generator=draw) - 1), y


@pytest.mark.parametrize("kind", ["dense", "sparse", "correlated", "clustered", "outliers"])
@pytest.mark.parametrize("swap", [False, True])
def test_the_same_rows_are_found_as_by_comparing_all_with_all(kind: str, swap: bool) -> None:
    for seed in range(3):
        x, y = tables_of(kind, torch.Generator().manual_seed(seed))
        x, y = (y, x) if swap else (x, y)
        expected = brute_force(x, y)
        assert 50 < len(expected) < 399
        result = shared_rows(Table(feature=x), Table(feature=y))
        assert list(zip(result.here.tolist(), result.there.tolist(), strict=True)) == expected


def test_rows_that_reach_too_many_cells_are_compared_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = tables_of("outliers", torch.Generator().manual_seed(0))
    expected = brute_force(x, y)
    monkeypatch.setattr(_shared, "_PROBES", 0)
    result = shared_rows(Table(feature=x), Table(feature=y))
    assert list(zip(result.here.tolist(), result.there.tolist(), strict=True)) == expected


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pairs of rows each call compares in all columns."""
    numbers: list[int] = []
    ratios = _shared._Comparison.ratios
    monkeypatch.setattr(_shared._Comparison, "ratios", lambda self, i, j: numbers.append(len(i)) or ratios(self, i, j))
    return numbers


def test_copies_of_one_image_do_not_multiply_the_comparisons(
    compared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_shared, "_IN_CELL", 8)
    x = torch.cat([features(1, 5).repeat(1000, 1), features(500, 0)])
    assert len(shared_rows(Table(feature=x), Table(feature=x[500:])).here) == 1500
    assert sum(compared) < 1.3 * (1000 * 8 + 500)  # there are 500,000 pairs of copies


@pytest.mark.parametrize("larger", ["table", "other"])
def test_rows_are_read_in_blocks_and_compared_a_constant_number_of_times(
    larger: str, compared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in ("_AT_ONCE", "_SAMPLE", "_COMPARED"):
        monkeypatch.setattr(_shared, size, 64)
    work, read = [], []
    for n in (2000, 4000):
        x = features(n, 0)
        kept = Computed(tuple(x.shape), lambda rows, x=x: read.append(len(x[rows])) or x[rows])
        few, many = Table(feature=x[: n // 2]), Table(feature=kept)
        assert len(shared_rows(*((many, few) if larger == "table" else (few, many))).here) == n // 2
        work.append(sum(compared) - sum(work))
    assert max(read) <= 64
    assert work[1] < 2.2 * work[0] < 2.2 * 1.3 * 1000


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


@pytest.mark.parametrize("how", ["relative", "absolute", "half"])
@pytest.mark.parametrize("width", [8, 96])
def test_a_sketch_recognises_images_without_their_table(how: str, width: int) -> None:
    x = features(2000, 0, width)
    kept = sketch(Table(feature=x, logit=x[:, :3]))
    assert kept is not None
    assert kept.shape == (2000, min(width, 8))
    new = sketch(Table(feature=torch.cat([features(300, 1, width), again(x[500:700], how)])))
    result = shared_rows(Table(feature=new), Table(feature=kept))
    assert (result.there == result.here + 200).all()
    assert len(result.here) == 200 or (how == "half" and len(result.here) > 100)  # some differ by too many steps


def test_a_sketch_is_of_logits_without_features_and_of_nothing_where_these_are_few() -> None:
    x = features(50, 0, 8)
    assert torch.equal(sketch(Table(logit=x)), x)
    assert sketch(Table(logit=x[:, :3])) is None
    assert sketch(Table(feature=x[:, :2], logit=x)) is None
    assert sketch(Table(feature=x).rows([])).shape == (0, 8)


def test_a_sketch_of_other_images_raises_no_false_alarm() -> None:
    for seed in range(3):
        x = sketch(Table(feature=features(21_000, seed)))
        assert not len(shared_rows(Table(feature=x[:1000]), Table(feature=x[1000:])).here)


def test_shared_images_do_not_make_the_grid_coarse(monkeypatch):
    """Of features that are mostly zero, many rows are zero in a few columns; rows of one image must not hide that."""
    monkeypatch.setattr(_shared, "_IN_CELL", 16)
    draw = torch.Generator().manual_seed(0)
    one, other = ((torch.randn(20_000, 48, generator=draw) - 0.7).relu() for _ in range(2))
    other[::20] = one[-1000:]
    shared = shared_rows(Table(feature=one), Table(feature=other))
    assert shared.here.tolist() == list(range(19_000, 20_000))
    assert shared.there.tolist() == list(range(0, 20_000, 20))
