/** Filters by class, prediction, set and flag; each reads and writes one key of the address. */

import { flagWords } from "./colours.js";
import { countBy } from "./columns.js";
import { at, count, heading, later, make } from "./dom.js";
import { readNumbers } from "./selection.js";

const LISTED = 10;
const MATCHES = 100;

export function startFilters(app) {
  const { address, columns, selection } = app;
  const several = (meta) => meta.name !== "set" || app.about.sets.length > 1;
  for (const meta of columns.ofKind("category").filter(several))
    at("categories").append(new CategoryFilter(app, meta).element);
  for (const meta of columns.ofKind("flag")) at("flags").append(flagFilter(app, meta));
  startFind(address);
  at("clear").addEventListener("click", () => {
    selection.clear();
    at("canvas").focus();
  });
}

/** Part of a file name, in the bar at the top. */
function startFind(address) {
  const input = at("find");
  // What is being typed is not replaced by what has been asked for.
  const show = () => {
    if (document.activeElement !== input || address.get("find") === "") input.value = address.get("find");
  };
  const commit = () => address.set({ find: input.value.trim() });
  input.addEventListener("input", later(commit, 250));
  input.addEventListener("change", commit);
  address.watch(["find"], show);
  show();
}

/** Both, or one of the two values of a flag. */
function flagFilter({ address }, meta) {
  const key = `is.${meta.name}`;
  const words = flagWords(meta.name);
  const values = { "": "all", 1: words[1], 0: words[0] };
  const radios = ["", "1", "0"].map((value) => {
    const input = make("input", { type: "radio", name: key, value, onchange: () => address.set({ [key]: value }) });
    return make("label", {}, input, make("span", { textContent: values[value] }));
  });
  const show = () => radios.forEach(({ firstChild }) => (firstChild.checked = firstChild.value === address.get(key)));
  address.watch([key], show);
  show();
  const legend = make("legend", { textContent: heading(meta.title), title: meta.about });
  return make("fieldset", { className: "flag" }, legend, make("div", { className: "choice" }, ...radios));
}

/** Any of the values of a category: the most frequent ones are listed, all can be searched. */
class CategoryFilter {
  constructor({ address, columns, selection, report }, meta) {
    Object.assign(this, { address, columns, selection, report, name: meta.name, key: `in.${meta.name}` });
    this.chosenText = make("span", { className: "fine" });
    const title = meta.title;
    const summary = make(
      "summary",
      { title: meta.about },
      make("span", { textContent: heading(title) }),
      this.chosenText,
    );
    this.search = make("input", {
      type: "search",
      placeholder: "Search by name",
      "aria-label": `Search: ${title}`,
      oninput: () => this.list(),
    });
    this.options = make("ul", { className: "options" });
    this.more = make("p", { className: "fine" });
    this.element = make("details", {}, summary, this.search, this.options, this.more);
    this.element.open = this.chosen().length > 0 || meta.name === "set";
    this.element.addEventListener("toggle", () => this.show());
    address.watch([this.key], () => this.show());
    selection.watch(() => this.show());
    this.show();
  }

  chosen() {
    return readNumbers(this.address.get(this.key));
  }

  async show() {
    const chosen = this.chosen();
    this.chosenText.textContent = chosen.length > 0 ? `${count(chosen.length)} chosen` : "";
    if (!this.element.open) return;
    try {
      await this.columns.load(this.name);
      this.list();
    } catch (error) {
      this.more.textContent = error.message;
    }
  }

  list() {
    const values = this.columns.values(this.name);
    const size = this.columns.size(this.name);
    const all = countBy(values, size, null);
    const shown = countBy(values, size, this.selection.shown);
    const text = this.search.value.trim().toLowerCase();
    const present = [...all.keys()].map((value) => (value === size ? -1 : value)).filter((value) => all.at(value) > 0);
    this.search.hidden = present.length <= LISTED;
    const named = present.filter((value) => this.columns.nameOf(this.name, value).toLowerCase().includes(text));
    const chosen = new Set(this.chosen());
    // Chosen ones stay in sight; few values keep their order, of many the most frequent come first.
    if (present.length > LISTED) named.sort((a, b) => chosen.has(b) - chosen.has(a) || all.at(b) - all.at(a) || a - b);
    const listed = named.slice(0, text === "" ? Math.max(LISTED, chosen.size) : MATCHES);
    const held = this.options.contains(document.activeElement) ? document.activeElement.dataset.value : undefined;
    this.options.replaceChildren(...listed.map((value) => this.option(value, chosen, shown.at(value))));
    if (held !== undefined) this.options.querySelector(`[data-value="${held}"]`)?.focus();
    const hidden = named.length - listed.length;
    this.more.textContent =
      named.length === 0 ? "No name contains this text." : hidden > 0 ? `${count(hidden)} more: search by name` : "";
  }

  option(value, chosen, many) {
    const toggle = () => {
      if (!chosen.delete(value)) chosen.add(value);
      this.address.set({ [this.key]: [...chosen].join(",") });
    };
    const box = make("input", { type: "checkbox", checked: chosen.has(value), onchange: toggle, "data-value": value });
    const name = make("span", { textContent: this.columns.nameOf(this.name, value) });
    return make("li", {}, make("label", {}, box, name, make("small", { textContent: count(many) })));
  }
}
