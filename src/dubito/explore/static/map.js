/** The map: every image a circle, coloured by one column, sized and faded by another; lasso, open and new image above. */

import { paint, readTheme } from "./colours.js";
import { at, later, makeSvg, oncePerFrame } from "./dom.js";
import { Points } from "./points.js";
import { readLasso } from "./selection.js";

const RINGED = 0.05;
const GLIDE = 450;
const MANY = 200_000;

/** Radius of the smallest circle in pixels: 3 for 2,000 images, less for more, which would hide each other. */
const smallest = (rows) => Math.min(5, Math.max(1, 3 * (2000 / rows) ** 0.4));

export class ImageMap {
  /** Name and positions of the layout that is drawn, or that circles are gliding to; null before the first one. */
  layout = null;
  xy = null;
  /** Corners of the lasso or box that is being drawn, in the map's unit; else null. */
  trace = null;
  #drawn = {};
  #turns = {};
  #newPlaces = null;
  #viewText = "";

  constructor({ about, address, columns, layouts }) {
    Object.assign(this, { about, address, columns, layouts });
    this.points = new Points(at("canvas"));
    const radius = smallest(about.rows);
    this.#set({ radius: [radius, 4 * radius], opacity: [0.9, 0.2] });
    this.readTheme();
    this.#restoreView();
    address.watch(["lasso", "image"], () => this.overlay());
    address.watch(["view"], () => this.#restoreView());
    new ResizeObserver(() => {
      this.points.resize();
      this.overlay();
    }).observe(at("map"));
  }

  /** Images that are not shown become ghosts. */
  follow(selection) {
    selection.watch(this.whenCalm(() => this.showMask(selection.shown)));
  }

  /** Drawing very many circles takes long: they follow a slider or a brush when it rests. */
  whenCalm(run) {
    return this.about.rows > MANY ? later(run, 120) : run;
  }

  /** The renderer fits everything to the number of positions: what comes before them waits. */
  #set(parts) {
    Object.assign(this.#drawn, parts);
    if (this.xy !== null) this.points.set(parts);
    this.points.draw();
  }

  /** What a promise resolves to, or null if a later call of the same kind has overtaken it. */
  async #latest(kind, promise) {
    this.#turns[kind] = promise;
    const value = await promise;
    return this.#turns[kind] === promise ? value : null;
  }

  /** Rows inside a polygon of any layout, drawn or not. */
  async inside(layout, polygon) {
    const xy = await this.layouts.positions(layout);
    if (xy === this.#drawn.xy) return this.points.inside(polygon);
    this.points.set({ xy });
    const mask = this.points.inside(polygon);
    this.points.set(this.#drawn);
    return mask;
  }

  /** Draw another layout; circles glide to their new places where motion is welcome. */
  async showLayout(layout) {
    const xy = await this.#latest("layout", this.layouts.positions(layout));
    if (xy === null || layout === this.layout) return;
    const from = this.xy;
    [this.layout, this.xy] = [layout, xy];
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches || this.about.rows > MANY;
    if (from === null) this.#set({ ...this.#drawn, xy });
    else if (still) this.#set({ xy });
    else this.#glide(from, xy);
    this.overlay();
  }

  #glide(from, to) {
    const start = performance.now();
    const between = new Float32Array(to.length);
    const step = () => {
      if (this.xy !== to) return;
      const time = Math.min(1, (performance.now() - start) / GLIDE);
      const share = time * time * (3 - 2 * time);
      for (let i = 0; i < to.length; i += 1) between[i] = from[i] + (to[i] - from[i]) * share;
      this.#set({ xy: time < 1 ? between : to });
      this.overlay();
      if (time < 1) requestAnimationFrame(step);
    };
    step();
  }

  showMask(mask) {
    this.#set({ mask });
  }

  /** Colour by a column; returns what the key shows, or null if another column was chosen meanwhile. */
  async showColours(name) {
    if ((await this.#latest("colours", this.columns.load(name))) === null) return null;
    const painted = paint(this.columns, name, this.theme);
    this.#set({ colours: painted.colours });
    return painted;
  }

  /** Size and fade by a score; the 5 % with the highest have a ring, as they are the most transparent. */
  async showShares(name) {
    if ((await this.#latest("shares", this.columns.load(name))) === null) return;
    const { columns } = this;
    const [order, known, values] = [columns.order(name), columns.known(name), columns.values(name)];
    const most = Math.min(known, Math.max(1, Math.round(RINGED * known)));
    const lowest = columns.quantile(name, 0);
    const ringed = order.slice(known - most, known).filter((row) => values[row] > lowest);
    this.#set({ shares: columns.shares(name), ringed });
  }

  /** Take over the colours of light or dark; circles have to be coloured again. */
  readTheme() {
    this.theme = readTheme();
    this.#set({ paper: this.theme.paper, ghost: this.theme.ghost });
  }

  // What is in sight.

  zoom(factor, px, py) {
    this.points.zoom(factor, px, py);
    this.keepView();
  }

  pan(dx, dy) {
    this.points.pan(dx, dy);
    this.keepView();
  }

  /** Bring an image into sight without changing the scale. */
  visit(row) {
    const [x, y] = this.points.toScreen(row);
    const { width, height } = this.points;
    if (x < 20 || y < 20 || x > width - 20 || y > height - 20) this.pan(width / 2 - x, height / 2 - y);
  }

  keepView() {
    const { x, y, scale } = this.points.view;
    this.#viewText = scale === 1 && x === 0 && y === 0 ? "" : [x, y, scale].map((one) => Number(one.toFixed(4))).join();
    this.address.set({ view: this.#viewText }, "replace");
    this.overlay();
  }

  #restoreView() {
    const text = this.address.get("view");
    const [x, y, scale] = text === "" ? [0, 0, 1] : text.split(",").map(Number);
    if (text === this.#viewText || ![x, y, 1 / scale].every(Number.isFinite) || scale < 0) return;
    this.#viewText = text;
    Object.assign(this.points.view, { x, y, scale });
    this.points.draw();
    this.overlay();
  }

  // Above the circles.

  overlay = oncePerFrame(() => {
    const row = Number(this.address.get("image", "-1"));
    this.showRing(at("ring"), this.xy !== null && row < this.about.rows ? row : -1);
    this.#showLasso();
    this.#showPin();
    this.onOverlay?.();
  });

  showRing(ring, row) {
    ring.hidden = !(row >= 0);
    if (ring.hidden) return;
    const [x, y] = this.points.toScreen(row);
    const r = this.points.size(row) + 4;
    Object.assign(ring.style, { left: `${x - r}px`, top: `${y - r}px`, width: `${2 * r}px`, height: `${2 * r}px` });
  }

  #showLasso() {
    const { layout, polygon } = readLasso(this.address.get("lasso"));
    const corners = this.trace ?? (layout === this.layout ? polygon : []);
    const points = corners
      .map(([x, y]) =>
        this.points
          .project(x, y)
          .map((one) => one.toFixed(1))
          .join(),
      )
      .join(" ");
    at("outline").replaceChildren(...(corners.length > 1 ? [makeSvg("polygon", { points })] : []));
  }

  /** Where a new image lies in every layout; null removes it. */
  showNew(places) {
    this.#newPlaces = places;
    this.overlay();
  }

  #showPin() {
    const place = this.#newPlaces?.[this.layout];
    at("pin").hidden = !place;
    if (!place) return;
    const [x, y] = this.points.project(...place);
    Object.assign(at("pin").style, { left: `${x}px`, top: `${y}px` });
  }
}
