// SPDX-License-Identifier: Apache-2.0
// Line and bar charts: a component around uPlot, which draws on a canvas.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact-3.1.1.min.js";
import { resolved, useThemeVersion } from "./colors.js";
import { compact, duration, durationLabels, tickLabels } from "./numbers.js";

const uPlot = window.uPlot;
const HEIGHT = 196;
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif';
const LETTER = 6.6; // widest digit of the font, pixels
const MARGIN = "300px"; // around the window, in which charts are drawn
const FAINT = 0.28; // opacity of the raw values behind smoothed ones
const DURATIONS = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800];
const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((one) => one * 10 ** power)).flat();
const PLACES = { step: "last", time: "last", from: "" }; // of the values without a cursor
const INCREMENTS = { time: DURATIONS, step: WHOLE }; // between the labels of x; undefined: any

// lines: [{ label, color, x: [...], y: [...] }]; each may have its own x values, and the options
//   raw: values that are drawn faintly behind; hasDots: mark each point; isDashed: to tell equal colors apart.
// unit: "step", "time" (x in seconds) or "value"; isLog: a logarithmic y axis, without the values up to zero.
export function Chart({ title, label = "", lines, bars = false, unit = "step", isLog = false }) {
  const holder = useRef(null);
  const plot = useRef(null);
  const zoom = useRef(null);
  const [cursor, setCursor] = useState(null);
  const theme = useThemeVersion();
  const isNear = useIsNear(holder);
  const series = lines.flatMap((line) => (line.raw ? [{ ...line, y: line.raw, isRaw: true }, line] : [line]));
  const shape = series.map((line) => [line.label, line.color, line.isRaw, line.hasDots].join("\t")).join("\n");
  const data = joined(series, isLog);

  useEffect(() => {
    if (!isNear) {
      return undefined;
    }
    plot.current = new uPlot(options(holder.current, series, { bars, unit, isLog, setCursor }), data, holder.current);
    if (zoom.current?.unit === unit) {
      plot.current.setScale("x", zoom.current);
    }
    const resize = new ResizeObserver(() => {
      const width = holder.current.clientWidth;
      if (width !== plot.current.width) {
        plot.current.setSize({ width, height: HEIGHT });
      }
    });
    resize.observe(holder.current);
    return () => {
      resize.disconnect();
      zoom.current = zoomOf(plot.current, unit);
      plot.current.destroy();
      plot.current = null;
    };
  }, [isNear, shape, theme, unit, isLog]);
  useEffect(() => {
    if (plot.current) {
      update(plot.current, data, unit);
    }
  }, [lines]);

  const numHidden = isLog ? lines.flatMap((line) => line.y).filter((value) => value !== null && value <= 0).length : 0;
  return html`
    <figure data-title=${title}>
      <figcaption>${label || title}${label && html` <small>${title}</small>`}
        ${numHidden > 0 && html`<small class="hidden-values">${numHidden} values up to 0 not shown</small>`}</figcaption>
      <div class="plot" ref=${holder} style=${{ height: `${HEIGHT}px` }}></div>
      <${Legend} lines=${lines} x=${cursor} unit=${bars ? "from" : unit} />
    </figure>`;
}

// The lines with their values: at the cursor, otherwise their last ones.
function Legend({ lines, x, unit }) {
  if (unit === "from" && lines.length < 2) {
    return null;
  }
  const place = x === null ? PLACES[unit] : unit === "time" ? duration(x) : `${unit} ${compact(x)}`;
  return html`
    <ul class="legend">
      <li class="place">${place}</li>
      ${lines.map((line) => html`
        <li><i class=${line.isDashed ? "dashed" : ""} style=${{ background: line.color }}></i><span>${line.label}</span>
          <output>${valueText(line, x, unit)}</output></li>`)}
    </ul>`;
}

function valueText(line, x, unit) {
  if (x === null) {
    return unit === "from" ? "" : compact(line.y.findLast((value) => value !== null));
  }
  return compact(line.y[line.x.indexOf(x)]);
}

