/** Two scores, or two models, side by side: each axis of the map is the rank by one score. */

import { at, fillSelect, plural } from "./dom.js";
import { ranksLayout } from "./layouts.js";

export class Comparison {
  constructor({ about, address, columns, layouts }) {
    Object.assign(this, { about, address, columns, layouts });
    this.scores = columns.scores;
    if (!this.possible) return;
    columns.define(
      {
        name: "gap",
        title: "disagreement of two scores",
        kind: "score",
        about: "How far apart the ranks by the two compared scores are, 0 to 1.",
      },
      () => this.#gap(),
    );
  }

  get possible() {
    return this.scores.length > 1;
  }

  /** The compared scores: those of the address, else the default score and that of another model, or another score. */
  get pair() {
    const [kind, ...pair] = this.address.get("layout", this.layouts.best() ?? "").split("!");
    if (kind === "ranks" && pair.length === 2 && pair.every((name) => this.columns.has(name))) return pair;
    const names = this.scores.map(({ name }) => name);
    const score = this.columns.chosenScore(this.address);
    const first = names.includes(score) ? score : names[0];
    const rest = names.filter((name) => name !== first);
    return [
      first,
      rest.find((name) => name === `other:${first}`) ?? rest.find((name) => name.startsWith("other:")) ?? rest[0],
    ];
  }

  start() {
    if (!this.possible) return;
    const options = this.scores.map(({ name, title }) => ({ value: name, text: title }));
    for (const id of ["compare-x", "compare-y"]) {
      fillSelect(at(id), [["", options]], "");
      at(id).addEventListener("change", () => this.#choose(at("compare-x").value, at("compare-y").value));
    }
    at("disagreeing").addEventListener("click", () => this.address.set({ order: "gap", rising: "", panel: "images" }));
    at("agreement").hidden = !this.columns.has("agree");
    at("agreement").addEventListener("click", () => this.address.set({ colour: "agree" }));
    this.address.watch(["layout"], () => this.#show());
    this.#show();
  }

  open() {
    this.#choose(...this.pair);
  }

  #choose(x, y) {
    this.address.set({ layout: ranksLayout(x, y), view: "" });
  }

  #show() {
    const [x, y] = this.pair;
    [at("compare-x").value, at("compare-y").value] = [x, y];
    if (this.shown !== undefined && this.shown !== `${x}!${y}`) this.columns.renew("gap");
    this.shown = `${x}!${y}`;
  }

  /** Axis titles and controls are there while ranks are drawn. */
  showDrawn(layout) {
    const on = this.layouts.isRanks(layout ?? "");
    for (const element of document.querySelectorAll(".comparing")) element.hidden = !on;
    if (!on) return;
    const [x, y] = this.pair.map((name) => this.columns.title(name));
    at("axis-x").textContent = `rank by ${x} →`;
    at("axis-y").textContent = `rank by ${y} →`;
    this.#showWords();
  }

  /** Why there is no other map, and which images lie on a line beside the others. */
  async #showWords() {
    const { pair } = this;
    await Promise.all(pair.map((name) => this.columns.load(name))).catch(() => {});
    if (pair.some((name) => this.columns.values(name) === null)) return;
    const lacking = Math.max(...pair.map((name) => this.columns.rows - this.columns.known(name)));
    const words = [
      ...(this.layouts.list.some((layout) => layout.state !== "failed") ? [] : [this.layouts.list[0]?.words]),
      ...(lacking > 0 ? [`${plural(lacking, "image")} without a value on a line below or to the left.`] : []),
    ];
    at("compare-words").textContent = words.filter(Boolean).join(" ");
  }

  async #gap() {
    const pair = this.pair;
    await Promise.all(pair.map((name) => this.columns.load(name)));
    const [x, y] = pair.map((name) => this.columns.ranks(name));
    return x.map((rank, row) => Math.abs(rank - y[row]));
  }
}
