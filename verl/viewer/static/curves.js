// SPDX-License-Identifier: Apache-2.0
// Logged metrics of the selected runs over their steps, and the time per phase.

import { html, useEffect, useMemo, useState } from "./vendor/htm-preact-3.1.1.min.js";
import { fetchJson } from "./api.js";
import { colorAt } from "./colors.js";
import { Chart } from "./charts.js";

const FIRST = [
  "reward/overall", "critic/score/mean", "val/reward_score", "actor/pg_loss", "actor/ppo_kl", "actor/entropy_loss",
  "actor/grad_norm", "response_length/mean", "rollout/log_probs_diff_mean", "perf/throughput",
];
const MAX_CHARTS = 40;
const NO_PHASE = ["timing_s/step"]; // the sum of the others

export function Curves({ runs, numbers, version }) {
  const [metrics, setMetrics] = useState({});
  const [wanted, setWanted] = useState("");
  useEffect(() => {
    let isCurrent = true;
    Promise.all(numbers.map((number) => fetchJson(`/api/runs/${number}/metrics`))).then((answers) => {
      if (isCurrent) {
        setMetrics(Object.fromEntries(numbers.map((number, index) => [number, answers[index]])));
      }
    });
    return () => { isCurrent = false; };
  }, [version]);

  const known = useMemo(() => numbers.filter((number) => metrics[number]), [metrics, version]);
  const names = useMemo(() => namesOf(known, metrics, wanted), [known, metrics, wanted]);
  const charts = useMemo(
    () => names.slice(0, MAX_CHARTS).map((name) => ({ name, lines: linesOf(name, known, metrics, runs) })),
    [names],
  );
  const phases = useMemo(() => known.map((number) => phasesOf(metrics[number])), [known, metrics]);
  return html`
    <section class="filters">
      <label>Metrics <input type="search" name="metrics" placeholder="name contains …" value=${wanted}
        onInput=${(event) => setWanted(event.target.value)} /></label>
      ${names.length > MAX_CHARTS && html`<small>the first ${MAX_CHARTS} of ${names.length}</small>`}
    </section>
    <section class="charts">
      ${charts.map(({ name, lines }) => html`<${Chart} key=${name} title=${name} lines=${lines} />`)}
    </section>
    ${!wanted && phases.length > 0 && html`
      <h2>Seconds per phase of a step</h2>
      <section class="charts">
        ${known.map((number, index) => html`
          <${Chart} key=${number} title=${`time of ${runs[number].name}`} lines=${phases[index]} />`)}
      </section>`}
  `;
}

function namesOf(known, metrics, wanted) {
  const all = [...new Set(known.flatMap((number) => Object.keys(metrics[number].metrics)))].sort();
  return wanted ? all.filter((name) => name.includes(wanted)) : FIRST.filter((name) => all.includes(name));
}

function linesOf(name, known, metrics, runs) {
  return known
    .filter((number) => metrics[number].metrics[name])
    .map((number) => ({
      label: runs[number].name, color: runs[number].color, x: metrics[number].step, y: metrics[number].metrics[name],
    }));
}

function phasesOf({ step, metrics }) {
  const names = Object.keys(metrics).filter((name) => name.startsWith("timing_s/") && !NO_PHASE.includes(name));
  return names.map((name, index) => ({
    label: name.replace("timing_s/", ""), color: colorAt(index), x: step, y: metrics[name],
  }));
}
