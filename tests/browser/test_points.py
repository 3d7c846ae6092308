"""points.js in a browser: what is drawn above what, one picture with and without WebGL2, and which points are meant."""

import base64
from importlib.resources import files

import numpy as np
import pytest
from matplotlib.path import Path as Outline

SCRIPT = files("dubito.report").joinpath("templates/points.js").read_text(encoding="utf-8")
WIDTH, HEIGHT = 300, 200
PAGE = f"""<!doctype html><meta charset="utf-8"><style>canvas {{ width: {WIDTH}px; height: {HEIGHT}px; }}</style>
<canvas id="canvas"></canvas>
<script type="module">
{SCRIPT}
const arrays = {{ xy: Float32Array, shares: Float32Array, colours: Uint8Array, mask: Uint8Array, ringed: Uint32Array }};
const typed = (parts) =>
  Object.fromEntries(Object.entries(parts).map(([name, one]) => [name, arrays[name]?.from(one) ?? one]));
window.points = new Points(document.getElementById("canvas"));
window.rgb = rgb;
window.frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
window.show = async (parts, view = {{}}) => {{
  points.set(typed(parts));
  Object.assign(points.view, {{ x: 0, y: 0, scale: 1 }}, view);
  points.draw();
  await frame();
}};
window.pixels = () => {{
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  return btoa(Array.from(data, (byte) => String.fromCharCode(byte)).join(""));
}};
</script>"""
RED, BLUE, GREY = [200, 0, 0], [0, 0, 200], [100, 100, 100]


@pytest.fixture(scope="module")
def write_page(tmp_path_factory):
    path = tmp_path_factory.mktemp("points") / "points.html"
    path.write_text(PAGE)
    return path


@pytest.fixture(scope="module")
def page(write_page, open_page, renderer):
    opened = open_page(write_page, before=renderer)
    yield opened
    opened.close()


def show(page, view=None, **parts) -> None:
    page.evaluate("([parts, view]) => show(parts, view)", [parts, view or {}])


def picture(page) -> np.ndarray:
    """(height, width, 4): red, green, blue, alpha."""
    width, height = page.evaluate("[canvas.width, canvas.height]")
    return np.frombuffer(base64.b64decode(page.evaluate("pixels()")), np.uint8).reshape(height, width, 4).astype(int)


def on_white(page) -> np.ndarray:
    """(height, width, 3): what a viewer sees, from 0 to 1."""
    drawn = picture(page) / 255
    return (1 - drawn[..., 3:]) + drawn[..., :3] * drawn[..., 3:]


def assert_alike(first: np.ndarray, second: np.ndarray) -> None:
    """Edges of circles may be smoothed in another way."""
    assert (first < 0.9).any()
    assert np.abs(first - second).mean() < 0.004
    assert (np.abs(first - second).max(-1) > 0.15).mean() < 0.005


def corners(*places: list[float]) -> list[float]:
    """These points, and two far ones that make the unit square of the map 0.92 of the canvas's height."""
    return [*sum(places, []), 0, 0, 1, 1]  # noqa: RUF017 (a handful)


