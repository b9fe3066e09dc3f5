// SPDX-License-Identifier: Apache-2.0
// Colors, defined in style.css for light and dark: elements use `var(--color-3)`, canvases the resolved value.

import { useEffect, useState } from "./vendor/htm-preact-3.1.1.min.js";

export const NUM_COLORS = 12;
const NUM_FIRST = 10; // the others are for names that find none of these free

export const colorAt = (index) => `var(--color-${index % NUM_COLORS})`;

// Returns a color for each name: the one that the name hashes to, or the next free one. A name keeps its color
// when others come and go, unless two of them want the same.
export function colorsOf(names) {
  const taken = new Set();
  const colors = {};
  for (const name of [...names].sort()) {
    let index = hash(name) % NUM_FIRST;
    while (taken.has(index) && taken.size < NUM_COLORS) {
      index = (index + 1) % NUM_COLORS;
    }
    taken.add(index);
    colors[name] = colorAt(index);
  }
  return colors;
}

const probe = document.createElement("i");
probe.hidden = true;

// Returns a color that canvases understand for `var(--...)`, with its opacity.
export function resolved(color, opacity = 1) {
  if (!probe.isConnected) {
    document.head.append(probe);
  }
  probe.style.color = color;
  const [red, green, blue] = getComputedStyle(probe).color.match(/[\d.]+/g);
  return `rgba(${red}, ${green}, ${blue}, ${opacity})`;
}

// Returns a number that changes when the page becomes light or dark: what draws on a canvas draws again.
export function useThemeVersion() {
  const [version, setVersion] = useState(0);
  useEffect(() => {
    const change = () => setVersion((old) => old + 1);
    addEventListener("themechange", change);
    return () => removeEventListener("themechange", change);
  }, []);
  return version;
}

function hash(name) {
  let value = 2166136261; // FNV-1a
  for (const letter of name) {
    value = Math.imul(value ^ letter.codePointAt(0), 16777619);
  }
  return (value ^ (value >>> 15)) >>> 0;
}
