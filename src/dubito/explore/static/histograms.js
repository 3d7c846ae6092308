/** Linked histograms: all images in grey, the shown ones in colour; a brush, by pointer or keyboard, filters by score. */

import { at, count, heading, make, makeSvg, oncePerFrame } from "./dom.js";
import { rangeText, readRange } from "./selection.js";

const BINS = 60;
const TALL = 40;
const NONE = 255;

const join = (names) => names.map(encodeURIComponent).join(",");
const split = (text) => text.split(",").map(decodeURIComponent);

export function startHistograms(app) {
  const { address, columns } = app;
  const open = new Map();
  const names = () =>
    address.get("histograms") === "" ? [columns.chosenScore(address)] : split(address.get("histograms"));
  const ranged = () => address.filters().flatMap(([key]) => (key.startsWith("range.") ? [key.slice(6)] : []));
  const show = () => {
    const wanted = [...new Set([...names(), ...ranged()])].filter((name) => columns.metas.get(name)?.kind === "score");
    for (const [name, histogram] of open) if (!wanted.includes(name)) open.delete(name) && histogram.close();
    for (const name of wanted) if (!open.has(name)) open.set(name, new Histogram(app, name, () => remove(name)));
    at("histograms").classList.toggle("single", wanted.length === 1);
    at("histograms").replaceChildren(...wanted.map((name) => open.get(name).element));
    fillChoice(wanted);
  };
  const remove = (name) => {
    const rest = [...open.keys()].filter((one) => one !== name);
    address.set({ histograms: join(rest), [`range.${name}`]: "" });
  };
  const choice = at("add-histogram");
  const fillChoice = (wanted) => {
    const rest = columns.ofKind("score").filter(({ name }) => !wanted.includes(name));
    choice.replaceChildren(
      new Option("Add a histogram…", ""),
      ...rest.map(({ name, title }) => new Option(title, name)),
    );
    choice.hidden = rest.length === 0;
  };
  choice.addEventListener("change", () => address.set({ histograms: join([...open.keys(), choice.value]) }));
  address.watch(["histograms", "score", "range."], show);
  show();
}

class Histogram {
  #closed = false;

  constructor({ address, columns, selection }, name, remove) {
    Object.assign(this, { address, columns, selection, name, key: `range.${name}` });
    const { title, about } = columns.metas.get(name);
    [this.all, this.part, this.veil] = ["all", "part", "veil"].map((name) => makeSvg("path", { class: name }));
    const frame = { viewBox: `0 0 ${BINS} ${TALL}`, preserveAspectRatio: "none", "aria-hidden": "true" };
    this.svg = makeSvg("svg", frame, this.all, this.part, this.veil);
    this.inputs = ["at least", "at most"].map((word, which) => {
      const events = { oninput: () => this.slide(which, "draft"), onchange: () => this.slide(which, "push") };
      return make("input", { type: "range", min: 0, max: BINS, "aria-label": `${title}, ${word}`, ...events });
    });
    this.words = make("p", { className: "fine" });
    const label = `Remove the histogram of ${title}`;
    const close = make("button", { type: "button", className: "plain", "aria-label": label, onclick: remove }, "×");
    this.element = make(
      "div",
      { className: "histogram", role: "group", "aria-label": `Histogram of ${title}` },
      make("div", { className: "head" }, make("h3", { textContent: heading(title), title: about }), close),
      make("div", { className: "bins" }, this.svg, ...this.inputs),
      this.words,
    );
    this.#brush();
    address.watch([this.key], () => this.ready && this.#showRange());
    selection.watch(() => this.ready && this.#draw());
    columns.watch((changed) => changed === name && this.load());
    this.load();
  }

  close() {
    this.#closed = true;
    this.ready = false;
  }

  async load() {
    try {
      await this.columns.load(this.name);
    } catch (error) {
      this.words.textContent = error.message;
      return;
    }
    if (this.#closed) return;
    this.#bin();
    this.ready = true;
    this.#draw();
    this.#showRange();
  }

  /** Bins between the 0.5 % and 99.5 % quantiles; the first and the last also hold what lies beyond. */
  #bin() {
    const { columns, name } = this;
    const values = columns.values(name);
    let [low, high] = [columns.quantile(name, 0.005), columns.quantile(name, 0.995)];
    if (!(high > low)) [low, high] = [columns.quantile(name, 0), columns.quantile(name, 1)];
    if (!(high > low)) [low, high] = [low - 0.5, low + 0.5];
    Object.assign(this, { low, step: (high - low) / BINS, bins: new Uint8Array(values.length) });
    for (let i = 0; i < values.length; i += 1) {
      const bin = Math.floor((values[i] - low) / this.step);
      this.bins[i] = Number.isNaN(values[i]) ? NONE : Math.max(0, Math.min(BINS - 1, bin));
    }
    this.most = values.includes(Infinity) ? Infinity : columns.quantile(name, 1);
    this.counts = this.#count(null);
    this.all.setAttribute("d", outline(this.counts));
  }

  #count(mask) {
    const counts = new Uint32Array(256);
    for (let i = 0; i < this.bins.length; i += 1) counts[this.bins[i]] += mask === null ? 1 : mask[i];
    return counts;
  }

  #draw = oncePerFrame(() => this.part.setAttribute("d", outline(this.#count(this.selection.shown))));

  /** The value at an edge between bins, rounded to what an address should hold; open at both ends. */
  #edge(place) {
    if (place <= 0) return -Infinity;
    return place >= BINS ? Infinity : Number((this.low + place * this.step).toPrecision(6));
  }

