/** The key of the map: what colours and sizes mean; its entries filter. */

import { countBy } from "./columns.js";
import { at, count, make } from "./dom.js";
import { readNumbers } from "./selection.js";

export class Key {
  constructor({ about, address, columns, selection, map }) {
    Object.assign(this, { about, address, columns, selection, map });
    selection.watch(() => this.#list());
  }

  /** After the map has been coloured by a column. */
  showColours(name, painted) {
    Object.assign(this, { name, painted });
    at("key-title").textContent = this.columns.title(name);
    this.#list();
  }

  /** Sizes of circles: five shares of the score between its ends. */
  showSizes(score) {
    const [low, high] = this.columns.ends(score);
    const format = (value) => this.columns.format(score, value);
    const shares = high > low ? [0, 0.5, 1] : [0];
    const sizes = shares.map((share) => {
      const dot = make("i");
      dot.style.setProperty("--f", share);
      const text = format(low + share * (high - low));
      return make("li", {}, dot, make("span", { textContent: high > low ? ["≤ ", "", "≥ "][2 * share] + text : text }));
    });
    at("sizes-title").textContent = this.columns.title(score);
    at("sizes").replaceChildren(...sizes);
  }

  #list() {
    if (!this.painted) return;
    const { key, rest, scale } = this.painted;
    at("key-rest").textContent = rest;
    at("key-scale").hidden = !scale;
    if (scale) {
      const ends = this.columns.ends(this.name).map((value) => this.columns.format(this.name, value));
      at("key-scale").replaceChildren(
        make("span", { textContent: ends[0] }),
        make("i", { className: "scale" }),
        make("span", { textContent: ends[1] }),
      );
    }
    const values = this.columns.values(this.name);
    const counts = key.length > 0 && values ? countBy(values, Math.max(2, this.#size()), this.selection.shown) : null;
    const held = document.activeElement?.dataset?.key;
    at("key").replaceChildren(...key.map((entry) => make("li", {}, this.#entry(entry, counts?.at(entry.value) ?? 0))));
    if (held !== undefined) at("key").querySelector(`[data-key="${held}"]`)?.focus();
  }

  #size() {
    return this.columns.metas.get(this.name).kind === "flag" ? 2 : this.columns.size(this.name);
  }

  #entry({ value, colour, text }, many) {
    const flag = this.columns.metas.get(this.name).kind === "flag";
    const address = `${flag ? "is" : "in"}.${this.name}`;
    const chosen = readNumbers(this.address.get(address));
    const on = chosen.includes(value);
    const toggle = () => {
      const next = flag ? (on ? [] : [value]) : on ? chosen.filter((one) => one !== value) : [...chosen, value];
      this.address.set({ [address]: next.join(",") });
    };
    const dot = make("i");
    dot.style.background = colour;
    const button = make("button", {
      type: "button",
      onclick: toggle,
      "aria-pressed": String(on),
      "data-key": value,
      title: on ? "Show the others too" : "Show only these",
    });
    button.append(dot, make("span", { textContent: text }), make("small", { textContent: count(many) }));
    for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => this.#light(value));
    for (const event of ["pointerleave", "blur"])
      button.addEventListener(event, () => this.map.showMask(this.selection.shown));
    return button;
  }

  /** Only images of one entry stand out while it is pointed at. */
  #light(value) {
    const [values, shown] = [this.columns.values(this.name), this.selection.shown];
    if (values) this.map.showMask(shown.map((one, row) => (one && values[row] === value ? 1 : 0)));
  }
}
