"""The same class over a running server: same answers as in memory, whole transactions, and a server that goes away."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from dubito.errors import ArtefactError, MissingPackageError, ServerError, TableError, ValueRangeError
from dubito.scores import Entropy, MaxProbability
from dubito.search import SafeIndex
from dubito.search import postgres as postgres_module
from dubito.search.backend import Backend, Origin
from dubito.table import Provenance, Table

D = 16
_COUNT = iter(range(1000))


@pytest.fixture
def name() -> str:
    return f'items {next(_COUNT)}"; DROP TABLE x; --'


def data(seed: int, n: int = 200) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    return {"feature": draw.normal(size=(n, D)), "u": draw.random(n), "label": draw.integers(0, 3, n)}


def both(server: Any, name: str, **settings: Any) -> tuple[SafeIndex, SafeIndex]:
    """The same items in memory and on the server."""
    items = data(0)
    memory, remote = SafeIndex(D, **settings), SafeIndex.on_server(server.dsn, table=name, width=D, **settings)
    for index in (memory, remote):
        index.add(items["feature"], items["u"], labels=items["label"])
    return memory, remote


def test_names_that_are_not_utf_8(server, name):
    items = data(0, 4)
    ids = ["\udcff.png", "a/\udce9t\udce9.jpg", "\U0010ffff", "plain"]
    memory = SafeIndex(D, quantile=0.5)
    remote = SafeIndex.on_server(server.dsn, table=name, width=D, quantile=0.5)
    for index in (memory, remote):
        index.add(items["feature"], items["u"], ids=ids)
        assert "\udcff.png" in index
        assert "\udcfe.png" not in index
    found = [index.search(items["feature"], items["u"], k=2).ids.tolist() for index in (memory, remote)]
    assert found[0] == found[1]
    assert memory.left_out() == remote.left_out() != []
    assert memory.backend.sample(3)[0] == remote.backend.sample(3)[0]
    for index in (memory, remote):
        index.remove(ids[:1])
        assert ids[0] not in index
        assert len(index) == 3


@pytest.mark.parametrize(
    "settings",
    [{}, {"per_class": True, "quantile": 0.7}, {"clean": "items"}, {"clean": "queries"}, {"clean": "none"}],
    ids=str,
)
def test_it_answers_as_the_memory_does(server, name, settings):
    memory, remote = both(server, name, **settings)
    queries = data(1, 25)
    ask = {"queries": queries["feature"], "uncertainty": queries["u"], "k": 6, "labels": queries["label"], "sets": True}
    one, two = memory.search(**ask), remote.search(**ask)
    assert two.ids.tolist() == one.ids.tolist()
    np.testing.assert_allclose(two.similarities, one.similarities, atol=1e-6)
    assert (two.labels == one.labels).all()
    assert (two.refused == one.refused).all()
    assert [s and s.ids for s in two.sets or ()] == [s and s.ids for s in one.sets or ()]
    assert (remote.thresholds, remote.kept, len(remote)) == (memory.thresholds, memory.kept, len(memory))
    assert remote.left_out() == memory.left_out()
    assert isinstance(remote.backend, Backend)


def test_quantiles_of_round_numbers_are_those_of_the_memory(server, name):
    for place, (n, quantile, kept) in enumerate(
        [(100, 0.55, 55), (100, 0.07, 7), (10, 0.9, 9), (7, 1.0, 7), (3, 0.01, 1)]
    ):
        memory = SafeIndex(D, quantile=quantile)
        remote = SafeIndex.on_server(server.dsn, table=f"{name} {place}", width=D, quantile=quantile)
        for index in (memory, remote):
            index.add(data(0, n)["feature"], np.random.default_rng(5).permutation(n).astype(float))
        assert (memory.kept, remote.kept, remote.thresholds.overall) == (kept, kept, kept - 1)


def test_items_come_and_go_as_in_memory(server, name):
    memory, remote = both(server, name, per_class=True)
    more, queries = data(2, 50), data(1, 25)
    for index in (memory, remote):
        index.remove(["3", "77", "199"])
        index.add(more["feature"], more["u"], ids=[f"m{row}" for row in range(50)], labels=more["label"])
    ask = (queries["feature"], queries["u"])
    one, two = (index.search(*ask, k=5, labels=queries["label"]) for index in (memory, remote))
    assert two.ids.tolist() == one.ids.tolist()
    assert ("3" in remote, "m49" in remote, len(remote)) == (False, True, 247)
    again = SafeIndex.on_server(server.dsn, table=name)  # another process would see the same
    assert again.search(*ask, k=5, labels=queries["label"]).ids.tolist() == one.ids.tolist()
    assert (again.rule, again.width) == (memory.rule, D)
    remote.remove([*(str(row) for row in range(200) if row not in (3, 77, 199)), *(f"m{row}" for row in range(50))])
    with pytest.raises(TableError, match="the index is empty"):
        again.search(*ask)


def test_hnsw_finds_what_the_exact_search_finds(server, name):
    memory, remote = both(server, name, quantile=0.1)  # a narrow filter: a plain HNSW would come back with too few
    approximation = remote.approximate(effort=20)
    assert (approximation.kind, approximation.queries) == ("hnsw", 20)
    assert approximation.recall > 0.95
    queries = data(1, 25)
    one, two = (index.search(queries["feature"], np.zeros(25), k=10) for index in (memory, remote))
    assert (one.exact, two.exact) == (True, False)
    assert np.mean(one.ids == two.ids) > 0.95
    remote.add(data(3, 10)["feature"], data(3, 10)["u"], ids=[f"n{i}" for i in range(10)], labels=[0] * 10)
    assert not remote.search(queries["feature"], np.zeros(25), k=10).exact  # the server keeps it up to date
    remote.backend.approximation = None
    assert remote.backend.approximation is None
    assert remote.search(queries["feature"], np.zeros(25), k=10).exact
    with pytest.raises(ValueRangeError, match="a server supports 'hnsw' for vectors of up to 2000 numbers; got 'IVF4'"):
        remote.approximate("IVF4")
    with pytest.raises(ValueRangeError, match=r"effort must be a whole number, at least 1; got 0\. Leave it out"):
        remote.approximate(effort=0)
    wide = SafeIndex.on_server(server.dsn, table=f"{name} wide", width=2001)
    wide.add(np.eye(3, 2001), [0.1, 0.2, 0.3])
    with pytest.raises(
        ValueRangeError, match=r"up to 2000 numbers; got 'hnsw' for 2001. Leave the kind out, or search"
    ):
        wide.approximate()
    assert wide.search(np.eye(1, 2001), [0.1], k=1).ids.tolist() == [["0"]]


def test_a_query_that_hnsw_gives_up_on_is_compared_with_all(server, name, monkeypatch):
    memory, remote = both(server, name, quantile=0.1)
    remote.approximate(effort=1)
    set_planner = postgres_module.set_planner

    def impatient(cursor: Any, effort: int | None) -> None:
        set_planner(cursor, effort)
        cursor.execute("SET LOCAL hnsw.max_scan_tuples = 1")

    monkeypatch.setattr(postgres_module, "set_planner", impatient)
    queries = data(1, 25)["feature"]
    one, two = (index.search(queries, np.zeros(25), k=20) for index in (memory, remote))  # all that is kept
    assert two.ids.tolist() == one.ids.tolist()


def test_an_old_pgvector_is_reported(server, name, monkeypatch):
    _, remote = both(server, name)
    monkeypatch.setattr(postgres_module, "_OLDEST_HNSW", (99, 1))
    with pytest.raises(ServerError, match=r"requires pgvector 99.1 or later; the server has 0\.\d.*"):
        remote.approximate()
    assert remote.search(data(1, 1)["feature"], [0.0], k=1).exact


def test_a_score_judges_tables(server, name):
    made = data(0, 40)
    table = Table(feature=made["feature"], logit=made["feature"][:, :3], provenance=Provenance(weights="one model"))
    index = SafeIndex.on_server(server.dsn, table=name, width=D, score=MaxProbability())
    index.add(table)
    assert index.search(table, k=2).refused.sum() == 4
    with pytest.raises(TableError, match="must come from one model"):
        index.search(Table(feature=made["feature"], logit=made["feature"], provenance=Provenance(weights="another")))


def test_what_judged_the_items_is_known_to_other_processes(server, name):
    made = data(0, 40)
    names = {"label_space": "own", "label_names": ["ant", "bee", "cat"]}
    table = Table(feature=made["feature"], logit=made["feature"][:, :3], label=made["label"], **names)
    SafeIndex.on_server(server.dsn, table=name, width=D, per_class=True, score=MaxProbability()).add(table)
    other = SafeIndex.on_server(server.dsn, table=name, score=Entropy())
    with pytest.raises(
        TableError, match=r"has another score \(entropy\) than the items of the index \(max_probability\)"
    ):
        other.search(table, k=1)
    other.score = None
    assert other.search(table, MaxProbability(), k=1).refused.any()
    table.label_names = ["bee", "cat", "dog"]
    with pytest.raises(TableError, match="table in memory has another set of classes"):
        other.search(table, MaxProbability(), k=1)


def test_names_that_no_server_can_keep_are_not_there(server, name):
    _, remote = both(server, name)
    assert [one in remote for one in ("\udcff.png", "a\0b", "", "5")] == [False, False, False, True]
    with pytest.raises(TableError, match="ids must be in the index; 1 of 2 are not"):
        remote.remove(["5", "\udcff.png"])
    assert remote.search(data(1, 1)["feature"], [0.0], k=1, exclude=["\udcff.png"]).ids.shape == (1, 1)


def test_an_addition_that_fails_leaves_nothing(server, name):
    _, remote = both(server, name)
    before = remote.thresholds
    broken = data(2, 30)
    broken["feature"][29] = 0
    with pytest.raises(ValueRangeError, match=r"row 29 \('b29'\) of the array has the norm 0"):
        remote.add(broken["feature"], broken["u"], ids=[f"b{row}" for row in range(30)], labels=broken["label"])
    assert (len(remote), "b0" in remote, remote.thresholds) == (200, False, before)
    with pytest.raises(TableError, match="ids must be new; 1 of 1 are in the index, such as '5'"):
        remote.add(np.ones((1, D)), [0.5], ids=["5"], labels=[0])
    unit = np.eye(1, D, dtype=np.float32)
    with pytest.raises(ServerError, match=r"another process has just added an item .*Key \(id\)=\(5\) alrea"):
        remote.backend.add([(["5"], unit, np.zeros(1), np.zeros(1, np.int64))], 1, Origin())
    with pytest.raises(TableError, match=r"another process has removed some of these items. Nothing was removed"):
        remote.backend.remove(["6", "never"])
    assert "6" in remote


def test_a_server_that_goes_in_the_middle_of_an_addition(server, name):
    _, remote = both(server, name)
    more = data(2, 20_000)

    def blocks():
        for start in range(0, 20_000, 1000):
            if start == 10_000:
                server.crash()
            rows = slice(start, start + 1000)
            unit = (more["feature"][rows] / np.linalg.norm(more["feature"][rows], axis=1)[:, None]).astype(np.float32)
            yield [f"c{row}" for row in range(start, start + 1000)], unit, more["u"][rows], more["label"][rows]

    with pytest.raises(ServerError) as caught:
        remote.backend.add(blocks(), 20_000, Origin())
    assert "SafeIndex.add: the server of 'postgres' at" in str(caught.value)
    assert "It was one transaction, so nothing was applied, and what was there before is safe" in str(caught.value)
    assert "secret" not in str(caught.value)
    with pytest.raises(
        ServerError, match=r"cannot be reached or went away .* Nothing was changed. Check that it runs and"
    ):
        len(remote)
    server.start()
    assert (len(remote), "c0" in remote) == (200, False)  # the same object connects anew
    remote.add(more["feature"][:5], more["u"][:5], ids=list("abcde"), labels=more["label"][:5])
    assert len(remote) == 205


def test_a_server_that_goes_in_the_middle_of_a_search(server, name):
    psycopg = pytest.importorskip("psycopg")
    memory, remote = both(server, name)
    queries = data(1, 5)
    errors: list[BaseException] = []

    def search() -> None:
        try:
            remote.search(queries["feature"], queries["u"], k=3)
        except ServerError as error:
            errors.append(error)

    with contextlib.closing(psycopg.connect(server.dsn)) as blocker:
        blocker.execute(psycopg.sql.SQL("LOCK TABLE {} IN ACCESS EXCLUSIVE MODE").format(psycopg.sql.Identifier(name)))
        thread = threading.Thread(target=search)
        thread.start()
        for _ in range(200):  # until the search waits for the lock
            waiting = blocker.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone()
            if waiting and waiting[0]:
                break
            time.sleep(0.02)
        else:
            pytest.fail("the search did not come to the table")
        server.crash()
        thread.join(20)
    assert not thread.is_alive()
    (error,) = errors
    assert "SafeIndex.search: the server of 'postgres' at" in str(error)
    assert "Nothing was changed. Check that it runs and call again: the next call reconnects." in str(error)
    server.start()
    expected = memory.search(queries["feature"], queries["u"], k=3)
    assert remote.search(queries["feature"], queries["u"], k=3).ids.tolist() == expected.ids.tolist()


def test_a_server_that_goes_while_it_confirms(server, name):
    _, remote = both(server, name)
    connection = remote.backend._connection  # type: ignore[attr-defined]
    with pytest.raises(ServerError, match="either all was applied or nothing, check `id in index`"):
        connection.write("SafeIndex.add", lambda cursor: server.crash())


def test_writers_that_come_between_are_seen(server, name):
    _, remote = both(server, name)
    unit = np.eye(1, D, dtype=np.float32)
    with pytest.raises(TableError, match=r"those of the index have some, the new block has none. Nothing was added"):
        remote.backend.add([(["x"], unit, np.zeros(1), None)], 1, Origin())
    first = SafeIndex.on_server(server.dsn, table=f"{name} 2", width=D)
    first.add(Table(feature=np.eye(3, D), provenance=Provenance(weights="one")), [0.1, 0.2, 0.3])
    with pytest.raises(TableError, match=r"the new block and the items of the index must come from one model"):
        first.backend.add([(["x"], unit, np.zeros(1), None)], 1, Origin(Provenance(weights="two")))
    assert ("x" in remote, "x" in first) == (False, False)


def test_two_writers_wait_for_each_other(server, name):
    _, remote = both(server, name)
    made = data(4, 120)

    def add(part: int) -> None:
        other = SafeIndex.on_server(server.dsn, table=name)
        for row in range(part, 120, 4):
            here = slice(row, row + 1)
            other.add(made["feature"][here], made["u"][here], ids=[f"w{row}"], labels=made["label"][here])
        other.close()

    together(add, 4)
    anew = SafeIndex.build(
        np.concatenate([data(0)["feature"], made["feature"]]), np.concatenate([data(0)["u"], made["u"]])
    )
    assert (len(remote), remote.kept, remote.thresholds) == (320, anew.kept, anew.thresholds)


def test_threads_share_an_index(server, name):
    memory, remote = both(server, name)
    queries = data(1, 10)
    expected = memory.search(queries["feature"], queries["u"], k=3).ids.tolist()

    def search(_: int) -> None:
        for _ in range(5):
            assert remote.search(queries["feature"], queries["u"], k=3).ids.tolist() == expected

    together(search, 4)


def test_a_table_is_made_once(server, name):
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(server.dsn, autocommit=True) as other:
        other.execute("CREATE DATABASE fresh")  # without pgvector, too
    dsn = server.dsn.replace("dbname=postgres", "dbname=fresh")
    together(lambda _: SafeIndex.on_server(dsn, table=name, width=D).close(), 4)
    assert len(SafeIndex.on_server(dsn, table=name)) == 0


def together(work: Callable[[int], None], threads: int) -> None:
    """Run at once; what one of them raises is raised."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))


