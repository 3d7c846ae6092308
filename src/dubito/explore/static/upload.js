/** A new image, dropped, pasted or chosen: the server places it on the map, decides whether to trust it and explains why. */

import { postBytes } from "./api.js";
import { at } from "./dom.js";

export function startUpload({ about, panel, report }) {
  let address = null;
  const send = async (file) => {
    if (!file) return;
    const most = about.limits?.upload_bytes ?? Infinity;
    if (file.size > most) {
      report(`${file.name} has ${(file.size / 1e6).toFixed(1)} MB; at most ${(most / 1e6).toFixed(1)} MB can be sent.`);
      return;
    }
    const close = report("The model looks at the image…", { stay: true });
    try {
      const image = await (await postBytes(`api/new?name=${encodeURIComponent(file.name)}`, file)).json();
      if (address !== null) URL.revokeObjectURL(address);
      address = URL.createObjectURL(file);
      panel.showNew(image, address);
    } catch (error) {
      report(error.message);
    } finally {
      close();
    }
  };
  const input = at("file");
  at("choose").addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    send(input.files[0]);
    input.value = "";
  });
  document.addEventListener("paste", (event) => {
    const file = [...(event.clipboardData?.files ?? [])].find(({ type }) => type.startsWith("image/"));
    if (file) send(file);
  });
  startDrop(send);
}

function startDrop(send) {
  let depth = 0;
  const carries = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  const show = (on) => (at("drop").hidden = !on);
  document.addEventListener("dragenter", (event) => {
    if (!carries(event)) return;
    depth += 1;
    show(true);
  });
  document.addEventListener("dragleave", (event) => {
    if (!carries(event)) return;
    depth = Math.max(0, depth - 1);
    show(depth > 0);
  });
  document.addEventListener("dragover", (event) => carries(event) && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!carries(event)) return;
    event.preventDefault();
    depth = 0;
    show(false);
    send(event.dataTransfer.files[0]);
  });
}
