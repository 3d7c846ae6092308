/** Start of the explorer: asks the server what there is, creates the parts and connects them. */

import { Address } from "./address.js";
import { connection, getJson, ServerError } from "./api.js";
import { Columns } from "./columns.js";
import { Comparison } from "./compare.js";
import { at, count, make, plural, shortName } from "./dom.js";
import { startExports } from "./exports.js";
import { startFilters } from "./filters.js";
import { Gallery } from "./gallery.js";
import { startHistograms } from "./histograms.js";
import { ImagePanel } from "./image.js";
import { Layouts } from "./layouts.js";
import { ImageMap } from "./map.js";
import { Notes } from "./notes.js";
import { Pointing } from "./pointing.js";
import { Rows } from "./rows.js";
import { Selection } from "./selection.js";
import { Threshold } from "./threshold.js";
import { Toolbar } from "./toolbar.js";
import { startUpload } from "./upload.js";
import { startWatch } from "./watch.js";

const RETRY = 3000;

/** Show a sentence for a while, or until the returned function is called. */
function report(text, { stay = false } = {}) {
  const message = make("p", { textContent: text });
  for (const one of [...at("messages").children]) if (one.textContent === text) one.remove();
  at("messages").append(message);
  const close = () => message.remove();
  if (!stay) setTimeout(close, 4000 + 60 * text.length);
  return close;
}

class Explorer {
  constructor(about) {
    this.about = about;
    this.report = report;
    this.open = (row) => this.#open(row);
    this.address = new Address();
    this.columns = new Columns(about);
    this.layouts = new Layouts(about, this.columns);
    this.rows = new Rows();
    // These three add columns that the page computes itself.
    this.threshold = new Threshold(this);
    this.notes = new Notes(this);
    this.comparison = new Comparison(this);
    this.map = new ImageMap(this);
    this.selection = new Selection({ ...this, inside: (layout, polygon) => this.map.inside(layout, polygon) });
    this.map.follow(this.selection);
    this.toolbar = new Toolbar(this);
    this.pointing = new Pointing(this);
  }

  /** The map first; everything else while the browser draws it. */
  async start() {
    this.#showSubject();
    this.#startPanels();
    this.selection.watch(() => this.#showCount());
    await this.toolbar.show();
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
    this.showWatch = startWatch(this);
    this.#startKeys();
    connection.addEventListener("restored", () => this.#refresh());
    document.body.dataset.ready = "true";
    // Only now: what the page waits for would take its turns with it.
    if (this.layouts.of("tsne")?.state === "none") this.layouts.start("tsne");
  }

  #showSubject() {
    const { name, model, notices, pictures } = this.about;
    document.title = `${shortName(name)} · dubito explorer`;
    Object.assign(at("name"), { textContent: shortName(name), title: name });
    at("model").textContent = model ?? "";
    this.#showCount();
    const sentences = [...notices, ...(pictures.words ? [pictures.words] : [])];
    const read = JSON.stringify(sentences);
    at("notices").hidden = sentences.length === 0 || sessionStorage.getItem("notices") === read;
    at("notices-list").replaceChildren(...sentences.map((textContent) => make("li", { textContent })));
    const more = sentences.length > 1 ? ` (and ${sentences.length - 1} more)` : "";
    at("notices-title").textContent = `${sentences[0] ?? ""}${more}`;
    at("dismiss").addEventListener("click", () => {
      sessionStorage.setItem("notices", read);
      at("notices").hidden = true;
    });
  }

  #showCount() {
    const { selection, about } = this;
    const total = plural(about.rows, "image");
    at("count").textContent = selection.count === about.rows ? total : `${count(selection.count)} of ${total}`;
    at("clear").hidden = !selection.filtered;
  }

  // Panels and dialogs.

  #startPanels() {
    const { address } = this;
    for (const button of document.querySelectorAll("[data-panel-of]")) {
      button.addEventListener("click", () => address.set({ panel: button.dataset.panelOf }));
    }
    at("widen").addEventListener("click", () => address.set({ wide: address.get("wide") ? "" : "1" }));
    at("close").addEventListener("click", () => this.#close());
    at("help").addEventListener("click", () => at("help-text").showModal());
    for (const dialog of document.querySelectorAll("dialog")) {
      dialog.querySelector(".close").addEventListener("click", () => dialog.close());
      dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
    }
    address.watch(["panel", "wide", "image"], () => this.#showPanel());
    this.#showPanel();
  }

  /** A link to an image opens its panel. */
  #showPanel() {
    const panel = this.address.get("panel", this.address.get("image") && "image");
    const wide = this.address.get("wide") !== "";
    document.body.dataset.panel = panel;
    document.body.classList.toggle("wide", wide);
    at("widen").setAttribute("aria-pressed", String(wide));
    for (const button of document.querySelectorAll("[data-panel-of]")) {
      if (button.dataset.panelOf === panel) button.setAttribute("aria-current", "true");
      else button.removeAttribute("aria-current");
    }
  }

  /** Open an image and go to its panel; closing it leads back to the map or the grid. */
  #open(row) {
    if ([at("canvas"), at("grid")].includes(document.activeElement)) this.opener = document.activeElement;
    this.address.set({ image: row, panel: "image" });
    if (!document.activeElement.closest(".image")) at("details").focus({ preventScroll: true });
  }

  #close() {
    // On a phone, the map and the grid are panels too.
    this.panel.close(this.opener === at("canvas") ? "map" : "images");
    (this.opener ?? at("grid")).focus();
  }

  #startKeys() {
    const next = () => this.panel.step(1);
    const previous = () => this.panel.step(-1);
    const arrow = (run) => () => this.panel.row >= 0 && run();
    const keys = {
      j: next,
      k: previous,
      ArrowRight: arrow(next),
      ArrowLeft: arrow(previous),
      m: () => this.panel.mark(),
      "/": () => at("find").focus(),
      "?": () => at("help-text").showModal(),
    };
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
      const typing = event.target.closest("input, textarea, select");
      if (event.key === "Escape") this.#escape(typing);
      else if (!typing && Object.hasOwn(keys, event.key)) keys[event.key]();
      else return;
      event.preventDefault();
    });
  }

  #escape(typing) {
    if (typing) typing.blur();
    else if (this.pointing.tool !== "move") this.pointing.use("move");
    else if (document.body.dataset.panel === "image") this.#close();
  }

  /** After the server has come back: what failed meanwhile is asked for again. */
  async #refresh() {
    const about = await getJson("api/about");
    if (about.rows !== this.about.rows || about.name !== this.about.name) location.reload();
    this.toolbar.show();
    this.selection.update();
    this.panel.load();
    this.threshold.open();
    this.showWatch();
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
  const gone =
    "The server does not answer. Start it again with the same command; what you see stays, and marks and notes are " +
    "kept here until then.";
  connection.addEventListener("lost", () => show(gone));
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
