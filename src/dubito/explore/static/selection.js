/** Which images are shown: one mask of bytes per filter in the address, and all of them combined. */

import { getBytes, unpack } from "./api.js";

/** Polygon and layout of a lasso as text in the address, and back. */
export const lassoText = (layout, polygon) =>
  `${layout}!${polygon.map(([x, y]) => `${Number(x.toFixed(4))},${Number(y.toFixed(4))}`).join(",")}`;

export function readLasso(text) {
  const cut = text.lastIndexOf("!");
  const numbers = text
    .slice(cut + 1)
    .split(",")
    .map(Number);
  const polygon = [];
  for (let i = 0; i + 1 < numbers.length; i += 2) polygon.push([numbers[i], numbers[i + 1]]);
  return { layout: text.slice(0, cut), polygon };
}

/** Limits of a range as text in the address, and back; an open end is infinite. */
export const rangeText = ([low, high]) =>
  low === -Infinity && high === Infinity
    ? ""
    : `${Number.isFinite(low) ? low : ""}~${Number.isFinite(high) ? high : ""}`;

export function readRange(text) {
  if (!text.includes("~")) return [-Infinity, Infinity];
  const [low, high] = text.split("~");
  return [low === "" ? -Infinity : Number(low), high === "" ? Infinity : Number(high)];
}

export const readNumbers = (text) =>
  text
    .split(",")
    .filter((one) => one !== "")
    .map(Number);

export class Selection {
  #parts = new Map();
  #watchers = [];
  #turn = 0;

  /**
   * @param inside (layout, polygon) => Promise<Uint8Array>: rows inside a lasso
   * @param report called with a sentence if a filter cannot be applied
   */
  constructor({ address, columns, inside, report }) {
    Object.assign(this, { address, columns, inside, report });
    this.shown = new Uint8Array(columns.rows).fill(1);
    this.count = columns.rows;
    address.watchFilters(() => this.update());
    columns.watch((name) => {
      if (["in.", "is.", "range."].some((kind) => address.get(kind + name) !== "")) this.update();
    });
  }

  watch(run) {
    this.#watchers.push(run);
  }

  get filtered() {
    return this.address.filters().length > 0;
  }

  clear() {
    this.address.set(Object.fromEntries(this.address.filters().map(([key]) => [key, ""])));
  }

  /** Bring the mask up to date with the address; only filters that changed are computed again. */
  async update() {
    this.#turn += 1;
    const turn = this.#turn;
    const filters = this.address.filters();
    const parts = new Map();
    await Promise.all(
      filters.map(async ([key, value]) => {
        const before = this.#parts.get(key);
        const version = this.columns.version(key.slice(key.indexOf(".") + 1));
        if (before?.value === value && before.version === version) parts.set(key, before);
        else
          await this.#part(key, value).then(
            (part) => parts.set(key, part),
            (error) => this.report(error.message),
          );
      }),
    );
    if (turn !== this.#turn) return;
    this.#parts = parts;
    this.#combine();
    for (const run of this.#watchers) run();
  }

  async #part(key, value) {
    const cut = key.indexOf(".");
    const [kind, name] = cut < 0 ? [key, ""] : [key.slice(0, cut), key.slice(cut + 1)];
    if (kind === "find") {
      return {
        value,
        mask: unpack(new Uint8Array(await getBytes(`api/find?text=${encodeURIComponent(value)}`)), this.columns.rows),
      };
    }
    if (kind === "lasso") {
      const { layout, polygon } = readLasso(value);
      return { value, mask: await this.inside(layout, polygon) };
    }
    if (!this.columns.has(name)) throw new Error(`The address filters by '${name}', which this table does not have.`);
    const values = await this.columns.load(name);
    const mask = kind === "range" ? withinRange(values, readRange(value)) : amongNumbers(values, readNumbers(value));
    return { value, mask, version: this.columns.version(name) };
  }

  #combine() {
    const shown = new Uint8Array(this.columns.rows).fill(1);
    for (const { mask } of this.#parts.values()) {
      for (let i = 0; i < shown.length; i += 1) shown[i] &= mask[i];
    }
    let count = 0;
    for (let i = 0; i < shown.length; i += 1) count += shown[i];
    Object.assign(this, { shown, count });
  }
}

function withinRange(values, [low, high]) {
  const [least, most] = [Math.fround(low), Math.fround(high)];
  const mask = new Uint8Array(values.length);
  for (let i = 0; i < values.length; i += 1) mask[i] = values[i] >= least && values[i] <= most ? 1 : 0;
  return mask;
}

function amongNumbers(values, numbers) {
  const wanted = new Uint8Array(Math.max(0, ...numbers) + 2);
  for (const one of numbers) wanted[one + 1] = 1;
  const mask = new Uint8Array(values.length);
  for (let i = 0; i < values.length; i += 1) mask[i] = wanted[values[i] + 1] ?? 0;
  return mask;
}
