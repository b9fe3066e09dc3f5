// SPDX-License-Identifier: Apache-2.0
// Line and bar charts: a component around uPlot, which draws on a canvas.

import { html, useEffect, useRef } from "./vendor/htm-preact-3.1.1.min.js";

const uPlot = window.uPlot;
const WIDTH = 380;
const HEIGHT = 190;

// lines: [{ label, color, x: [...], y: [...] }]; each may have places of its own on the axis.
export function Chart({ title, lines, bars = false }) {
  const holder = useRef(null);
  const plot = useRef(null);
  const shape = lines.map((line) => line.label + line.color).join("\n");
  const data = lines.length ? uPlot.join(lines.map((line) => [line.x, line.y])) : [[]];

  useEffect(() => {
    plot.current = new uPlot(options(lines, bars), data, holder.current);
    return () => plot.current.destroy();
  }, [shape]);
  useEffect(() => {
    update(plot.current, data);
  }, [lines]);
  return html`<figure data-title=${title}><figcaption>${title}</figcaption><div ref=${holder}></div></figure>`;
}

// New data; who has enlarged a part of the axis keeps looking at that part.
function update(chart, data) {
  const { min, max } = chart.scales.x;
  const places = chart.data[0];
  const isDrawn = Number.isFinite(min) && places.length > 0; // uPlot draws after a new chart's first update
  const isEnlarged = isDrawn && (min > places[0] || max < places.at(-1));
  chart.setData(data, !isEnlarged);
  if (isEnlarged) {
    chart.setScale("x", { min, max });
  }
}

function options(lines, bars) {
  const paths = bars ? uPlot.paths.stepped({ align: 1 }) : undefined;
  const series = lines.map((line) => ({
    label: line.label,
    stroke: line.color,
    fill: bars ? `${line.color}22` : undefined,
    width: 1.5,
    spanGaps: true,
    points: { show: bars ? false : undefined, size: 4 },
    paths,
  }));
  return {
    width: WIDTH,
    height: HEIGHT,
    scales: { x: { time: false } },
    axes: [{ size: 30 }, { size: 56 }],
    cursor: { sync: bars ? undefined : { key: "step" } },
    legend: { show: lines.length > 1 },
    series: [{ label: bars ? "from" : "step" }, ...series],
  };
}
