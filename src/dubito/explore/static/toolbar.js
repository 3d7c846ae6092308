/** What the map shows: layout with its progress, colour, size, and the key below. */

import { coloursSuffice } from "./colours.js";
import { at, fillSelect, make, percent } from "./dom.js";
import { Key } from "./key.js";

export class Toolbar {
  /** @param app { about, address, columns, layouts, map, selection, comparison, report } */
  constructor(app) {
    Object.assign(this, app);
    this.key = new Key(app);
    this.#fill();
    const { address, columns, map } = this;
    address.watch(["layout"], () => this.#showLayout());
    address.watch(["colour", "score"], () => this.#showColours());
    address.watch(["score"], () => this.#showShares());
    this.layouts.watch(() => this.#showLayout());
    const recolour = map.whenCalm(() => this.#showColours());
    columns.watch((name) => name === this.colouring && recolour());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      map.readTheme();
      this.#showColours();
    });
  }

  /** Draw everything, or what could not be drawn before. */
  show() {
    return Promise.all([this.#showLayout(), this.#showColours(), this.#showShares()]);
  }

  #fill() {
    const { address, columns } = this;
    const option = ({ name, title, about }) => ({ value: name, text: title, title: about });
    const kinds = [
      ["Classes", "category"],
      ["Decisions", "flag"],
      ["Scores", "score"],
    ];
    fillSelect(
      at("colour"),
      kinds.map(([title, kind]) => [title, columns.ofKind(kind).map(option)]),
      "",
    );
    fillSelect(at("score"), [["", columns.scores.map(option)]], "");
    at("colour").addEventListener("change", () => address.set({ colour: at("colour").value }));
    at("score").addEventListener("change", () => address.set({ score: at("score").value }));
  }

  async #showLayout() {
    const choice = this.address.get("layout");
    const drawn = this.layouts.drawn(choice);
    this.#showButtons(drawn);
    const running = this.layouts.list.find(({ state }) => state === "running");
    this.#showProgress(this.layouts.of(choice) ?? running ?? this.layouts.of(drawn));
    this.comparison.showDrawn(drawn);
    at("no-map").hidden = drawn !== null;
    if (drawn !== null) await this.map.showLayout(drawn).catch((error) => this.report(error.message));
  }

  #showButtons(drawn) {
    const buttons = this.layouts.list.map((layout) => {
      const { name, title, state, words } = layout;
      const text = name === "pca" ? "PCA" : title;
      const ready = this.layouts.isReady(layout) ? "ready" : state;
      const properties = {
        textContent: text,
        title: words || title,
        "data-state": ready,
        "aria-pressed": name === drawn,
      };
      return make("button", { type: "button", ...properties, onclick: () => this.#choose(name) });
    });
    if (this.comparison.possible) {
      const properties = { textContent: "Compare", title: "Two scores or two models side by side" };
      const pressed = this.layouts.isRanks(drawn ?? "");
      const open = () => this.comparison.open();
      buttons.push(make("button", { type: "button", ...properties, "aria-pressed": pressed, onclick: open }));
    }
    const held = [...at("layouts").children].indexOf(document.activeElement);
    at("layouts").replaceChildren(...buttons);
    buttons[held]?.focus();
  }

  #choose(name) {
    this.address.set({ layout: name, view: "" });
    const layout = this.layouts.of(name);
    if (!this.layouts.isReady(layout) && layout.state !== "running") this.layouts.start(name);
  }

  /** A bar while a layout is computed, and words if it failed or does not show everything exactly. */
  #showProgress(layout) {
    const ready = this.layouts.isReady(layout);
    at("progress").hidden = layout === undefined || (ready && !layout.words);
    if (at("progress").hidden) return;
    const { name, title, state, progress, words } = layout;
    const running = state === "running";
    at("progress-bar").hidden = !running;
    at("progress-bar").value = progress;
    const done = running ? `${title}: ${percent(Math.round(100 * progress) / 100)}. ` : "";
    at("progress-words").textContent = done + (words || (running ? "" : `${title} has not been computed.`));
    at("progress-start").hidden = running || ready;
    at("progress-start").textContent = state === "failed" ? "Try again" : "Compute it";
    at("progress-start").onclick = () => this.layouts.start(name);
  }

  /** Classes or predictions where ten colours suffice for half of the images, else the score. */
  async #defaultColour() {
    const classes = ["label", "predicted"].filter((name) => this.columns.has(name));
    for (const name of classes) {
      await this.columns.load(name);
      if (coloursSuffice(this.columns, name)) return name;
    }
    return this.columns.chosenScore(this.address) ?? classes[0] ?? "marked";
  }

  async #showColours() {
    try {
      const chosen = this.address.get("colour");
      this.colouring = this.columns.has(chosen) ? chosen : await this.#defaultColour();
      at("colour").value = this.colouring;
      const name = this.colouring;
      const painted = await this.map.showColours(name);
      if (painted !== null) this.key.showColours(name, painted);
    } catch (error) {
      this.report(error.message);
    }
  }

  async #showShares() {
    const score = this.columns.chosenScore(this.address);
    document.body.classList.toggle("no-scores", score === null);
    at("score").value = score ?? "";
    if (score === null) return;
    try {
      await this.map.showShares(score);
      this.key.showSizes(score);
    } catch (error) {
      this.report(error.message);
    }
  }
}
