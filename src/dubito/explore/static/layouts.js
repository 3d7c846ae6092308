/** Positions of the images: layouts of the server, PCA until a better one is ready, and ranks by two scores. */

import { getJson, getLayout, path, postJson } from "./api.js";

const PREFERRED = ["tsne", "umap", "pca"];
const POLL = 1000;

/** The layout whose axes are the ranks by two scores. */
export const ranksLayout = (x, y) => `ranks!${x}!${y}`;

/** A layout that is ready, in the server's words: it may not show every image exactly. */
async function described(name) {
  const about = await getJson("api/about").catch(() => ({ layouts: [] }));
  return about.layouts.find((layout) => layout.name === name) ?? { state: "ready", progress: 1 };
}

export class Layouts {
  #positions = new Map();
  #watchers = [];
  #polling = 0;

  constructor(about, columns) {
    this.columns = columns;
    this.list = about.layouts.map((layout) => ({ ...layout }));
    if (this.list.some(({ state }) => state === "running")) this.#poll();
  }

  watch(run) {
    this.#watchers.push(run);
  }

  of(name) {
    return this.list.find((layout) => layout.name === name);
  }

  isRanks(id) {
    return id.startsWith("ranks!");
  }

  /** PCA is computed when it is first asked for. */
  isReady(layout) {
    return layout?.state === "ready" || (layout?.name === "pca" && layout.state === "none");
  }

  /** The best layout that is ready, or ranks where the table has no features; null without two scores. */
  best() {
    const ready = this.list.filter((layout) => this.isReady(layout));
    const place = ({ name }) => (PREFERRED.includes(name) ? PREFERRED.indexOf(name) : PREFERRED.length);
    if (ready.length > 0) return ready.sort((a, b) => place(a) - place(b))[0].name;
    const { scores } = this.columns;
    return this.list.every(({ state }) => state !== "running") && scores.length > 1
      ? ranksLayout(scores[0].name, scores[1].name)
      : null;
  }

  /** The layout to draw for a choice of the user: the best one until it is ready. */
  drawn(choice) {
    if (choice !== "" && (this.isRanks(choice) || this.isReady(this.of(choice)))) return choice;
    return this.best();
  }

  /** @returns {Promise<Float32Array>} x and y of every image in the unit square */
  positions(id) {
    if (!this.#positions.has(id)) {
      const promise = this.isRanks(id) ? this.#ranks(id) : this.#fetch(id);
      this.#positions.set(id, promise);
      promise.catch(() => this.#positions.delete(id));
    }
    return this.#positions.get(id);
  }

  async #fetch(name) {
    const answer = await getLayout(name);
    if (answer instanceof Float32Array) return answer;
    throw new Error(answer.words || `The layout '${name}' is not ready.`);
  }

  /** Images without one of the scores lie beside the square. */
  async #ranks(id) {
    const [, ...names] = id.split("!");
    const unknown = names.find((name) => !this.columns.has(name));
    if (unknown !== undefined) throw new Error(`The address compares '${unknown}', which this table does not have.`);
    await Promise.all(names.map((name) => this.columns.load(name)));
    const [x, y] = names.map((name) => this.columns.ranks(name));
    const positions = new Float32Array(2 * x.length);
    for (let i = 0; i < x.length; i += 1) {
      positions[2 * i] = Number.isNaN(x[i]) ? -0.03 : x[i];
      positions[2 * i + 1] = 1 - (Number.isNaN(y[i]) ? -0.03 : y[i]);
    }
    return positions;
  }

  async start(name) {
    Object.assign(this.of(name), { state: "running", progress: 0, words: "" });
    this.#report();
    try {
      this.#note(name, await postJson(path("layout", name), {}));
    } catch (error) {
      this.#note(name, { state: "failed", words: error.message });
    }
    this.#poll();
  }

  #note(name, { state = "running", progress = 0, words = "" }) {
    Object.assign(this.of(name), { state, progress, words });
    this.#report();
  }

  #report() {
    for (const run of this.#watchers) run();
  }

  /** Ask for the layouts that are being computed until none is; a server that does not answer is asked again. */
  #poll() {
    clearTimeout(this.#polling);
    this.#polling = setTimeout(async () => {
      for (const { name } of this.list.filter(({ state }) => state === "running")) {
        const answer = await getLayout(name).catch((error) =>
          error.status ? { state: "failed", words: error.message } : null,
        );
        if (answer instanceof Float32Array) {
          this.#positions.set(name, Promise.resolve(answer));
          this.#note(name, await described(name));
        } else if (answer !== null) this.#note(name, answer);
      }
      if (this.list.some(({ state }) => state === "running")) this.#poll();
    }, POLL);
  }
}
