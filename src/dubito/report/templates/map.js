// With points.js, which comes first in the page's one script.
const at = (id) => document.getElementById(id);
const data = JSON.parse(at("data").textContent);
const [box, canvas, ring, tip, key, find, from, to] = ["map", "canvas", "ring", "tip", "key", "find", "from", "to"].map(at);
const n = data.x.length;
const all = [...Array(n).keys()];
const sorted = [...all].sort((a, b) => data.u[a] - data.u[b]);
const rank = new Uint32Array(n);
sorted.forEach((i, place) => (rank[i] = place));
const STEPS = 32;

const points = new Points(canvas);
const [view, shares] = [points.view, Float32Array.from(data.share)];
const other = rgb(data.other);
points.set({
  xy: Float32Array.from(all.flatMap((i) => [data.x[i], data.y[i]])),
  shares,
  ringed: Uint32Array.from(data.ringed),
  radius: data.radius,
  opacity: data.opacity,
  ghost: other,
});

// What is looked at: a colouring, the places of its classes among the colours, and the images that are not filtered away.
const seen = new Uint8Array(n);
const hidden = new Set();
const thumbnails = new Map(Object.entries(data.thumbnails).map(([i, address]) => [Number(i), address]));
let colouring = null;
let colours = new Map();
let marked = -1;

const group = (i) => (colours.has(colouring.of[i]) ? colouring.of[i] : -1);

/** Show the images that are not filtered away; of one class alone, if it is given. */
const show = (lit = null) => {
  points.set({ mask: lit === null ? seen : seen.map((one, i) => one && Number(group(i) === lit)) });
  draw();
};

/** Colour the circles, and what lies below rings, for light or dark. */
const paint = () => {
  const shades = colouring === null ? readShades() : data.colours.map(rgb);
  const shade = colouring === null ? (i) => Math.round(shares[i] * STEPS) : (i) => colours.get(colouring.of[i]);
  const bytes = new Uint8Array(3 * n);
  for (const i of all) bytes.set(shades[shade(i)] ?? other, 3 * i);
  points.set({ colours: bytes, paper: rgb(getComputedStyle(box).backgroundColor) });
};

const draw = () => {
  points.draw();
  mark();
};

const spoken = (value) => String(value).replace("-", "\u2212");

const line = (tag, text) => {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
};

// The ring and the tooltip lie above the canvas: pointing at another redraws nothing.
const mark = () => {
  ring.hidden = marked < 0;
  if (marked < 0) return;
  const [[x, y], r] = [points.toScreen(marked), points.size(marked) + 3];
  Object.assign(ring.style, { left: `${x - r}px`, top: `${y - r}px`, width: `${2 * r}px`, height: `${2 * r}px` });
  const { width, height } = points;
  const right = x + r + 8 + tip.offsetWidth <= width;
  const left = right ? x + r + 8 : x - r - 8 - tip.offsetWidth;
  tip.style.left = `${Math.max(4, Math.min(left, width - tip.offsetWidth - 4))}px`;
  tip.style.top = `${Math.max(4, Math.min(y - tip.offsetHeight / 2, height - tip.offsetHeight - 4))}px`;
};

const tell = (i) => {
  tip.hidden = i < 0;
  if (i >= 0 && i !== marked) {
    tip.replaceChildren();
    if (thumbnails.has(i)) {
      const image = document.createElement("img");
      Object.assign(image, { src: thumbnails.get(i), alt: "", onload: mark });
      tip.append(image);
    }
    tip.append(line("b", data.id[i]), line("span", `${data.score.replaceAll("_", " ")} ${spoken(data.u[i])}`));
    for (const [name, { classes, of }] of Object.entries(data.colourings)) {
      tip.append(line("span", `${name}: ${classes[of[i]]}`));
    }
  }
  marked = i;
  mark();
};

const move = (x, y) => {
  points.pan(x, y);
  mark();
};

const zoom = (factor, x, y) => {
  points.zoom(factor, x, y);
  // The whole map lets a finger scroll the page; a part of it is moved by the finger.
  canvas.style.touchAction = view.scale === 1 ? "pan-y" : "none";
  mark();
};

/** Bring an image into sight, zoomed in if a scale is given. */
const visit = (i, scale = view.scale) => {
  if (scale !== view.scale) zoom(scale / view.scale);
  const [[x, y], { width, height }] = [points.toScreen(i), points];
  const out = x < 20 || y < 20 || x > width - 20 || y > height - 20;
  if (out || scale > 1) move(width / 2 - x, height / 2 - y);
  tell(i);
};

