// SPDX-License-Identifier: Apache-2.0
// One prompt with its images and frames, and its responses side by side with colored tokens.
//
// Texts are untrusted: they go into text nodes, shortened if long, and never into markup.

import { html, useEffect, useState } from "./vendor/htm-preact-3.1.1.min.js";
import * as address from "./address.js";
import { fetchJson, shown } from "./api.js";

const MAX_CHARACTERS = 20000;
const MAX_TOKENS = 2000;
const FULL_COLOR = 5; // nats: a token this unlikely has the full color
const COLORINGS = {
  "old log-prob": (row, index) => surprise(row.old_log_probs[index]),
  "rollout log-prob": (row, index) => surprise(row.rollout_log_probs[index]),
  "difference": (row, index) => surprise(-FULL_COLOR * 10 * Math.abs(difference(row, index))),
  "advantage": (row, index) => signed(row.advantages[index], row.largest),
};
const PLAIN = "none: plain text";

export function Group({ runs, run, kind, step, group }) {
  const [rows, setRows] = useState([]);
  const [problem, setProblem] = useState("");
  const [coloring, setColoring] = useState("old log-prob");
  useEffect(() => {
    fetchJson(`/api/runs/${run}/groups/${kind}/${step}/${encodeURIComponent(group)}`)
      .then((answer) => setRows(withScale(answer)))
      .catch((error) => setProblem(error.message));
  }, [run, kind, step, group]);
  if (problem || !rows.length) {
    return html`<p class="notice">${problem || "Loading …"}</p>`;
  }
  const [first] = rows;
  return html`
    <section class="filters">
      <a href=${address.link("rollouts")}>back</a>
      <strong>${runs[run].name}, step ${step}, ${group}</strong>
      <label>Token color
        <select name="coloring" value=${coloring} onChange=${(event) => setColoring(event.target.value)}>
          ${[...Object.keys(COLORINGS), PLAIN].map((name) => html`<option value=${name}>${name}</option>`)}
        </select>
      </label>
    </section>
    <section class="prompt">
      <h2>Prompt <small>${first.prompt_length} tokens</small></h2>
      <${Long} text=${first.prompt} />
      ${(first.media || []).map((medium) => html`<${Medium} medium=${medium} run=${run} />`)}
      <h2>Ground truth</h2>
      <${Long} text=${first.ground_truth} />
    </section>
    <section class="responses">
      ${rows.map((row) => html`<${Response} key=${row.sample} row=${row} coloring=${coloring} />`)}
    </section>
  `;
}

function Response({ row, coloring }) {
  const [most, setMost] = useState(MAX_TOKENS);
  const color = COLORINGS[coloring];
  return html`
    <article>
      <h3>score ${shown(row.score)}, advantage ${shown(row.advantage)}</h3>
      <p class="facts">
        ${row.response_length} tokens, ${shown(row.finish_reason)}
        ${Object.entries(row.reward_values).map(([name, value]) => html` · ${name} ${shown(value)}`)}
      </p>
      ${coloring === PLAIN
        ? html`<${Long} text=${row.response} />`
        : html`<pre>${row.tokens.slice(0, most).map((token, index) => html`
            <span title=${title(row, index)} style=${{ background: color(row, index) }}>${token}</span>`)}</pre>`}
      ${coloring !== PLAIN && row.tokens.length > most && html`
        <button onClick=${() => setMost(row.tokens.length)}>show all ${row.tokens.length} tokens</button>`}
    </article>
  `;
}

function Medium({ medium, run }) {
  return html`
    <figure class="medium" data-kind=${medium.kind}>
      ${(medium.files || []).map((file) => html`<img src=${`/media/${run}/${file}`} alt=${medium.kind} />`)}
      <figcaption>${medium.kind}: ${medium.source} ${medium.problem && `(not shown: ${medium.problem})`}</figcaption>
    </figure>
  `;
}

function Long({ text }) {
  const [isWhole, setWhole] = useState(false);
  const value = shown(text);
  return html`
    <pre>${isWhole ? value : value.slice(0, MAX_CHARACTERS)}</pre>
    ${!isWhole && value.length > MAX_CHARACTERS && html`
      <button onClick=${() => setWhole(true)}>show all ${value.length} characters</button>`}
  `;
}

function withScale(answer) {
  // A validation has only the log-probs of the engine.
  const rows = answer.map((row) => ({
    ...row, old_log_probs: row.old_log_probs || [], advantages: row.advantages || [],
  }));
  const sizes = rows.flatMap((row) => row.advantages.map((value) => Math.abs(value || 0)));
  const largest = sizes.reduce((most, size) => Math.max(most, size), 0) || 1;
  return rows.map((row) => ({ ...row, largest }));
}

function difference(row, index) {
  return (row.old_log_probs[index] ?? 0) - (row.rollout_log_probs[index] ?? 0);
}

function surprise(logProb) {
  const strength = Math.min(Math.max(-(logProb ?? -FULL_COLOR), 0) / FULL_COLOR, 1);
  return `rgba(220, 38, 38, ${(0.75 * strength).toFixed(3)})`;
}

function signed(value, largest) {
  const strength = (0.75 * Math.abs(value || 0)) / largest;
  return `rgba(${(value || 0) < 0 ? "234, 88, 12" : "22, 163, 74"}, ${strength.toFixed(3)})`;
}

function title(row, index) {
  return [
    `token ${row.token_ids[index]}`,
    `old log-prob ${shown(row.old_log_probs[index], 4)}`,
    `rollout log-prob ${shown(row.rollout_log_probs[index], 4)}`,
    `advantage ${shown(row.advantages[index], 4)}`,
  ].join("\n");
}
