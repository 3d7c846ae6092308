"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const box = document.getElementById("map");
  const canvas = document.getElementById("canvas");
  const tip = document.getElementById("tip");
  const key = document.getElementById("key");
  const count = document.getElementById("count");
  const brush = canvas.getContext("2d");
  const points = data.x.length;
  // The uncertain ones first, so that the clear ones stay visible on top of them.
  const order = [...data.x.keys()].sort((a, b) => data.share[b] - data.share[a]);
  const view = { scale: 1, x: 0, y: 0 };
  const hidden = new Set();
  let colouring = null;
  let marked = -1;

  const side = () => Math.min(box.clientWidth, box.clientHeight) * 0.92;
  const place = (i) => [
    box.clientWidth / 2 + (data.x[i] - 0.5 + view.x) * side() * view.scale,
    box.clientHeight / 2 + (data.y[i] - 0.5 + view.y) * side() * view.scale,
  ];
  const size = (i) => data.radius[i] * Math.sqrt(view.scale);
  const shown = (i) => colouring === null || !hidden.has(colouring.of[i]);
  const warm = (share) => `hsl(${195 - 175 * share} 65% 42%)`;
  const colour = (i) => (colouring === null ? warm(data.share[i]) : colouring.groups[colouring.of[i]][1]);

  const draw = () => {
    const dense = window.devicePixelRatio || 1;
    canvas.width = box.clientWidth * dense;
    canvas.height = box.clientHeight * dense;
    brush.setTransform(dense, 0, 0, dense, 0, 0);
    brush.clearRect(0, 0, box.clientWidth, box.clientHeight);
    for (const i of order) {
      if (!shown(i)) continue;
      const [x, y] = place(i);
      brush.globalAlpha = data.opacity[i];
      brush.fillStyle = colour(i);
      brush.beginPath();
      brush.arc(x, y, size(i), 0, 2 * Math.PI);
      brush.fill();
    }
    if (marked >= 0 && shown(marked)) {
      const [x, y] = place(marked);
      brush.globalAlpha = 1;
      brush.strokeStyle = getComputedStyle(box).color;
      brush.lineWidth = 2;
      brush.beginPath();
      brush.arc(x, y, size(marked) + 3, 0, 2 * Math.PI);
      brush.stroke();
    }
  };

  const line = (tag, text) => {
    const element = document.createElement(tag);
    element.textContent = text;
    return element;
  };

  const tell = (i) => {
    if (i !== marked) {
      marked = i;
      draw();
    }
    tip.hidden = i < 0;
    if (i < 0) return;
    tip.replaceChildren();
    const picture = data.pictures[i];
    if (picture) {
      const image = document.createElement("img");
      image.src = picture;
      image.alt = "";
      tip.append(image);
    }
    tip.append(line("b", data.id[i]), line("span", `u = ${data.u[i]}`));
    if (data.label) tip.append(line("span", `label: ${data.label[i]}`));
    if (data.prediction) tip.append(line("span", `prediction: ${data.prediction[i]}`));
    const [x, y] = place(i);
    tip.style.left = `${Math.max(0, Math.min(x + 14, box.clientWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${Math.max(0, Math.min(y + 14, box.clientHeight - tip.offsetHeight - 8))}px`;
  };

  const nearest = (x, y) => {
    let best = -1;
    let least = Infinity;
    for (let i = 0; i < points; i += 1) {
      if (!shown(i)) continue;
      const [px, py] = place(i);
      const away = Math.hypot(px - x, py - y) - size(i);
      if (away < least && away < 6) [best, least] = [i, away];
    }
    return best;
  };

  const zoom = (factor, x = box.clientWidth / 2, y = box.clientHeight / 2) => {
    const scale = Math.min(80, Math.max(0.5, view.scale * factor));
    const [dx, dy] = [(x - box.clientWidth / 2) / side(), (y - box.clientHeight / 2) / side()];
    view.x += dx / scale - dx / view.scale;
    view.y += dy / scale - dy / view.scale;
    view.scale = scale;
    tell(-1);
    draw();
  };

  const legend = () => {
    key.replaceChildren();
    if (colouring === null) return;
    colouring.groups.forEach(([name, shade], group) => {
      const many = colouring.of.filter((one) => one === group).length;
      if (many === 0) return;
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", String(!hidden.has(group)));
      const dot = document.createElement("i");
      dot.style.setProperty("--c", shade);
      button.append(dot, line("span", `${name} (${many})`));
      button.addEventListener("click", () => {
        if (!hidden.delete(group)) hidden.add(group);
        update();
      });
      const item = document.createElement("li");
      item.append(button);
      key.append(item);
    });
  };

  const update = () => {
    const seen = order.filter(shown).length;
    count.textContent = `${seen} image${seen === 1 ? "" : "s"}`;
    legend();
    draw();
  };

  const held = { on: false, x: 0, y: 0 };
  canvas.addEventListener("pointerdown", (event) => {
    Object.assign(held, { on: true, x: event.clientX, y: event.clientY });
    canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("held");
  });
  canvas.addEventListener("pointerup", () => {
    held.on = false;
    canvas.classList.remove("held");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held.on) {
      view.x += (event.clientX - held.x) / (side() * view.scale);
      view.y += (event.clientY - held.y) / (side() * view.scale);
      Object.assign(held, { x: event.clientX, y: event.clientY });
      tip.hidden = true;
      draw();
      return;
    }
    const edge = canvas.getBoundingClientRect();
    tell(nearest(event.clientX - edge.left, event.clientY - edge.top));
  });
  canvas.addEventListener("pointerleave", () => tell(-1));
  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      const edge = canvas.getBoundingClientRect();
      zoom(Math.exp(-event.deltaY / 400), event.clientX - edge.left, event.clientY - edge.top);
    },
    { passive: false },
  );
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => {
      const factor = Number(button.dataset.zoom);
      if (factor === 0) Object.assign(view, { scale: 1, x: 0, y: 0 });
      zoom(factor || 1);
    });
  }
  for (const row of document.querySelectorAll("[data-place]")) {
    row.addEventListener("pointerenter", () => tell(Number(row.dataset.place)));
    row.addEventListener("pointerleave", () => tell(-1));
  }

  const choices = [...Object.keys(data.colourings), "uncertainty"];
  choices.forEach((name, number) => {
    const label = document.createElement("label");
    const input = document.createElement("input");
    Object.assign(input, { type: "radio", name: "colour", value: name, checked: number === 0 });
    input.addEventListener("change", () => choose(name));
    label.append(input, line("span", name));
    document.getElementById("colours").append(label);
  });
  const choose = (name) => {
    colouring = data.colourings[name] || null;
    hidden.clear();
    update();
  };
  document.getElementById("controls").hidden = false;
  new ResizeObserver(draw).observe(box);
  choose(choices[0]);
})();
