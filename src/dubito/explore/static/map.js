/** The map: every image a circle, coloured by one column, sized and faded by another; move, zoom, lasso, point, open. */

import { paint, readTheme } from "./colours.js";
import { at, make, makeSvg, oncePerFrame } from "./dom.js";
import { Points } from "./points.js";
import { lassoText, readLasso } from "./selection.js";

const RINGED = 0.05;
const GLIDE = 450;
const MOST_GLIDING = 200_000;
const CLICK = 4;

/** Radius of the smallest circle in pixels: 3 for 2,000 images, less for more, which would hide each other. */
const smallest = (rows) => Math.min(5, Math.max(1, 3 * (2000 / rows) ** 0.4));

export class ImageMap {
  #pointers = new Map();
  #trace = null;
  #moved = false;
  #hovered = -1;
  #xy = null;
  #turns = {};
  #place = null;
  #drawn = {};

  /** @param app { about, address, columns, layouts, rows, report, open(row) } */
  constructor(app) {
    Object.assign(this, app);
    this.box = at("map");
    this.canvas = at("canvas");
    this.points = new Points(this.canvas);
    this.theme = readTheme();
    this.layout = null;
    this.tool = "move";
    const radius = smallest(this.about.rows);
    this.#set({ radius: [radius, 4 * radius], opacity: [0.9, 0.2], paper: this.theme.paper, ghost: this.theme.ghost });
    this.#listen();
    this.#restoreView();
    new ResizeObserver(() => {
      this.points.resize();
      this.#overlay();
    }).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#repaint());
  }

