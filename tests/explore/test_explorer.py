"""A running explorer: its address, its folder, and what happens when it is stopped, opened twice or killed."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
import torch

import dubito
from dubito.errors import ArtefactError


def ask(address: str, path: str = "api/about"):
    with urllib.request.urlopen(address + path, timeout=30) as answer:  # noqa: S310 (our own server)
        return json.load(answer)


def test_the_address_is_local_has_a_token_and_stays(table, folder):
    with dubito.explore(table, folder, browser=False) as explorer:
        address = explorer.address
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address)
        assert ask(address)["rows"] == 40
        with pytest.raises(
            ArtefactError, match=r"another explorer of this table is open at http://127\.0\.0\.1:\d+/\S+/\. Look"
        ):
            dubito.explore(table, browser=False)
        kept = explorer.kept
        assert kept is not None
        assert (kept / "address.json").stat().st_mode & 0o077 == 0
        assert address in explorer._repr_html_()
    with pytest.raises(urllib.error.URLError):
        ask(address)
    with dubito.explore(table, folder, browser=False) as again:
        assert again.address == address


def test_a_port_that_is_taken(table):
    words = r"cannot listen on 127\.0\.0\.1, port \d+ .* Choose another port"
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ArtefactError, match=words):
        dubito.explore(table, browser=False, port=other.getsockname()[1])
    with dubito.explore(table, browser=False):
        pass  # the lock was released


def test_a_table_in_memory_keeps_nothing():
    with dubito.explore(dubito.Table(logit=torch.randn(5, 3)), browser=False) as explorer:
        assert explorer.kept is None
        about = ask(explorer.address)
        assert about["pictures"]["words"].startswith("No pictures")
        assert about["layouts"][0]["state"] == "failed"


def test_a_read_only_place_is_explored_in_memory(table, monkeypatch):
    def refuse(*_, **__):
        raise OSError("read-only")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    with dubito.explore(table, browser=False) as explorer:
        assert explorer.kept is None


@contextlib.contextmanager
def killed_at_last(process):
    """Whatever fails: waiting for a process that goes on would never end."""
    try:
        yield
    finally:
        process.kill()


def test_killed_it_goes_on_at_the_same_address_with_its_notes(table, tmp_path):
    command = [sys.executable, "-m", "dubito", "explore", table.name, "--no-browser", "--json"]
    address = ""
    for turn in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running, killed_at_last(running):
            assert running.stdout is not None
            text = ""
            while not text.endswith("}\n"):
                line = running.stdout.readline()
                assert line, "the explorer ended before it printed its address"
                text += line
            shown = json.loads(text)["address"]
            assert shown == (address or shown)
            address = shown
            if turn == 0:
                change = urllib.request.Request(  # noqa: S310
                    address + "api/notes/3", json.dumps({"marked": True}).encode(), method="PUT"
                )
                urllib.request.urlopen(change, timeout=30).close()  # noqa: S310
                os.kill(running.pid, signal.SIGKILL)
            else:
                assert ask(address, "api/notes")["notes"]["3"]["marked"]
                running.send_signal(signal.SIGINT)
                end = time.monotonic() + 30
                while running.poll() is None and time.monotonic() < end:
                    time.sleep(0.1)
                assert running.returncode == 0
