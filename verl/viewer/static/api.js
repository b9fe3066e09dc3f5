// SPDX-License-Identifier: Apache-2.0
// Requests to the server, and helpers shared by all views.

import { link } from "./address.js";

// Returns the response as JSON; throws an error response with its text.
export async function fetchJson(path, params = []) {
  const query = new URLSearchParams(params).toString();
  const response = await fetch(query ? `${path}?${query}` : path);
  if (!response.ok) {
    throw new Error(await response.text());
  }
  return response.json();
}

// Sends an object; `key` shows the server that its own page does. Throws an error response with its text.
export async function sendJson(path, content, key) {
  const headers = { "Content-Type": "application/json", "X-Viewer-Key": key };
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(content) });
  if (!response.ok) {
    throw new Error(await response.text());
  }
}

export function shown(value, digits = 3) {
  if (value === null || value === undefined) {
    return "–";
  }
  return typeof value === "number" && !Number.isInteger(value) ? value.toFixed(digits) : String(value);
}

export const counted = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

export const groupLink = (row, runs) => link("group", [runs[row.run].name, row.kind, row.step, row.group]);
