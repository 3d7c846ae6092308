/** The threshold: coverage, selective risk and its bound under the slider, the risk-coverage curve, a risk target. */

import { getJson, path } from "./api.js";
import { lineChart } from "./charts.js";
import { at, count, fillSelect, make, makeSvg, oncePerFrame, percent } from "./dom.js";

export class Threshold {
  #data = null;
  #turn = 0;

  constructor({ about, address, columns }) {
    Object.assign(this, { about, address, columns });
    columns.define(
      {
        name: "slider",
        title: "accepted under the slider",
        kind: "flag",
        about: "Images whose score is at most the threshold of the slider.",
      },
      () => this.#accepted(),
    );
  }

  get score() {
    const chosen = this.address.get("by");
    if (this.columns.scores.some(({ name }) => name === chosen)) return chosen;
    return this.about.guard?.score ?? this.columns.chosenScore(this.address);
  }

  /** The threshold in the address, else the guard's, else one that accepts every image. */
  get value() {
    const text = this.address.get("threshold");
    if (text !== "" && Number.isFinite(Number(text))) return Number(text);
    return this.about.guard !== null && this.score === this.about.guard.score ? this.about.guard.threshold : Infinity;
  }

  start() {
    const { scores } = this.columns;
    if (scores.length === 0) at("threshold-words").textContent = "There is no score to set a threshold on.";
    fillSelect(at("by"), [["", scores.map(({ name, title }) => ({ value: name, text: title }))]], this.score);
    at("by").addEventListener("change", () => this.address.set({ by: at("by").value, threshold: "" }));
    at("slider").addEventListener("input", () => this.#slide("draft"));
    at("slider").addEventListener("change", () => this.#slide("push"));
    at("risk-form").addEventListener("submit", (event) => this.#aim(event));
    at("colour-acceptance").addEventListener("click", () => {
      const on = this.address.get("colour") === "slider";
      this.address.set({ colour: on ? "" : "slider" });
    });
    this.address.watch(["colour"], () => this.#showColouring());
    this.address.watch(["threshold"], () => this.#follow());
    this.address.watch(["by", "score", "panel"], () => this.open());
    this.#showGuard();
    this.#showColouring();
    this.open();
  }

  /** Flags of acceptance under the slider; rows without a score are unknown. */
  async #accepted() {
    if (this.score === null) return new Int32Array(this.columns.rows).fill(-1);
    const values = await this.columns.load(this.score);
    const most = Math.fround(this.value);
    const flags = new Int32Array(values.length);
    for (let i = 0; i < values.length; i += 1) flags[i] = values[i] <= most ? 1 : values[i] > most ? 0 : -1;
    return flags;
  }

  /** The curve is fetched when the panel is first looked at. */
  open() {
    at("by").value = this.score;
    if (this.loaded !== undefined && this.loaded !== this.score) this.columns.renew("slider");
    const visible = this.address.get("panel") === "threshold";
    if (visible && this.score !== null && this.loaded !== this.score) this.#load();
  }

  async #load() {
    this.#turn += 1;
    const turn = this.#turn;
    this.loaded = this.score;
    const exact = Number.isFinite(this.value) ? `?at=${encodeURIComponent(this.value)}` : "";
    try {
      const data = await getJson(path("threshold", this.score) + exact);
      if (turn !== this.#turn) return;
      this.#data = data;
      this.#showCurve();
    } catch (error) {
      this.loaded = undefined;
      at("threshold-words").textContent = error.message;
    }
  }

  #follow() {
    this.columns.renew("slider");
    if (this.#data === null) return;
    // A threshold between two steps is asked for once, so that its numbers are exact.
    const exact = this.value === Infinity || this.#data.thresholds[this.#step()] === this.value;
    if (exact || this.asked === this.value) this.#show();
    else {
      this.asked = this.value;
      this.#load();
    }
  }

  /** The laxest step that accepts nothing above the threshold. */
  #step() {
    const { thresholds } = this.#data;
    let [low, high] = [0, thresholds.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (thresholds[middle] <= this.value) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  #numbers(step) {
    const { thresholds, accepted, errors, bound, rows } = this.#data;
    const judged = (this.#data.judged ?? accepted)[step];
    const kept = step < 0 ? 0 : accepted[step];
    return {
      threshold: thresholds[step],
      accepted: kept,
      coverage: kept / rows,
      judged,
      errors: errors?.[step],
      risk: errors && judged > 0 ? errors[step] / judged : NaN,
      bound: bound?.[step] ?? NaN,
    };
  }

  #showCurve() {
    const { thresholds, errors, words } = this.#data;
    const steps = thresholds.map((_, step) => this.#numbers(step));
    this.chart = errors === null ? null : this.#chart(steps);
    at("curve").replaceChildren(...(this.chart ? [this.chart.svg] : []));
    at("curve-key").hidden = this.chart === null;
    at("slider").max = thresholds.length - 1;
    at("slider").disabled = thresholds.length < 2;
    at("threshold-words").textContent = words;
    if (this.chart) this.#mark(steps);
    this.#show();
  }

  #chart(steps) {
    const risks = steps.map(({ risk }) => risk);
    // The first few accepted images do not set the scale; what lies above it is left out.
    const settled = risks.slice(Math.floor(risks.length / 20)).filter(Number.isFinite);
    const top = Math.min(1, Math.max(0.02, 1.5 * Math.max(0, ...settled)));
    const xs = steps.map(({ coverage }) => coverage);
    const line = (kind) => ({ xs, ys: steps.map((one) => (one[kind] <= top ? one[kind] : NaN)), kind });
    const whole = `the selective risk is ${percent(risks.at(-1), 1)} if every image is accepted`;
    return lineChart({
      lines: [line("bound"), line("risk")],
      x: { title: "coverage →", low: 0, high: 1, format: percent },
      y: { title: "↑ selective risk", low: 0, high: top, format: percent },
      label: `Risk-coverage curve by ${this.columns.title(this.score)}: ${whole}.`,
    });
  }

  /** The marker of the slider, which can be dragged. */
  #mark(steps) {
    const { svg, inner } = this.chart;
    this.marker = makeSvg(
      "g",
      { class: "marker" },
      makeSvg("path", { d: `M0 ${inner.top}V${inner.bottom}` }),
      makeSvg("circle", { r: 5 }),
    );
    svg.append(this.marker);
    const drag = (event, how) => {
      const wanted = this.chart.valueAt(event.clientX);
      const far = ({ coverage }) => Math.abs(coverage - wanted);
      const { threshold } = steps.reduce((best, one) => (far(one) < far(best) ? one : best));
      this.address.set({ threshold }, how);
    };
    svg.addEventListener("pointerdown", (event) => {
      svg.setPointerCapture(event.pointerId);
      drag(event, "draft");
    });
    svg.addEventListener("pointermove", (event) => event.buttons > 0 && drag(event, "draft"));
    svg.addEventListener("pointerup", (event) => drag(event, "push"));
  }

  #slide(how) {
    this.address.set({ threshold: this.#data?.thresholds[Number(at("slider").value)] }, how);
  }

  #show = oncePerFrame(() => {
    if (this.#data === null) return;
    const step = this.#step();
    const now = this.#numbers(step);
    const { rows, errors, confidence } = this.#data;
    const known = this.columns.values(this.score) !== null;
    const value = known ? this.columns.format(this.score, now.threshold) : now.threshold?.toPrecision(4);
    const wrong = step < 0 ? "nothing is accepted" : `${count(now.errors ?? 0)} of ${count(now.judged)} wrong`;
    const words = {
      "threshold-value": step < 0 ? "below every score" : value,
      coverage: percent(now.coverage, 1),
      "coverage-words": `${count(now.accepted)} of ${count(rows)} accepted`,
      risk: percent(now.risk, 1),
      "risk-words": errors === null ? "needs labels" : wrong,
      // A bound is rounded up.
      bound: Number.isFinite(now.bound) ? `≤ ${percent(now.bound, 1, Math.ceil)}` : "–",
      "bound-words": errors === null ? "needs labels" : `with ${percent(confidence)} confidence`,
    };
    for (const [id, text] of Object.entries(words)) at(id).textContent = text;
    at("slider").value = Math.max(0, step);
    const spoken = `${words["threshold-value"]}; coverage ${words.coverage}, selective risk ${words.risk}`;
    at("slider").setAttribute("aria-valuetext", spoken);
    if (this.chart) this.#moveMarker(now);
  });

  #moveMarker({ coverage, risk }) {
    const [x, y] = this.chart.place(coverage, Number.isFinite(risk) ? risk : 0);
    this.marker.setAttribute("transform", `translate(${x} 0)`);
    this.marker.lastChild.setAttribute("cy", Math.max(this.chart.inner.top, y));
  }

  async #aim(event) {
    event.preventDefault();
    const [risk, confidence] = [Number(at("target").value) / 100, Number(at("confidence").value) / 100];
    const words = at("target-words");
    words.classList.remove("bad");
    words.textContent = "Looking for the threshold…";
    try {
      const query = new URLSearchParams({ score: this.score, risk, confidence });
      const answer = await getJson(`api/risk?${query}`);
      words.textContent = answer.words;
      this.address.set({ by: this.score, threshold: answer.threshold });
    } catch (error) {
      words.classList.add("bad");
      words.textContent = error.message;
    }
  }

  #showGuard() {
    const { guard } = this.about;
    at("guard").hidden = guard === null;
    at("no-guard").hidden = guard !== null;
    if (guard === null) return;
    at("guarantee").textContent = guard.guarantee;
    at("findings").replaceChildren(...guard.findings.map((textContent) => make("li", { textContent })));
    at("guard-threshold").addEventListener("click", () =>
      this.address.set({ by: guard.score, threshold: guard.threshold }),
    );
  }

  #showColouring() {
    at("colour-acceptance").setAttribute("aria-pressed", String(this.address.get("colour") === "slider"));
  }
}
