/** Names and classes of single rows, asked for in batches when they come into sight. */

import { postJson } from "./api.js";

const BATCH = 500;
const KEPT = 20_000;

/** Whether a prediction is wrong, where labels are the model's classes. */
export const isWrong = (columns, { label, predicted }) =>
  columns.has("correct") && (label ?? -1) >= 0 && label !== predicted;

export class Rows {
  #entries = new Map();
  #waiting = new Map();

  /** What the server knows about a row: { row, id, label_name, predicted_name, picture, ... }. */
  one(row) {
    if (this.#entries.has(row)) return Promise.resolve(this.#entries.get(row));
    if (!this.#waiting.has(row)) {
      if (this.#waiting.size === 0) setTimeout(() => this.#ask(), 0);
      const entry = {};
      entry.promise = new Promise((resolve, reject) => Object.assign(entry, { resolve, reject }));
      this.#waiting.set(row, entry);
    }
    return this.#waiting.get(row).promise;
  }

  /** What is known already, else null. */
  known(row) {
    return this.#entries.get(row) ?? null;
  }

  async #ask() {
    const waiting = this.#waiting;
    this.#waiting = new Map();
    const rows = [...waiting.keys()];
    for (let start = 0; start < rows.length; start += BATCH) {
      const batch = rows.slice(start, start + BATCH);
      try {
        for (const entry of await postJson("api/rows", { rows: batch })) this.#keep(entry);
        for (const row of batch) waiting.get(row).resolve(this.#entries.get(row));
      } catch (error) {
        for (const row of batch) waiting.get(row).reject(error);
      }
    }
  }

  #keep(entry) {
    if (this.#entries.size >= KEPT) this.#entries.delete(this.#entries.keys().next().value);
    this.#entries.set(entry.row, entry);
  }
}
