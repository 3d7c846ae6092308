/** Columns of the table, fetched when they are first shown: order, quantiles, ranks and shares of each. */

import { getBytes, path } from "./api.js";
import { decimals, number } from "./dom.js";

/** Rows in ascending order of a score, equal ones in the table's order, those without a value last. */
export function argsort(values) {
  const rows = values.length;
  const bits = new Int32Array(values.buffer, values.byteOffset, rows);
  const keys = new Uint32Array(rows);
  // Floats order as unsigned integers once negative ones are inverted and positive ones are moved above them.
  for (let i = 0; i < rows; i += 1) {
    keys[i] = Number.isNaN(values[i]) ? 0xffffffff : bits[i] ^ ((bits[i] >> 31) | 0x80000000);
  }
  let order = new Uint32Array(rows).map((_, i) => i);
  for (const shift of [0, 16]) {
    const starts = new Uint32Array(65537);
    for (let i = 0; i < rows; i += 1) starts[((keys[i] >>> shift) & 0xffff) + 1] += 1;
    for (let key = 1; key <= 65536; key += 1) starts[key] += starts[key - 1];
    const next = new Uint32Array(rows);
    for (const row of order) next[starts[(keys[row] >>> shift) & 0xffff]++] = row;
    order = next;
  }
  return order;
}

function countOf(values, holds) {
  let count = 0;
  for (let i = 0; i < values.length; i += 1) count += holds(values[i]) ? 1 : 0;
  return count;
}

/** Whole numbers counted by value, -1 last, among the rows of a mask. */
export function countBy(values, size, mask) {
  const counts = new Uint32Array(size + 1);
  for (let i = 0; i < values.length; i += 1) counts[values[i] < 0 ? size : values[i]] += mask === null ? 1 : mask[i];
  return counts;
}

export class Columns {
  #promises = new Map();
  #values = new Map();
  #derived = new Map();
  #computed = new Map();
  #watchers = [];

  constructor(about) {
    this.about = about;
    this.rows = about.rows;
    this.metas = new Map(about.columns.map((meta) => [meta.name, meta]));
  }

  has(name) {
    return this.metas.has(name);
  }

  /** @param {"score"|"category"|"flag"} kind */
  ofKind(kind) {
    return [...this.metas.values()].filter((meta) => meta.kind === kind);
  }

  /** Scores of the server, without those that the page derives. */
  get scores() {
    return this.ofKind("score").filter(({ name }) => !this.#derived.has(name));
  }

  /** The score by which circles are sized and images ordered; null where the table has none. */
  chosenScore(address) {
    const chosen = address.get("score");
    return this.metas.get(chosen)?.kind === "score" ? chosen : this.about.score;
  }

  title(name) {
    return this.metas.get(name)?.title ?? name;
  }

  /** Names of a category's values. */
  names(name) {
    const { of } = this.metas.get(name);
    return (Array.isArray(of) ? of : this.about[of]) ?? [];
  }

  nameOf(name, value) {
    if (value < 0) return name === "label" ? "no label" : "none";
    return this.names(name)[value] ?? String(value);
  }

  /** How many values a category has, also where they have no names. */
  size(name) {
    const values = this.#values.get(name);
    return this.#once(name, "size", () =>
      values.reduce((most, value) => Math.max(most, value + 1), this.names(name).length),
    );
  }

  /** A column that the page computes itself, such as acceptance under the slider. */
  define(meta, compute) {
    this.metas.set(meta.name, { about: "", of: null, ...meta });
    this.#derived.set(meta.name, compute);
  }

  /** Compute a column again that the page computes itself, and report it. */
  renew(name) {
    for (const kept of [this.#promises, this.#values, this.#computed]) kept.delete(name);
    for (const run of this.#watchers) run(name);
  }

  watch(run) {
    this.#watchers.push(run);
  }

  /** A number that changes with every renewal. */
  version(name) {
    return this.#promises.get(name) ?? null;
  }

  load(name) {
    if (!this.#promises.has(name)) {
      const promise = this.#fetch(name);
      this.#promises.set(name, promise);
      promise.then(
        (values) => this.#promises.get(name) === promise && this.#values.set(name, values),
        () => this.#promises.get(name) === promise && this.#promises.delete(name),
      );
    }
    return this.#promises.get(name);
  }

  async #fetch(name) {
    if (this.#derived.has(name)) return this.#derived.get(name)();
    const bytes = await getBytes(path("column", name));
    return this.metas.get(name)?.kind === "score" ? new Float32Array(bytes) : new Int32Array(bytes);
  }

  /** Values of a column that has been loaded, else null. */
  values(name) {
    return this.#values.get(name) ?? null;
  }

  /** Rows by ascending score. */
  order(name) {
    return this.#once(name, "order", () => argsort(this.values(name)));
  }

  /** Rows that have a value: the first ones of `order`. */
  known(name) {
    return this.#once(name, "known", () => countOf(this.values(name), (value) => !Number.isNaN(value)));
  }

  /** Among finite values; infinite ones were refused whatever the threshold. */
  quantile(name, share) {
    const finite = this.#once(name, "finite", () => countOf(this.values(name), Number.isFinite));
    const [values, order] = [this.values(name), this.order(name)];
    if (finite === 0) return 0;
    const place = share * (finite - 1);
    const [low, high] = [values[order[Math.floor(place)]], values[order[Math.ceil(place)]]];
    return low + (high - low) * (place - Math.floor(place));
  }

  /** Where circles are smallest and largest: the 2 % and 98 % quantiles, or the range where these are equal. */
  ends(name) {
    return this.#once(name, "ends", () => {
      const inner = [this.quantile(name, 0.02), this.quantile(name, 0.98)];
      return inner[1] > inner[0] ? inner : [this.quantile(name, 0), this.quantile(name, 1)];
    });
  }

  /** From 0, the most certain, to 1; 0 where all are equal or a value is missing. */
  shares(name) {
    return this.#once(name, "shares", () => {
      const [low, high] = this.ends(name);
      const shares = new Float32Array(this.rows);
      if (!(high > low)) return shares;
      const values = this.values(name);
      for (let i = 0; i < this.rows; i += 1) {
        const share = (values[i] - low) / (high - low);
        shares[i] = share > 0 ? Math.min(share, 1) : 0;
      }
      return shares;
    });
  }

  /** Share of the other images that are more certain, 0 to 1; equal scores have equal ranks, missing ones NaN. */
  ranks(name) {
    return this.#once(name, "ranks", () => {
      const [values, order, known] = [this.values(name), this.order(name), this.known(name)];
      const ranks = new Float32Array(this.rows).fill(NaN);
      for (let start = 0; start < known;) {
        let end = start;
        while (end + 1 < known && values[order[end + 1]] === values[order[start]]) end += 1;
        for (let place = start; place <= end; place += 1)
          ranks[order[place]] = (start + end) / 2 / Math.max(1, known - 1);
        start = end + 1;
      }
      return ranks;
    });
  }

  /** A score as text, with the decimals that tell this column's values apart. */
  format(name, value) {
    return number(value, decimals(...this.ends(name)));
  }

  #once(name, what, compute) {
    if (!this.#computed.has(name)) this.#computed.set(name, new Map());
    const kept = this.#computed.get(name);
    if (!kept.has(what)) kept.set(what, compute());
    return kept.get(what);
  }
}
