// SPDX-License-Identifier: Apache-2.0
// Requests to the server, and helpers shared by all views.

export const COLORS = ["#2563eb", "#ea580c", "#16a34a", "#9333ea", "#db2777", "#0891b2", "#854d0e", "#475569"];

// Returns the response as JSON; throws an error response with its text.
export async function fetchJson(path, params = []) {
  const query = new URLSearchParams(params).toString();
  const response = await fetch(query ? `${path}?${query}` : path);
  if (!response.ok) {
    throw new Error(await response.text());
  }
  return response.json();
}

export const colorOf = (run) => COLORS[run % COLORS.length];

export function shown(value, digits = 3) {
  if (value === null || value === undefined) {
    return "–";
  }
  return typeof value === "number" && !Number.isInteger(value) ? value.toFixed(digits) : String(value);
}

export const groupLink = (row) => `#group/${row.run}/${row.step}/${encodeURIComponent(row.group)}`;
