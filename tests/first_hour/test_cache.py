"""A cache does not disturb its surroundings, proves itself, and can always be repaired."""

import errno
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dubito
from dubito.cache.extract import _Extraction
from dubito.cache.shards import forget_shards
from dubito.cli import main
from dubito.errors import CacheError, DamagedShardError, DubitoError, RepairedShardWarning


class RandomImages(torch.utils.data.Dataset):
    """A user's data set whose transform draws from all three generators; one item may not fit the others."""

    def __init__(self, fails=None):
        self.fails = fails

    def __len__(self):
        return 6

    def __getitem__(self, index):
        random.random(), np.random.rand(), torch.rand(())  # noqa: NPY002, S311
        return torch.full((3, 2, 1 if index == self.fails else 2), float(index)), index % 3


@pytest.fixture
def model():
    torch.manual_seed(0)
    return dubito.wrap(nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3)), name="tiny")


@pytest.fixture
def x():
    return torch.randn(7, 3, 2, 2, generator=torch.Generator().manual_seed(0))


def extract(model, x, to, **options):
    return dubito.extract(model, x, to, **{"shard_size": 2, "workers": 0, **options})


def states():
    return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fails", [None, 4])
def test_random_states_are_as_they_were(model, tmp_path, workers, fails):
    before = states()
    if fails is None:
        extract(model, RandomImages(), tmp_path / "cache", workers=workers)
    else:
        with pytest.raises(DubitoError, match="inputs must have one shape"):
            extract(model, RandomImages(fails), tmp_path / "cache", workers=workers)
    assert states() == before


def test_a_lost_shard_that_comes_back_with_other_bytes_can_be_repaired(model, x, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    expected = extract(model, x, cache).logit
    next(cache.glob("forward-00001-*")).unlink()
    monkeypatch.setattr("dubito.probes.forward.Forward.run", _rounded(dubito.probes.Forward.run))
    monkeypatch.setattr(_Extraction, "_finish", _killed)
    with pytest.warns(RepairedShardWarning), pytest.raises(KeyboardInterrupt):
        extract(model, x, cache)
    monkeypatch.undo()
    again = extract(model, x, cache)
    torch.testing.assert_close(again.logit, expected, rtol=1e-5, atol=1e-5)
    assert len(dubito.open(cache)) == 7


def _rounded(run):
    """As another version of torch would have it: other last bits."""
    return lambda *arguments, **options: {key: value * (1 + 1e-6) for key, value in run(*arguments, **options).items()}


def _killed(*_):
    raise KeyboardInterrupt


def test_swapped_shards_are_seen_and_repaired(model, x, tmp_path):
    cache = tmp_path / "cache"
    expected = extract(model, x, cache).logit
    first, second = (next(cache.glob(f"forward-0000{block}-*")) for block in (0, 1))
    contents = {first: first.read_bytes(), second: second.read_bytes()}
    crc = {path: path.name.rsplit("-", 1)[1] for path in contents}
    first.rename(cache / f"forward-00001-{crc[first]}")
    second.rename(cache / f"forward-00000-{crc[second]}")
    with pytest.raises(DamagedShardError, match=r"is missing.*Run the same extraction again"):
        dubito.open(cache)
    with pytest.warns(RepairedShardWarning, match="is missing; it is extracted again"):
        assert torch.equal(extract(model, x, cache).logit, expected)
    assert {path.name for path in cache.glob("forward-0000[01]-*")} == {first.name, second.name}


@pytest.mark.parametrize(
    "harm",
    [
        lambda manifest: manifest["rows"]["shards"][0].update(rows=1),
        lambda manifest: manifest["rows"].update(shards=[]),
        lambda manifest: manifest["rows"]["shards"].append(manifest["rows"]["shards"][0]),
        lambda manifest: manifest.update(classes=["one"]),
        lambda manifest: manifest.update(shard_size=0),
    ],
)
def test_a_manifest_that_was_changed_is_refused(model, x, tmp_path, harm):
    extract(model, x, tmp_path / "cache")
    path = tmp_path / "cache" / "manifest.json"
    manifest = json.loads(path.read_text())
    harm(manifest)
    path.write_text(json.dumps(manifest))
    for opened in (lambda: dubito.open(tmp_path / "cache"), lambda: extract(model, x, tmp_path / "cache")):
        with pytest.raises(
            CacheError, match=r"manifest\.json was changed after it was written\)\. Extract again into another folder"
        ):
            opened()


def test_json_that_is_nested_too_deeply(model, x, tmp_path):
    extract(model, x, tmp_path / "cache")
    (tmp_path / "cache" / "manifest.json").write_text("[" * 100_000)
    with pytest.raises(CacheError, match=r"cannot be read \(it is nested too deeply\)"):
        dubito.open(tmp_path / "cache")


@pytest.mark.parametrize(
    "arguments", [["list", "probes"], ["list", "probes", "--json"], ["--version"], ["x", "--json"]]
)
def test_a_full_disk_behind_standard_output(arguments, monkeypatch, capfd):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(arguments) == (2 if arguments[0] == "x" else 1)
        monkeypatch.undo()
    error = capfd.readouterr().err
    assert "Traceback" not in error
    assert "No space left on device" in error or arguments[0] == "x"


def test_a_finished_cache_on_a_read_only_disk(model, x, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    expected = extract(model, x, tmp_path / "cache").logit
    for place in ("filelock.FileLock.acquire", "dubito.storage.files.os.fsync", "pathlib.Path.unlink"):
        monkeypatch.setattr(place, refuse)
    forget_shards()
    assert torch.equal(extract(model, x, tmp_path / "cache").logit, expected)
    with pytest.raises(CacheError, match=r"is not complete, and cannot be written \(Read-only file system\)"):
        extract(model, x, tmp_path / "cache", probes=[dubito.probes.Gradient()])
    with pytest.raises(CacheError, match=r"cannot be written \(Read-only file system\)"):
        extract(model, x, tmp_path / "new")
