/** Start of the explorer: asks the server what there is, creates the parts and connects them. */

import { Address } from "./address.js";
import { connection, getJson, ServerError } from "./api.js";
import { coloursSuffice } from "./colours.js";
import { Columns } from "./columns.js";
import { Comparison } from "./compare.js";
import { at, count, fillSelect, make, percent, plural, shortName } from "./dom.js";
import { startExports } from "./exports.js";
import { startFilters } from "./filters.js";
import { Gallery } from "./gallery.js";
import { startHistograms } from "./histograms.js";
import { ImagePanel } from "./image.js";
import { Key } from "./key.js";
import { Layouts } from "./layouts.js";
import { ImageMap } from "./map.js";
import { Notes } from "./notes.js";
import { Rows } from "./rows.js";
import { Selection } from "./selection.js";
import { Threshold } from "./threshold.js";
import { startUpload } from "./upload.js";

const RETRY = 3000;

/** Show a sentence for a while, or until the returned function is called. */
function report(text, { stay = false } = {}) {
  const message = make("p", { textContent: text });
  at("messages").append(message);
  const close = () => message.remove();
  if (!stay) setTimeout(close, 4000 + 60 * text.length);
  return close;
}

class Explorer {
  constructor(about) {
    this.about = about;
    this.report = report;
    this.address = new Address();
    this.columns = new Columns(about);
    this.layouts = new Layouts(about, this.columns);
    this.rows = new Rows();
    this.open = (row) => this.#open(row);
    this.threshold = new Threshold(this);
    this.notes = new Notes(this);
    this.comparison = new Comparison(this);
    this.map = new ImageMap(this);
    this.selection = new Selection({ ...this, inside: (layout, polygon) => this.map.inside(layout, polygon) });
    this.map.follow(this.selection);
    this.key = new Key(this);
  }

