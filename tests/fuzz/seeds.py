"""Small valid files of every format that the library reads, and how sums inside of them are made to agree again."""

import io
import json
import pickle
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from tests.fuzz.world import Artefact

MARKER = "executed"
"""The file that code hidden in a pickle would write, in the folder of the example."""
LABELS = (b"path,label\na/0.png,a\nb/1.png,b\n", b"id,label,real_labels\n0,1,1 2\n1,0,\n")
VOTES = b"val_id,label,votes_no,votes_maybe,votes_yes\n2,970,0,1,4\n2,971,5,0,0\n"
PICKS = b"id;round;u;rank;label\na/0.png;0;0.5;1;a\nb/1.png;0;0.25;2;\n"


class Bomb:
    """Unpickling it writes a file: what a hostile checkpoint would do, made visible."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (Path(MARKER), "executed")


class SavedWhole(nn.Module):
    """A module that is pickled with its class."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)


def picture(kind: str, mode: str = "RGB", size: int = 8, **options: Any) -> bytes:
    """A small image file."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (size, size, 3), dtype=np.uint8)
    if mode == "P":
        image = Image.fromarray(pixels).quantize(8)
    elif mode in ("I;16", "F"):
        values = rng.random((size, size)) * (60_000 if mode == "I;16" else 1)
        image = Image.fromarray(values.astype(np.uint16 if mode == "I;16" else np.float32))
    else:
        image = Image.fromarray(pixels).convert(mode)
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


MEMBERS = {"a/0.png": picture("PNG", size=4), "b/1.jpg": picture("JPEG", size=4)}
"""Images of archives."""


def pictures() -> list[bytes]:
    """Every format and mode that Pillow writes, with the tags that matter."""
    turned = Image.Exif()
    turned[274] = 6
    files = [picture("PNG"), picture("PNG", "P", transparency=1), picture("PNG", "I;16"), picture("PNG", "LA")]
    files += [picture("JPEG", exif=turned), picture("JPEG", "CMYK"), picture("JPEG", progressive=True)]
    files += [picture("TIFF", "F"), picture("TIFF", "I;16"), picture("TIFF", compression="tiff_lzw")]
    files += [picture(kind) for kind in ("BMP", "WEBP", "PPM", "AVIF", "JPEG2000", "TGA", "ICO")]
    return [*files, picture("GIF", "P"), picture("GIF", "P", save_all=True, append_images=[Image.new("P", (8, 8))])]


def arrays() -> list[bytes]:
    """Pixels and inputs, stored and compressed, and an object that would be unpickled."""
    pixels = np.arange(2 * 4 * 4 * 3, dtype=np.uint8).reshape(2, 4, 4, 3)
    files = []
    for save, content in (
        (np.savez, {"images": pixels, "labels": np.array([0, 1]), "ids": np.array(["x", "y"])}),
        (
            np.savez_compressed,
            {"train_inputs": pixels / 255, "train_labels": np.array(["a", "b"]), "test_images": pixels},
        ),
        (np.savez, {"images": pixels, "labels": np.array([Bomb(), Bomb()], dtype=object)}),
    ):
        file = io.BytesIO()
        save(file, **content)
        files.append(file.getvalue())
    return files


def target_arrays() -> list[bytes]:
    """Targets of the task loss, one row per image."""
    plain, named = io.BytesIO(), io.BytesIO()
    np.save(plain, np.zeros((6, 2)))
    np.savez_compressed(named, targets=np.zeros(6), other=np.ones(2))
    objects = io.BytesIO()
    np.save(objects, np.array([Bomb()], dtype=object), allow_pickle=True)
    return [plain.getvalue(), named.getvalue(), objects.getvalue()]


def zips() -> list[bytes]:
    """Images in class folders, stored and compressed."""
    files = []
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", method) as archive:
            for name, content in {**MEMBERS, "b/note.txt": b"x"}.items():
                archive.writestr(name, content)
        files.append(file.getvalue())
    return files


def tars() -> list[bytes]:
    """Shards with labels beside images, and tars with links, long names and compression."""
    shard = {
        "0.png": picture("PNG", size=4),
        "0.cls": b"1",
        "1.jpg": picture("JPEG", size=4),
        "1.json": b'{"label": "b"}',
    }
    files = [_tar("w:", shard, tarfile.USTAR_FORMAT), _tar("w:gz", shard, tarfile.PAX_FORMAT)]
    long = {f"{'n' * 150}/{name}": content for name, content in shard.items()}
    return [*files, _tar("w:", long, tarfile.GNU_FORMAT), _tar("w:", long, tarfile.PAX_FORMAT), _tar("w:xz", shard, 1)]


def _tar(mode: Any, members: dict[str, bytes], format_: int) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode, format=format_) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.LNKTYPE, next(iter(members))
        archive.addfile(link)
    return file.getvalue()


def parquets() -> list[bytes]:
    """Image bytes, as Hugging Face writes them and plain, and paths."""
    import pyarrow  # noqa: PLC0415 (only where it is installed)
    from pyarrow import parquet  # noqa: PLC0415

    content = picture("PNG", size=4)
    info = {"info": {"features": {"label": {"names": ["a", "b"], "_type": "ClassLabel"}}}}
    hugging_face = pyarrow.table({"image": [{"bytes": content, "path": "0.png"}] * 3, "label": [0, 1, 0]})
    tables = [
        hugging_face.replace_schema_metadata({"huggingface": json.dumps(info)}),
        pyarrow.table({"image": [content, content], "path": ["x", "y"], "label": ["a", "b"]}),
        pyarrow.table({"path": ["0.png", "0.png"], "label": [1, 2]}),
    ]
    files = []
    for table, compression in zip(tables, ("snappy", "none", "zstd"), strict=True):
        file = io.BytesIO()
        parquet.write_table(table, file, compression=compression, row_group_size=2)
        files.append(file.getvalue())
    return files


def checkpoints() -> list[bytes]:
    """Files of torch.save, old and new, with and without Python objects, and one that would run code."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 2).state_dict()
    files = []
    for content, new in (
        ({f"module.fc.{key}": value for key, value in plain.items()}, True),
        ({"state_dict": plain, "epoch": 3}, False),
        (SavedWhole(), True),
        ({"model": plain, "args": Bomb()}, True),
        (Bomb(), False),
        ({"a": Bomb()}, True),
    ):
        file = io.BytesIO()
        torch.save(content, file, _use_new_zipfile_serialization=new)
        files.append(file.getvalue())
    return files


