import io
import os
import struct
import sys
import threading
import warnings
import zlib
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from dubito.data.decode import decode, missing_package, read_content, to_rgb
from dubito.errors import BrokenImageError
from dubito.storage import RemotePath

RAMP = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
# 65535 / 257 = 255 exactly, and every 257th value in between is a whole grey level.
RAMP_8 = np.arange(256, dtype=np.uint8).reshape(16, 16)


def saved(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def grey(data: bytes) -> np.ndarray:
    pixels = np.asarray(decode(data, "ramp"))
    assert (pixels[..., :1] == pixels).all()
    return pixels[..., 0]


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def raw_png(width: int, height: int, bits: int, colour: int, lines: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    body = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(lines)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def raw_tiff(pixels: np.ndarray, order: str, bits: int, photometric: int, data: bytes | None = None) -> bytes:
    height, width = pixels.shape
    data = pixels.tobytes() if data is None else data
    tags = [(256, width), (257, height), (258, bits), (259, 1), (262, photometric), (273, 8 + 2 + 9 * 12 + 4)]
    tags += [(277, 1), (278, height), (279, len(data))]
    entries = b"".join(struct.pack(order + "HHII", tag, 4, 1, value) for tag, value in tags)
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, len(tags))
    return head + entries + struct.pack(order + "I", 0) + data


def test_rgb_is_read_as_it_is_from_bytes_and_path(tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    path = tmp_path / "a.png"
    path.write_bytes(saved(Image.fromarray(pixels), "PNG"))
    for image in (decode(path, "a"), decode(path.read_bytes(), "a")):
        assert image.mode == "RGB"
        assert type(image) is Image.Image
        np.testing.assert_array_equal(np.asarray(image), pixels)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "TIFF", "PPM"])
def test_grey_becomes_three_equal_channels(kind: str):
    np.testing.assert_array_equal(grey(saved(Image.fromarray(RAMP_8), kind)), RAMP_8)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM", "JPEG2000"])
def test_sixteen_bit_grey_is_scaled_not_clipped(kind: str):
    np.testing.assert_array_equal(grey(saved(Image.fromarray(RAMP), kind)), RAMP_8)


def test_sixteen_bit_grey_is_rounded_to_the_nearest_level():
    # 128 / 257 = 0.498 -> 0, 129 / 257 = 0.502 -> 1, 65406 / 257 = 254.498 -> 254, 65407 / 257 = 254.502 -> 255
    values = np.array([[128, 129, 65406, 65407]], np.uint16)
    assert grey(saved(Image.fromarray(values), "PNG")).tolist() == [[0, 1, 254, 255]]


@pytest.mark.parametrize("order", ["<", ">"])
def test_tiff_of_either_byte_order(order: str):
    np.testing.assert_array_equal(grey(raw_tiff(RAMP.astype(order + "u2"), order, 16, 1)), RAMP_8)


def test_tiff_that_calls_zero_white_is_turned_over():
    np.testing.assert_array_equal(grey(raw_tiff(RAMP, "<", 16, 0)), 255 - RAMP_8)
    np.testing.assert_array_equal(grey(raw_tiff(RAMP_8, "<", 8, 0)), 255 - RAMP_8)


def test_twelve_bit_tiff_reaches_white():
    # Two 12-bit values in three bytes: 0xFFF and 0x000.
    data = bytes([0xFF, 0xF0, 0x00])
    assert grey(raw_tiff(np.zeros((1, 2)), "<", 12, 1, data)).tolist() == [[255, 0]]


@pytest.mark.parametrize(("colour", "channels"), [(2, 3), (4, 2), (6, 4)])
def test_sixteen_bit_png_with_several_channels(colour: int, channels: int):
    opaque = np.full(RAMP.shape, 65535, np.uint16)
    planes = [RAMP] * (channels - (colour != 2)) + [opaque] * (colour != 2)
    lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in np.stack(planes, -1))
    np.testing.assert_array_equal(grey(raw_png(16, 16, 16, colour, lines)), RAMP_8)