def test_who_may_only_read_can_search(server, name):
    psycopg = pytest.importorskip("psycopg")
    memory, _ = both(server, name)
    with psycopg.connect(server.dsn, autocommit=True) as other:
        other.execute("CREATE ROLE reader LOGIN")
        names = [psycopg.sql.Identifier(one) for one in (name, f"{name}_about")]
        other.execute(psycopg.sql.SQL("GRANT SELECT ON {}, {} TO reader").format(*names))
        other.execute("CREATE DATABASE bare")
    dsn = server.dsn.replace("user=postgres", "user=reader")
    reader = SafeIndex.on_server(dsn, table=name)
    queries = data(1, 5)
    expected = memory.search(queries["feature"], queries["u"], k=3, sets=True)
    result = reader.search(queries["feature"], queries["u"], k=3, sets=True)
    assert result.ids.tolist() == expected.ids.tolist()
    with pytest.raises(ServerError, match=r"refused \(permission denied for table .*Nothing was changed"):
        reader.add(queries["feature"], queries["u"], ids=list("abcde"), labels=queries["label"])
    with pytest.raises(ServerError, match=r"'bare' at .* has no pgvector, and it cannot be enabled .*CREATE EXTENSION"):
        SafeIndex.on_server(dsn.replace("dbname=postgres", "dbname=bare"), table=name, width=D)