/** The next image in a direction: not far, and not much aside. */
const step = (dx, dy) => {
  const [x, y] = marked < 0 ? [points.width / 2, points.height / 2] : points.toScreen(marked);
  let [best, least] = [-1, Infinity];
  for (const i of all) {
    if (!seen[i] || i === marked) continue;
    const [toX, toY] = points.toScreen(i);
    const [ex, ey] = [toX - x, toY - y];
    const [along, aside] = [ex * dx + ey * dy, Math.abs(ex * dy) + Math.abs(ey * dx)];
    if (along > 0.5 && aside <= along && along + 2 * aside < least) [best, least] = [i, along + 2 * aside];
  }
  if (marked < 0) best = points.pick(x, y, Infinity);
  if (best >= 0) visit(best);
};

const item = (shade, name, number, many) => {
  const button = document.createElement("button");
  button.type = "button";
  button.setAttribute("aria-pressed", String(!hidden.has(number)));
  const sample = document.createElement("i");
  sample.style.setProperty("--c", shade);
  button.append(sample, line("span", `${name} (${many})`));
  button.addEventListener("click", () => {
    if (!hidden.delete(number)) hidden.add(number);
    update();
  });
  for (const [event, one] of Object.entries({ pointerenter: number, focus: number, pointerleave: null, blur: null })) {
    button.addEventListener(event, () => show(hidden.has(number) ? null : one));
  }
  const element = document.createElement("li");
  element.append(button);
  return element;
};

/** The images that are searched for: by the whole name of a class, else by a part of any name. */
const matching = () => {
  const text = find.value.trim().toLowerCase();
  if (text === "") return () => true;
  const by = Object.values(data.colourings).map(({ classes, of }) => ({ of, names: classes.map((one) => one.toLowerCase()) }));
  const exact = by.some(({ names }) => names.includes(text));
  const fits = by.map(({ of, names }) => {
    const matches = names.map((name) => (exact ? name === text : name.includes(text)));
    return (i) => matches[of[i]];
  });
  return (i) => fits.some((fit) => fit(i)) || (!exact && data.id[i].toLowerCase().includes(text));
};

const update = () => {
  const fits = all.filter(matching());
  const [low, high] = [from, to].map((input) => Math.round((Number(input.value) / 100) * (n - 1)));
  const counts = new Map();
  if (colouring !== null) for (const i of fits) counts.set(colouring.of[i], (counts.get(colouring.of[i]) || 0) + 1);
  // If there are more classes than colours, those of the images in view have them, in their order.
  const present = [...counts.keys()].sort((a, b) => a - b);
  const enough = colouring !== null && colouring.classes.length <= data.colours.length;
  const chosen = present.slice(0, data.colours.length);
  colours = new Map(chosen.map((one, place) => [one, enough ? one : place]));
  seen.fill(0);
  for (const i of fits) {
    seen[i] = rank[i] >= low && rank[i] <= high && (colouring === null || !hidden.has(group(i))) ? 1 : 0;
  }
  const rest = present.slice(data.colours.length).reduce((sum, one) => sum + counts.get(one), 0);
  const items = chosen.map((one) => item(data.colours[colours.get(one)], colouring.classes[one], one, counts.get(one)));
  if (rest) items.push(item(data.other, `${present.length - chosen.length} other classes`, -1, rest));
  // The buttons are new ones: who was at one of them by the keyboard will stay there.
  const held = [...key.children].findIndex((one) => one.contains(document.activeElement));
  key.replaceChildren(...items);
  const many = seen.reduce((sum, one) => sum + one, 0);
  const total = `${n.toLocaleString("en")} image${n === 1 ? "" : "s"}`;
  at("count").textContent = many === n ? total : `${many.toLocaleString("en")} of ${total}`;
  const [least, most] = [sorted[low], sorted[high]].map((i) => spoken(data.u[i]));
  at("span").textContent = `${least} to ${most}`;
  at("all").hidden = many === n;
  if (marked >= 0 && !seen[marked]) tell(-1);
  paint();
  show();
  items[held]?.firstChild.focus();
};

const showAll = () => {
  [find.value, from.value, to.value] = ["", 0, 100];
  hidden.clear();
  update();
};

const choose = (name) => {
  colouring = data.colourings[name] || null;
  hidden.clear();
  at("sizes").classList.toggle("shaded", colouring === null);
  update();
};

/** The scale from certain to uncertain, as the style sheet defines it for light and dark. */
const readShades = () => {
  const sample = document.createElement("i");
  sample.className = "shade";
  box.append(sample);
  const shades = Array.from({ length: STEPS + 1 }, (_, place) => {
    sample.style.setProperty("--f", place / STEPS);
    return rgb(getComputedStyle(sample).color);
  });
  sample.remove();
  return shades;
};