// Returns whether an element is in or near the window; once it was, always: drawn charts stay.
function useIsNear(holder) {
  const [isNear, setNear] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver(
      (entries) => {
        if (entries.some((entry) => entry.isIntersecting)) {
          setNear(true);
          observer.disconnect();
        }
      },
      { rootMargin: MARGIN },
    );
    observer.observe(holder.current);
    return () => observer.disconnect();
  }, []);
  return isNear;
}

function joined(series, isLog) {
  const drawn = (values) => (isLog ? values.map((value) => (value > 0 ? value : null)) : values);
  return series.length ? uPlot.join(series.map((line) => [line.x, drawn(line.y)])) : [[]];
}

// Sets new data; a zoomed axis stays as it is.
function update(chart, data, unit) {
  const zoom = zoomOf(chart, unit);
  chart.setData(data, !zoom);
  if (zoom) {
    chart.setScale("x", zoom);
  }
}

function zoomOf(chart, unit) {
  const { min, max } = chart.scales.x;
  const positions = chart.data[0];
  const isDrawn = Number.isFinite(min) && positions.length > 0; // uPlot draws only after a new chart's first update
  return isDrawn && (min > positions[0] || max < positions.at(-1)) ? { min, max, unit } : null;
}

function options(holder, series, { bars, unit, isLog, setCursor }) {
  const paths = bars ? uPlot.paths.stepped({ align: 1 }) : undefined;
  const lines = series.map((line) => ({
    label: line.label,
    stroke: resolved(line.color, line.isRaw ? FAINT : 1),
    fill: bars ? resolved(line.color, 0.14) : undefined,
    width: line.isRaw ? 1 : 1.75,
    dash: line.isDashed ? [5, 4] : undefined,
    spanGaps: true,
    points: { show: (chart, index) => !bars && !line.isRaw && (line.hasDots || isSingle(chart.data[index])), size: 6,
      fill: resolved(line.color) },
    paths,
  }));
  const axis = { stroke: resolved("var(--muted)"), font: FONT, ticks: { show: false },
    grid: { stroke: resolved("var(--line)"), width: 1 } };
  const isTime = unit === "time";
  const xAxis = { ...axis, size: 26, gap: 4, space: isTime ? 64 : 48, incrs: INCREMENTS[unit], grid: { show: false },
    ticks: { show: true, size: 4, stroke: resolved("var(--strong-line)"), width: 1 },
    values: (_, values) => (isTime ? durationLabels(values) : tickLabels(values)) };
  const yAxis = { ...axis, gap: 6, space: 34, size: (_, labels) => widthOf(labels),
    values: (_, values) => (isLog ? values.map((value) => (value === null ? "" : compact(value))) : tickLabels(values)) };
  return {
    width: holder.clientWidth,
    height: HEIGHT,
    padding: [10, 16, 0, 0], // room for half of the last label of x
    scales: { x: { time: false }, y: isLog ? { distr: 3, range: logRange } : { range: linearRange } },
    axes: [xAxis, yAxis],
    cursor: { sync: bars ? undefined : { key: unit, scales: ["x", null] }, points: { size: 7 } },
    legend: { show: false },
    hooks: { setCursor: [(chart) => setCursor(chart.cursor.idx === null ? null : chart.data[0][chart.cursor.idx] ?? null)] },
    series: [{}, ...lines],
  };
}

const isSingle = (values) => values.filter((value) => value !== null && value !== undefined).length === 1;

const widthOf = (labels) => 14 + LETTER * Math.max(2, ...(labels || []).map((text) => (text || "").length));

// A constant is drawn in the middle.
function linearRange(chart, min, max) {
  if (min === null) {
    return [0, 1];
  }
  if (max - min <= 1e-9 * Math.abs(max)) {
    const room = Math.abs(max) / 4 || 1;
    return [min - room, max + room];
  }
  return uPlot.rangeNum(min, max, 0.1, true);
}

function logRange(chart, min, max) {
  return min === null ? [1, 10] : uPlot.rangeLog(min, max, 10, true);
}
