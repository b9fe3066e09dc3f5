// SPDX-License-Identifier: Apache-2.0
// Line and bar charts: a component around uPlot, which draws on a canvas.

import { html, useEffect, useRef } from "./vendor/htm-preact-3.1.1.min.js";
import { resolved, useThemeVersion } from "./colors.js";

const uPlot = window.uPlot;
const WIDTH = 380;
const HEIGHT = 190;

// lines: [{ label, color, x: [...], y: [...] }]; each may have its own x values.
export function Chart({ title, lines, bars = false }) {
  const holder = useRef(null);
  const plot = useRef(null);
  const theme = useThemeVersion();
  const shape = lines.map((line) => line.label + line.color).join("\n");
  const data = lines.length ? uPlot.join(lines.map((line) => [line.x, line.y])) : [[]];

  useEffect(() => {
    plot.current = new uPlot(options(lines, bars), data, holder.current);
    return () => plot.current.destroy();
  }, [shape, theme]);
  useEffect(() => {
    update(plot.current, data);
  }, [lines]);
  return html`<figure data-title=${title}><figcaption>${title}</figcaption><div ref=${holder}></div></figure>`;
}

// Sets new data; a zoomed axis stays as it is.
function update(chart, data) {
  const { min, max } = chart.scales.x;
  const positions = chart.data[0];
  const isDrawn = Number.isFinite(min) && positions.length > 0; // uPlot draws only after a new chart's first update
  const isZoomed = isDrawn && (min > positions[0] || max < positions.at(-1));
  chart.setData(data, !isZoomed);
  if (isZoomed) {
    chart.setScale("x", { min, max });
  }
}

function options(lines, bars) {
  const paths = bars ? uPlot.paths.stepped({ align: 1 }) : undefined;
  const series = lines.map((line) => ({
    label: line.label,
    stroke: resolved(line.color),
    fill: bars ? resolved(line.color, 0.13) : undefined,
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
