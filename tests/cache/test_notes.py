"""What a probe tells beside its columns: the layers of gradients, kept with a cache, through kills and joins."""

import json

import pytest
import torch

import dubito
from dubito.errors import DubitoError, StaleCacheError
from tests.cache.conftest import contents

SIZES = {"batch_size": 4, "shard_size": 8, "workers": 0, "progress": False}
LAYERS = {"layers": ["0", "1", "5"], "depth": [0, 1, 2], "of": 3}


def extract(model, folder, to, *probes):
    return dubito.extract(model, folder, to, probes=list(probes), **SIZES)


def test_a_cache_reports_the_layers(model, folder, tmp_path):
    probe = dubito.probes.Gradient("exact", uniform=True)
    table = extract(model, folder, tmp_path / "cache", probe)
    assert table.shape("gradient") == table.shape("gradient_uniform") == (23, 3)
    for opened in (table, dubito.open(tmp_path / "cache")):
        assert opened.provenance.probes["gradient"] == {"settings": probe.settings(), "notes": LAYERS}
    images = dubito.open_images(folder)
    x = model.transform.finish(torch.stack([model.transform.prepare(images.read(i)) for i in range(len(images))]))
    torch.testing.assert_close(table.whole("gradient"), probe.run(model, x, None)["gradient"], rtol=1e-4, atol=0)
    assert set(extract(model, folder, tmp_path / "plain").provenance.probes) == {"forward"}


def test_two_gradient_probes_in_one_cache(model, folder, tmp_path):
    last = dubito.probes.Gradient(beta=3.0, tolerance=0.3, name="late")
    table = extract(model, folder, tmp_path / "cache", dubito.probes.Gradient(), last)
    assert {"gradient", "gradient_predicted", "late", "late_predicted"} <= set(table.columns)
    probes = dubito.open(tmp_path / "cache").provenance.probes
    assert probes["late"]["notes"]["layers"] == ["1", "5"]
    assert probes["late"]["notes"]["depth"] == [1, 2]
    assert probes["late"]["notes"]["of"] == probes["gradient"]["notes"]["of"] == 3
    torch.testing.assert_close(table.whole("late_predicted"), table.whole("gradient_predicted")[:, 1:])


@pytest.mark.parametrize("stop_at", [2, 5])
def test_stopped_and_taken_up_again(model, folder, tmp_path, monkeypatch, stop_at):
    """Stopped in the first block or in the second: the rest is done by a new probe, and the bytes are the same."""
    extract(model, folder, tmp_path / "whole", dubito.probes.Gradient())
    batches = []
    run = dubito.probes.Gradient.run

    def stopping(self, *arguments):
        batches.append(1)
        if len(batches) == stop_at:
            raise KeyboardInterrupt
        return run(self, *arguments)

    monkeypatch.setattr(dubito.probes.Gradient, "run", stopping)
    with pytest.raises(KeyboardInterrupt):
        extract(model, folder, tmp_path / "stopped", dubito.probes.Gradient())
    assert len(list((tmp_path / "stopped").glob("gradient-*"))) == (stop_at - 1) // 2
    table = extract(model, folder, tmp_path / "stopped", dubito.probes.Gradient())
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")
    assert table.provenance.probes["gradient"]["notes"]["layers"] == ["0", "1", "5"]
    done = len(batches)
    extract(model, folder, tmp_path / "stopped", dubito.probes.Gradient())
    assert len(batches) == done  # nothing is done again


def test_gradients_come_later_and_leave_the_rest_alone(model, folder, tmp_path):
    extract(model, folder, tmp_path / "cache")
    before = {name: digest for name, digest in contents(tmp_path / "cache").items() if name.startswith("forward")}
    table = extract(model, folder, tmp_path / "cache", dubito.probes.Gradient())
    assert table.provenance.probes["gradient"]["notes"]["of"] == 3
    assert before.items() <= contents(tmp_path / "cache").items()
    message = json.loads((tmp_path / "cache" / "manifest.json").read_text())["probes"]
    assert message["gradient"]["notes"] == LAYERS
    assert "notes" not in message["forward"]


def test_other_settings_are_another_cache(model, folder, tmp_path):
    extract(model, folder, tmp_path / "cache", dubito.probes.Gradient())
    for other in (dubito.probes.Gradient(seed=1), dubito.probes.Gradient(last=2), dubito.probes.Gradient(copies=1)):
        with pytest.raises(StaleCacheError, match="gradient"):
            extract(model, folder, tmp_path / "cache", other)
    with pytest.raises(DubitoError, match="gradient"):
        extract(model, folder, tmp_path / "cache", dubito.probes.Gradient(), dubito.probes.Gradient(seed=1))


def test_broken_images_have_no_row(model, folder, tmp_path):
    (folder / "a" / "000.png").write_bytes(b"")
    with pytest.warns(dubito.errors.SkippedImagesWarning):
        table = extract(model, folder, tmp_path / "cache", dubito.probes.Gradient())
    assert table.shape("gradient") == (22, 3)


def test_joined_tables_keep_what_was_reported(model, folder, tmp_path):
    a, b = (extract(model, folder / part, tmp_path / part, dubito.probes.Gradient()) for part in "ab")
    both = dubito.concat([a, b])
    assert both.shape("gradient") == (16, 3)
    assert torch.equal(both.whole("gradient"), torch.cat([a.whole("gradient"), b.whole("gradient")]))
    assert both.provenance.probes == a.provenance.probes
