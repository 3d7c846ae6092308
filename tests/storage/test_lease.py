import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import fsspec
import pytest

from dubito.errors import ArtefactError, CacheBusyError, StoreError
from dubito.storage import (
    RemotePath,
    SavedFolder,
    lease,
    locked,
    remove_file,
    sizes_in,
    staged,
    write_file,
    write_sealed,
)
from dubito.storage.lease import LeaseTakenError, leased


@pytest.fixture
def folder():
    yield RemotePath("memory://leases")
    fsspec.filesystem("memory").rm("/", recursive=True)


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(lease, "_RENEWAL_SECONDS", 0.05)
    monkeypatch.setattr(lease, "_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(lease, "_LOOK_SECONDS", 0.02)


def of_another_machine(folder: RemotePath, number: int, **entries: object) -> None:
    content = {"token": "x", "machine": "elsewhere", "pid": 1, "renewals": 0, "released": False, **entries}
    (folder / ".lock" / f"{number:06}").write_bytes(json.dumps(content).encode())


def test_one_holder_at_a_time(folder):
    order = []

    def write(name: str) -> None:
        with locked(folder, seconds=20.0):
            order.append(name)
            time.sleep(0.05)
            order.append(name)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order[::2] == order[1::2]
    assert sorted(order[::2]) == list("abcd")
    assert [*sizes_in(folder / ".lock")] == ["000004"]


def test_a_holder_that_is_alive_is_not_disturbed(folder, monkeypatch):
    monkeypatch.setattr(lease, "_PATIENCE_SECONDS", 30.0)
    with leased(folder, seconds=0.0):
        with pytest.raises(LeaseTakenError), leased(folder, seconds=0.0):
            pass
        with pytest.raises(CacheBusyError, match="another process is writing into 'memory://leases'"):
            locked(folder, busy=CacheBusyError).__enter__()
    with leased(folder, seconds=0.0):
        pass


def test_a_dead_holder_of_another_machine_is_replaced_after_a_while(folder):
    of_another_machine(folder, 7)
    start = time.monotonic()
    with leased(folder, seconds=0.0):
        assert time.monotonic() - start > 0.5
        assert [*sizes_in(folder / ".lock")] == ["000008"]


def test_a_released_lease_is_free_at_once_and_a_damaged_one_after_a_while(folder, monkeypatch):
    of_another_machine(folder, 1, released=True)
    with monkeypatch.context() as patch:
        patch.setattr(lease, "_PATIENCE_SECONDS", 1e9)
        with leased(folder, seconds=0.0):
            pass
    (folder / ".lock" / "000009").write_bytes(b"\x00")  # nobody renews it
    with leased(folder, seconds=0.0):
        assert [*sizes_in(folder / ".lock")] == ["000010"]


def test_a_lease_that_was_overtaken_is_given_up(folder, monkeypatch):
    of_another_machine(folder, 7, released=True)
    create = RemotePath.create

    def overtaken(path: RemotePath, data: bytes) -> None:
        create(path, data)
        if path.name == "000008":  # while this process looked at 7, others had 8 and 9, and removed 8
            of_another_machine(folder, 9, released=True)

    monkeypatch.setattr(RemotePath, "create", overtaken)
    with leased(folder, seconds=0.0):
        assert [*sizes_in(folder / ".lock")] == ["000010"]


def test_a_store_that_cannot_keep_two_writers_apart_is_refused(folder, monkeypatch):
    monkeypatch.setattr(RemotePath, "create", RemotePath.write_bytes)
    with pytest.raises(StoreError, match=r"cannot create a file for one writer alone.*Write to a disk, and copy"):
        locked(folder).__enter__()


def test_a_file_system_that_looks_before_it_writes_is_refused():
    with pytest.raises(StoreError, match=r"'hf://datasets/me/photos' is in a store that cannot create a file for one"):
        locked(RemotePath("hf://datasets/me/photos")).__enter__()


def test_a_lease_that_another_process_has_written_is_lost(folder):
    with leased(folder, seconds=0.0):
        lease.check_held(folder)
        time.sleep(2 * lease._RENEWAL_SECONDS)
        lease.check_held(folder)
        lease._HELD[folder.url]._done.set()  # no renewal comes between
        of_another_machine(folder, 1)
        with pytest.raises(StoreError, match="is written by another process now"):
            lease.check_held(folder)


def test_a_holder_that_lost_its_lease_removes_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("DUBITO_COPIES", str(tmp_path))
    kept = SavedFolder("guard", "guard.json", 1, ("parts",), "Guard.save")

    def write(place: Path) -> dict[str, str]:
        of_another_machine(folder, 5)  # as after a long suspension; the new holder has uploaded a part
        (folder / "parts-1-00000000.bin").write_bytes(b"x")
        return {"parts": kept.put_file(place, "parts", ".bin", lambda put: put(b"mine"))}

    with pytest.raises(StoreError, match="is written by another process now"):
        kept.save(folder, write)
    assert (folder / "parts-1-00000000.bin").exists()
    assert not (folder / "guard.json").exists()


def test_a_holder_that_lost_its_lease_writes_no_description(folder):
    with leased(folder, seconds=0.0):
        write_sealed(folder / "guard.json", {"format": 1})
        of_another_machine(folder, 2)  # as after a long suspension
        with pytest.raises(StoreError, match=r"'memory://leases' is written by another process now.*Run the same call"):
            write_sealed(folder / "guard.json", {"format": 2})
    assert json.loads((folder / "guard.json").read_bytes())["format"] == 1


def test_a_holder_that_lost_its_lease_writes_nothing_below_its_folder(folder):
    below, other = folder / "heads/seed-1", RemotePath("memory://leases-2")
    with leased(folder, seconds=0.0):
        write_file(below / "model.bin", b"first")
        of_another_machine(folder, 2)  # as after a long suspension
        with pytest.raises(StoreError, match="is written by another process now"):
            write_file(below / "model.bin", b"second")
        with pytest.raises(StoreError, match="is written by another process now"):
            remove_file(below / "model.bin")
        with pytest.raises(StoreError, match="is written by another process now"), staged(below) as place:
            (place / "config.json").write_bytes(b"{}")
        write_file(other / "model.bin", b"of another folder")
    assert list(sizes_in(below)) == ["model.bin"]
    assert (below / "model.bin").read_bytes() == b"first"


def test_a_store_that_refuses_is_an_error_of_the_caller(folder, monkeypatch):
    def refuse(self, data: bytes) -> None:
        raise StoreError("'memory://leases' cannot be accessed.") from cause

    monkeypatch.setattr(RemotePath, "create", refuse)
    cause = PermissionError("Forbidden")
    with pytest.raises(ArtefactError, match=r"the folder 'memory://leases' cannot be written"):
        locked(folder).__enter__()
    cause = ConnectionError()  # for some minutes, perhaps: nobody may write without the lease
    with pytest.raises(StoreError, match="cannot be accessed"):
        locked(folder).__enter__()


def _hold(url: str, ready) -> None:
    with leased(RemotePath(url), seconds=0.0):
        ready.set()
        time.sleep(60)


def test_a_killed_holder_of_this_machine_is_replaced_at_once(bucket, monkeypatch):
    monkeypatch.setattr(lease, "_PATIENCE_SECONDS", 60)
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_hold, args=(f"{bucket}/held", ready))
    process.start()
    assert ready.wait(60)
    with pytest.raises(LeaseTakenError), leased(RemotePath(f"{bucket}/held"), seconds=0.0):
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    start = time.monotonic()
    with leased(RemotePath(f"{bucket}/held"), seconds=0.0):
        assert time.monotonic() - start < 30