def test_mode_i_is_read_as_sixteen_bits_and_refused_beyond():
    image = Image.fromarray(np.array([[0, 257, 65535]], np.int32))
    assert grey(saved(image, "TIFF")).tolist() == [[0, 1, 255]]
    wide = Image.fromarray(np.array([[0, 70000]], np.int32))
    with pytest.raises(
        BrokenImageError, match=r"'w\.tif' of mode I must have values in 0\.\.65535; got 0\.\.70000\. Save"
    ):
        decode(saved(wide, "TIFF"), "w.tif")


def test_float_tiff_of_0_to_1_is_scaled_and_others_are_refused():
    ramp = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    np.testing.assert_array_equal(grey(saved(Image.fromarray(ramp), "TIFF")), RAMP_8)
    for bad in (-0.5, 200.0, np.nan, np.inf):
        values = np.array([[0.5, bad]], np.float32)
        with pytest.raises(BrokenImageError, match=r"of mode F must have values in 0\.\.1; got .*"):
            decode(saved(Image.fromarray(values), "TIFF"), "f.tif")


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_red_is_red(kind: str):
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    data = saved(red, kind)
    if kind == "JPEG":
        assert b"Adobe" in data  # Adobe stores CMYK inverted, and so does Pillow
    assert decode(data, "red").getpixel((8, 8)) == (255, 0, 0)


def test_palette_colours():
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 0), 1)
    for kind in ("PNG", "GIF", "BMP"):
        read = decode(saved(image, kind), "p")
        assert [read.getpixel((x, 0)) for x in (0, 1)] == [(10, 20, 30), (200, 100, 50)]


def test_transparent_palette_entry_is_white():
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 200, 100, 50])
    image.putpixel((1, 0), 1)
    for kind, transparency in (("PNG", 0), ("GIF", 0), ("PNG", bytes([0, 255]))):
        read = decode(saved(image, kind, transparency=transparency), "p")
        assert [read.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (200, 100, 50)]


def test_one_bit():
    image = Image.new("1", (2, 1))
    image.putpixel((1, 0), 1)
    for kind in ("PNG", "TIFF", "PPM"):
        read = decode(saved(image, kind), "bit")
        assert [read.getpixel((x, 0)) for x in (0, 1)] == [(0, 0, 0), (255, 255, 255)]


@pytest.mark.parametrize(("mode", "colour"), [("RGBA", (100, 50, 0, 102)), ("LA", (100, 102))])
def test_alpha_is_laid_over_white(mode: str, colour: tuple[int, ...]):
    # alpha 102 = 0.4: 0.4 * 100 + 0.6 * 255 = 193, 0.4 * 50 + 153 = 173, 0.4 * 0 + 153 = 153
    expected = (193, 173, 153) if mode == "RGBA" else (193, 193, 193)
    assert decode(saved(Image.new(mode, (3, 3), colour), "PNG"), "a").getpixel((1, 1)) == expected


def test_key_colour_of_an_rgb_png_is_white():
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    image.putpixel((1, 0), (9, 9, 9))
    read = decode(saved(image, "PNG", transparency=(1, 2, 3)), "key")
    assert [read.getpixel((x, 0)) for x in (0, 1)] == [(255, 255, 255), (9, 9, 9)]


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_is_upright(orientation: int, kind: str):
    upright = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    # What a camera held that way writes: the inverse of the turn that the number asks for.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.fromarray(np.ascontiguousarray(stored)), kind, exif=exif)
    np.testing.assert_array_equal(np.asarray(decode(data, "turned")), upright)


def test_orientation_of_a_jpeg_and_of_sixteen_bits():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode(saved(Image.new("RGB", (20, 10)), "JPEG", exif=exif), "a").size == (10, 20)
    np.testing.assert_array_equal(grey(saved(Image.fromarray(RAMP), "PNG", exif=exif)), np.rot90(RAMP_8, -1))


def test_corrupt_exif_is_read_upright_and_in_silence():
    data = saved(Image.new("RGB", (20, 10)), "JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01garbage")
    assert decode(data, "a").size == (20, 10)


