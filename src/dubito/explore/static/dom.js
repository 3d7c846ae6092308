/** Elements and numbers as text: names from files become text nodes, never markup. */

export const at = (id) => document.getElementById(id);

/** An element with properties or attributes; children are elements or text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

export function makeSvg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** A coloured bar from 0 to 1: `share` sets its length and its place on the scale from certain to uncertain. */
export function bar(share) {
  const element = make("i", { className: "bar" });
  element.style.setProperty("--f", share);
  return element;
}

const minus = (text) => text.replace("-", "\u2212");

export const count = (many) => many.toLocaleString("en");
export const plural = (many, noun) => `${count(many)} ${noun}${many === 1 ? "" : "s"}`;

/** The title of a column at the beginning of a line. */
export const heading = (text) => text.charAt(0).toUpperCase() + text.slice(1);

/** The last part of a path: a table is named by its folder. */
export const shortName = (name) => name.split(/[\\/]/).filter(Boolean).at(-1) ?? name;

/** A share as per cent: small ones, and those near 100, with a decimal; never rounded to 100 from below. */
export function percent(share, digits, round = Math.round) {
  if (!Number.isFinite(share)) return "–";
  const value = 100 * share;
  const places = digits ?? (Number.isInteger(value) || (value >= 10 && value <= 99) ? 0 : 1);
  const rounded = round(value * 10 ** places) / 10 ** places;
  return value < 100 && rounded >= 100 ? "> 99.9 %" : `${rounded.toFixed(places)} %`;
}

/** Decimals that tell values apart: three digits of their range. */
export function decimals(low, high) {
  const range = high > low ? high - low : Math.abs(low) || 1;
  return Math.min(10, Math.max(0, 2 - Math.floor(Math.log10(range))));
}

export function number(value, digits = 3) {
  if (!Number.isFinite(value)) return value > 0 ? "∞" : value < 0 ? "\u2212∞" : "none";
  if (Math.abs(value) >= 1e6) return minus(value.toExponential(2).replace("e+", "e"));
  return minus((Number(value.toFixed(digits)) + 0).toString());
}

/** Run at most once a frame, with the last arguments. */
export function oncePerFrame(run) {
  let waiting = 0;
  let last = [];
  return (...now) => {
    last = now;
    waiting ||= requestAnimationFrame(() => {
      waiting = 0;
      run(...last);
    });
  };
}

/** Run once, some time after the last call. */
export function later(run, milliseconds) {
  let timer = 0;
  return (...now) => {
    clearTimeout(timer);
    timer = setTimeout(() => run(...now), milliseconds);
  };
}

/** Fill a <select>: groups of [title, [{ value, text, title }]]. */
export function fillSelect(select, groups, chosen) {
  const option = ({ value, text, title = "" }) => make("option", { value, textContent: text, title });
  select.replaceChildren(
    ...groups
      .filter(([, options]) => options.length > 0)
      .flatMap(([title, options]) =>
        title ? [make("optgroup", { label: title }, ...options.map(option))] : options.map(option),
      ),
  );
  select.value = chosen;
}
