"""`dubito compare`: the same verdicts as dubito.compare, shown or as JSON."""

from pathlib import Path

import pytest

from .conftest import MODEL, Run, write_images


@pytest.fixture(scope="module")
def ood(run: Run, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ood")
    write_images(folder / "images", 6, seed=7)
    command = ("extract", MODEL, folder / "images", "--to", folder / "strange", "--weights", weights, "--workers", 0)
    assert run(*command).code == 0
    return folder / "strange"


def test_scores_are_ranked_by_errors_and_ood_images(run: Run, labelled: Path, ood: Path) -> None:
    found = run("compare", labelled, "--ood", ood, "--resamples", 20, "--json").json
    assert [one["about"] for one in found["questions"]] == ["errors", "errors", "strange"]
    assert {"entropy", "energy", "margin"} <= set(found["questions"][0]["scores"])
    assert found["left_out"]["neighbours"].startswith("it learns from feature")


def test_the_table_and_the_sentences_are_shown(run: Run, labelled: Path) -> None:
    answer = run("compare", labelled, "-s", "entropy", "-s", "energy", "--resamples", 20)
    assert answer.code == 0, answer.err
    for text in ("12 images, 2 scores", "gap to best", "µs / image", "entropy", "energy"):
        assert text in answer.out
    assert "on these 12 images (4 wrong predictions)" in answer.out


def test_scores_that_learn_take_train(run: Run, labelled: Path, ood: Path) -> None:
    options = ("-s", "neighbours", "--set", "neighbours.k=2", "--resamples", 20, "--json")
    assert "neighbours" in run("compare", labelled, "--train", ood, *options).json["costs"]
    answer = run("compare", labelled, *options)
    assert answer.code == 1
    assert "neighbours learns from feature" in answer.err
    assert "Use --train CACHE." in answer.err


def test_without_labels_and_ood_images_there_is_nothing_to_compare(run: Run, cache: Path) -> None:
    answer = run("compare", cache)
    assert answer.code == 1
    assert "Extract it with labels, or give OOD images." in answer.err