def test_the_first_frame_of_a_gif():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "lime")]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode(data, "gif").getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("kind", ["WEBP", "AVIF"])
def test_newer_formats(kind: str):
    image = decode(saved(Image.new("RGB", (16, 16), (255, 0, 0)), kind, quality=100), "new")
    assert np.abs(np.asarray(image).astype(int) - [255, 0, 0]).max() <= 8


def test_lab_is_read_by_its_meaning():
    # L = 255 (100 %), a = b = 128 (0) is white.
    white = to_rgb(Image.new("LAB", (2, 2), (255, 128, 128)), "lab")
    assert np.asarray(white).min() >= 253


def test_zero_bytes():
    with pytest.raises(
        BrokenImageError, match=r"image 'a/b\.jpg' must be an image file; it has 0 bytes\. Copy it again"
    ):
        decode(b"", "a/b.jpg")


def test_truncated_jpeg():
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = saved(Image.fromarray(pixels), "JPEG")
    with pytest.raises(
        BrokenImageError,
        match=r"'b\.jpg' must be a whole image file; got truncated JPEG: image file is truncated .* Copy",
    ):
        decode(data[: len(data) // 2], "b.jpg")
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


@pytest.mark.parametrize("keep", [10, 30, 50, 100, 0.3, 0.9])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "GIF", "BMP", "WEBP", "JPEG2000", "PPM"])
def test_cut_files_of_every_kind_are_broken_images(kind: str, keep: float):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = saved(Image.fromarray(pixels), kind)
    cut = data[: keep if keep >= 1 else int(keep * len(data))]
    with pytest.raises(BrokenImageError, match=r"image 'cut' must be .* or take it out\."):
        decode(cut, "cut")


def test_damaged_png():
    data = bytearray(saved(Image.fromarray(RAMP_8), "PNG"))
    data[60] ^= 0xFF
    with pytest.raises(BrokenImageError, match=r"'d\.png' must be a whole image file; got damaged PNG: .*\. Copy"):
        decode(bytes(data), "d.png")


def test_text_is_no_image():
    with pytest.raises(
        BrokenImageError,
        match=r"'t\.jpg' must be an image file; got 12 bytes that begin with b'hello wo', which is no",
    ):
        decode(b"hello world!", "t.jpg")


def test_missing_file(tmp_path: Path):
    with pytest.raises(BrokenImageError, match=r"'x\.png' must be a readable file; reading it gave: No such file"):
        decode(tmp_path / "x.png", "x.png")


def test_decompression_bomb():
    with pytest.raises(
        BrokenImageError, match=r"'bomb' must fit in memory; got a decompression bomb: Image size \(40000"
    ):
        decode(raw_png(20000, 20000, 8, 0, b""), "bomb")


def test_no_warning_of_pillow_gets_out_and_filters_are_restored():
    large = raw_png(10000, 10000, 8, 0, b"")  # Pillow warns about it, then finds it empty
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(BrokenImageError, match=r"got (damaged|truncated) PNG"):
            decode(large, "large")
    assert caught == []
    assert warnings.filters == before


