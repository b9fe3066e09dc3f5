// SPDX-License-Identifier: Apache-2.0
// The logged metrics of the chosen runs over their steps, and where the time of a step goes.

import { html, useEffect, useMemo, useState } from "./vendor/htm-preact-3.1.1.min.js";
import { COLORS, ask, colorOf } from "./api.js";
import { Chart } from "./charts.js";

const FIRST = [
  "reward/overall", "critic/score/mean", "val/reward_score", "actor/pg_loss", "actor/ppo_kl", "actor/entropy_loss",
  "actor/grad_norm", "response_length/mean", "rollout/log_probs_diff_mean", "perf/throughput",
];
const MOST = 40; // charts at once
const NO_PHASE = ["timing_s/step"]; // the sum of the others

export function Curves({ runs, numbers, version }) {
  const [metrics, setMetrics] = useState({});
  const [wanted, setWanted] = useState("");
  useEffect(() => {
    let isCurrent = true;
    Promise.all(numbers.map((number) => ask(`/api/runs/${number}/metrics`))).then((answers) => {
      if (isCurrent) {
        setMetrics(Object.fromEntries(numbers.map((number, place) => [number, answers[place]])));
      }
    });
    return () => { isCurrent = false; };
  }, [version]);

  const known = useMemo(() => numbers.filter((number) => metrics[number]), [metrics, version]);
  const names = useMemo(() => namesOf(known, metrics, wanted), [known, metrics, wanted]);
  const charts = useMemo(
    () => names.slice(0, MOST).map((name) => ({ name, lines: linesOf(name, known, metrics, runs) })),
    [names],
  );
  const phases = useMemo(() => known.map((number) => phasesOf(metrics[number])), [known, metrics]);
  return html`
    <section class="filters">
      <label>Metrics <input type="search" name="metrics" placeholder="all that contain …" value=${wanted}
        onInput=${(event) => setWanted(event.target.value)} /></label>
      ${names.length > MOST && html`<small>the first ${MOST} of ${names.length}</small>`}
    </section>
    <section class="charts">
      ${charts.map(({ name, lines }) => html`<${Chart} key=${name} title=${name} lines=${lines} />`)}
    </section>
    ${!wanted && phases.length > 0 && html`
      <h2>Seconds of each phase of a step</h2>
      <section class="charts">
        ${known.map((number, place) => html`
          <${Chart} key=${number} title=${`time of ${runs[number].name}`} lines=${phases[place]} />`)}
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
      label: runs[number].name, color: colorOf(number), x: metrics[number].step, y: metrics[number].metrics[name],
    }));
}

function phasesOf({ step, metrics }) {
  const names = Object.keys(metrics).filter((name) => name.startsWith("timing_s/") && !NO_PHASE.includes(name));
  return names.map((name, place) => ({
    label: name.replace("timing_s/", ""), color: COLORS[place % COLORS.length], x: step, y: metrics[name],
  }));
}
