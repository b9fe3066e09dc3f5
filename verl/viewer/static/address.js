// SPDX-License-Identifier: Apache-2.0
// The state of the page, kept in its address: `#curves?run=first&smooth=0.6`.
//
// Every view keeps what it shows here instead of in variables, so that reloading, going back, and sending the
// address to someone else give the same page. Parameters are shared by all views: a link to another view keeps
// them. Runs are named, since their positions change with the folders that the viewer is given.

import { useEffect, useState } from "./vendor/htm-preact-3.1.1.min.js";

const PAUSE_MS = 150; // browsers limit how often a page may change its address
const listeners = new Set();
let current = location.hash; // ahead of the address during fast changes
let timer = 0;
let written = -PAUSE_MS; // time of the last change of the address

// Returns { view, path, params }: `#group/first/12/a%2Fb?sort=score` has the path ["first", "12", "a/b"].
export function read() {
  const [place, query = ""] = splitOnce(current.slice(1), "?");
  const [view, ...path] = place.split("/").map(decoded);
  return { view, path, params: new URLSearchParams(query) };
}

// Returns one parameter, or the fallback if it is missing.
export function get(name, fallback = "") {
  return read().params.get(name) ?? fallback;
}

// Changes parameters: `set({ sort: "score", offset: null })`; null, undefined and "" remove one, an array repeats
// it. Choices become an entry of the history, so that "back" undoes them; pass `replace` for what changes with
// every key press.
export function set(changes, { replace = false } = {}) {
  const { view, path } = read();
  go(view, path, changes, { replace });
}

// Opens a view, with all parameters as they are except for the changes.
export function go(view, path = [], changes = {}, { replace = false } = {}) {
  const hash = link(view, path, changes);
  if (hash === current) {
    return;
  }
  if (replace) {
    current = hash;
    clearTimeout(timer);
    timer = setTimeout(write, written + PAUSE_MS - performance.now());
  } else {
    write();
    current = hash;
    history.pushState(null, "", hash);
  }
  notify();
}

// Returns the address of a view for `href`, with all parameters as they are except for the changes.
export function link(view, path = [], changes = {}) {
  const { params } = read();
  for (const [name, value] of Object.entries(changes)) {
    params.delete(name);
    const values = Array.isArray(value) ? value : [value ?? ""].filter((one) => one !== "");
    values.forEach((one) => params.append(name, one));
  }
  const place = [view, ...path].map(encodeURIComponent).join("/");
  const query = params.toString();
  return `#${place}${query && `?${query}`}`;
}

// Calls a function after every change, by `set`, a link, or "back"; returns how to end it.
export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

// Returns `read()` in a component, which is rendered again when the address changes.
export function useAddress() {
  const [, setHash] = useState(current);
  useEffect(() => subscribe(() => setHash(current)), []);
  return read();
}

function notify() {
  listeners.forEach((listener) => listener());
}

// Writes a change that is still ahead of the address.
function write() {
  clearTimeout(timer);
  if (current !== location.hash) {
    history.replaceState(null, "", current || "#");
    written = performance.now();
  }
}

// Follows a link, or the browser's history.
function follow() {
  clearTimeout(timer);
  if (current !== location.hash) { // a link causes two events
    current = location.hash;
    notify();
  }
}

function splitOnce(text, separator) {
  const at = text.indexOf(separator);
  return at < 0 ? [text] : [text.slice(0, at), text.slice(at + 1)];
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a truncated link
  }
}

addEventListener("popstate", follow);
addEventListener("hashchange", follow);
addEventListener("click", write, true); // before a link is followed
addEventListener("pagehide", write);
