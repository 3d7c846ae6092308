/** What to do with all shown images: mark them, or export them as a file. */

import { pack, postBytes } from "./api.js";
import { at, make, plural } from "./dom.js";

export function startExports({ selection, notes, report }) {
  const menu = at("export-menu");
  at("export").addEventListener("click", () => {
    at("export-count").textContent = plural(selection.count, "image");
    for (const button of menu.querySelectorAll("[data-format], [data-mark]")) button.disabled = selection.count === 0;
    menu.showModal();
  });
  for (const button of menu.querySelectorAll("[data-format]")) {
    button.addEventListener("click", async () => {
      menu.close();
      const { format } = button.dataset;
      try {
        const answer = await postBytes(`api/export?format=${format}`, pack(selection.shown));
        save(await answer.blob(), named(answer) ?? `${format}.csv`);
        report(`${plural(selection.count, "image")} exported.`);
      } catch (error) {
        report(error.message);
      }
    });
  }
  for (const button of menu.querySelectorAll("[data-mark]")) {
    button.addEventListener("click", () => {
      menu.close();
      notes.saveMask(selection.shown, button.dataset.mark === "1").catch((error) => report(error.message));
    });
  }
}

const named = (answer) => /filename="?([^";]+)"?/.exec(answer.headers.get("Content-Disposition") ?? "")?.[1];

function save(blob, name) {
  const address = URL.createObjectURL(blob);
  make("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