// One finger or the mouse moves the map, two fingers zoom it; a touch that did not move is a tap.
const fingers = new Map();
const spot = (event) => {
  const edge = canvas.getBoundingClientRect();
  return { x: event.clientX - edge.left, y: event.clientY - edge.top };
};
const span = ([a, b]) => ({ x: (a.x + b.x) / 2, y: (a.y + b.y) / 2, wide: Math.hypot(a.x - b.x, a.y - b.y) });
let moved = false;

canvas.addEventListener("pointerdown", (event) => {
  if (fingers.size === 0) moved = false;
  fingers.set(event.pointerId, spot(event));
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  const now = spot(event);
  const before = fingers.get(event.pointerId);
  if (before === undefined) {
    tell(points.pick(now.x, now.y, 5));
    return;
  }
  if (!moved && Math.hypot(now.x - before.x, now.y - before.y) < 4) return;
  if (!moved) tell(-1);
  moved = true;
  canvas.classList.add("held");
  if (fingers.size === 2) {
    const old = span([...fingers.values()]);
    fingers.set(event.pointerId, now);
    const fresh = span([...fingers.values()]);
    move(fresh.x - old.x, fresh.y - old.y);
    zoom(fresh.wide / Math.max(old.wide, 1), fresh.x, fresh.y);
    return;
  }
  fingers.set(event.pointerId, now);
  move(now.x - before.x, now.y - before.y);
});
const release = (event) => {
  fingers.delete(event.pointerId);
  if (fingers.size === 0) canvas.classList.remove("held");
};
canvas.addEventListener("pointerup", (event) => {
  release(event);
  if (moved) return;
  const { x, y } = spot(event);
  tell(points.pick(x, y, event.pointerType === "mouse" ? 5 : 16));
});
canvas.addEventListener("pointercancel", release);
canvas.addEventListener("pointerleave", (event) => {
  if (event.pointerType === "mouse") tell(-1);
});
canvas.addEventListener(
  "wheel",
  (event) => {
    // There is nothing farther away than the whole map: the page scrolls on.
    if (view.scale === 1 && event.deltaY > 0 && !event.ctrlKey) return;
    event.preventDefault();
    const { x, y } = spot(event);
    tell(-1);
    zoom(Math.exp(-event.deltaY / (event.ctrlKey ? 100 : 400)), x, y);
  },
  { passive: false },
);
canvas.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const keys = {
    ArrowLeft: () => step(-1, 0),
    ArrowRight: () => step(1, 0),
    ArrowUp: () => step(0, -1),
    ArrowDown: () => step(0, 1),
    "+": () => zoom(1.5),
    "=": () => zoom(1.5),
    "-": () => zoom(1 / 1.5),
    0: () => zoom(0),
    Escape: () => tell(-1),
  };
  if (!Object.hasOwn(keys, event.key)) return;
  event.preventDefault();
  keys[event.key]();
});

for (const button of document.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", () => zoom(Number(button.dataset.zoom)));
}
for (const row of document.querySelectorAll("[data-place]")) {
  const name = row.querySelector("th");
  const button = line("button", name.textContent);
  Object.assign(button, { type: "button", title: "show on the map" });
  button.addEventListener("click", () => {
    const i = Number(row.dataset.place);
    if (!seen[i]) showAll();
    box.scrollIntoView({ block: "center" });
    canvas.focus({ preventScroll: true });
    visit(i, Math.max(view.scale, 4));
  });
  name.replaceChildren(button);
}
for (const name of [...Object.keys(data.colourings), "uncertainty"]) {
  const label = document.createElement("label");
  const input = document.createElement("input");
  Object.assign(input, { type: "radio", name: "colour", value: name, checked: name === data.first });
  input.addEventListener("change", () => choose(name));
  label.append(input, line("span", name));
  at("colours").append(label);
}
const names = new Set(Object.values(data.colourings).flatMap(({ classes }) => classes));
at("names").append(...[...names].sort().map((name) => Object.assign(document.createElement("option"), { value: name })));
find.addEventListener("input", () => {
  hidden.clear();
  update();
});
from.addEventListener("input", () => {
  if (Number(to.value) < Number(from.value)) to.value = from.value;
  update();
});
to.addEventListener("input", () => {
  if (Number(to.value) < Number(from.value)) from.value = to.value;
  update();
});
at("all").addEventListener("click", showAll);
at("controls").addEventListener("submit", (event) => event.preventDefault());
at("controls").hidden = false;
at("zoom").hidden = false;
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  paint();
  draw();
});
new ResizeObserver(() => {
  points.resize();
  at("sizes").style.setProperty("--k", points.shrink);
  mark();
}).observe(box);
choose(data.first);
