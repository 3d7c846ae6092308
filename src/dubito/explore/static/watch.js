/** What the guard has been used on since: evidence of a change as drawings, alarms, what to do, images that show it. */

import { getJson, path } from "./api.js";
import { at, heading, make, makeSvg } from "./dom.js";

/** Show the watch whenever its panel is opened, as others may feed it meanwhile; returns what shows it again. */
export function startWatch(app) {
  const { about, address } = app;
  at("watch-tab").hidden = !about.watch;
  const show = async () => {
    if (!about.watch || address.get("panel") !== "watch") return;
    try {
      at("watch").replaceChildren(...parts(await getJson(path("watch")), app));
    } catch (error) {
      at("watch").replaceChildren(make("p", { className: "hint", textContent: error.message }));
    }
  };
  address.watch(["panel"], show);
  show();
  return show;
}

function parts({ title, alarm, figures, key, sentences, facts, examples }, app) {
  const items = (texts) => texts.map((textContent) => make("li", { textContent }));
  const names = Object.entries(facts).map(([name, textContent]) =>
    make("div", {}, make("dt", { textContent: heading(name) }), make("dd", { textContent })),
  );
  return [
    make("p", { className: alarm ? "verdict bad" : "verdict good" }, make("b", { textContent: title })),
    make("ul", { className: "sentences" }, ...items(sentences)),
    make("p", { className: "history-key" }, ...key.map(sample)),
    ...figures.map(figure),
    ...(examples.length === 0 ? [] : pictures(examples, app)),
    make("dl", { className: "facts" }, ...names),
  ];
}

/** The server drew it and escaped every name; this is parsed, and nothing in it can run. */
function figure({ svg, title, small }) {
  const drawing = new DOMParser().parseFromString(svg, "text/html").body.firstElementChild;
  const caption = [make("b", { textContent: title }), make("span", { className: "fine", textContent: small })];
  return make("figure", { className: "history" }, make("figcaption", {}, ...caption), drawing);
}

function sample({ name, kind, dashes }) {
  const line = makeSvg("line", { class: kind, x1: 0, x2: 28, y1: 4, y2: 4, "stroke-dasharray": dashes || "none" });
  return make("span", {}, makeSvg("svg", { viewBox: "0 0 28 8", "aria-hidden": "true" }, line), name);
}

/** Images of the table open when they are clicked; of others, the name is all there is. */
function pictures(examples, app) {
  const [here, elsewhere] = [true, false].map((there) => examples.filter(({ row }) => (row !== null) === there));
  const item = (one) => make("li", {}, picture(one, app));
  const names = elsewhere.map(({ id }) => `'${id}'`).join(", ");
  return [
    make("h3", { textContent: "Images that show it" }),
    ...(here.length === 0 ? [] : [make("ul", { className: "neighbours" }, ...here.map(item))]),
    ...(names ? [make("p", { className: "fine", textContent: `Not in this table: ${names}.` })] : []),
  ];
}

function picture({ id, row }, { open, rows }) {
  const blank = make("span", { className: "missing" });
  rows.one(row).then(
    (entry) => entry.picture && blank.replaceWith(make("img", { src: path("thumbnail", row), alt: "" })),
    () => {},
  );
  const name = make("span", { className: "name", textContent: id });
  return make("button", { type: "button", title: id, onclick: () => open(row) }, blank, name);
}