def test_a_time_limit_is_a_refusal(server, name):
    _, remote = both(server, name)
    remote.close()
    hurried = SafeIndex.on_server(f"{server.dsn} options='-c statement_timeout=200'", table=name)
    with pytest.raises(ServerError, match=r"refused \(canceling statement due to statement timeout\)"):
        hurried.backend._connection.read("SafeIndex", lambda cursor: cursor.execute("SELECT pg_sleep(5)"))  # type: ignore[attr-defined]
    assert len(hurried) == 200


def test_a_restart_between_calls_is_not_noticed(server, name):
    _, remote = both(server, name)
    for call in (lambda: len(remote), lambda: remote.remove(["0"])):
        server.crash()
        server.start()
        call()
    assert len(remote) == 199


def test_a_closed_index_opens_again(server, name):
    _, remote = both(server, name)
    for _ in range(2):
        remote.close()
    assert len(remote) == 200


def test_what_a_table_must_be(server, name):
    psycopg = pytest.importorskip("psycopg")
    with pytest.raises(TableError, match=r"there is no table 'nowhere' yet, .* Pass width=..."):
        SafeIndex.on_server(server.dsn, table="nowhere")
    for width in (0, 16_001):
        with pytest.raises(ValueRangeError, match=rf"width must be a whole number in \[1, 16000\]; got {width}"):
            SafeIndex.on_server(server.dsn, table="nowhere", width=width)
    _, remote = both(server, name)
    for width in (8, 0):
        with pytest.raises(TableError, match=rf"was created with width=16; got width={width}. Leave it out"):
            SafeIndex.on_server(server.dsn, table=name, width=width)
    with pytest.raises(TableError, match=r"was created with quantile=0.9; got quantile=0.5. Leave it out"):
        SafeIndex.on_server(server.dsn, table=name, quantile=0.5)
    for bad in ("x" * 58, "a.b.c", "", ".x", "a\0"):
        with pytest.raises(ValueRangeError, match=r"table must be 'name' or 'schema.name', at most 57 bytes long"):
            SafeIndex.on_server(server.dsn, table=bad, width=D)
    with psycopg.connect(server.dsn, autocommit=True) as other:
        other.execute("CREATE TABLE foreign_one (a int)")
        with pytest.raises(ArtefactError, match="'foreign_one' is a table that SafeIndex did not create"):
            SafeIndex.on_server(server.dsn, table="foreign_one", width=D)
        other.execute("CREATE SCHEMA apart")
        apart = SafeIndex.on_server(server.dsn, table="apart.items", width=D)
        apart.add(np.eye(2, D), [0.1, 0.2])
        apart.approximate()
        assert other.execute("SELECT count(*) FROM apart.items").fetchone() == (2,)
        other.execute("DROP TABLE apart.items")
        with pytest.raises(ServerError, match=r'refused .*relation "apart.items" does not exist'):
            apart.left_out()
    with pytest.raises(ArtefactError, match="this index is on a server, which has stored every change already"):
        remote.save("somewhere")


