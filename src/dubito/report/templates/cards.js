"use strict";
(() => {
  const form = document.getElementById("controls");
  const list = document.getElementById("cards");
  const count = document.getElementById("count");
  const cards = [...list.children].map((element, place) => ({
    element,
    place,
    group: element.dataset.group,
    scores: JSON.parse(element.dataset.scores),
    bars: [...element.querySelectorAll("dl > div")],
  }));

  const update = () => {
    const chosen = new FormData(form);
    // The order in which the cards were written, or a score; equal cards stay in the order in which they were written.
    const given = chosen.get("order") === "given";
    const by = given ? 0 : Number(chosen.get("order"));
    const group = chosen.get("group") || "";
    const sign = chosen.has("flip") ? 1 : -1;
    let shown = 0;
    const value = (card) => (given ? -card.place : card.scores[by][0]);
    cards.sort((a, b) => sign * (value(a) - value(b)) || a.place - b.place);
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
