/** Requests to the server, and whether it answers: `connection` reports "lost", "refused" and "restored". */

export const connection = new EventTarget();
let answers = true;

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

const report = (name, message = "") => connection.dispatchEvent(new CustomEvent(name, { detail: message }));

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options });
  } catch {
    if (answers) report("lost");
    answers = false;
    throw new ServerError("The server does not answer.", 0);
  }
  const { error } = response.ok ? {} : await response.json().catch(() => ({}));
  const message = error ?? `The server answered ${response.status} ${response.statusText}.`;
  if (response.status === 403) {
    answers = false;
    report("refused", message);
  } else if (!answers) {
    answers = true;
    report("restored");
  }
  if (!response.ok) throw new ServerError(message, response.status);
  return response;
}

const asJson = (method, body) => ({
  method,
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify(body),
});
const asBytes = (body) => ({ method: "POST", headers: { "Content-Type": "application/octet-stream" }, body });

export const path = (...parts) => `api/${parts.map(encodeURIComponent).join("/")}`;
export const getJson = async (address) => (await request(address)).json();
export const getBytes = async (address) => (await request(address)).arrayBuffer();
export const postJson = async (address, body) => (await request(address, asJson("POST", body))).json();
export const putJson = async (address, body) => (await request(address, asJson("PUT", body))).json();
export const postBytes = async (address, body) => request(address, asBytes(body));

/** A layout's positions, or how far it is: { state, progress, words }. */
export async function getLayout(name) {
  const response = await request(path("layout", name));
  return response.status === 202 ? response.json() : new Float32Array(await response.arrayBuffer());
}

/** Bits, bit i & 7 of byte i >> 3, from bytes of 0 and 1. */
export function pack(mask) {
  const bits = new Uint8Array((mask.length + 7) >> 3);
  for (let i = 0; i < mask.length; i += 1) bits[i >> 3] |= mask[i] << (i & 7);
  return bits;
}

/** Bytes of 0 and 1 from bits. */
export function unpack(bits, rows) {
  const mask = new Uint8Array(rows);
  for (let i = 0; i < rows; i += 1) mask[i] = (bits[i >> 3] >> (i & 7)) & 1;
  return mask;
}

export function toBase64(bytes) {
  let text = "";
  for (let i = 0; i < bytes.length; i += 0x8000) text += String.fromCharCode(...bytes.subarray(i, i + 0x8000));
  return btoa(text);
}
