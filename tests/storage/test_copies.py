import os

import fsspec
import pytest

from dubito.errors import ValueRangeError
from dubito.storage import RemotePath, copies, fetch_ahead, forget_copy, local_copy, staged


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DUBITO_COPIES", str(tmp_path / "copies"))
    monkeypatch.setattr(copies, "_unchecked", [0])
    yield RemotePath("memory://cache")
    fsspec.filesystem("memory").rm("/", recursive=True)


def test_a_file_is_fetched_once(folder, monkeypatch):
    place = folder / "rows-1"
    place.write_bytes(b"content")
    copy = local_copy(place)
    assert copy.read_bytes() == b"content"
    monkeypatch.setattr(RemotePath, "download", lambda *_: pytest.fail("fetched again"))
    assert local_copy(place) == copy


def test_folders_with_the_same_names_have_copies_of_their_own(folder):
    other = RemotePath("memory://other") / "rows-1"
    (folder / "rows-1").write_bytes(b"one")
    other.write_bytes(b"two")
    assert [local_copy(folder / "rows-1").read_bytes(), local_copy(other).read_bytes()] == [b"one", b"two"]


def test_a_folder_is_fetched_with_everything_in_it(folder):
    for name in ("a", "deep/b"):
        (folder / "parts-1" / name).write_bytes(name.encode())
    copy = local_copy(folder / "parts-1", folder=True)
    assert {path.relative_to(copy).as_posix(): path.read_text() for path in copy.rglob("*") if path.is_file()} == {
        "a": "a",
        "deep/b": "deep/b",
    }


@pytest.mark.parametrize("key", ["/outside", "../outside", "a/../../outside", "a//b", "./a", "..\\outside"])
def test_names_that_lead_out_of_a_folder_are_refused_before_anything_is_written(folder, tmp_path, monkeypatch, key):
    monkeypatch.setattr(RemotePath, "files_below", lambda _: ["whole", key])
    with pytest.raises(ValueError, match="which would be written outside of its folder"):
        local_copy(folder / "parts-1-00000000", folder=True)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_copy_of_another_user_is_read_all_the_same(folder, monkeypatch):
    place = folder / "rows-1"
    place.write_bytes(b"content")
    copy = local_copy(place)

    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "utime", refused)
    assert local_copy(place) == copy


def test_a_copy_is_forgotten(folder, tmp_path):
    (folder / "a-1").write_bytes(b"x")
    assert not forget_copy(folder / "a-1")
    local_copy(folder / "a-1")
    assert forget_copy(folder / "a-1")
    assert not forget_copy(tmp_path)
    assert tmp_path.exists()


def test_what_is_missing_leaves_nothing(folder, tmp_path):
    with pytest.raises(FileNotFoundError):
        local_copy(folder / "missing")
    assert [path for path in (tmp_path / "copies").rglob("*") if path.is_file()] == []


def test_old_copies_make_room(folder, monkeypatch):
    monkeypatch.setenv("DUBITO_COPIES_GB", "3e-6")  # 3,000 bytes
    monkeypatch.setattr(copies, "_IN_USE_SECONDS", -1.0)
    kept = []
    for number in range(5):
        (folder / f"rows-{number}").write_bytes(bytes(1000))
        kept.append(local_copy(folder / f"rows-{number}"))
        local_copy(folder / "rows-0")  # used again and again
    assert [path.exists() for path in kept] == [True, False, False, True, True]


def test_what_others_put_there_stays(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("DUBITO_COPIES_GB", "0")
    monkeypatch.setattr(copies, "_IN_USE_SECONDS", -1.0)
    for place in (tmp_path / "copies" / "thesis", tmp_path / "copies" / "dubito-copies" / "thesis"):
        place.mkdir(parents=True)
        (place / "chapter").write_text("x")
    (tmp_path / "copies" / "dubito-copies" / ".DS_Store").write_text("x")
    (folder / "a").write_bytes(b"x")
    local_copy(folder / "a")
    assert len([*tmp_path.rglob("chapter")]) == 2


def test_copies_in_use_stay(folder, monkeypatch):
    monkeypatch.setenv("DUBITO_COPIES_GB", "0")
    (folder / "a").write_bytes(b"x")
    assert local_copy(folder / "a").exists()


def test_damage_on_the_way_is_noticed(folder, tmp_path):
    (folder / "rows-00000-12345678.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"it has checksum [0-9a-f]{8}, its name says 12345678"):
        local_copy(folder / "rows-00000-12345678.safetensors")
    assert [path for path in (tmp_path / "copies").rglob("*") if path.is_file()] == []


def test_files_are_fetched_ahead(folder):
    (folder / "a").write_bytes(b"x")
    fetch_ahead(folder / "a")
    fetch_ahead(folder / "missing")
    assert local_copy(folder / "a").read_bytes() == b"x"
    with pytest.raises(FileNotFoundError):
        local_copy(folder / "missing")


def test_a_limit_that_is_no_number(folder, monkeypatch):
    monkeypatch.setenv("DUBITO_COPIES_GB", "much")
    (folder / "a").write_bytes(b"x")
    with pytest.raises(ValueRangeError, match="DUBITO_COPIES_GB must be a number of gigabytes, such as 20; got 'much'"):
        local_copy(folder / "a")


def test_staged_files_are_uploaded_unless_writing_fails(folder, tmp_path):
    with staged(folder) as place:
        (place / "deep").mkdir()
        (place / "deep" / "a").write_text("x")
    assert (folder / "deep" / "a").read_text() == "x"
    with pytest.raises(RuntimeError), staged(folder) as place:  # noqa: PT012 (what happens inside)
        (place / "b").write_text("x")
        raise RuntimeError
    assert not (folder / "b").exists()
    with staged(tmp_path) as place:
        assert place == tmp_path
