/** An image's page: picture, verdict, prediction, scores, neighbours, tiles, corruption curves and notes. */

import { getJson, path } from "./api.js";
import { lineChart } from "./charts.js";
import { COLOURS } from "./colours.js";
import { at, bar, count, decimals, heading, later, make, number, percent } from "./dom.js";
import { isWrong } from "./rows.js";

const title = (text) => make("h3", { textContent: text });
const line = (text, className = "") => make("p", { textContent: text, className });
const section = (text, ...children) => make("section", {}, title(text), ...children);

export class ImagePanel {
  #turn = 0;
  #image = null;

  constructor(app) {
    Object.assign(this, app);
    at("previous").addEventListener("click", () => this.step(-1));
    at("next").addEventListener("click", () => this.step(1));
    at("mark").addEventListener("click", () => this.mark());
    this.#listenToNotes();
    this.address.watch(["image"], () => this.load());
    this.gallery.watch(() => this.#showPlace());
    this.notes.watch(() => this.#showNote());
    this.load();
  }

  get row() {
    const text = this.address.get("image");
    return /^\d+$/.test(text) ? Number(text) : -1;
  }

  /** The next image in the order of the grid, or the first one. */
  step(by) {
    if (this.gallery.length === 0) return;
    const place = this.gallery.place(this.row);
    const next = place < 0 ? 0 : Math.max(0, Math.min(this.gallery.length - 1, place + by));
    this.open(this.gallery.row(next));
  }

  close(panel) {
    this.#image = null;
    this.map.showNew(null);
    this.address.set({ image: "", panel });
  }

  mark() {
    if (this.row >= 0) this.notes.toggle(this.row);
  }

  /** Show an image that is not in the table; `picture` is an address of its own. */
  showNew(image, picture) {
    this.#turn += 1;
    this.address.set({ image: "", panel: "image" });
    this.#image = image;
    this.#show(picture);
    this.map.showNew(image.positions ?? null);
  }

  /** Show the image that the address names. */
  async load() {
    this.#turn += 1;
    const [turn, row] = [this.#turn, this.row];
    if (row < 0) {
      if (this.#image?.row !== null) this.#clear();
      return;
    }
    this.map.showNew(null);
    this.#showPlace();
    this.#showNote();
    at("image-body").setAttribute("aria-busy", "true");
    try {
      const [image, entry] = await Promise.all([getJson(path("image", row)), this.rows.one(row)]);
      if (turn !== this.#turn) return;
      this.#image = image;
      this.#show(entry.picture ? path("picture", row) : null);
    } catch (error) {
      if (turn === this.#turn) this.#clear(error.message);
    }
  }

  #clear(words = "Click a circle on the map or a picture in the grid, or drop an image here.") {
    this.#image = null;
    at("image-head").hidden = true;
    at("note").hidden = true;
    at("image-body").removeAttribute("aria-busy");
    at("image-body").replaceChildren(line(words, "hint"));
  }

  #show(picture) {
    const image = this.#image;
    at("image-head").hidden = false;
    at("note").hidden = image.row === null;
    at("mark").hidden = image.row === null;
    at("image-body").removeAttribute("aria-busy");
    at("image-body").replaceChildren(
      ...[
        this.#figure(image, picture),
        make("h2", { textContent: image.id }),
        this.#classes(image),
        this.#verdict(image),
        this.#top(image),
        this.#predictionSet(image),
        this.#scores(image),
        this.#neighbours(image),
        this.#corruption(image),
      ].filter((one) => one !== null),
    );
    this.#showPlace();
    this.#showNote();
  }

  #showPlace() {
    const row = this.row;
    const place = row < 0 ? -1 : this.gallery.place(row);
    const total = this.gallery.length;
    at("place").textContent =
      row < 0 ? "new image" : place < 0 ? "not among those shown" : `${count(place + 1)} of ${count(total)}`;
    at("previous").disabled = total === 0 || place === 0;
    at("next").disabled = total === 0 || place === total - 1;
  }

  // The picture, with tile-wise uncertainty above it.

  #figure(image, picture) {
    const frame = make("div", { className: "frame" });
    const figure = make("figure", {}, frame);
    const why = this.about.pictures.words || "It may have been moved or renamed.";
    const missing = () => line(`The picture is not there. ${why}`, "missing");
    if (picture === null) frame.append(missing());
    else
      frame.append(
        make("img", { src: picture, alt: `Picture of ${image.id}`, onerror: () => frame.replaceChildren(missing()) }),
      );
    const refused = image.unavailable?.tiles;
    if (picture === null && !refused) return figure;
    const words = make("span", { className: "fine", textContent: refused ?? "" });
    const box = make("input", {
      type: "checkbox",
      id: "tiles",
      checked: this.#tilesOn && !refused,
      disabled: Boolean(refused),
    });
    const show = () => this.#tiles(image, frame, words, box.checked);
    box.addEventListener("change", () => {
      this.address.set({ tiles: box.checked ? "1" : "" }, "replace");
      show();
    });
    if (box.checked) show();
    figure.append(
      make("figcaption", {}, make("label", {}, box, make("span", { textContent: "Uncertainty of tiles" })), words),
    );
    return figure;
  }

  get #tilesOn() {
    return this.address.get("tiles") !== "";
  }

  async #tiles(image, frame, words, on) {
    frame.querySelector("canvas")?.remove();
    words.textContent = "";
    if (!on) return;
    words.textContent = "The model looks at the tiles…";
    try {
      const tiles = await getJson(path("tiles", image.row));
      if (this.#image !== image || !this.#tilesOn) return;
      frame.append(heatMap(tiles, this.map.theme.shades));
      const digits = decimals(tiles.low, tiles.high);
      words.textContent = `${tiles.about} From ${number(tiles.low, digits)} (blue) to ${number(tiles.high, digits)} (orange).`;
    } catch (error) {
      words.textContent = error.message;
    }
  }

  // Words about the image.

  #classes({ label_name: label, set }) {
    const from = this.about.sets.length > 1 ? this.about.sets.find(({ name }) => name === set) : undefined;
    const chip = (what, text) =>
      make("span", { className: "chip" }, make("small", { textContent: what }), String(text));
    const chips = [
      ...(label === null ? [] : [chip("class", label)]),
      ...(isWrong(this.columns, this.#image)
        ? [make("span", { className: "chip bad", textContent: "wrong prediction" })]
        : []),
      ...(from ? [chip("set", from.name + (from.ood ? " (out-of-distribution)" : ""))] : []),
    ];
    return chips.length > 0 ? make("p", { className: "chips" }, ...chips) : null;
  }

  #verdict({ verdict }) {
    if (!verdict) return null;
    return make(
      "p",
      { className: `verdict ${verdict.tone}` },
      make("b", { textContent: verdict.verdict }),
      make("span", { textContent: verdict.reason }),
    );
  }

