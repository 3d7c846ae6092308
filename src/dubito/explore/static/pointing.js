/** Pointer and keyboard on the map: move, zoom, lasso, box, the image under the pointer, and opening it. */

import { at, make, oncePerFrame } from "./dom.js";
import { lassoText } from "./selection.js";

const CLICK = 4;
const CORNERS = 150;

export class Pointing {
  tool = "move";
  #pointers = new Map();
  #moved = false;
  #drawing = "move";
  #hovered = -1;

  /** @param app { address, columns, map, rows, selection, open(row) } */
  constructor(app) {
    Object.assign(this, app);
    this.canvas = at("canvas");
    this.map.onOverlay = () => this.#hovered >= 0 && this.#placeTip();
    const events = {
      pointerdown: (event) => this.#press(event),
      pointermove: (event) => this.#drag(event),
      pointerup: (event) => this.#release(event),
      pointercancel: (event) => this.#cancel(event),
      pointerleave: () => this.#hover(-1),
      blur: () => this.#hover(-1),
      keydown: (event) => this.#key(event),
    };
    for (const [name, run] of Object.entries(events)) this.canvas.addEventListener(name, run);
    this.canvas.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    for (const button of document.querySelectorAll("[data-tool]")) {
      button.addEventListener("click", () => this.use(button.dataset.tool));
    }
    for (const button of document.querySelectorAll("[data-zoom]")) {
      button.addEventListener("click", () => this.map.zoom(Number(button.dataset.zoom)));
    }
  }

  /** @param {"move"|"lasso"|"box"} tool */
  use(tool) {
    this.tool = tool;
    this.canvas.dataset.tool = tool;
    for (const button of document.querySelectorAll("[data-tool]")) {
      button.setAttribute("aria-pressed", String(button.dataset.tool === tool));
    }
  }

  // One finger or the mouse uses the tool; two fingers zoom; a touch that did not move opens an image.

