"""`dubito serve` as a process: its address, its key, its end by a signal, and what a kill leaves."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import httpx
import psutil
import pytest
import torch

import dubito
from dubito.cli import main

from .conftest import log_lines, pictures, pixels

MODEL = "timm:test_resnet"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The guard of a random network from timm, and a file of its weights."""
    place = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    drawn = dubito.load(MODEL, weights=None)
    torch.save(drawn.module.state_dict(), place / "net.pt")
    model = dubito.load(MODEL, weights=str(place / "net.pt"))
    table = dubito.extract(model, pixels(150), to=place / "cache", progress=False)
    dubito.Guard.fit(model, table, coverage=0.8).save(place / "guard")
    return place / "guard"


@contextmanager
def running(saved, *options, **environment):
    command = [sys.executable, "-m", "dubito", "serve", str(saved), "--port", "0", "--workers", "1", "--json", *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env={**os.environ, **environment}) as process:
        try:
            assert process.stdout is not None
            text = ""
            while not text.endswith("}\n"):
                line = process.stdout.readline()
                assert line, process.stderr.read()
                text += line
            yield process, json.loads(text)
        finally:
            if process.poll() is None:
                process.kill()


def test_it_answers_and_ends_by_a_signal(saved, tmp_path):
    (tmp_path / "key").write_text("open\n")
    options = ("--key-file", str(tmp_path / "key"), "--watch", str(tmp_path / "watch"))
    with running(saved, *options) as (process, shown):
        assert (shown["name"], shown["keyed"]) == ("guard", True)
        head = {"X-API-Key": "open"}
        answer = httpx.post(f"{shown['address']}/guard", content=pictures(1)[0], headers=head, timeout=30).json()
        assert answer["fingerprint"] == shown["fingerprint"] == dubito.Guard.load(saved).fingerprint
        assert httpx.post(f"{shown['address']}/guard", content=pictures(1)[0]).status_code == 401
        assert httpx.get(f"{shown['address']}/v2/models/guard", headers=head).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0
    assert [one["status"] for one in log_lines(err)] == [200, 401, 200]
    assert dubito.Guard.load(saved).watch(tmp_path / "watch").report().images == 1


def test_killed_it_leaves_a_whole_watch_and_no_processes(saved, tmp_path):
    guard = dubito.Guard.load(saved)
    with running(saved, "--watch", str(tmp_path / "watch")) as (process, shown):
        with httpx.Client(base_url=shown["address"], timeout=30) as client:
            for one in pictures(5):
                assert client.post("/guard", content=one).status_code == 200
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=10)
        assert psutil.wait_procs(children, timeout=10)[1] == []
    watch = guard.watch(tmp_path / "watch")
    assert watch.report().images == 5  # all that were answered
    cache = dubito.open(saved.parent / "cache")
    assert watch.update(guard.decide(cache.rows(slice(0, 6)))).images == 11  # and it goes on from there


def test_an_empty_key_is_refused(saved, monkeypatch, capsys):
    monkeypatch.setenv("DUBITO_API_KEY", " ")
    assert main(["serve", str(saved)]) == 2
    assert "the key must not be empty" in capsys.readouterr().err
