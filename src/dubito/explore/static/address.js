/**
 * What is shown lives in the address, `#key=value&...`: a link restores it, and back and forward work.
 *
 *   layout, view            positions, and the part of the map in sight (x,y,scale)
 *   colour, score           columns by which circles are coloured, and sized and faded
 *   in.COLUMN, is.COLUMN    filters: categories (0,3,-1 for none), flags (1 or 0)
 *   range.COLUMN            filter: scores from~to; either may be empty
 *   find, lasso             filters: part of a file name; LAYOUT!x,y,x,y,...
 *   histograms              scores whose histograms are open
 *   order, rising           order of the grid
 *   by, threshold           score and threshold of the slider
 *   panel, wide, cell       open panel, whether it is wide; size of the grid's pictures
 *   image, tiles, curves    row of the open image; whether its tiles and its corruption curves are shown
 */

const FILTERS = ["in.", "is.", "range.", "find", "lasso"];

const read = () => new Map(new URLSearchParams(location.hash.slice(1)));

function write(values) {
  const text = (part) => encodeURIComponent(part).replaceAll("%2C", ",").replaceAll("%20", "+");
  return `#${[...values].map(([key, value]) => `${text(key)}=${text(value)}`).join("&")}`;
}

const matches = (keys, key) => keys.some((one) => (one.endsWith(".") ? key.startsWith(one) : key === one));

export class Address {
  #values = read();
  #watchers = [];
  #timer = 0;

  constructor() {
    for (const event of ["popstate", "hashchange"]) window.addEventListener(event, () => this.#apply(read()));
  }

  get(key, fallback = "") {
    return this.#values.get(key) ?? fallback;
  }

  /** Every filter as [key, value]. */
  filters() {
    return [...this.#values].filter(([key]) => matches(FILTERS, key));
  }

  /** Call `run` after any of the keys has changed; "in." stands for all keys that begin with it. */
  watch(keys, run) {
    this.#watchers.push({ keys, run });
  }

  watchFilters(run) {
    this.watch(FILTERS, run);
  }

  /**
   * Change keys; an empty value removes one. "push" adds an entry to the history, "replace" changes the current one
   * after a while (moving the map), "draft" does not touch it (while something is being dragged).
   * @param {"push"|"replace"|"draft"} how
   */
  set(changes, how = "push") {
    if (how !== "replace" && this.#timer) this.#settle();
    const next = new Map(this.#values);
    for (const [key, value] of Object.entries(changes)) {
      if (value === "" || value === null || value === undefined) next.delete(key);
      else next.set(key, String(value));
    }
    this.#apply(next);
    if (how === "push" && write(next) !== location.hash) history.pushState(null, "", write(next));
    if (how === "replace") {
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.#settle(), 250);
    }
  }

  #settle() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    history.replaceState(null, "", write(this.#values));
  }

  #apply(next) {
    const before = this.#values;
    const changed = [...new Set([...before.keys(), ...next.keys()])].filter((key) => before.get(key) !== next.get(key));
    this.#values = next;
    for (const { keys, run } of this.#watchers) {
      if (changed.some((key) => matches(keys, key))) run();
    }
  }
}
