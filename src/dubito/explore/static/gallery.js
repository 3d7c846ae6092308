/** The grid of the shown images: only what is in sight exists as elements, however many rows there are. */

import { at, count, fillSelect, later, make, oncePerFrame } from "./dom.js";
import { isWrong } from "./rows.js";

/** Browsers do not lay out taller elements; beyond, the scroll bar is scaled. */
const TALLEST = 10_000_000;
const CAPTION = 22;
const TABLE = "table";

export class Gallery {
  #order = new Uint32Array(0);
  #cells = new Map();
  #active = 0;
  #turn = 0;
  #shown = "";
  #tallView = 0;
  #watchers = [];

  constructor(app) {
    Object.assign(this, app);
    this.scroller = at("grid");
    this.inner = at("grid-inner");
    this.scroller.addEventListener("scroll", () => this.#render());
    this.scroller.addEventListener("keydown", (event) => this.#key(event));
    this.inner.addEventListener("click", (event) => this.#click(event));
    new ResizeObserver(() => this.#resize()).observe(this.scroller);
    at("order").addEventListener("change", () => this.address.set({ order: at("order").value }));
    at("direction").addEventListener("click", () =>
      this.address.set({ rising: this.address.get("rising") ? "" : "1" }),
    );
    at("cell-size").addEventListener("input", () => this.address.set({ cell: at("cell-size").value }, "replace"));
    this.address.watch(["order", "rising", "score"], () => this.update());
    this.address.watch(["cell"], () => this.#refill());
    this.address.watch(["image"], () => this.#showOpen());
    this.selection.watch(() => this.update());
    this.columns.watch((name) => name === this.score && this.update());
    this.notes.watch(() => this.#repaint());
    this.update();
  }

  /** The score that orders the grid; null for the order of the table. */
  get score() {
    const chosen = this.address.get("order");
    if (chosen === TABLE) return null;
    return this.columns.metas.get(chosen)?.kind === "score" ? chosen : this.columns.chosenScore(this.address);
  }

  get size() {
    return Math.min(240, Math.max(64, Number(this.address.get("cell", "104")) || 104));
  }

  /** Put the shown rows into the chosen order; a score that cannot be computed leaves that of the table. */
  async update() {
    this.#turn += 1;
    const turn = this.#turn;
    const { score } = this;
    this.#showOrder();
    const values = score === null ? null : await this.columns.load(score).catch((error) => this.report(error.message));
    if (turn !== this.#turn) return;
    const rising = this.address.get("rising") !== "";
    this.#order = this.#sorted(values instanceof Float32Array ? score : null, rising);
    this.#active = Math.min(this.#active, Math.max(0, this.#order.length - 1));
    // Another selection or order begins at the top; a mark that takes one image away does not move the others.
    const shown = JSON.stringify([this.address.filters(), score, rising]);
    const anew = this.#shown !== "" && shown !== this.#shown;
    this.#shown = shown;
    this.#refill();
    if (anew) this.scroller.scrollTop = this.#active = 0;
    else this.#showOpen();
    for (const run of this.#watchers) run();
  }

  /** The shown rows by a score, those without a value last either way; without a score in the order of the table. */
  #sorted(score, rising) {
    const { columns, selection } = this;
    const order = score === null ? null : columns.order(score);
    const known = score === null ? 0 : columns.known(score);
    const rows = new Uint32Array(selection.count);
    let filled = 0;
    for (let k = 0; k < columns.rows; k += 1) {
      const place = k >= known || rising ? k : known - 1 - k;
      const row = order === null ? place : order[place];
      if (selection.shown[row]) rows[filled++] = row;
    }
    return rows;
  }

  /** Call `run` after the order has changed. */
  watch(run) {
    this.#watchers.push(run);
  }

  get length() {
    return this.#order.length;
  }

  /** The place of a row in the order of the grid, -1 if it is not shown. */
  place(row) {
    return this.#order.indexOf(row);
  }

  row(place) {
    return this.#order[place];
  }

  #showOrder() {
    const scores = this.columns.ofKind("score").map(({ name, title }) => ({ value: name, text: title }));
    fillSelect(at("order"), [["", [...scores, { value: TABLE, text: "order of the table" }]]], this.score ?? TABLE);
    const rising = this.address.get("rising") !== "";
    at("direction").hidden = this.score === null;
    at("direction").textContent = rising ? "↑ lowest" : "↓ highest";
  }

  // Layout: rows of cells; the inner element is as tall as all of them, or as tall as a browser allows.

  /** A grid that was hidden comes back with the image that was open. */
  #resize() {
    const hidden = !this.#tallView;
    this.#tallView = this.scroller.clientHeight;
    this.#refill();
    if (hidden) this.#reveal(this.#active);
  }

  #refill() {
    const width = this.scroller.clientWidth - 16;
    if (width <= 0) return;
    at("cell-size").value = this.size;
    this.columnsOfCells = Math.max(2, Math.floor(width / this.size));
    this.side = Math.floor(width / this.columnsOfCells);
    this.tall = this.side + CAPTION;
    this.total = Math.ceil(this.#order.length / this.columnsOfCells) * this.tall + 16;
    this.inner.style.height = `${Math.min(this.total, TALLEST)}px`;
    this.#repaint();
    at("empty").hidden = this.#order.length > 0;
  }

  /** Pixels of the whole grid above what is in sight. */
  get #above() {
    const view = this.scroller.clientHeight;
    if (this.total <= TALLEST) return this.scroller.scrollTop;
    return (this.scroller.scrollTop / (TALLEST - view)) * (this.total - view);
  }

  #repaint() {
    for (const cell of this.#cells.values()) cell.remove();
    this.#cells.clear();
    this.#showActive();
    this.#render();
  }

  #render = oncePerFrame(() => {
    if (!this.tall || this.scroller.clientHeight === 0) return;
    const above = this.#above;
    const shift = this.scroller.scrollTop - above;
    const first = Math.max(0, Math.floor(above / this.tall) - 1) * this.columnsOfCells;
    const last = Math.min(
      this.#order.length,
      (Math.ceil((above + this.scroller.clientHeight) / this.tall) + 1) * this.columnsOfCells,
    );
    for (const [place, cell] of this.#cells) {
      if (place < first || place >= last) {
        cell.remove();
        this.#cells.delete(place);
      }
    }
    for (let place = first; place < last; place += 1) {
      if (!this.#cells.has(place)) this.#cells.set(place, this.inner.appendChild(this.#cell(place)));
      const cell = this.#cells.get(place);
      const [x, y] = [(place % this.columnsOfCells) * this.side, Math.floor(place / this.columnsOfCells) * this.tall];
      cell.style.transform = `translate(${8 + x}px, ${8 + y + shift}px)`;
    }
    this.#showActive();
    this.#fetch();
  });

  #cell(place) {
    const row = this.#order[place];
    const cell = make("div", {
      className: "cell",
      role: "option",
      id: `cell-${place}`,
      "aria-posinset": place + 1,
      "aria-setsize": this.#order.length,
    });
    cell.dataset.row = row;
    cell.style.width = `${this.side}px`;
    cell.style.height = `${this.tall}px`;
    const score = this.score ?? this.columns.chosenScore(this.address);
    cell.style.setProperty("--f", this.columns.values(score) ? this.columns.shares(score)[row] : 0);
    cell.setAttribute("aria-selected", String(this.address.get("image") === String(row)));
    cell.setAttribute("aria-label", `Image ${count(place + 1)}`);
    const entry = this.rows.known(row);
    if (entry !== null) this.#fill(cell, entry);
    return cell;
  }

  /** Names are asked for once scrolling has come to rest. */
  #fetch = later(() => {
    for (const cell of this.#cells.values()) {
      if (cell.childElementCount > 0) continue;
      this.rows.one(Number(cell.dataset.row)).then(
        (entry) => cell.isConnected && this.#fill(cell, entry),
        () => {},
      );
    }
  }, 40);

  #fill(cell, entry) {
    const note = this.notes.of(entry.row);
    const wrong = isWrong(this.columns, entry);
    const name = entry.predicted_name ?? entry.label_name ?? entry.id;
    const picture = entry.picture
      ? make("img", {
          src: `api/thumbnail/${entry.row}`,
          alt: "",
          decoding: "async",
          draggable: false,
          onerror: () => picture.replaceWith(missing(entry)),
        })
      : missing(entry);
    const caption = make("span", { className: wrong ? "name wrong" : "name", textContent: name });
    const words = [
      entry.id,
      ...(entry.predicted_name === null ? [] : [`prediction: ${entry.predicted_name}${wrong ? " (wrong)" : ""}`]),
      ...(entry.label_name === null ? [] : [`class: ${entry.label_name}`]),
      ...(note?.marked ? ["marked"] : []),
    ];
    cell.setAttribute("aria-label", words.join(", "));
    cell.title = words.join("\n");
    cell.replaceChildren(picture, caption);
    if (note?.marked) cell.append(make("span", { className: "star", textContent: "★" }));
  }

