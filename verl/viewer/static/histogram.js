// SPDX-License-Identifier: Apache-2.0
// A histogram of the filtered rows, by run. Dragging over it selects a range.

import { html, useRef, useState } from "./vendor/htm-preact-3.1.1.min.js";

const WIDTH = 1000; // of the drawing, which is scaled to its place
const HEIGHT = 100;
const HIGHEST = 82; // below the label
const MIN_DRAG = 0.02; // of the width: a shorter one is a click
const TICKS = 5;
const TOLERANCE = 1e-4; // of the distance of two ticks: values are float32

// edges: [0, 0.5, 1]; counts: { run: [3, 4] }; select(min, max) is called with the chosen range.
export function Histogram({ title, edges, counts, runs, select }) {
  const plot = useRef(null);
  const [drag, setDrag] = useState(null); // [start, end] as parts of the width
  const low = edges[0];
  const high = edges.at(-1);
  const most = Math.max(1, ...Object.values(counts).flat());
  const part = (event) => {
    const box = plot.current.getBoundingClientRect();
    return Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
  };
  const begin = (event) => {
    plot.current.setPointerCapture(event.pointerId);
    setDrag([part(event), part(event)]);
  };
  const end = () => {
    const [from, to] = [Math.min(...drag), Math.max(...drag)];
    setDrag(null);
    if (to - from > MIN_DRAG) { // whole bars
      const last = edges.length - 1;
      select(edges[Math.floor(from * last)], edges[Math.ceil(to * last)]);
    }
  };
  return html`
    <figure class="histogram" data-title=${title}>
      <figcaption>${title} <small>${total(counts).toLocaleString("en")} rows; drag to select</small></figcaption>
      <div class="plot" ref=${plot} onPointerDown=${begin} onPointerUp=${drag && end}
        onPointerMove=${drag && ((event) => setDrag([drag[0], part(event)]))} onPointerCancel=${() => setDrag(null)}>
        <svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${title}>
          ${Object.entries(counts).map(([run, values]) => html`
            <path d=${outline(values, most)} style=${{ "--color": runs[run].color }} />`)}
        </svg>
        <span class="most">${most.toLocaleString("en")}</span><i class="top"></i>
        ${drag && html`<i class="drag" style=${{
          left: `${100 * Math.min(...drag)}%`, width: `${100 * Math.abs(drag[1] - drag[0])}%`,
        }}></i>`}
      </div>
      <div class="axis">
        ${ticks(low, high).map((tick) => html`
          <span style=${{ left: `${high > low ? (100 * (tick - low)) / (high - low) : 50}%` }}>
            ${tick.toLocaleString("en", { maximumSignificantDigits: 6 })}</span>`)}
      </div>
    </figure>
  `;
}

// Returns round numbers from low to high.
export function ticks(low, high) {
  const rough = (high - low) / TICKS;
  if (!(rough > 0)) {
    return [low];
  }
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const first = Math.ceil(low / step - TOLERANCE);
  const count = Math.floor(high / step + TOLERANCE) - first + 1;
  return Array.from({ length: count }, (_, index) => Number(((first + index) * step).toPrecision(12)));
}

function outline(values, most) {
  const width = WIDTH / values.length;
  const steps = values.map((value, index) => {
    const y = HEIGHT - (value / most) * HIGHEST;
    return `L${index * width} ${y}L${(index + 1) * width} ${y}`;
  });
  return `M0 ${HEIGHT}${steps.join("")}L${WIDTH} ${HEIGHT}Z`;
}

const total = (counts) => Object.values(counts).flat().reduce((sum, count) => sum + count, 0);
