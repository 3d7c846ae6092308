/** Colours of circles: classes, flags and scores, safe for the colour-blind (the palette of dubito's map pages). */

import { countBy } from "./columns.js";
import { count } from "./dom.js";
import { rgb } from "./points.js";

export const COLOURS = [
  "#0072b2",
  "#d55e00",
  "#009e73",
  "#cc79a7",
  "#e69f00",
  "#56b4e9",
  "#9977ff",
  "#aa1100",
  "#883366",
  "#0044bb",
];
const OTHER = "#b9b6ae";
const STEPS = 64;

/** The colours of the style sheet, which differ between light and dark. */
export function readTheme() {
  const sample = document.createElement("i");
  sample.className = "shade";
  document.body.append(sample);
  const style = getComputedStyle(sample);
  const shades = Array.from({ length: STEPS + 1 }, (_, place) => {
    sample.style.setProperty("--f", place / STEPS);
    return rgb(style.color);
  });
  const theme = { paper: rgb(style.backgroundColor), ghost: rgb(OTHER), shades };
  sample.remove();
  return theme;
}

/**
 * Which values of a category have a colour: up to ten in their own order; of more, the ten most frequent.
 * @returns {number[]} values, the first with the first colour
 */
export function rankedValues(counts) {
  const present = [...counts.keys()].slice(0, -1).filter((value) => counts[value] > 0);
  if (present.length <= COLOURS.length) return present;
  return present.sort((a, b) => counts[b] - counts[a] || a - b).slice(0, COLOURS.length);
}

/** Whether ten colours suffice for half of the images. */
export function coloursSuffice(columns, name) {
  const counts = countBy(columns.values(name), columns.size(name), null);
  return rankedValues(counts).reduce((sum, value) => sum + counts[value], 0) >= columns.rows / 2;
}

/**
 * The colour of every image by one column that has been loaded.
 * @returns {{ colours: Uint8Array, key: { value, colour, text }[], rest: string, scale: boolean }}
 */
export function paint(columns, name, theme) {
  const { kind } = columns.metas.get(name);
  if (kind === "score") return paintScore(columns, name, theme);
  return kind === "flag" ? paintFlag(columns, name, theme) : paintCategory(columns, name);
}

function fill(rows, lookup) {
  const colours = new Uint8Array(3 * rows);
  for (let i = 0; i < rows; i += 1) {
    const colour = lookup(i);
    colours[3 * i] = colour[0];
    colours[3 * i + 1] = colour[1];
    colours[3 * i + 2] = colour[2];
  }
  return colours;
}

function paintScore(columns, name, { shades }) {
  const [values, shares, none] = [columns.values(name), columns.shares(name), rgb(OTHER)];
  const colours = fill(columns.rows, (i) => (Number.isNaN(values[i]) ? none : shades[Math.round(shares[i] * STEPS)]));
  return { colours, key: [], rest: "", scale: true };
}

function paintFlag(columns, name, { shades }) {
  const [values, none] = [columns.values(name), rgb(OTHER)];
  // What needs a look is orange: errors, abstentions, disagreements, marked images.
  const ends = name === "marked" ? [shades[0], shades[STEPS]] : [shades[STEPS], shades[0]];
  const colours = fill(columns.rows, (i) => ends[values[i]] ?? none);
  const words = flagWords(name);
  const css = (colour) => `rgb(${colour.join(" ")})`;
  const key = [1, 0].map((value) => ({ value, colour: css(ends[value]), text: words[value] }));
  const missing = values.includes(-1) ? [{ value: -1, colour: OTHER, text: "unknown" }] : [];
  return { colours, key: [...key, ...missing], rest: "", scale: false };
}

/** What 0 and 1 of a flag mean. */
export function flagWords(name) {
  if (name.startsWith("correct")) return ["wrong", "correct"];
  if (name.startsWith("accepted") || name === "slider") return ["abstained", "accepted"];
  if (name === "agree") return ["disagree", "agree"];
  if (name === "marked") return ["not marked", "marked"];
  return ["no", "yes"];
}

function paintCategory(columns, name) {
  const values = columns.values(name);
  const size = columns.size(name);
  const counts = countBy(values, size, null);
  const present = counts.reduce((sum, many) => sum + (many > 0 ? 1 : 0), 0) - (counts[size] > 0 ? 1 : 0);
  const ranked = rankedValues(counts);
  const table = Array.from({ length: size + 1 }, () => rgb(OTHER));
  // Few values keep the colour of their number, so that sets and classes look the same in every view.
  const colourOf = (value, place) => COLOURS[size <= COLOURS.length ? value : place];
  ranked.forEach((value, place) => (table[value] = rgb(colourOf(value, place))));
  const colours = fill(columns.rows, (i) => table[values[i] < 0 ? size : values[i]]);
  const key = ranked.map((value, place) => ({
    value,
    colour: colourOf(value, place),
    text: columns.nameOf(name, value),
  }));
  if (counts[size] > 0) key.push({ value: -1, colour: OTHER, text: columns.nameOf(name, -1) });
  const rest = present > ranked.length ? `${count(present - ranked.length)} less frequent: grey` : "";
  return { colours, key, rest, scale: false };
}