  #top({ top }) {
    if (!top || top.length === 0) return null;
    const entry = ({ name, probability }) => {
      const share = make("i", { className: "bar plain" });
      share.style.setProperty("--f", probability);
      return make(
        "li",
        {},
        make("span", { className: "name", textContent: name }),
        share,
        make("span", { className: "value", textContent: percent(probability) }),
      );
    };
    return section("Prediction", make("ol", { className: "bars" }, ...top.map(entry)));
  }

  #predictionSet({ prediction_set: names }) {
    if (!names) return null;
    const shown = names.slice(0, 12).map((textContent) => make("span", { className: "chip", textContent }));
    const rest = names.length > 12 ? [line(`and ${count(names.length - 12)} more`, "fine")] : [];
    const body =
      names.length === 0
        ? [line("Empty: no class is likely enough.", "fine")]
        : [make("p", { className: "chips" }, ...shown), ...rest];
    return section("Prediction set", ...body);
  }

  #scores({ scores }) {
    if (!scores || scores.length === 0) return null;
    const entry = ({ name, title: score, value, rank }) => {
      const digits = this.columns.values(name)
        ? decimals(...this.columns.ends(name))
        : decimals(0, Math.abs(value) || 1);
      // An infinite score arrives as null: refused whatever the threshold.
      const text = value === null ? "∞" : number(value, digits);
      return make(
        "li",
        { title: this.columns.metas.get(name)?.about ?? "" },
        make("span", { className: "name", textContent: heading(score) }),
        rank === null ? make("i", { className: "bar none" }) : bar(rank),
        make("span", { className: "value", textContent: text }),
        make("span", { className: "rank", textContent: rank === null ? "" : percent(rank) }),
      );
    };
    return section(
      "Scores",
      line("Bar: share of the images that are more certain.", "fine"),
      make("ul", { className: "bars ranked" }, ...scores.map(entry)),
    );
  }

  #neighbours({ neighbours, unavailable }) {
    if (unavailable?.neighbours) return section("Nearest neighbours", line(unavailable.neighbours, "fine"));
    if (!neighbours || neighbours.length === 0) return null;
    return section(
      "Nearest neighbours",
      make("ul", { className: "neighbours" }, ...neighbours.map((one) => make("li", {}, this.#neighbour(one)))),
    );
  }

  #neighbour({ row, id, label_name: label, predicted_name: predicted, correct, similarity, rank, picture }) {
    const text = [
      id,
      ...(label === null ? [] : [`class: ${label}`]),
      ...(predicted === null ? [] : [`prediction: ${predicted}`]),
      `similarity ${number(similarity, 2)}`,
      ...(rank === null ? [] : [`more uncertain than ${percent(rank)}`]),
    ];
    const button = make("button", {
      type: "button",
      title: text.join("\n"),
      "aria-label": text.join(", "),
      onclick: () => this.open(row),
    });
    const name = make("span", {
      className: correct === false ? "name wrong" : "name",
      textContent: label ?? predicted ?? id,
    });
    const shown = picture
      ? make("img", { src: path("thumbnail", row), alt: "", loading: "lazy" })
      : make("span", { className: "missing" });
    button.append(shown, name, ...(rank === null ? [] : [bar(rank)]));
    return button;
  }

  // The same image under corruptions: the model runs only when the section is open.

  #corruption(image) {
    const refused = image.unavailable?.corruption;
    if (refused) return section("Under corruption", line(refused, "fine"));
    const body = make("div");
    const details = make(
      "details",
      { className: "corruption", open: this.address.get("curves") !== "" },
      make("summary", { textContent: "Under corruption" }),
      body,
    );
    const show = () => {
      this.address.set({ curves: details.open ? "1" : "" }, "replace");
      if (details.open && body.childElementCount === 0) this.#curves(image, body);
    };
    details.addEventListener("toggle", show);
    return details;
  }

  async #curves(image, body) {
    body.replaceChildren(line("The model looks at corrupted copies…", "fine"));
    try {
      const { severities, curves, title: score } = await getJson(path("corruption", image.row));
      if (this.#image !== image) return;
      const all = curves.flatMap(({ u }) => u).filter(Number.isFinite);
      const [low, high] = [Math.min(...all), Math.max(...all)];
      const digits = decimals(low, high);
      const { svg } = lineChart({
        lines: curves.map(({ u }, place) => ({
          xs: severities,
          ys: u,
          kind: "curve",
          colour: COLOURS[place % COLOURS.length],
        })),
        x: { title: "severity →", low: severities[0], high: severities.at(-1) },
        y: { title: `↑ ${score}`, low, high: high > low ? high : low + 1, format: (value) => number(value, digits) },
        label: `${score} of this image under ${curves.map(({ kind }) => kind).join(", ")}, by severity`,
      });
      body.replaceChildren(svg, make("ul", { className: "curve-key" }, ...curves.map(curveKey)));
    } catch (error) {
      body.replaceChildren(line(error.message, "fine"));
    }
  }

  // Notes.

  #listenToNotes() {
    const save = (key, field) => async () => {
      const [row, value] = [this.row, at(field).value];
      if (row < 0 || (this.notes.of(row)?.[key] ?? "") === value) return;
      at("note-state").textContent = "Saving…";
      at("note-state").textContent = (await this.notes.save(row, { [key]: value }))
        ? "Saved"
        : "Kept here; not saved yet";
    };
    for (const [key, field] of [
      ["label", "note-label"],
      ["note", "note-text"],
    ]) {
      at(field).addEventListener("change", save(key, field));
      at(field).addEventListener("input", later(save(key, field), 800));
    }
    at("note-classes").replaceChildren(...(this.about.classes ?? []).map((value) => make("option", { value })));
  }

  #showNote() {
    const note = this.row < 0 ? null : this.notes.of(this.row);
    const marked = Boolean(note?.marked);
    at("mark").setAttribute("aria-pressed", String(marked));
    at("mark").textContent = marked ? "★ Marked" : "☆ Mark";
    // What is being typed is not overwritten by what the server knows.
    const fields = [
      ["note-label", note?.label],
      ["note-text", note?.note],
    ];
    for (const [id, text] of fields) {
      if (document.activeElement !== at(id) || this.noted !== this.row) at(id).value = text ?? "";
    }
    if (this.noted !== this.row) at("note-state").textContent = "";
    this.noted = this.row;
  }
}

