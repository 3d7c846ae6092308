import gzip
import pickle
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from dubito.data import TarImages, open_images
from dubito.data.image_set import hash_images
from dubito.errors import BrokenImageError, DamagedArchiveWarning, ImagesError, LeftOutFilesWarning
from dubito.types import Images

FILES: dict[str, str | bytes] = {"dog/2.png": "red", "cat/1.png": "lime", "cat/0.png": "blue"}
COLOURS = [(0, 0, 255), (0, 255, 0), (255, 0, 0)]


def write_tar(path: Path, files: dict[str, bytes], *others: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, BytesIO(content))
        for member in others:
            archive.addfile(member)
    return path


def link(name: str, to: str, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, to
    return member


@pytest.fixture
def pngs(folder) -> dict[str, bytes]:
    root = folder(FILES)
    return {f"./{name}": (root / name).read_bytes() for name in FILES}


@pytest.mark.parametrize("name", ["photos.tar", "photos.tar.gz"])
def test_a_tar_is_read_in_any_order_and_by_any_process(pngs, tmp_path: Path, name: str):
    images = TarImages(write_tar(tmp_path / name, pngs))
    assert isinstance(images, Images)
    assert (images.ids, images.classes) == (["dog/2.png", "cat/1.png", "cat/0.png"], ("cat", "dog"))
    assert [images.read(row).getpixel((0, 0)) for row in (2, 0, 1)] == [COLOURS[0], COLOURS[2], COLOURS[1]]
    copy = pickle.loads(pickle.dumps(images))  # noqa: S301 (our own bytes)
    assert copy.read(1).getpixel((0, 0)) == COLOURS[1]
    assert copy.digest() == images.digest() == hash_images(images.ids, [images.read_hashed(row)[1] for row in range(3)])


def test_special_members_of_a_tar_are_broken_images(pngs, tmp_path: Path):
    hard, soft = link("a.png", "./cat/0.png", tarfile.LNKTYPE), link("b.png", "/etc/passwd", tarfile.SYMTYPE)
    images = TarImages(write_tar(tmp_path / "x.tar", pngs, hard, soft))
    assert images.ids[3:] == ["a.png", "b.png"]
    assert images.read(3).getpixel((0, 0)) == COLOURS[0]
    with pytest.raises(
        BrokenImageError, match=r"x\.tar/b\.png' .* unpacking gave: it is a link or another special file"
    ):
        images.read(4)


def test_labels_beside_the_images_of_a_tar(pngs, tmp_path: Path):
    first, second, third = pngs.values()
    noted = {"1.png": first, "1.json": b'{"label": "dog"}', "2.png": second, "2.json": b'{"cls": "cat"}'}
    images = TarImages(write_tar(tmp_path / "noted.tar", noted))
    assert (images.labels.tolist(), images.classes) == ([1, 0], ("cat", "dog"))
    with pytest.warns(LeftOutFilesWarning) as caught:
        assert TarImages(write_tar(tmp_path / "some.tar", {**noted, "3.png": third})).labels is None
    messages = [str(one.message) for one in caught]
    assert "labels beside the images are not used, since 1 of 3 images have none: '3.png'." in messages[0]
    assert messages[1].endswith("left out 2 .json.")


def samples(pngs: dict[str, bytes], labels: dict[str, str]) -> dict[str, bytes]:
    """Samples as WebDataset writes them: 0.png, 0.cls, 1.png, ..."""
    contents = iter([*pngs.values()] * 2)
    return {f"{key}{end}": data for key, label in labels.items() for end, data in _parts(next(contents), label)}


def _parts(content: bytes, label: str) -> list[tuple[str, bytes]]:
    return [(".png", content), (".cls", label.encode())]


@pytest.fixture
def shards(pngs, tmp_path: Path) -> Path:
    """Two shards in a folder, whose classes are not the same; their keys repeat."""
    (tmp_path / "shards").mkdir()
    write_tar(tmp_path / "shards" / "train-09.tar", samples(pngs, {"0": "fox", "1": "cat"}))
    write_tar(tmp_path / "shards" / "train-10.tar", samples(pngs, {"0": "dog"}))
    return tmp_path / "shards"


def test_shards_are_one_set_whose_ids_are_shard_and_key(shards, monkeypatch):
    images = open_images(shards)
    assert isinstance(images, TarImages)
    assert images.ids == ["train-09.tar/0.png", "train-09.tar/1.png", "train-10.tar/0.png"]
    assert (images.labels.tolist(), images.classes) == ([2, 0, 1], ("cat", "dog", "fox"))
    assert [images.read(row).getpixel((0, 0)) for row in (2, 1, 0)] == [COLOURS[2], COLOURS[1], COLOURS[2]]
    monkeypatch.chdir(shards)
    same = (str(shards / "train-{09..10}.tar"), "*.tar", ["train-09.tar", Path("train-10.tar")])
    assert [open_images(source).digest() for source in same] == [images.digest()] * 3
    assert open_images("train-10.tar").ids == ["0.png"]
    with pytest.raises(ImagesError, match=r"archive 'train-11\.tar' cannot be read \(.*No such file.*\)"):
        open_images("train-{10..11}.tar")


def test_class_folders_over_all_shards(pngs, tmp_path: Path):
    parts = [{name: content} for name, content in pngs.items()]
    paths = [write_tar(tmp_path / f"{place}.tar", part) for place, part in enumerate(parts)]
    images = open_images(paths)
    assert (images.labels.tolist(), images.classes) == ([1, 0, 0], ("cat", "dog"))


def test_images_in_a_folder_come_before_its_shards(shards, pngs):
    (shards / "cover.png").write_bytes(pngs["./dog/2.png"])
    with pytest.warns(LeftOutFilesWarning, match=r"left out 2 \.tar\."):
        assert open_images(shards).ids == ["cover.png"]


def test_a_broken_image_is_one_broken_image(shards, pngs):
    write_tar(
        shards / "train-10.tar", {"0.png": b"broken", "0.cls": b"dog", "1.png": [*pngs.values()][2], "1.cls": b"cat"}
    )
    images = open_images(shards)
    with pytest.raises(BrokenImageError, match=r"shards/train-10\.tar/0\.png' must be an image file"):
        images.read(2)
    assert images.read(3).getpixel((0, 0)) == COLOURS[0]


@pytest.mark.parametrize("name", ["train-09.tar", "train-09.tar.gz"])
def test_a_tar_that_is_cut_off_gives_what_precedes_the_cut(pngs, tmp_path: Path, name: str):
    path = write_tar(tmp_path / name, samples(pngs, {"0": "fox", "1": "cat", "2": "dog"}))
    whole = path.read_bytes()
    # Cut inside the last image, of which neither pixels nor label are left.
    cut = len(whole) * 5 // 6 if path.suffix == ".gz" else 4 * (512 + 512) + 512 + 10
    path.write_bytes(whole[:cut])
    with pytest.warns(DamagedArchiveWarning, match=r"the tar file cannot be read as a whole .*it is cut off"):
        images = TarImages(path)
    assert 0 < len(images) < 3
    assert images.classes == ("cat", "fox")[-len(images) :]
    assert images.read(0).getpixel((0, 0)) == COLOURS[2]


def test_a_tar_that_is_cut_between_two_files(pngs, tmp_path: Path):
    path = write_tar(tmp_path / "x.tar", pngs)
    path.write_bytes(path.read_bytes()[:2048])  # two small files, each of a header and one block
    with pytest.warns(DamagedArchiveWarning, match=r"the mark of its end is missing, 2 images are left"):
        assert TarImages(path).ids == ["dog/2.png", "cat/1.png"]


def test_a_damaged_header_costs_its_own_file(pngs, tmp_path: Path):
    path = write_tar(tmp_path / "x.tar", samples(pngs, {"0": "fox", "1": "cat", "2": "dog"}))
    data = bytearray(path.read_bytes())
    data[2 * 1024 + 20] ^= 0xFF  # in the header of 1.png
    data[5 * 1024 + 20] ^= 0xFF  # in the header of 2.cls
    path.write_bytes(data)
    with pytest.warns(DamagedArchiveWarning, match=r"a header is damaged; its file is left out, 1 images are left"):
        images = TarImages(path)
    assert (images.ids, images.classes) == (["0.png"], ("fox",))


def test_a_tar_that_holds_nothing_whole(pngs, tmp_path: Path):
    path = write_tar(tmp_path / "x.tar", pngs)
    path.write_bytes(path.read_bytes()[:520])
    with pytest.raises(ImagesError, match=r"archive '.*x\.tar' cannot be read \(it is cut off.*\)\. Copy it again"):
        TarImages(path)
    path.write_bytes(b"no tar" * 200)
    with pytest.raises(ImagesError, match=r"archive '.*x\.tar' cannot be read \(.*\)\. Copy it again"):
        TarImages(path)


def test_a_header_that_points_backwards_ends_the_tar(pngs, tmp_path: Path):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in pngs.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, BytesIO(content))
        member = tarfile.TarInfo("back.png")
        member.pax_headers = {"size": "-2048"}
        archive.addfile(member)
    with pytest.warns(DamagedArchiveWarning):
        assert len(TarImages(path)) >= 3


def test_a_tar_that_shrinks(pngs, tmp_path: Path):
    path = write_tar(tmp_path / "x.tar", pngs)
    images = TarImages(path)
    path.write_bytes(b"")
    with pytest.raises(BrokenImageError, match=r"bytes are missing"):
        images.read(0)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_that_states_gigabytes_is_not_read(pngs, tmp_path: Path, kind: bytes):
    forged = tarfile.TarInfo("long")
    forged.type, forged.size = kind, 8 << 30
    with tarfile.open(write_tar(tmp_path / "whole.tar", pngs)) as archive:
        second = archive.getmembers()[1].offset
    whole, header = (tmp_path / "whole.tar").read_bytes(), forged.tobuf(tarfile.GNU_FORMAT)
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(whole[:second] + header + whole[second:]))
    with pytest.warns(DamagedArchiveWarning, match="a header is damaged"):
        assert len(open_images(path)) == len(pngs)
    path.write_bytes(gzip.compress(header + whole))
    with pytest.raises(ImagesError, match=r"cannot be read \(a header of 8589934592 bytes\)"):
        open_images(path)