def test_a_damaged_rule_is_refused(server, name):
    _, remote = both(server, name)
    for rule, reason in (
        ({"quantile": 9.5}, r"quantile must be .* got 9\.5"),
        ({"share": 1}, "share"),
        (None, "NoneType"),
    ):
        remote.backend._change("test", lambda _, about, rule=rule: about.update(rule=rule))  # type: ignore[attr-defined]
        with pytest.raises(ArtefactError, match=rf"_about' cannot be read \(.*{reason}.*\)\. Build the index in anot"):
            SafeIndex.on_server(server.dsn, table=name)


def test_dsns_that_lead_nowhere(server):
    with pytest.raises(ServerError, match="the dsn cannot be read") as caught:
        SafeIndex.on_server("password=hidden nonsense", table="x", width=2)
    assert "hidden" not in str(caught.value)
    with pytest.raises(ServerError, match="'nowhere' at /no/such/place cannot be reached") as caught:
        SafeIndex.on_server("host=/no/such/place dbname=nowhere password=hidden", table="x", width=2)
    assert "hidden" not in str(caught.value)


def test_without_the_packages_the_pip_line_is_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "dubito.search.postgres")
    with pytest.raises(MissingPackageError, match=r"needs psycopg and pgvector .* pip install 'dubito\[server\]'"):
        SafeIndex.on_server("host=x", table="items")