  /** Follow the selection: images that are not shown become ghosts. */
  follow(selection) {
    this.selection = selection;
    selection.watch(() => this.showMask(selection.shown));
    this.address.watch(["lasso", "image"], () => this.#overlay());
    this.address.watch(["view"], () => this.#restoreView());
  }

  showMask(mask) {
    this.#set({ mask });
  }

  /** The renderer fits everything to the number of positions: what comes before them waits. */
  #set(parts) {
    Object.assign(this.#drawn, parts);
    if (this.#xy !== null) this.points.set(parts);
    this.points.draw();
  }

  /** Rows inside a polygon of any layout, drawn or not. */
  async inside(layout, polygon) {
    const xy = await this.layouts.positions(layout);
    if (xy === this.#xy) return this.points.inside(polygon);
    this.points.set({ xy });
    const mask = this.points.inside(polygon);
    this.points.set(this.#drawn);
    return mask;
  }

  /** Draw another layout; circles glide to their new places where motion is welcome. */
  async showLayout(layout) {
    const xy = await this.#latest("layout", this.layouts.positions(layout));
    if (xy === null || layout === this.layout) return;
    const from = this.#xy;
    [this.layout, this.#xy] = [layout, xy];
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches || xy.length > 2 * MOST_GLIDING;
    if (from === null) this.#set({ ...this.#drawn, xy });
    else if (still) this.#set({ xy });
    else this.#glide(from, xy);
    this.#overlay();
  }

  #glide(from, to) {
    const start = performance.now();
    const between = new Float32Array(to.length);
    const step = () => {
      if (this.#xy !== to) return;
      const time = Math.min(1, (performance.now() - start) / GLIDE);
      const share = time * time * (3 - 2 * time);
      for (let i = 0; i < to.length; i += 1) between[i] = from[i] + (to[i] - from[i]) * share;
      this.#set({ xy: time < 1 ? between : to });
      this.#overlay();
      if (time < 1) requestAnimationFrame(step);
    };
    step();
  }

  /** Colour by a column; returns the key, or null if another column was chosen meanwhile. */
  async showColours(name) {
    if ((await this.#latest("colours", this.columns.load(name))) === null) return null;
    this.colouring = name;
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

  #repaint() {
    this.theme = readTheme();
    this.#set({ paper: this.theme.paper, ghost: this.theme.ghost });
    if (this.colouring) this.showColours(this.colouring);
  }

  /** What a promise resolves to, or null if a later call of the same kind has overtaken it. */
  async #latest(kind, promise) {
    this.#turns[kind] = promise;
    const value = await promise;
    return this.#turns[kind] === promise ? value : null;
  }

  useTool(tool) {
    this.tool = tool;
    this.canvas.dataset.tool = tool;
    for (const button of document.querySelectorAll("[data-tool]")) {
      button.setAttribute("aria-pressed", String(button.dataset.tool === tool));
    }
  }

  // What is in sight.

  #look(view, keep = true) {
    Object.assign(this.points.view, view);
    this.points.draw();
    this.#overlay();
    if (keep) this.#saveView();
  }

  #saveView() {
    const { x, y, scale } = this.points.view;
    const text = scale === 1 && x === 0 && y === 0 ? "" : [x, y, scale].map((one) => Number(one.toFixed(4))).join(",");
    this.viewText = text;
    this.address.set({ view: text }, "replace");
  }

  #restoreView() {
    const text = this.address.get("view");
    if (text === this.viewText) return;
    this.viewText = text;
    const [x, y, scale] = text === "" ? [0, 0, 1] : text.split(",").map(Number);
    if ([x, y, scale].every(Number.isFinite) && scale > 0) this.#look({ x, y, scale }, false);
  }

  zoom(factor, px, py) {
    this.points.zoom(factor, px, py);
    this.#overlay();
    this.#saveView();
  }

  /** Bring an image into sight without changing the scale. */
  visit(row) {
    if (this.#xy === null) return;
    const [x, y] = this.points.toScreen(row);
    const { width, height } = this.points;
    if (x > 20 && y > 20 && x < width - 20 && y < height - 20) return;
    this.points.pan(width / 2 - x, height / 2 - y);
    this.#overlay();
    this.#saveView();
  }

  // Above the circles: the lasso, the open image, a new image.

  #overlay = oncePerFrame(() => {
    const row = this.address.get("image");
    this.#ring(at("ring"), row !== "" && this.#xy !== null && Number(row) < this.about.rows ? Number(row) : -1);
    this.#outline();
    this.#pin();
    if (this.#hovered >= 0) this.#placeTip();
  });

  #ring(ring, row) {
    ring.hidden = row < 0;
    if (row < 0) return;
    const [x, y] = this.points.toScreen(row);
    const r = this.points.size(row) + 4;
    Object.assign(ring.style, { left: `${x - r}px`, top: `${y - r}px`, width: `${2 * r}px`, height: `${2 * r}px` });
  }

  #outline() {
    const { layout, polygon } = readLasso(this.address.get("lasso"));
    const drawn = this.#trace ?? (layout === this.layout && this.#xy !== null ? polygon : []);
    const corners = drawn.map(([x, y]) => this.points.project(x, y).map((one) => one.toFixed(1)).join(","));
    at("outline").replaceChildren(...(corners.length > 1 ? [makeSvg("polygon", { points: corners.join(" ") })] : []));
  }

  /** Where a new image lies in every layout; null removes it. */
  showNew(positions) {
    this.#place = positions;
    this.#overlay();
  }

  #pin() {
    const place = this.#place?.[this.layout];
    at("pin").hidden = !place;
    if (!place) return;
    const [x, y] = this.points.project(...place);
    Object.assign(at("pin").style, { left: `${x}px`, top: `${y}px` });
  }

  // Pointing: one finger or the mouse moves the map, draws a lasso or a box; two fingers zoom; a touch that did not move opens.

  #listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => this.#press(event));
    canvas.addEventListener("pointermove", (event) => this.#drag(event));
    canvas.addEventListener("pointerup", (event) => this.#release(event));
    canvas.addEventListener("pointercancel", (event) => this.#cancel(event));
    canvas.addEventListener("pointerleave", () => this.#hover(-1));
    canvas.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.#key(event));
    canvas.addEventListener("blur", () => this.#hover(-1));
  }

  #spot(event) {
    const edge = this.canvas.getBoundingClientRect();
    return { x: event.clientX - edge.left, y: event.clientY - edge.top };
  }

  #press(event) {
    if (event.button > 0 || this.#xy === null) return;
    const spot = this.#spot(event);
    if (this.#pointers.size === 0) {
      this.#moved = false;
      this.drawing = event.shiftKey && this.tool === "move" ? "lasso" : this.tool;
    } else this.#trace = null;
    this.#pointers.set(event.pointerId, spot);
    try {
      this.canvas.setPointerCapture(event.pointerId);
    } catch {
      // A pointer that has been lifted meanwhile cannot be captured.
    }
  }

  #drag(event) {
    const [now, before] = [this.#spot(event), this.#pointers.get(event.pointerId)];
    if (before === undefined) {
      this.#point(now);
      return;
    }
    if (!this.#moved && Math.hypot(now.x - before.x, now.y - before.y) < CLICK) return;
    if (!this.#moved && this.drawing !== "move" && this.#pointers.size === 1) this.#trace = [this.points.toMap(before.x, before.y)];
    this.#moved = true;
    this.#hover(-1);
    if (this.#pointers.size === 2) this.#pinch(event.pointerId, now);
    else if (this.#trace) this.#extend(now);
    else {
      this.points.pan(now.x - before.x, now.y - before.y);
      this.#saveView();
    }
    this.#pointers.set(event.pointerId, now);
    this.#overlay();
  }

  #extend({ x, y }) {
    const corner = this.points.toMap(x, y);
    if (this.drawing === "lasso") this.#trace.push(corner);
    else {
      const [left, top] = this.#trace[0];
      this.#trace = [[left, top], [corner[0], top], corner, [left, corner[1]]];
    }
  }

  #pinch(id, now) {
    const span = ([a, b]) => ({ x: (a.x + b.x) / 2, y: (a.y + b.y) / 2, wide: Math.hypot(a.x - b.x, a.y - b.y) });
    const old = span([...this.#pointers.values()]);
    this.#pointers.set(id, now);
    const fresh = span([...this.#pointers.values()]);
    this.points.pan(fresh.x - old.x, fresh.y - old.y);
    this.zoom(fresh.wide / Math.max(old.wide, 1), fresh.x, fresh.y);
  }

  #cancel(event) {
    this.#pointers.delete(event.pointerId);
    this.#trace = null;
    this.#overlay();
  }

  #release(event) {
    if (!this.#pointers.delete(event.pointerId) || this.#pointers.size > 0) return;
    const trace = this.#trace;
    this.#trace = null;
    if (trace !== null && trace.length > 2) this.address.set({ lasso: lassoText(this.layout, thin(trace)) });
    this.#overlay();
    if (this.#moved) return;
    const { x, y } = this.#spot(event);
    const row = this.points.pick(x, y, event.pointerType === "mouse" ? 4 : 16);
    if (row >= 0) this.open(row);
  }

  #wheel(event) {
    event.preventDefault();
    const { x, y } = this.#spot(event);
    this.#hover(-1);
    const pixels = event.deltaMode === 1 ? 16 * event.deltaY : event.deltaY;
    this.zoom(Math.exp(-pixels / (event.ctrlKey ? 100 : 400)), x, y);
  }

  // The tooltip: which image is under the pointer or under the keyboard's focus.

  #point = oncePerFrame(({ x, y }) => this.#hover(this.#xy === null ? -1 : this.points.pick(x, y, 4)));

  async #hover(row) {
    if (row === this.#hovered) return;
    this.#hovered = row;
    const tip = at("tip");
    tip.hidden = row < 0;
    this.#ring(at("hover"), row);
    if (row < 0) return;
    tip.replaceChildren(make("b", { textContent: "…" }));
    this.#placeTip();
    const entry = await this.rows.one(row).catch(() => null);
    if (entry === null || row !== this.#hovered) return;
    tip.replaceChildren(...this.#tipLines(entry));
    this.#placeTip();
  }

  #tipLines(entry) {
    const score = this.columns.chosenScore(this.address);
    const values = this.columns.values(score);
    const picture = entry.picture ? [make("img", { src: `api/thumbnail/${entry.row}`, alt: "", onload: () => this.#placeTip() })] : [];
    const line = (text) => make("span", { textContent: text });
    return [
      ...picture,
      make("b", { textContent: entry.id }),
      ...(entry.label_name !== null ? [line(`Class: ${entry.label_name}`)] : []),
      ...(entry.predicted_name !== null ? [line(`Prediction: ${entry.predicted_name}`)] : []),
      ...(values ? [line(`${this.columns.title(score)}: ${this.columns.format(score, values[entry.row])}`)] : []),
    ];
  }

  #placeTip() {
    const tip = at("tip");
    this.#ring(at("hover"), this.#hovered);
    const [x, y] = this.points.toScreen(this.#hovered);
    const away = this.points.size(this.#hovered) + 12;
    const { width, height } = this.points;
    const left = x + away + tip.offsetWidth <= width ? x + away : x - away - tip.offsetWidth;
    tip.style.left = `${Math.max(4, Math.min(left, width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(4, Math.min(y - tip.offsetHeight / 2, height - tip.offsetHeight - 4))}px`;
  }

  // The keyboard.

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const keys = {
      ArrowLeft: () => this.#step(-1, 0),
      ArrowRight: () => this.#step(1, 0),
      ArrowUp: () => this.#step(0, -1),
      ArrowDown: () => this.#step(0, 1),
      Enter: () => this.#hovered >= 0 && this.open(this.#hovered),
      "+": () => this.zoom(1.5),
      "=": () => this.zoom(1.5),
      "-": () => this.zoom(1 / 1.5),
      0: () => this.zoom(0),
    };
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    keys[event.key]();
  }

  /** The next image in a direction: not far, and not much aside. */
  #step(dx, dy) {
    if (this.#xy === null) return;
    const [xy, mask, from] = [this.#xy, this.selection.shown, this.#hovered];
    const [x, y] = from < 0 ? this.points.toMap(this.points.width / 2, this.points.height / 2) : [xy[2 * from], xy[2 * from + 1]];
    let [best, least] = [-1, Infinity];
    for (let i = 0; i < mask.length; i += 1) {
      if (mask[i] === 0 || i === from) continue;
      const [ex, ey] = [xy[2 * i] - x, xy[2 * i + 1] - y];
      const [along, aside] = [ex * dx + ey * dy, Math.abs(ex * dy) + Math.abs(ey * dx)];
      const far = from < 0 ? ex * ex + ey * ey : along + 2 * aside;
      if (far < least && (from < 0 || (along > 0 && aside <= along))) [best, least] = [i, far];
    }
    if (best < 0) return;
    this.visit(best);
    this.#hover(best);
  }
}

/** At most 150 corners, so that a lasso fits into an address. */
function thin(corners) {
  const every = Math.ceil(corners.length / 150);
  return corners.filter((_, place) => place % every === 0);
}
