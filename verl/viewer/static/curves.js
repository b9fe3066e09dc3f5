// SPDX-License-Identifier: Apache-2.0
// Logged metrics of the selected runs over their steps or their time, by area, and the seconds per phase.

import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact-3.1.1.min.js";
import * as address from "./address.js";
import { fetchJson } from "./api.js";
import { Chart } from "./charts.js";
import { NUM_COLORS, colorAt } from "./colors.js";
import { KEY_AREA, PHASE_AREA, areasOf, isValidation, phasesOf } from "./metrics.js";
import { known, smoothed, trainingSeconds } from "./series.js";

const OPEN = [KEY_AREA, PHASE_AREA]; // areas that are open until they are closed
const MAX_SMOOTHING = 0.99;

export function Curves({ runs, numbers }) {
  const { params } = address.useAddress();
  const { logs, problem } = useLogs(runs, numbers);
  const wanted = params.get("metric") || "";
  const view = {
    unit: params.get("x") === "time" ? "time" : "step",
    isLog: params.get("y") === "log",
    smoothing: Math.min(Math.max(Number(params.get("smooth")) || 0, 0), MAX_SMOOTHING),
  };
  const shown = useMemo(
    () => numbers.filter((number) => logs[number]).map((number) => ({ run: runs[number], log: logs[number] })),
    [logs, numbers.join(), runs.map((run) => run.color).join()],
  );
  const names = useMemo(() => [...new Set(shown.flatMap(({ log }) => Object.keys(log.metrics)))], [shown]);
  const areas = useMemo(() => areasOf(names, wanted), [names, wanted]);
  if (!numbers.length) {
    return html`<p class="empty">No run is selected.</p>`;
  }
  return html`
    <${Toolbar} view=${view} wanted=${wanted} />
    ${problem && html`<p class="notice">${problem}</p>`}
    ${shown.length > 0 && !names.length && html`
      <p class="empty">No metrics were logged: <code>trainer.logger</code> needs <code>file</code> to write them.</p>`}
    ${names.length > 0 && !areas.length && html`<p class="empty">No metric has “${wanted}” in its name.</p>`}
    ${areas.map(({ area, charts }) => html`
      <${Area} key=${area} area=${area} charts=${charts} shown=${shown} names=${names} view=${view} wanted=${wanted} />`)}
  `;
}

function Toolbar({ view, wanted }) {
  const typed = (name) => (event) => address.set({ [name]: event.target.value }, { replace: true });
  return html`
    <section class="filters toolbar">
      <label><input type="search" name="metrics" placeholder="Find a metric …" aria-label="Find a metric" value=${wanted}
        onInput=${typed("metric")} /></label>
      <label>Smoothing
        <input type="range" name="smooth" min="0" max=${MAX_SMOOTHING} step="0.01" value=${view.smoothing}
          onInput=${(event) => address.set({ smooth: Number(event.target.value) || null }, { replace: true })} />
        <output>${view.smoothing.toFixed(2)}</output></label>
      <span class="choice" role="group" aria-label="Horizontal axis">
        ${["step", "time"].map((unit) => html`
          <button class=${view.unit === unit ? "on" : ""} aria-pressed=${view.unit === unit}
            onClick=${() => address.set({ x: unit === "step" ? null : unit })}>${unit}</button>`)}
      </span>
      <label><input type="checkbox" name="log" checked=${view.isLog}
        onChange=${(event) => address.set({ y: event.target.checked ? "log" : null })} /> log axis</label>
    </section>`;
}

function Area({ area, charts, shown, names, view, wanted }) {
  const { params } = address.useAddress();
  const isOpen = wanted !== "" || OPEN.includes(area) !== params.getAll("flip").includes(area);
  const flip = () => {
    const flipped = params.getAll("flip");
    address.set({ flip: flipped.includes(area) ? flipped.filter((one) => one !== area) : [...flipped, area] });
  };
  const hasPhases = area === PHASE_AREA && wanted === "";
  return html`
    <section class="area" data-area=${area}>
      <h2><button class="quiet" aria-expanded=${isOpen} disabled=${wanted !== ""} onClick=${flip}>
        <b class="arrow">${isOpen ? "▾" : "▸"}</b> ${area} <small>${hasPhases ? "" : charts.length}</small></button></h2>
      ${isOpen && html`<div class="charts">
        ${hasPhases
          ? html`<${Phases} shown=${shown} names=${names} view=${view} />`
          : charts.map(({ name, label }) => html`
              <${Metric} key=${name} name=${name} label=${label} shown=${shown} view=${view} />`)}
      </div>`}
    </section>`;
}

function Metric({ name, label, shown, view }) {
  const lines = useMemo(
    () => shown.flatMap(({ run, log }) => lineOf(log, name, view, { label: run.name, color: run.color })),
    [name, shown, view.unit, view.smoothing],
  );
  return html`<${Chart} title=${name} label=${label} lines=${lines} unit=${view.unit} isLog=${view.isLog} />`;
}

// One chart per run; a phase has the same color in all of them.
function Phases({ shown, names, view }) {
  const phases = useMemo(() => phasesOf(names), [names]);
  const charts = useMemo(
    () => shown.map(({ run, log }) => ({
      title: `time of ${run.name}`,
      lines: phases.flatMap((phase, index) => lineOf(log, `timing_s/${phase}`, view,
        { label: phase, color: colorAt(index), isDashed: index >= NUM_COLORS })),
    })),
    [shown, phases, view.unit, view.smoothing],
  );
  return charts.filter(({ lines }) => lines.length).map(({ title, lines }) => html`
    <${Chart} key=${title} title=${title} lines=${lines} unit=${view.unit} isLog=${view.isLog} />`);
}

// Returns the line of a metric in a list, which is empty if the run did not log it.
function lineOf(log, name, { unit, smoothing }, style) {
  const positions = unit === "time" ? log.seconds : log.step;
  if (!log.metrics[name] || !positions) {
    return [];
  }
  const { x, y } = known(positions, log.metrics[name]);
  if (isValidation(name) || smoothing === 0) {
    return [{ ...style, x, y, hasDots: isValidation(name) }];
  }
  return [{ ...style, x, y: smoothed(y, smoothing), raw: y }];
}

// Returns the logs of the runs, by position; one is requested again only after it has changed.
function useLogs(runs, numbers) {
  const [state, setState] = useState({ logs: {}, problem: "" });
  const versions = useRef({});
  useEffect(() => {
    numbers.filter((number) => versions.current[number] !== runs[number].version).forEach(async (number) => {
      versions.current[number] = runs[number].version;
      try {
        const answer = await fetchJson(`/api/runs/${number}/metrics`);
        const log = { ...answer, seconds: trainingSeconds(answer) };
        setState((old) => ({ logs: { ...old.logs, [number]: log }, problem: "" }));
      } catch (error) {
        delete versions.current[number]; // the next change of any run tries again
        setState((old) => ({ ...old, problem: String(error) }));
      }
    });
  }, [numbers.map((number) => runs[number].version).join(" "), numbers.join()]);
  return state;
}
