"""Calls that look alike are alike, swapped arguments are recognised, and hints are sensible."""

import inspect

import pytest
import torch
from torch import nn

import dubito
from dubito.cli import main
from dubito.errors import CacheError, ModelError, ValueRangeError, first_words
from dubito.guard import Guard


@pytest.fixture(scope="module")
def table():
    logit = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    return dubito.Table(logit=logit, label=torch.arange(40) % 3)


@pytest.fixture(scope="module")
def model():
    return dubito.wrap(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)))


def error_of(capsys, *arguments):
    assert main([str(one) for one in arguments]) in (1, 2)
    return capsys.readouterr().err


def test_concat_and_ensemble_take_a_list(table):
    assert len(dubito.concat([table, table])) == 80
    assert dubito.ensemble([table, table]).shape("members_logit") == (40, 2, 3)
    for join in (dubito.concat, dubito.ensemble):
        with pytest.raises(dubito.DubitoError, match=r"Pass a list: \w+\(\[a, b\]\)"):
            join(table)


def test_swapped_arguments_in_python(table, model):
    extract, fit = inspect.unwrap(dubito.extract), inspect.unwrap(Guard.fit.__func__)  # past the tests' type checks
    with pytest.raises(ModelError, match=r"extract: model and images are swapped. Call extract\(model, images, ...\)"):
        extract("photos", model, "cache")
    with pytest.raises(ModelError, match=r"model and table are swapped. Call Guard.fit\(model, table, ...\)"):
        fit(Guard, table, model)


def test_swapped_arguments_on_the_command_line(tmp_path, capsys):
    (tmp_path / "photos").mkdir()
    swapped = error_of(capsys, "extract", tmp_path / "photos", "timm:resnet18", "--to", tmp_path / "cache")
    assert "MODEL and IMAGES are swapped" in swapped
    (tmp_path / "guard").mkdir()
    (tmp_path / "guard" / "guard.json").write_text("{}")
    assert "GUARD and IMAGES are swapped" in error_of(capsys, "guard", "run", tmp_path / "photos", tmp_path / "guard")


def test_a_folder_of_images_is_no_cache(tmp_path, capsys):
    (tmp_path / "a.jpg").touch()
    with pytest.raises(CacheError, match=r"it holds images\. Run a model over them first: dubito.extract"):
        dubito.open(tmp_path)
    assert f"Run a model over them first: `dubito extract MODEL {tmp_path} --to cache`" in error_of(
        capsys, "score", tmp_path
    )


def test_names_that_are_not_there(table):
    with pytest.raises(AttributeError, match=r"'dubito.scores' has no attribute 'Entorpy'. Did you mean Entropy\?"):
        _ = dubito.scores.Entorpy
    with pytest.raises(AttributeError, match=r"'dubito.metrics' has no attribute 'aurok'. Did you mean auroc\?"):
        _ = dubito.metrics.aurok
    with pytest.raises(AttributeError, match=r"'logits'. Did you mean logit\?"):
        _ = table.logits
    with pytest.raises(AttributeError, match=r"Read it with table.whole\('tiles_7'\)"):
        _ = table.extended(tiles_7=torch.zeros(40, 2)).tiles_7
    with pytest.raises(ValueRangeError, match=r"Did you mean entropy\?"):
        _ = dubito.evaluate("entropy", table, resamples=2)["entrpy"]
    with pytest.raises(AttributeError) as error:
        _ = dubito.zebra
    assert "Did you mean" not in str(error.value)  # nothing is like it


def test_quoted_errors_end_between_words():
    text = first_words(RuntimeError("size mismatch " * 40))
    assert len(text) <= 200
    assert text.endswith((" size ...", " mismatch ..."))


def test_what_scores_learn_from_is_no_training(capsys):
    for command in (["score"], ["evaluate"], ["guard", "fit"], ["diagnose"]):
        assert main([*command, "--help"]) == 0
        text = capsys.readouterr().out
        assert "--learn-from" in text
        assert "--train" not in text