def test_threads_leave_the_warning_filters_as_they_were():
    data = saved(Image.fromarray(RAMP_8), "PNG")
    before = list(warnings.filters)
    threads = [threading.Thread(target=lambda: [decode(data, "a") for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert warnings.filters == before


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(tmp_path: Path):
    path = tmp_path / "secret.png"
    path.write_bytes(b"x")
    path.chmod(0)
    with pytest.raises(BrokenImageError, match="reading it gave: Permission denied"):
        decode(path, "secret.png")


def test_a_heic_file_by_any_name_is_seen_from_its_content(tmp_path, monkeypatch):
    heif = pytest.importorskip("pillow_heif")
    path = tmp_path / "IMG_0001.jpg"
    heif.from_pillow(Image.new("RGB", (64, 64), "red")).save(path, format="HEIF")
    red, green, blue = decode(path, "x").getpixel((32, 32))
    assert red > 240
    assert green + blue < 20
    with_plugin = read_content(path)[1]
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    monkeypatch.delitem(Image.OPEN, "HEIF")
    with pytest.raises(BrokenImageError, match=r"image 'x' has a format .* with a plug-in: pip install pillow-heif$"):
        decode(path, "x")
    assert read_content(path)[1] != with_plugin  # a cache without the image does not match once it can be read


@pytest.mark.parametrize(
    ("content", "package"),
    [
        (b"\xff\x0a" + bytes(20), "pillow-jxl-plugin"),
        (b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(20), "pillow-jxl-plugin"),
        (b"\0\0\0\x1cftypmif1\0\0\0\0mif1heicmiaf", "pillow-heif"),
        (b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf", "pillow-avif-plugin"),
    ],
)
def test_which_package_reads_a_format(content: bytes, package: str, monkeypatch):
    for name in ("pillow_heif", "pillow_jxl", "pillow_avif"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(Image, "OPEN", {})
    monkeypatch.setattr("dubito.data.decode.features.check", lambda name: False)
    assert missing_package(content) == package


def test_what_is_read_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("dubito.data.decode.LIMIT", 10)
    (tmp_path / "x.png").write_bytes(bytes(11))
    with pytest.raises(BrokenImageError, match="the most that is read of an image"):
        decode(tmp_path / "x.png", "x")
    (tmp_path / "x.png").write_bytes(b"0123456789")
    assert read_content(tmp_path / "x.png")[0] == b"0123456789"


@pytest.fixture
def server():
    """Answers /N with status N, at the second request with 200; counts requests by path."""
    counts: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            counts[self.path] += 1
            self.send_response(int(self.path[1:]) if counts[self.path] == 1 else 200)
            self.end_headers()
            self.wfile.write(b"content")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{web.server_port}", counts
        web.shutdown()


def test_urls_of_busy_servers_are_tried_again(server, monkeypatch):
    address, counts = server
    assert read_content(RemotePath(f"{address}/200"))[0] == b"content"
    assert read_content(RemotePath(f"{address}/503"))[0] == b"content"
    with pytest.raises(BrokenImageError, match="the server answered 404 Not Found"):
        decode(read_content(RemotePath(f"{address}/404"))[0], "x")
    assert counts == {"/200": 1, "/503": 2, "/404": 1}
    monkeypatch.setattr("dubito.data.decode.LIMIT", 3)
    with pytest.raises(BrokenImageError, match="the most that is read of an image"):
        decode(read_content(RemotePath(f"{address}/200"))[0], "x")


def test_addresses_of_nothing():
    with pytest.raises(BrokenImageError, match="must be a readable file; reading it gave:"):
        decode(read_content(RemotePath("http://127.0.0.1:1/x.png"))[0], "x")
    with pytest.raises(BrokenImageError, match="InvalidURL"):
        decode(read_content(RemotePath("http://127.0.0.1:port/x.png"))[0], "x")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "P", "I;16", "F"])
def test_a_large_image_is_converted_in_bands(mode, monkeypatch):
    """To the same pixels: 16 rows of 16 in bands of 3, and one row is left."""
    if mode in ("I;16", "F"):
        image = Image.fromarray(RAMP if mode == "I;16" else (RAMP / 65535).astype(np.float32))
    else:
        image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 4), dtype=np.uint8)).convert(mode)
    whole = to_rgb(image, "x")
    monkeypatch.setattr("dubito.data.decode._PIXELS_AT_ONCE", 48)
    np.testing.assert_array_equal(to_rgb(image, "x"), whole)


def test_values_out_of_range_are_seen_in_every_band(monkeypatch):
    values = (RAMP / 65535).astype(np.float32)
    values[15, 3] = 2.0
    monkeypatch.setattr("dubito.data.decode._PIXELS_AT_ONCE", 48)
    with pytest.raises(BrokenImageError, match=r"must have values in 0\.\.1; got .*\.\.2"):
        to_rgb(Image.fromarray(values), "x")
