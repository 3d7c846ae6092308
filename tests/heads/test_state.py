"""The state of a training on disk: there and back, and whose it is."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from dubito.errors import ArtefactError
from dubito.heads.state import FILE, TrainingState, read_state, write_state

IDENTITY = {
    "recipe": {"lr": 0.1, "loss": "ranking"},
    "seed": 1,
    "width": 4,
    "depth": 2,
    "features": 8,
    "rows": 100,
    "model_id": "ab12",
    "losses": "cd34",
    "held_out": None,
}


def state() -> TrainingState:
    return TrainingState(
        step=7,
        since=2,
        losses=torch.tensor(0.3),
        history=[{"step": 5, "loss": 0.1 + 0.2}],
        module={"layers.0.weight": torch.randn(2, 3).t()},
        optimizer={"0.step": torch.tensor(7.0), "0.exp_avg": torch.randn(2, 3)},
    )


def test_there_and_back(tmp_path):
    assert read_state(tmp_path, IDENTITY) is None
    before = state()
    write_state(tmp_path, IDENTITY, before)
    after = read_state(tmp_path, IDENTITY)
    assert after is not None
    assert (after.step, after.since, after.history) == (7, 2, before.history)
    assert torch.equal(after.losses, before.losses)
    for ours, theirs in ((after.module, before.module), (after.optimizer, before.optimizer)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_the_same_state_is_the_same_bytes(tmp_path):
    one = state()
    write_state(tmp_path, IDENTITY, one)
    first = (tmp_path / FILE).read_bytes()
    write_state(tmp_path, IDENTITY, one)
    assert (tmp_path / FILE).read_bytes() == first


def test_it_replaces_the_one_before(tmp_path):
    write_state(tmp_path, IDENTITY, state())
    write_state(tmp_path, IDENTITY, TrainingState(step=9))
    after = read_state(tmp_path, IDENTITY)
    assert after is not None
    assert (after.step, after.module) == (9, {})


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"seed": 2}, "the seed (1 there, 2 here)"),
        ({"width": 8}, "the head's width (4 there, 8 here)"),
        ({"depth": 3}, "the head's depth (2 there, 3 here)"),
        ({"features": 9}, "the width of the features (8 there, 9 here)"),
        ({"rows": 101}, "the number of rows (100 there, 101 here)"),
        ({"model_id": "ee55"}, "the model that made the table (ab12 there, ee55 here)"),
        ({"losses": "ff66"}, "the losses (cd34 there, ff66 here)"),
        ({"held_out": "aa"}, "the held-out images (none there, aa here)"),
        ({"recipe": {"lr": 0.2, "loss": "ranking"}}, "the recipe (lr=0.1 there, 0.2 here)"),
        ({"seed": 2, "rows": 5}, "the seed (1 there, 2 here); the number of rows (100 there, 5 here)"),
    ],
)
def test_another_training_is_refused_with_what_differs(tmp_path, changes, differing):
    write_state(tmp_path, IDENTITY, state())
    with pytest.raises(ArtefactError) as error:
        read_state(tmp_path, {**IDENTITY, **changes})
    assert str(error.value) == (
        f"'{tmp_path}' holds another training: {differing}. Train into another folder, or delete this one."
    )


def refused(folder, reason=".*"):
    with pytest.raises(
        ArtefactError, match=rf"^'{re.escape(str(folder / FILE))}' cannot be read \({reason}\)\. Delete it to train"
    ):
        read_state(folder, IDENTITY)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_file_that_was_cut_off(tmp_path, keep):
    write_state(tmp_path, IDENTITY, state())
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:keep])
    refused(tmp_path)


@pytest.mark.parametrize("place", [-1, -20])
def test_a_flipped_bit_among_the_numbers(tmp_path, place):
    write_state(tmp_path, IDENTITY, state())
    data = bytearray((tmp_path / FILE).read_bytes())
    data[place] ^= 4
    (tmp_path / FILE).write_bytes(data)
    refused(tmp_path, "its checksum does not match")


@pytest.mark.parametrize(
    "notes", [None, "[]", "{}", "no json", json.dumps({"identity": IDENTITY, "step": "x", "since": 0, "history": []})]
)
def test_a_file_of_somebody_else(tmp_path, notes):
    write_state(tmp_path, IDENTITY, state())
    save_file(load_file(tmp_path / FILE), tmp_path / FILE, None if notes is None else {"notes": notes})
    refused(tmp_path)
