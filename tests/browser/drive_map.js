async () => {
  // Points, searches, zooms and types on a map's page, and returns what it shows (see test_map.py). Four images are in
  // the corners of a square and one in its middle. So the map's unit is the side of the square: 0.92 of the shorter side
  // of the box, and the corners are 0.46 of it away from the middle.
  "use strict";
  const at = (id) => document.getElementById(id);
  const [box, canvas, tip, ring, count] = ["map", "canvas", "tip", "ring", "count"].map(at);
  const frame = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const [middleX, middleY] = [box.clientWidth / 2, box.clientHeight / 2];
  const side = 0.46 * Math.min(box.clientWidth, box.clientHeight);
  const places = {
    "bottom left": [-1, 1], "bottom right": [1, 1], "top left": [-1, -1], "top right": [1, -1], middle: [0, 0],
    nowhere: [0.5, 0],
  };
  const spot = (name) => [middleX + places[name][0] * side, middleY + places[name][1] * side];
  const send = (kind, name, more = {}) => {
    const [edge, [x, y]] = [canvas.getBoundingClientRect(), spot(name)];
    const init = { clientX: edge.left + x, clientY: edge.top + y, bubbles: true, cancelable: true, pointerId: 1, ...more };
    canvas.dispatchEvent(kind === "wheel" ? new WheelEvent(kind, init) : new PointerEvent(kind, init));
  };
  const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  const tooltip = () => (tip.hidden ? null : [...tip.querySelectorAll("b, span")].map((one) => one.textContent));
  const ringed = () => [ring.offsetLeft + ring.offsetWidth / 2, ring.offsetTop + ring.offsetHeight / 2];
  const pixel = (name) => {
    const dense = window.devicePixelRatio || 1;
    return [...canvas.getContext("2d").getImageData(...spot(name).map((one) => Math.round(one * dense)), 1, 1).data];
  };
  const enter = (id, value) => {
    at(id).value = value;
    at(id).dispatchEvent(new Event("input", { bubbles: true }));
  };
  const keys = () => [...at("key").querySelectorAll("button")];
  const choose = (name) => document.querySelector(`input[name=colour][value=${name}]`).click();
  const shown = {};

  await frame();
  shown.start = { count: count.textContent, controls: !at("controls").hidden, keys: keys().map((one) => one.textContent) };
  shown.colours = { first: document.querySelector("input[name=colour]:checked").value };
  for (const name of Object.keys(places)) shown.colours[name] = pixel(name);

  send("pointermove", "top right");
  shown.pointed = { text: tooltip(), ring: ringed(), place: spot("top right"), picture: tip.querySelector("img")?.src };
  send("pointermove", "middle");
  shown.evil = { text: tooltip(), images: tip.querySelectorAll("img").length, rows: document.querySelectorAll("img[onerror]").length };
  send("pointermove", "nowhere");
  shown.nowhere = tooltip();

  shown.searched = {};
  for (const text of ["dog", "TOP", "nothing"]) {
    enter("find", text);
    shown.searched[text] = [count.textContent, keys().map((one) => one.textContent)];
  }
  at("all").click();
  enter("from", 50);
  shown.ranked = [count.textContent, at("span").textContent];
  enter("to", 25);
  shown.crossed = [at("from").value, count.textContent];
  at("all").click();
  shown.all = [count.textContent, at("all").hidden];

  keys()[1].focus();
  keys()[1].click();
  await frame();
  const pressed = keys().map((one) => one.getAttribute("aria-pressed"));
  shown.hidden = { count: count.textContent, pressed, focus: keys().indexOf(document.activeElement), pixel: pixel("top right") };
  at("all").click();

  choose("uncertainty");
  await frame();
  shown.shaded = { keys: keys().length, sizes: at("sizes").classList.contains("shaded"), pixel: pixel("bottom left") };
  choose("label");

  const wide = () => ring.offsetWidth;
  send("pointermove", "top right");
  const before = wide();
  send("wheel", "top right", { deltaY: -400 });
  await frame();
  send("pointermove", "top right");
  shown.zoomed = { text: tooltip()[0], ring: ringed(), place: spot("top right"), wider: wide() > before };
  send("pointerdown", "top right", { pointerType: "mouse" });
  send("pointermove", "middle", { pointerType: "mouse" });
  send("pointerup", "middle", { pointerType: "mouse" });
  await frame();
  send("pointermove", "middle");
  shown.dragged = tooltip()[0];

  for (const key of ["0", "Escape"]) press(key);
  shown.walk = [];
  for (const key of ["ArrowUp", "ArrowRight", "ArrowUp", "ArrowLeft", "ArrowLeft", "Escape"]) {
    press(key);
    await frame();
    shown.walk.push(tooltip()?.[0] ?? null);
  }
  enter("find", "dog");
  document.querySelector("[data-place] button").click();
  await frame();
  shown.listed = { text: tooltip()[0], count: count.textContent, ring: ringed(), middle: spot("middle") };
  return { ...shown, alerts: window.alerts };
}
