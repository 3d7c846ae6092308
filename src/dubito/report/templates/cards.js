"use strict";
(() => {
  const form = document.getElementById("controls");
  const list = document.getElementById("cards");
  const count = document.getElementById("count");
  const cards = [...list.children].map((element) => ({
    element,
    group: element.dataset.group,
    scores: JSON.parse(element.dataset.scores),
    bars: [...element.querySelectorAll("dl > div")],
  }));

  const update = () => {
    const chosen = new FormData(form);
    const by = Number(chosen.get("order"));
    const group = chosen.get("group") || "";
    const sign = chosen.has("flip") ? 1 : -1;
    let shown = 0;
    cards.sort((a, b) => sign * (a.scores[by][0] - b.scores[by][0]));
    for (const { element, group: own, scores, bars } of cards) {
      element.hidden = group !== "" && own !== group;
      element.style.setProperty("--f", scores[by][1]);
      bars.forEach((bar, place) => bar.classList.toggle("chosen", place === by));
      shown += element.hidden ? 0 : 1;
    }
    list.append(...cards.map(({ element }) => element));
    count.textContent = `${shown} image${shown === 1 ? "" : "s"}`;
  };

  form.addEventListener("change", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;
  update();
})();
