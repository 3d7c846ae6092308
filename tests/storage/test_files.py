"""CSV files, replaced in one step; folders that are locked; tensors with notes; damage."""

import csv
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dubito.errors import ArtefactError, CacheBusyError, CacheError, TableError
from dubito.storage import SavedFolder, locked, parse_json, read_tensors, reading, write_csv, write_tensors


def test_what_was_written_is_read_back_and_the_folder_is_made(tmp_path: Path) -> None:
    lines = [["id", "u"], ['a "quoted", name', "0.5"], ["two\nlines", "1"]]
    path = write_csv(tmp_path / "deep" / "picks.csv", lines)
    with path.open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == lines


def test_an_old_file_is_replaced(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "one.csv", [["a"], ["1"], ["2"]])
    write_csv(path, [["b"]])
    assert path.read_text() == "b\n"
    assert [one.name for one in tmp_path.iterdir()] == ["one.csv"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ArtefactError, match=r"'picks\.csv' cannot be saved in '.*file' \(.*\)\. Choose another place\."
    ):
        write_csv(tmp_path / "file" / "picks.csv", [])


def test_a_folder_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))  # root may read all folders

    monkeypatch.setattr("os.scandir", refuse)
    kept = SavedFolder("guard", "guard.json", 1, ("parts",), "Guard.save")
    for call in (kept.check_place, lambda folder: kept.save(folder, lambda _: {})):
        with pytest.raises(ArtefactError, match=r"the guard cannot be saved in '.*' \(Permission denied\)\. Choose"):
            call(tmp_path)


def test_a_locked_folder_is_busy_until_its_writer_has_ended(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with locked(folder):
        for options, error in (({}, ArtefactError), ({"busy": CacheBusyError}, CacheBusyError)):
            with pytest.raises(error) as caught, locked(folder, **options):
                pass
            assert str(caught.value) == (
                f"another process is writing into '{folder}'. Wait until it has ended, or choose another folder."
            )
    with pytest.raises(KeyError), locked(folder):
        raise KeyError
    with locked(folder):  # let go of, although its writer has failed
        pass


@pytest.mark.parametrize(("options", "error"), [({}, ArtefactError), ({"refused": CacheError}, CacheError)])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, options: dict, error: type[Exception]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(error) as caught, locked(tmp_path / "file" / "folder", **options):
        pass
    place = tmp_path / "file" / "folder"
    assert str(caught.value) == f"the folder '{place}' cannot be written (Not a directory). Choose another one."


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ValueError("its checksum does not match"), "its checksum does not match"), (KeyError("step"), "no 'step'")],
)
def test_what_a_damaged_file_raises_says_what_to_do(error: Exception, reason: str) -> None:
    with pytest.raises(ArtefactError) as caught, reading("'state'", "Delete it."):
        raise error
    assert str(caught.value) == f"'state' cannot be read ({reason}). Delete it."
    own = ArtefactError("names the file and the repair")
    with pytest.raises(ArtefactError) as caught, reading("'state'", "Delete it."):
        raise own
    assert caught.value is own
    with pytest.raises(ArtefactError, match="wide"), reading("'state'", "Delete it."):
        raise TableError("features must be 3 wide")


NOTES = {"step": 7, "history": [{"loss": 0.1 + 0.2}], "none": None}


def tensors() -> dict[str, torch.Tensor]:
    turned = torch.arange(6.0).reshape(2, 3).t()
    return {"turned": turned, "number": torch.tensor(7.0), "bytes": torch.tensor([0, 1], dtype=torch.uint8)}


def test_tensors_and_notes_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_tensors(path, {"old": torch.zeros(2)}, {})
    write_tensors(path, tensors(), NOTES)
    after, notes = read_tensors(path)
    assert notes == NOTES
    assert after.keys() == tensors().keys()
    assert all(torch.equal(after[key], value) and after[key].dtype == value.dtype for key, value in tensors().items())
    written = path.read_bytes()
    write_tensors(path, tensors(), NOTES)
    assert path.read_bytes() == written


def refused(path: Path, reason: str = ".*") -> None:
    message = rf"^it cannot be read \({reason}\)\. Delete it\.$"
    with pytest.raises(ArtefactError, match=message), reading("it", "Delete it."):
        read_tensors(path)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_tensors_that_were_cut_off(tmp_path: Path, keep: int) -> None:
    write_tensors(tmp_path / "state", tensors(), NOTES)
    (tmp_path / "state").write_bytes((tmp_path / "state").read_bytes()[:keep])
    refused(tmp_path / "state")


@pytest.mark.parametrize("place", [b'"step', b"\x00\x00\x40\x40"])  # a note; the number 3.0
def test_a_flipped_bit_in_notes_or_numbers(tmp_path: Path, place: bytes) -> None:
    write_tensors(tmp_path / "state", tensors(), NOTES)
    data = bytearray((tmp_path / "state").read_bytes())
    data[data.index(place.replace(b'"', b'\\"')) + 3] ^= 2
    (tmp_path / "state").write_bytes(data)
    refused(tmp_path / "state", "its checksum does not match")


@pytest.mark.parametrize("metadata", [None, {"notes": "[]"}, {"notes": "{}", "digest": "0"}, {"other": "no notes"}])
def test_tensors_of_somebody_else(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    write_tensors(tmp_path / "state", tensors(), NOTES)
    save_file(load_file(tmp_path / "state"), tmp_path / "state", metadata)
    refused(tmp_path / "state")


@pytest.mark.parametrize("nested", ["[" * 100_000, '{"a":' * 100_000])
def test_json_that_is_nested_too_deeply(tmp_path: Path, nested: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(nested)
    (tmp_path / "guard.json").write_text(nested)
    with pytest.raises(ArtefactError, match=r"the guard in .* cannot be read \(it is nested too deeply\)\. Copy"):
        SavedFolder("guard", "guard.json", 1, ("parts",), "Guard.save").read(tmp_path)
