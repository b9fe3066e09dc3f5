// SPDX-License-Identifier: Apache-2.0
// One prompt at all steps that kept it: its scores over the steps, and its responses.

import { html, useEffect, useMemo, useState } from "./vendor/htm-preact-3.1.1.min.js";
import * as address from "./address.js";
import { fetchJson, shown } from "./api.js";
import { Chart } from "./charts.js";
import { Picture } from "./media.js";
import { readable } from "./text.js";

const LINES = [["mean", "var(--color-0)"], ["max", "var(--color-2)"], ["min", "var(--color-1)"]];
const SHOWN_STEPS = 50;

export function OverSteps({ runs, run, kind, step, group }) {
  const [history, setHistory] = useState(null);
  const [problem, setProblem] = useState("");
  const version = runs[run].version;
  useEffect(() => {
    let isCurrent = true;
    fetchJson(`/api/runs/${run}/prompts/${kind}/${step}/${encodeURIComponent(group)}`).then(
      (answer) => isCurrent && setHistory(answer), (error) => isCurrent && setProblem(error.message));
    return () => { isCurrent = false; };
  }, [run, kind, step, group, version]);
  const lines = useMemo(() => linesOf(history || []), [history]);
  if (problem || !history) {
    return html`<p class="notice">${problem || "Loading …"}</p>`;
  }
  if (history.length < 2) {
    return html`<p class="card">No other step kept responses to this prompt. Validations repeat their prompts;
      training repeats one with each pass over the data, and keeps it by chance.</p>`;
  }
  return html`
    <section class="over-steps">
      <${Chart} title="score of this prompt" lines=${lines} />
      <div class="scroll"><table>
        <thead><tr><th>step</th><th>mean</th><th>min</th><th>max</th><th>best response</th></tr></thead>
        <tbody>${[...history].reverse().slice(0, SHOWN_STEPS).map((one) => html`
          <tr class=${one.step === step && one.kind === kind ? "current" : ""}>
            <td><a href=${address.link("group", [runs[run].name, one.kind, one.step, one.group])}>${one.step}</a>
              ${one.kind === "validation" && html` <b class="badge">val</b>`}</td>
            <td>${shown(one.mean)}</td><td>${shown(one.min)}</td><td>${shown(one.max)}</td>
            <${Best} row=${best(one.rows)} run=${run} />
          </tr>`)}</tbody>
      </table></div>
    </section>
  `;
}

function Best({ row, run }) {
  return html`
    <td class="text response-cell">
      ${row.picture_start && html`<${Picture} file=${row.picture_start} run=${run} alt="" loading="lazy" />`}
      <span>${readable(row.response_start || "")}</span></td>`;
}

// Each kind of rollout has its own lines: with training and validation, those of the kind with more steps.
function linesOf(history) {
  const kinds = ["train", "validation"].map((kind) => history.filter((one) => one.kind === kind));
  const longest = kinds[0].length > kinds[1].length ? kinds[0] : kinds[1];
  const isSingle = longest.every((one) => one.rows.length === 1);
  return LINES.slice(0, isSingle ? 1 : LINES.length).map(([name, color]) => ({
    label: isSingle ? "score" : name, color, x: longest.map((one) => one.step), y: longest.map((one) => one[name]),
  }));
}

const best = (rows) => rows.reduce((most, row) => ((row.score ?? -Infinity) > (most.score ?? -Infinity) ? row : most));
