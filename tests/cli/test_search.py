"""`dubito search`: what is built is what the library builds; caches and images as queries; clear answers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import dubito
from dubito.search import SafeIndex
from dubito.table import Provenance

from .conftest import COUNT, MODEL, Run, write_images


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, run: Run, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("search") / "index"
    answer = run("search", "build", cache, "--to", folder, "--score", "entropy", "--quantile", 0.75, "--json")
    assert answer.code == 0, answer.err
    result = answer.json
    assert (result["items"], result["searched"], result["score"], result["clean"]) == (COUNT, 9, "entropy", "both")
    return folder


def test_it_is_the_library_s_own_index(index: Path, cache: Path) -> None:
    table = dubito.open(cache)
    expected = SafeIndex.build(table, dubito.Entropy(), quantile=0.75)
    loaded = SafeIndex.load(index)
    assert (loaded.thresholds, loaded.left_out()) == (expected.thresholds, expected.left_out())
    assert loaded.score == dubito.Entropy()


def test_a_cache_as_queries(run: Run, index: Path, cache: Path) -> None:
    answer = run("search", "query", index, cache, "--k", 2, "--others", "--sets", "--json")
    table = dubito.open(cache)
    expected = SafeIndex.load(index).search(table, k=2, exclude=table.id, sets=True)
    result = answer.json
    assert (answer.code, result["refused"], result["exact"], len(result["queries"])) == (0, 3, True, COUNT)
    assert [one["id"] for one in result["queries"]] == table.id.tolist()
    assert result["queries"] == json.loads(json.dumps(expected.to_dict()["queries"]))
    assert result["skipped"] == []
    assert all(one["id"] not in one["ids"] for one in result["queries"])


def test_people_see_neighbours_and_reasons(run: Run, index: Path, cache: Path) -> None:
    answer = run("search", "query", index, cache, "-k", 1, "--sets")
    assert answer.code == 0, answer.err
    assert f"{COUNT} queries, 3 refused" in answer.out
    assert answer.out.count("its uncertainty") == 3
    assert " 1.000 " in answer.out  # an image is its own nearest item
    assert "in its set" in answer.out


def test_code_that_an_index_names_is_not_run_unasked(run: Run, cache: Path, images: Path, tmp_path: Path) -> None:
    table = dubito.open(cache)
    table.provenance = replace(table.provenance, model=f"python:{tmp_path / 'evil.py'}:make")
    SafeIndex.build(table, dubito.Entropy()).save(tmp_path / "index")
    (tmp_path / "evil.py").write_text("open(__file__ + '.ran', 'w').close()")
    answer = run("search", "query", tmp_path / "index", images)
    assert answer.code == 2
    assert "which dubito does not run on its own" in " ".join(answer.err.replace("│", " ").split())
    assert not (tmp_path / "evil.py.ran").exists()


def test_images_as_queries_go_through_the_model_of_the_index(
    run: Run, index: Path, cache: Path, images: Path, weights: Path
) -> None:
    answer = run("search", "query", index, images, "--weights", weights, "--k", 1, "--json")
    assert answer.code == 0, answer.err
    same = run("search", "query", index, cache, "--k", 1, "--json").json
    assert [one["ids"] for one in answer.json["queries"]] == [one["ids"] for one in same["queries"]]


@pytest.mark.parametrize("option", [("--model", MODEL), ("--weights", "none"), ("--classes", "0")])
def test_options_of_a_model_are_refused_where_a_cache_needs_none(
    run: Run, index: Path, cache: Path, option: tuple[str, str]
) -> None:
    answer = run("search", "query", index, cache, *option)
    assert answer.code == 2
    assert "have no effect on it. Leave them out, or pass images." in " ".join(answer.err.replace("│", " ").split())


def test_another_model_is_refused(run: Run, index: Path, images: Path) -> None:
    answer = run("search", "query", index, images, "--model", MODEL, "--weights", "none", "--json")
    assert (answer.code, answer.json["kind"]) == (1, "TableError")
    assert f"{images} and the items of the index must come from one model" in answer.json["error"]
    assert "the first comes from another" in answer.json["error"]


def test_images_that_cannot_be_read_are_listed(run: Run, index: Path, weights: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "new", 1)
    broken = [f"b{number}.png" for number in range(4)]
    for name in broken:
        (tmp_path / "new" / name).write_bytes(b"no image")
    answer = run("search", "query", index, tmp_path / "new", "--weights", weights, "--k", 1, "--json")
    assert answer.code == 0, answer.err
    assert [one["id"] for one in answer.json["skipped"]] == broken
    assert all(one["id"] in one["reason"] for one in answer.json["skipped"])
    assert [one["id"] for one in answer.json["queries"]] == ["00.png"]
    (note,) = answer.json["notes"]
    assert note.startswith(f"4 of 5 images could not be decoded and were skipped: image '{tmp_path / 'new'}/b0.png'")
    assert note.endswith("; and 1 more.")  # the manifest is gone: nobody is sent there
    assert not any(wrong in note for wrong in (".;", "..", "manifest", "queries"))


def test_thresholds_of_classes_and_images_without_labels(run: Run, labelled: Path, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    assert run("search", "build", labelled, "--to", folder, "--score", "entropy", "--per-class").code == 0
    overall = SafeIndex.load(folder).thresholds.overall
    answer = run("search", "query", folder, cache, "--k", 1, "--json")
    assert (answer.code, answer.json["kind"]) == (1, "TableError")
    assert f"{cache} has no labels. Pass a cache with labels" in answer.json["error"]
    assert f"--refuse-above U (of all items together it is {overall:.4g})" in answer.json["error"]
    assert "=" not in answer.json["error"]  # options, no Python
    u = dubito.Entropy().score(dubito.open(cache))
    middle = float(u.median())
    requested = run("search", "query", folder, cache, "--k", 1, "--refuse-above", middle, "--json").json
    assert [one["refused"] for one in requested["queries"]] == (u > middle).tolist()
    assert run("search", "query", folder, labelled, "--k", 1).code == 0


def test_a_class_without_items_names_options(run: Run, labelled: Path, tmp_path: Path) -> None:
    table = dubito.open(labelled)
    subset = table.rows(table.label != table.label[0])
    SafeIndex.build(subset, dubito.Entropy(), per_class=True).save(tmp_path / "index")
    answer = run("search", "query", tmp_path / "index", labelled, "--k", 1)
    assert answer.code == 1
    assert f"no item has class {int(table.label[0])}, as {labelled} has. Leave these images out, or" in answer.err


def test_another_model_is_reported_before_its_classes(run: Run, labelled: Path, cache: Path, tmp_path: Path) -> None:
    table = dubito.open(labelled)
    table.provenance = Provenance(weights="another")
    SafeIndex.build(table, dubito.Entropy(), per_class=True).save(tmp_path / "index")
    answer = run("search", "query", tmp_path / "index", cache, "--k", 1)
    assert (answer.code, "must come from one model" in answer.err) == (1, True)


def test_a_quantile_that_leaves_nothing_out_is_reported(run: Run, labelled: Path, cache: Path, tmp_path: Path) -> None:
    answer = run("search", "build", labelled, "--to", tmp_path / "a", "--score", "entropy", "--per-class")
    message = (
        "no image is left out: a quantile of a class needs more images of it. Lower --quantile, or leave --per-class"
    )
    assert (answer.code, message in answer.err) == (0, True), answer.err
    answer = run("search", "build", cache, "--to", tmp_path / "b", "--score", "entropy", "--quantile", 0.95)
    assert "no image is left out: there are too few images, or too many alike. Lower --quantile." in answer.err
    answer = run("search", "build", cache, "--to", tmp_path / "c", "--score", "entropy", "--clean", "queries")
    assert "left out" not in answer.err


def test_an_index_is_not_built_among_photographs(run: Run, cache: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "photos", 1)
    answer = run("search", "build", cache, "--to", tmp_path / "photos", "--json")
    assert (answer.code, answer.json["kind"]) == (1, "ArtefactError")
    assert "holds other things (00.png) and no index. Choose a new or empty folder" in answer.json["error"]
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["00.png"]


def test_without_a_score_it_says_which_it_took(run: Run, cache: Path, tmp_path: Path) -> None:
    answer = run("search", "build", cache, "--to", tmp_path / "index", "--approximate", "HNSW8")
    assert answer.code == 0, answer.err
    assert "uncertainty by max_probability. Choose another with --score or --head" in answer.err
    assert "12, of which 11 are searched" in answer.out
    assert "HNSW8, recall 1.000 of ten neighbours" in answer.out
    args = run("search", "query", tmp_path / "index", cache, "-k", 1)
    assert "(approximate search)" in args.out


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--quantile", 0), 1, "quantile must be a number in (0, 1]; got 0.0. It is the share of items that is kept"),
        (
            ("--per-class",),
            1,
            "has no labels. Add labels with `dubito label",
        ),
        (
            ("--score", "entropy", "--head", "auto"),
            2,
            "Pass --score entropy or --head auto.",
        ),
        (("--score", "neighbours"), 1, "Use --learn-from CACHE."),
        (("--clean", "neither"), 2, "Invalid value for '--clean'"),
        (("--approximate", "nonsense"), 1, "faiss cannot build 'nonsense'"),
    ],
)
def test_building_wrongly(
    run: Run, cache: Path, tmp_path: Path, arguments: tuple[object, ...], code: int, text: str
) -> None:
    answer = run("search", "build", cache, "--to", tmp_path / "index", *arguments)
    assert (answer.code, text in answer.err) == (code, True), answer.err
    assert not (tmp_path / "index").exists()


def test_asking_wrongly(run: Run, index: Path, cache: Path, tmp_path: Path) -> None:
    answer = run("search", "query", tmp_path, cache, "--json")
    assert (answer.code, answer.json["kind"]) == (1, "ArtefactError")
    assert "no index in" in answer.json["error"]
    answer = run("search", "query", index, cache, "--k", 10)
    assert "k must be a whole number in [1, 9]; got 10. 9 of 12 items are searched" in answer.err