def some_points(n: int = 400) -> dict[str, object]:
    draw = np.random.default_rng(0)
    return {
        "xy": draw.random(2 * n).tolist(),
        "shares": draw.random(n).tolist(),
        "colours": draw.integers(0, 256, 3 * n).tolist(),
        "mask": (draw.random(n) < 0.8).astype(int).tolist(),
        "ringed": draw.permutation(n)[: n // 20].tolist(),
        "paper": [250, 250, 240],
        "ghost": GREY,
        "radius": [2, 8],
        "opacity": [0.9, 0.2],
    }


def test_certain_points_lie_on_uncertain_ones_and_ghosts_behind_all(page):
    # Three points in the middle: a certain red one, an uncertain blue one, and a certain ghost.
    show(
        page,
        xy=corners([0.5, 0.5], [0.5, 0.5], [0.5, 0.5]),
        shares=[0, 1, 0, 0, 0],
        colours=[*RED, *BLUE, *RED, *GREY, *GREY],
        mask=[1, 1, 0, 1, 1],
        ringed=[],
        ghost=GREY,
        radius=[5, 20],
        opacity=[0.9, 0.2],
    )
    drawn = picture(page)
    # Circles of a canvas 200 high have half their size: the blue one a radius of 10, the red one of 2.5.
    red, green, blue, alpha = drawn[100, 150] / 255
    # Opacities from top to bottom: 0.9 red, 0.2 blue, 0.18 grey; together 1 - 0.1 x 0.8 x 0.82 = 0.9344.
    assert alpha == pytest.approx(0.9344, abs=0.01)
    grey = 0.1 * 0.8 * 0.18 * 100 / 255
    assert red * alpha == pytest.approx(0.9 * 200 / 255 + grey, abs=0.01)
    assert blue * alpha == pytest.approx(0.1 * 0.2 * 200 / 255 + grey, abs=0.01)
    assert green * alpha == pytest.approx(grey, abs=0.01)
    assert drawn[100, 158] == pytest.approx([0, 0, 200, 0.2 * 255], abs=3)
    assert drawn[100, 165, 3] == 0


def test_rings_lie_above_everything_on_a_line_of_paper(page):
    show(
        page,
        xy=corners([0.5, 0.5], [0.5, 0.5]),
        shares=[1, 0, 0, 0],
        colours=[*BLUE, *RED, *GREY, *GREY],
        mask=[1, 1, 1, 1],
        ringed=[0],
        paper=[0, 255, 0],
        radius=[80, 20],
        opacity=[1, 1],
    )
    row = picture(page)[100]
    # The red circle (radius 40) covers the blue one (radius 10), but not its ring: blue at 10, paper 1.4 beside it.
    assert row[150] == pytest.approx([*RED, 255], abs=3)
    assert row[159, 2] > 150
    assert row[161, 1] > 100
    show(page, mask=[0, 1, 1, 1])
    assert picture(page)[100, 159] == pytest.approx([*RED, 255], abs=3)  # a ghost has no ring


def test_a_circle_whose_centre_is_out_of_sight_is_still_seen(page):
    parts = {"colours": [*RED, *GREY, *GREY], "mask": [1, 1, 1], "ringed": [], "opacity": [1, 1]}
    show(page, xy=corners([0.5, 0.5]), shares=[0, 0, 0], radius=[60, 60], **parts)
    page.evaluate("() => { points.pan(-170, 0); return frame(); }")  # its centre is at -20, its radius 30
    drawn = picture(page)
    assert drawn[100, 5] == pytest.approx([*RED, 255], abs=3)
    assert drawn[100, 15, 3] == 0


@pytest.mark.parametrize("scale", [1, 3, 12])
def test_the_picture_is_the_same_without_webgl2(page, write_page, open_page, without_webgl2, scale):
    plain = open_page(write_page, before=without_webgl2)
    pictures = []
    for one in (page, plain):
        show(one, {"x": 0.1, "y": -0.05, "scale": scale}, **some_points())
        pictures.append(on_white(one))
    plain.close()
    assert_alike(*pictures)


@pytest.mark.parametrize(("dense", "n"), [(1, 400), (2, 400), (1, 20_000)])
def test_a_map_that_was_moved_looks_as_if_drawn_anew(browser, write_page, renderer, dense, n):
    context = browser.new_context(device_scale_factor=dense)
    context.add_init_script(renderer)
    moving, fresh = (context.new_page() for _ in range(2))
    for page in (moving, fresh):
        page.goto(write_page.as_uri())
        show(page, {"scale": 2}, **some_points(n))
    for by in ([7, 0], [0, -12], [-30, 5], [-3.25, 2], [0, 0], [260, -150], [-500, 10]):
        view = moving.evaluate("(by) => { points.pan(...by); return frame().then(() => points.view); }", by)
        show(fresh, view, **some_points(n))
        assert_alike(on_white(moving), on_white(fresh))
    context.close()


def test_a_lost_context_and_circles_beyond_its_limit_are_drawn_all_the_same(write_page, open_page, with_webgl2):
    page = open_page(write_page, before=with_webgl2)
    show(page, **some_points())
    before = picture(page)
    page.evaluate("window.extension = contexts.webgl2.getExtension('WEBGL_lose_context'); extension.loseContext()")
    page.wait_for_function("contexts.webgl2.isContextLost()")
    page.evaluate("frame()")
    lost = picture(page)
    assert np.abs(lost - before).mean() < 2
    page.evaluate("extension.restoreContext()")
    page.wait_for_function("!contexts.webgl2.isContextLost()")
    page.evaluate("frame().then(frame)")
    assert (picture(page) == before).all()
    page.close()
    tiny = "WebGL2RenderingContext.prototype.getParameter = () => [1, 8];"
    page = open_page(write_page, before=with_webgl2 + tiny)
    show(page, **some_points())
    assert (picture(page) == lost).all()
    page.close()


def test_the_point_under_the_pointer_is_the_nearest_of_those_that_can_be_seen(page):
    parts = some_points()
    show(page, {"x": 0.1, "y": -0.05, "scale": 3}, **parts)
    n = len(parts["shares"])
    places = np.array(page.evaluate(f"Array.from({{ length: {n} }}, (_, i) => points.toScreen(i))"))
    sizes = np.array(page.evaluate(f"Array.from({{ length: {n} }}, (_, i) => points.size(i))"))
    # Half of 2 to 8 pixels on this small canvas, times the root of the scale.
    assert sizes == pytest.approx((2 + 6 * np.array(parts["shares"])) / 2 * np.sqrt(3), rel=1e-5)
    asked = np.random.default_rng(1).random((200, 2)) * [WIDTH, HEIGHT]
    picked = page.evaluate("(asked) => asked.map(([x, y]) => points.pick(x, y, 2))", asked.tolist())
    for spot, index in zip(asked, picked, strict=True):
        away = np.hypot(*(places - spot).T)
        meant = (away < sizes + 2) & (np.array(parts["mask"]) == 1)
        assert index == (np.where(meant, away, np.inf).argmin() if meant.any() else -1)
    assert len({*picked}) > 20
    assert -1 in picked


def test_places_on_the_screen_and_on_the_map(page):
    show(page, xy=corners([0.25, 0.75]), shares=[0, 0, 0])
    # The unit is 0.92 x 200 = 184 pixels: a quarter of it left of and below the middle.
    assert page.evaluate("points.toScreen(0)") == pytest.approx([150 - 46, 100 + 46])
    assert page.evaluate("points.toMap(104, 146)") == pytest.approx([0.25, 0.75])
    assert page.evaluate("points.zoom(4, 104, 146), points.toScreen(0)") == pytest.approx([104, 146])
    assert page.evaluate("points.project(0.5, 0.75)") == pytest.approx([104 + 4 * 46, 146])
    assert page.evaluate("points.pan(7, -3), points.toScreen(0)") == pytest.approx([111, 143])
    assert page.evaluate("points.zoom(1000), points.view.scale") == 80
    assert page.evaluate("points.zoom(0), points.view") == {"x": 0, "y": 0, "scale": 1}


def test_what_a_lasso_holds(page):
    parts = some_points(2000)
    show(page, **parts)
    draw = np.random.default_rng(2)
    turns = np.sort(draw.random(60)) * 2 * np.pi
    star = 0.5 + np.column_stack([np.cos(turns), np.sin(turns)]) * draw.uniform(0.1, 0.6, (60, 1))
    inside = page.evaluate("(polygon) => [...points.inside(polygon)]", star.tolist())
    expected = Outline(star).contains_points(np.array(parts["xy"]).astype(np.float32).reshape(-1, 2))
    assert np.array(inside).astype(bool).tolist() == expected.tolist()
    assert 100 < sum(inside) < 1900
    # Two squares share a corner of a path that crosses itself in the middle: what is inside twice is outside.
    show(page, xy=[0.2, 0.5, 0.5, 0.5, 0.8, 0.5])
    twice = [[0, 0], [0.6, 0], [0.6, 1], [0, 1], [0, 0], [0.4, 0], [1, 0], [1, 1], [0.4, 1], [0.4, 0]]
    assert page.evaluate("(polygon) => [...points.inside(polygon)]", twice) == [1, 0, 1]
    assert page.evaluate("[...points.inside([]), ...points.inside([[0, 0], [1, 1]])]") == [0] * 6


def test_few_points_none_and_any_subset_of_the_settings(page):
    show(page, xy=[0.3, 0.7], colours=RED, radius=[20, 20], opacity=[1, 1], ringed=[], shares=[float("nan")], mask=[1])
    assert picture(page)[100, 150] == pytest.approx([*RED, 255], abs=3)  # one point is in the middle
    show(page, colours=BLUE)
    assert picture(page)[100, 150] == pytest.approx([*BLUE, 255], abs=3)
    show(page, xy=[])
    assert not picture(page).any()
    assert page.evaluate("[points.pick(150, 100, 1000), points.inside([[0, 0], [1, 0], [1, 1]]).length]") == [-1, 0]
    page.evaluate("() => { canvas.style.display = 'none'; points.resize(); return frame(); }")
    page.evaluate("() => { canvas.style.display = ''; points.resize(); return frame(); }")
    show(page, xy=[0.3, 0.7])
    assert picture(page)[100, 150, 3] == 255


def test_colours_of_css(page):
    assert page.evaluate("[rgb('#d55e00'), rgb('white'), rgb('color-mix(in srgb, #f00, #00f)')]") == [
        [0xD5, 0x5E, 0x00],
        [255, 255, 255],
        [128, 0, 128],
    ]
