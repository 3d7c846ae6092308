/** Marks, labels and notes of images: they live on the server, and what could not be saved is kept and sent again. */

import { connection, getJson, pack, path, postJson, putJson, toBase64 } from "./api.js";

export class Notes {
  #notes = new Map();
  #unsaved = new Map();
  #watchers = [];

  constructor({ columns, report }) {
    Object.assign(this, { columns, report });
    columns.define({ name: "marked", title: "marked", kind: "flag", about: "Images that you marked." }, () =>
      this.#flags(),
    );
    connection.addEventListener("restored", () => this.load());
    document.addEventListener("visibilitychange", () => document.hidden || this.load());
  }

  watch(run) {
    this.#watchers.push(run);
  }

  /** @returns {{ marked: boolean, label: string, note: string } | null} */
  of(row) {
    return this.#notes.get(row) ?? null;
  }

  /** What another tab wrote is taken over; what is not saved yet is sent again. */
  async load() {
    try {
      const { notes } = await getJson("api/notes");
      this.#notes = new Map(Object.entries(notes).map(([row, note]) => [Number(row), note]));
      for (const [row, change] of this.#unsaved) {
        this.#notes.set(row, { ...this.#notes.get(row), ...change });
        this.save(row, change);
      }
      this.#report();
    } catch (error) {
      this.report(`Marks and notes could not be read. ${error.message}`);
    }
  }

  toggle(row) {
    return this.save(row, { marked: !this.of(row)?.marked });
  }

  /** Show a change at once and save it; returns whether it was saved. */
  async save(row, change) {
    this.#notes.set(row, { marked: false, label: "", note: "", ...this.#notes.get(row), ...change });
    this.#unsaved.set(row, { ...this.#unsaved.get(row), ...change });
    this.#report("marked" in change);
    const sent = this.#unsaved.get(row);
    try {
      await putJson(path("notes", row), sent);
      if (this.#unsaved.get(row) === sent) this.#unsaved.delete(row);
      return true;
    } catch (error) {
      this.report(`Not saved yet: ${error.message}`);
      return false;
    }
  }

  /** Mark or unmark every image of a mask. */
  async saveMask(mask, marked) {
    await postJson("api/notes", { mask: toBase64(pack(mask)), marked });
    await this.load();
  }

  #report(marks = true) {
    for (const run of this.#watchers) run();
    if (marks) this.columns.renew("marked");
  }

  #flags() {
    const flags = new Int32Array(this.columns.rows);
    for (const [row, { marked }] of this.#notes) if (marked) flags[row] = 1;
    return flags;
  }
}