/** Uncertainty of tiles as a small canvas that is stretched over the part of the picture that they cover. */
function heatMap({ grid: [height, width], values, low, high, box = [0, 0, 1, 1] }, shades) {
  const canvas = make("canvas", { width, height, "aria-hidden": "true" });
  const brush = canvas.getContext("2d");
  values.forEach((tiles, y) =>
    tiles.forEach((value, x) => {
      const share = high > low ? Math.max(0, Math.min(1, (value - low) / (high - low))) : 0;
      brush.fillStyle = `rgb(${shades[Math.round(share * (shades.length - 1))].join(" ")})`;
      brush.fillRect(x, y, 1, 1);
    }),
  );
  const [left, top, right, bottom] = box.map((one) => 100 * one);
  Object.assign(canvas.style, {
    left: `${left}%`,
    top: `${top}%`,
    width: `${right - left}%`,
    height: `${bottom - top}%`,
  });
  return canvas;
}

function curveKey({ kind, predicted_name: names }, place) {
  const sample = make("i");
  sample.style.background = COLOURS[place % COLOURS.length];
  const changes = names ? names.findIndex((name) => name !== names[0]) : -1;
  const words =
    changes > 0 ? `prediction changes to ${names[changes]} at severity ${changes}` : "same prediction throughout";
  return make(
    "li",
    {},
    sample,
    make("b", { textContent: kind }),
    make("span", { className: "fine", textContent: words }),
  );
}