  #spot(event) {
    const edge = this.canvas.getBoundingClientRect();
    return { x: event.clientX - edge.left, y: event.clientY - edge.top };
  }

  #press(event) {
    if (event.button > 0 || this.map.xy === null) return;
    if (this.#pointers.size === 0) {
      this.#moved = false;
      this.#drawing = event.shiftKey && this.tool === "move" ? "lasso" : this.tool;
    } else this.map.trace = null;
    this.#pointers.set(event.pointerId, this.#spot(event));
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
    const { map } = this;
    if (!this.#moved && this.#drawing !== "move" && this.#pointers.size === 1) {
      map.trace = [map.points.toMap(before.x, before.y)];
    }
    this.#moved = true;
    this.#hover(-1);
    if (this.#pointers.size === 2) this.#pinch(event.pointerId, now);
    else if (map.trace !== null) this.#extend(now);
    else map.pan(now.x - before.x, now.y - before.y);
    this.#pointers.set(event.pointerId, now);
  }

  #extend({ x, y }) {
    const { map } = this;
    const corner = map.points.toMap(x, y);
    const [left, top] = map.trace[0];
    if (this.#drawing === "lasso") map.trace.push(corner);
    else map.trace = [[left, top], [corner[0], top], corner, [left, corner[1]]];
    map.overlay();
  }

  #pinch(id, now) {
    const span = ([a, b]) => ({ x: (a.x + b.x) / 2, y: (a.y + b.y) / 2, wide: Math.hypot(a.x - b.x, a.y - b.y) });
    const old = span([...this.#pointers.values()]);
    this.#pointers.set(id, now);
    const fresh = span([...this.#pointers.values()]);
    this.map.points.pan(fresh.x - old.x, fresh.y - old.y);
    this.map.zoom(fresh.wide / Math.max(old.wide, 1), fresh.x, fresh.y);
  }

  #cancel(event) {
    this.#pointers.delete(event.pointerId);
    this.map.trace = null;
    this.map.overlay();
  }

  #release(event) {
    if (!this.#pointers.delete(event.pointerId) || this.#pointers.size > 0) return;
    const { map } = this;
    const corners = map.trace ?? [];
    map.trace = null;
    // Few enough corners that the lasso fits into an address.
    const every = Math.ceil(corners.length / CORNERS);
    const polygon = corners.filter((_, place) => place % every === 0);
    if (polygon.length > 2) this.address.set({ lasso: lassoText(map.layout, polygon) });
    map.overlay();
    if (this.#moved) return;
    const { x, y } = this.#spot(event);
    const row = map.points.pick(x, y, event.pointerType === "mouse" ? CLICK : 4 * CLICK);
    if (row >= 0) this.open(row);
  }

  #wheel(event) {
    event.preventDefault();
    const { x, y } = this.#spot(event);
    this.#hover(-1);
    const pixels = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 16 * event.deltaY : event.deltaY;
    this.map.zoom(Math.exp(-pixels / (event.ctrlKey ? 100 : 400)), x, y);
  }

  // The tooltip of the image under the pointer or at the keyboard's place.

  #point = oncePerFrame(({ x, y }) => this.#hover(this.map.xy === null ? -1 : this.map.points.pick(x, y, CLICK)));

  async #hover(row) {
    if (row === this.#hovered) return;
    this.#hovered = row;
    at("tip").hidden = row < 0;
    this.map.showRing(at("hover"), row);
    if (row < 0) return;
    at("tip").replaceChildren("…");
    this.#placeTip();
    const entry = await this.rows.one(row).catch(() => null);
    if (entry === null || row !== this.#hovered) return;
    at("tip").replaceChildren(...this.#tipLines(entry));
    this.#placeTip();
  }

  #tipLines({ row, id, label_name: label, predicted_name: predicted, picture }) {
    const score = this.columns.chosenScore(this.address);
    const values = this.columns.values(score);
    const line = (textContent) => make("span", { textContent });
    return [
      ...(picture ? [make("img", { src: `api/thumbnail/${row}`, alt: "", onload: () => this.map.overlay() })] : []),
      make("b", { textContent: id }),
      ...(label === null ? [] : [line(`class: ${label}`)]),
      ...(predicted === null ? [] : [line(`prediction: ${predicted}`)]),
      ...(values ? [line(`${this.columns.title(score)}: ${this.columns.format(score, values[row])}`)] : []),
    ];
  }

  #placeTip() {
    const { points } = this.map;
    this.map.showRing(at("hover"), this.#hovered);
    const [x, y] = points.toScreen(this.#hovered);
    const { offsetWidth: wide, offsetHeight: tall, style } = at("tip");
    const away = points.size(this.#hovered) + 12;
    const left = x + away + wide <= points.width ? x + away : x - away - wide;
    style.left = `${Math.max(4, Math.min(left, points.width - wide - 4))}px`;
    style.top = `${Math.max(4, Math.min(y - tall / 2, points.height - tall - 4))}px`;
  }

  // The keyboard.

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.map.xy === null) return;
    const keys = {
      ArrowLeft: () => this.#step(-1, 0),
      ArrowRight: () => this.#step(1, 0),
      ArrowUp: () => this.#step(0, -1),
      ArrowDown: () => this.#step(0, 1),
      Enter: () => this.#hovered >= 0 && this.open(this.#hovered),
      "+": () => this.map.zoom(1.5),
      "=": () => this.map.zoom(1.5),
      "-": () => this.map.zoom(1 / 1.5),
      0: () => this.map.zoom(0),
    };
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    keys[event.key]();
  }

  /** The next image in a direction, not far and not much aside; at first the one nearest to the middle. */
  #step(dx, dy) {
    const { xy, points } = this.map;
    const [mask, from] = [this.selection.shown, this.#hovered];
    const [x, y] = from < 0 ? points.toMap(points.width / 2, points.height / 2) : [xy[2 * from], xy[2 * from + 1]];
    let [best, least] = [-1, Infinity];
    for (let i = 0; i < mask.length; i += 1) {
      if (mask[i] === 0 || i === from) continue;
      const [ex, ey] = [xy[2 * i] - x, xy[2 * i + 1] - y];
      const [along, aside] = [ex * dx + ey * dy, Math.abs(ex * dy) + Math.abs(ey * dx)];
      const far = from < 0 ? Math.hypot(ex, ey) : along + 2 * aside;
      if (far < least && (from < 0 || (along > 0 && aside <= along))) [best, least] = [i, far];
    }
    if (best < 0) return;
    this.map.visit(best);
    this.#hover(best);
  }
}