def pickles() -> list[bytes]:
    """What is inside of those checkpoints, and a plain pickle that would run code."""
    inside = []
    for data in checkpoints():
        if zipfile.is_zipfile(io.BytesIO(data)):
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                inside += [archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")]
    return [*inside, pickle.dumps(Bomb()), pickle.dumps({"weight": [Bomb()]}, protocol=0)]


def in_checkpoint(data: bytes) -> bytes:
    """A pickle in the zip file that torch.save would write, beside two storages."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        storages = {"0": bytes(24), "1": bytes(8)}
        for name, content in {"data.pkl": data, "version": b"3\n", "byteorder": b"little"}.items():
            archive.writestr(f"archive/{name}", content)
        for key, content in storages.items():
            archive.writestr(f"archive/data/{key}", content)
    return file.getvalue()


def tensor_files(artefacts: list[Artefact]) -> list[bytes]:
    """The safetensors files among other artefacts."""
    return [data for one in artefacts for name, data in one.files.items() if name.endswith(".safetensors")]


def graphs() -> list[bytes]:
    """A tiny network as an ONNX file, as an exported guard is one."""
    from onnx import TensorProto, helper, numpy_helper  # noqa: PLC0415 (only where it is installed)

    from dubito.models.from_onnx import fixed_input  # noqa: PLC0415

    rng = np.random.default_rng(0)
    mixing, weight, bias = (rng.normal(size=size).astype(np.float32) for size in ((12, 4), (2, 4), (2,)))
    sample = np.maximum(fixed_input((3, 2, 2)).numpy().reshape(1, 12) @ mixing, 0)
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"]),
        helper.make_node("MatMul", ["flat", "mixing"], ["mixed"]),
        helper.make_node("Relu", ["mixed"], ["feature"]),
        helper.make_node("Identity", ["w"], ["head_weight"]),
        helper.make_node("Identity", ["b"], ["head_bias"]),
    ]
    shapes = {"feature": ["n", 4], "head_weight": [2, 4], "head_bias": [2]}
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 2, 2])
    known = [numpy_helper.from_array(one, name) for one, name in ((mixing, "mixing"), (weight, "w"), (bias, "b"))]
    graph = helper.make_graph(nodes, "tiny", [x], outputs, known)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    notes = {"transform": None, "classes": ["a", "b"], "model": {"weights": "0"}, "sample": sample[0].tolist()}
    helper.set_model_props(model, {f"dubito.{key}": json.dumps(value) for key, value in notes.items()})
    return [model.SerializeToString()]


def with_png_sums(data: bytes) -> bytes:
    """A PNG whose chunks have the sums that they should have."""
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    fixed, at = bytearray(data), 8
    while at + 12 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        end = at + 8 + size
        if end + 4 > len(data):
            break
        fixed[end : end + 4] = zlib.crc32(data[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return bytes(fixed)


def with_tar_sums(data: bytes) -> bytes:
    """A tar whose headers have the sums that they should have."""
    fixed = bytearray(data)
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            fixed[at + 148 : at + 156] = b" " * 8
            fixed[at + 148 : at + 156] = b"%06o\0 " % sum(fixed[at : at + 512])
    return bytes(fixed)


def with_zip_sums(data: bytes) -> bytes:
    """A zip file whose members have the sums and sizes that they should have."""
    fixed, at = bytearray(data), data.find(b"PK\x01\x02")
    while at >= 0 and at + 46 <= len(data):
        method, packed, start = (*struct.unpack_from("<10xH8xI", data, at), struct.unpack_from("<I", data, at + 42)[0])
        if start + 30 <= len(data):
            begin = start + 30 + sum(struct.unpack_from("<HH", data, start + 26))
            content: bytes | None = data[begin : begin + packed]
            if method == zipfile.ZIP_DEFLATED:
                try:
                    content = zlib.decompressobj(-15).decompress(data[begin : begin + packed], 1 << 20)
                except zlib.error:
                    content = None
            if content is not None and method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                struct.pack_into("<I", fixed, at + 16, zlib.crc32(content))
                struct.pack_into("<I", fixed, at + 24, len(content))
        at = data.find(b"PK\x01\x02", at + 46)
    return bytes(fixed)
