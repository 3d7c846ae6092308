/** Line charts as SVG: the risk-coverage curve and the corruption curves. */

import { makeSvg, number } from "./dom.js";

const [WIDTH, HEIGHT] = [380, 214];
const INNER = { left: 40, right: 362, top: 26, bottom: 176 };

/** About four round values between two limits. */
function ticks(low, high) {
  const rough = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const values = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k += 1) values.push(k * step);
  return values;
}

/**
 * @param {{ lines: { xs: number[], ys: number[], kind: string, colour?: string }[], x: object, y: object, label: string }} chart
 *   x and y: { title, low, high, format(value) }
 * @returns {{ svg: SVGElement, place(x, y): number[], valueAt(clientX): number }}
 */
export function lineChart({ lines, x, y, label }) {
  const toX = (value) => INNER.left + ((value - x.low) / (x.high - x.low || 1)) * (INNER.right - INNER.left);
  const toY = (value) => INNER.bottom - ((value - y.low) / (y.high - y.low || 1)) * (INNER.bottom - INNER.top);
  const svg = makeSvg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img", "aria-label": label });
  const text = (content, attributes) => {
    const element = makeSvg("text", attributes);
    element.textContent = content;
    return element;
  };
  for (const value of ticks(y.low, y.high)) {
    svg.append(makeSvg("path", { class: "grid", d: `M${INNER.left} ${toY(value)}H${INNER.right}` }));
    svg.append(text((y.format ?? number)(value), { x: INNER.left - 6, y: toY(value) + 3.5, "text-anchor": "end" }));
  }
  for (const value of ticks(x.low, x.high)) {
    svg.append(text((x.format ?? number)(value), { x: toX(value), y: INNER.bottom + 15, "text-anchor": "middle" }));
  }
  svg.append(text(x.title, { x: INNER.right, y: HEIGHT - 4, "text-anchor": "end", class: "axis" }));
  svg.append(text(y.title, { x: 2, y: 12, class: "axis" }));
  for (const { xs, ys, kind, colour } of lines) {
    const path = makeSvg("path", { class: `line ${kind}`, d: linePath(xs, ys, toX, toY) });
    if (colour) path.style.stroke = colour;
    svg.append(path);
  }
  const valueAt = (clientX) => {
    const edge = svg.getBoundingClientRect();
    const inside = ((clientX - edge.left) / edge.width) * WIDTH;
    return x.low + ((inside - INNER.left) / (INNER.right - INNER.left)) * (x.high - x.low);
  };
  return { svg, place: (one, other) => [toX(one), toY(other)], valueAt, inner: INNER };
}

/** A line that breaks where a value is missing. */
function linePath(xs, ys, toX, toY) {
  let path = "";
  let broken = true;
  for (let i = 0; i < xs.length; i += 1) {
    if (!Number.isFinite(ys[i])) {
      broken = true;
      continue;
    }
    path += `${broken ? "M" : "L"}${toX(xs[i]).toFixed(1)} ${toY(ys[i]).toFixed(1)}`;
    broken = false;
  }
  return path;
}