  /** The map first; everything else while the browser draws it. */
  async start() {
    this.#showSubject();
    this.#fillControls();
    this.#watch();
    this.#showPanel();
    await Promise.all([this.#showLayout(), this.#showColours(), this.#showShares()]);
    this.selection.update();
    this.notes.load();
    this.gallery = new Gallery(this);
    this.panel = new ImagePanel(this);
    startFilters(this);
    startHistograms(this);
    this.threshold.start();
    this.comparison.start();
    startUpload(this);
    startExports(this);
    this.#listenToKeys();
    document.body.dataset.ready = "true";
  }

  #showSubject() {
    const { name, model, notices, pictures } = this.about;
    document.title = `${shortName(name)} · dubito explorer`;
    Object.assign(at("name"), { textContent: shortName(name), title: name });
    at("model").textContent = model ?? "";
    const sentences = [...notices, ...(pictures.words ? [pictures.words] : [])];
    at("notices").hidden = sentences.length === 0;
    at("notices-list").replaceChildren(...sentences.map((textContent) => make("li", { textContent })));
    at("notices-title").textContent = sentences.length > 1 ? `${sentences[0]} (and ${sentences.length - 1} more)` : sentences[0] ?? "";
    this.#showCount();
  }

  #fillControls() {
    const option = ({ name, title, about }) => ({ value: name, text: title, title: about });
    const { columns } = this;
    const kinds = [["Classes", "category"], ["Decisions", "flag"], ["Scores", "score"]];
    fillSelect(at("colour"), kinds.map(([title, kind]) => [title, columns.ofKind(kind).map(option)]), "");
    fillSelect(at("score"), [["", columns.scores.map(option)]], this.score ?? "");
    at("colour").addEventListener("change", () => this.address.set({ colour: at("colour").value }));
    at("score").addEventListener("change", () => this.address.set({ score: at("score").value }));
    for (const button of document.querySelectorAll("[data-tool]")) button.addEventListener("click", () => this.map.useTool(button.dataset.tool));
    for (const button of document.querySelectorAll("[data-zoom]")) button.addEventListener("click", () => this.map.zoom(Number(button.dataset.zoom)));
    for (const button of document.querySelectorAll("[data-panel-of]")) button.addEventListener("click", () => this.address.set({ panel: button.dataset.panelOf }));
    at("widen").addEventListener("click", () => this.address.set({ wide: this.address.get("wide") ? "" : "1" }));
    at("help").addEventListener("click", () => at("help-text").showModal());
    at("close").addEventListener("click", () => this.#close());
    for (const dialog of document.querySelectorAll("dialog")) {
      dialog.querySelector(".close").addEventListener("click", () => dialog.close());
      dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    }
  }

  #watch() {
    const { address, columns, layouts, selection } = this;
    address.watch(["layout"], () => this.#showLayout());
    address.watch(["colour", "score"], () => this.#showColours());
    address.watch(["score"], () => this.#showShares());
    address.watch(["panel", "wide"], () => this.#showPanel());
    layouts.watch(() => this.#showLayout());
    columns.watch((name) => name === this.colouring && this.#showColours());
    selection.watch(() => this.#showCount());
    connection.addEventListener("restored", () => this.#refresh());
  }

  /** Open an image and go to its panel; closing it leads back to the map or the grid. */
  #open(row) {
    if ([at("canvas"), at("grid")].includes(document.activeElement)) this.opener = document.activeElement;
    this.address.set({ image: row, panel: "image" });
    if (!document.activeElement.closest(".image")) at("details").focus({ preventScroll: true });
  }

  // The map.

  get score() {
    return this.columns.chosenScore(this.address);
  }

  async #showLayout() {
    const choice = this.address.get("layout");
    const drawn = this.layouts.drawn(choice);
    this.#showLayoutButtons(choice, drawn);
    this.comparison.showDrawn(drawn);
    at("no-map").hidden = drawn !== null;
    if (drawn === null) return;
    try {
      await this.map.showLayout(drawn);
    } catch (error) {
      this.report(error.message);
    }
  }

  #showLayoutButtons(choice, drawn) {
    const button = (text, pressed, onclick, title = "") =>
      make("button", { type: "button", textContent: text, "aria-pressed": String(pressed), onclick, title });
    const buttons = this.layouts.list.map((layout) => {
      const { name, title, state, words } = layout;
      const element = button(name === "pca" ? "PCA" : title, name === drawn, () => this.#chooseLayout(name), words || title);
      element.dataset.state = this.layouts.isReady(layout) ? "ready" : state;
      return element;
    });
    if (this.comparison.possible) {
      buttons.push(button("Compare", this.layouts.isRanks(drawn ?? ""), () => this.comparison.open(), "Two scores or two models side by side"));
    }
    const held = [...at("layouts").children].indexOf(document.activeElement);
    at("layouts").replaceChildren(...buttons);
    buttons[held]?.focus();
    const running = this.layouts.list.find(({ state }) => state === "running");
    this.#showProgress(this.layouts.of(choice) ?? running ?? this.layouts.of(drawn));
  }

  #chooseLayout(name) {
    this.address.set({ layout: name, view: "" });
    if (["none", "failed"].includes(this.layouts.of(name).state)) this.layouts.start(name);
  }

  /** A bar while a layout is computed, and words if it failed or shows less than all. */
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
    return this.score ?? classes[0] ?? "marked";
  }

  async #showColours() {
    try {
      const chosen = this.address.get("colour");
      const name = this.columns.has(chosen) ? chosen : await this.#defaultColour();
      this.colouring = name;
      at("colour").value = name;
      const painted = await this.map.showColours(name);
      if (painted !== null) this.key.showColours(name, painted);
    } catch (error) {
      this.report(error.message);
    }
  }

  async #showShares() {
    const { score } = this;
    at("score").value = score ?? "";
    document.body.classList.toggle("no-scores", score === null);
    if (score === null) return;
    try {
      await this.map.showShares(score);
      this.key.showSizes(score);
    } catch (error) {
      this.report(error.message);
    }
  }

  // The frame around it.

  #showCount() {
    const { selection, about } = this;
    const total = plural(about.rows, "image");
    at("count").textContent = selection.count === about.rows ? total : `${count(selection.count)} of ${total}`;
    at("clear").hidden = !selection.filtered;
  }

  #showPanel() {
    document.body.dataset.panel = this.address.get("panel");
    document.body.classList.toggle("wide", this.address.get("wide") !== "");
    at("widen").setAttribute("aria-pressed", String(this.address.get("wide") !== ""));
    for (const button of document.querySelectorAll("[data-panel-of]")) {
      const chosen = button.dataset.panelOf === this.address.get("panel");
      if (chosen) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
  }

  #listenToKeys() {
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
      const typing = event.target.closest("input, textarea, select");
      if (event.key === "Escape") this.#escape(typing);
      else if (typing) return;
      else if (event.key === "j" || (event.key === "ArrowRight" && this.panel.row >= 0)) this.panel.step(1);
      else if (event.key === "k" || (event.key === "ArrowLeft" && this.panel.row >= 0)) this.panel.step(-1);
      else if (event.key === "m") this.panel.mark();
      else if (event.key === "/") at("find").focus();
      else if (event.key === "?") at("help-text").showModal();
      else return;
      event.preventDefault();
    });
  }

  #escape(typing) {
    if (typing) typing.blur();
    else if (this.map.tool !== "move") this.map.useTool("move");
    else if (this.address.get("panel") === "image") this.#close();
  }

  #close() {
    // On a phone, the map and the grid are panels too.
    this.panel.close(this.opener === at("canvas") ? "map" : "images");
    (this.opener ?? at("grid")).focus();
  }

  /** After the server has come back: what failed meanwhile is asked for again. */
  async #refresh() {
    const about = await getJson("api/about");
    if (about.rows !== this.about.rows || about.name !== this.about.name) location.reload();
    this.#showLayout();
    this.#showColours();
    this.#showShares();
    this.selection.update();
    this.panel?.load();
    this.threshold.open();
  }
}

/** Say that the server is gone or refuses, and ask again until it answers. */
function watchConnection() {
  let timer = 0;
  const ask = () => getJson("api/about").catch(() => {});
  const show = (text) => {
    at("banner").hidden = false;
    at("banner-words").textContent = text;
    clearInterval(timer);
    timer = setInterval(ask, RETRY);
  };
  connection.addEventListener("lost", () =>
    show("The server does not answer. Start it again with the same command; what you see stays, and marks and notes are kept here until then."),
  );
  connection.addEventListener("refused", ({ detail }) => show(detail));
  connection.addEventListener("restored", () => {
    at("banner").hidden = true;
    clearInterval(timer);
  });
  at("retry").addEventListener("click", ask);
}

async function boot() {
  watchConnection();
  try {
    const about = await getJson("api/about");
    document.body.classList.remove("starting");
    await new Explorer(about).start();
  } catch (error) {
    at("starting").textContent = error.message;
    connection.addEventListener("restored", () => location.reload(), { once: true });
    if (!(error instanceof ServerError)) throw error;
  }
}

boot();