  // The active cell: where the keyboard is.

  #click(event) {
    const cell = event.target.closest(".cell");
    if (cell === null) return;
    this.#active = this.place(Number(cell.dataset.row));
    this.open(Number(cell.dataset.row));
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || this.#order.length === 0) return;
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / this.tall)) * this.columnsOfCells;
    const steps = {
      ArrowLeft: -1,
      ArrowRight: 1,
      ArrowUp: -this.columnsOfCells,
      ArrowDown: this.columnsOfCells,
      PageUp: -page,
      PageDown: page,
      Home: -Infinity,
      End: Infinity,
    };
    if (event.key in steps)
      this.#activate(Math.max(0, Math.min(this.#order.length - 1, this.#active + steps[event.key])));
    else if (event.key === "Enter" || event.key === " ") this.open(this.#order[this.#active]);
    else if (event.key === "m") this.notes.toggle(this.#order[this.#active]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #activate(place) {
    this.#active = place;
    this.#reveal(place);
    this.#render();
  }

  #reveal(place) {
    const view = this.scroller.clientHeight;
    if (!this.tall || view === 0) return;
    const top = Math.floor(place / this.columnsOfCells) * this.tall;
    const above = this.#above;
    const wanted = top < above ? top : top + this.tall + 16 > above + view ? top + this.tall + 16 - view : above;
    if (wanted === above) return;
    this.scroller.scrollTop = this.total <= TALLEST ? wanted : (wanted / (this.total - view)) * (TALLEST - view);
  }

  #showActive() {
    for (const [place, cell] of this.#cells) cell.classList.toggle("active", place === this.#active);
    const there = this.#cells.has(this.#active);
    if (there) this.scroller.setAttribute("aria-activedescendant", `cell-${this.#active}`);
    else this.scroller.removeAttribute("aria-activedescendant");
  }

  /** The open image is the active one. */
  #showOpen() {
    const row = this.address.get("image");
    for (const cell of this.#cells.values()) cell.setAttribute("aria-selected", String(cell.dataset.row === row));
    const place = row === "" ? -1 : this.place(Number(row));
    if (place >= 0) this.#activate(place);
  }
}

function missing(entry) {
  return make("span", { className: "missing" }, make("span", { textContent: entry.id.split("/").at(-1) }));
}