  #place(value) {
    if (!Number.isFinite(value)) return value < 0 ? 0 : BINS;
    return Math.max(0, Math.min(BINS, Math.round((value - this.low) / this.step)));
  }

  #showRange() {
    const [low, high] = readRange(this.address.get(this.key));
    const format = (value) => this.columns.format(this.name, value);
    const places = [this.#place(low), this.#place(high)];
    this.inputs.forEach((input, which) => {
      input.value = places[which];
      const value = [low, high][which];
      input.setAttribute("aria-valuetext", Number.isFinite(value) ? format(value) : "no limit");
    });
    this.veil.setAttribute("d", `M0 0H${places[0]}V${TALL}H0ZM${places[1]} 0H${BINS}V${TALL}H${places[1]}Z`);
    const none = this.counts[NONE] > 0 ? ` · ${count(this.counts[NONE])} without a value` : "";
    const from = low === -Infinity ? this.columns.quantile(this.name, 0) : low;
    const to = high === Infinity ? this.most : high;
    this.words.textContent = `${format(from)} to ${format(to)}${none}`;
    this.words.classList.toggle("active", low !== -Infinity || high !== Infinity);
  }

  slide(which, how) {
    const places = this.inputs.map((input) => Number(input.value));
    if (places[0] >= places[1]) places[which] = places[1 - which] + (which === 0 ? -1 : 1);
    this.#filter(places, how);
  }

  #filter([low, high], how) {
    this.address.set({ [this.key]: rangeText([this.#edge(low), this.#edge(high)]) }, how);
    this.#showRange();
  }

  /** Dragging over the bins selects those between; a click without dragging shows all again. */
  #brush() {
    let start = null;
    const place = (event) => {
      const edge = this.svg.getBoundingClientRect();
      return Math.max(0, Math.min(BINS, ((event.clientX - edge.left) / edge.width) * BINS));
    };
    const drag = (event, how) => {
      const [low, high] = [start, place(event)].sort((a, b) => a - b);
      this.#filter(high - low < 0.5 ? [0, BINS] : [Math.floor(low), Math.ceil(high)], how);
    };
    this.svg.addEventListener("pointerdown", (event) => {
      if (!this.ready || event.button > 0) return;
      start = place(event);
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener("pointermove", (event) => start !== null && drag(event, "draft"));
    this.svg.addEventListener("pointerup", (event) => {
      if (start !== null) drag(event, "push");
      start = null;
    });
    this.svg.addEventListener("pointercancel", () => (start = null));
  }
}

/** Bars as one path, scaled to their own peak. */
function outline(counts) {
  const peak = Math.max(1, ...counts.subarray(0, BINS));
  let path = `M0 ${TALL}`;
  for (let bin = 0; bin < BINS; bin += 1) {
    // The least frequent bin that is not empty is still visible.
    const tall = counts[bin] === 0 ? 0 : Math.max(1, (counts[bin] / peak) * TALL);
    path += `H${bin + 0.08}V${(TALL - tall).toFixed(2)}H${bin + 0.92}V${TALL}`;
  }
  return `${path}Z`;
}
