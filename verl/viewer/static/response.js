// SPDX-License-Identifier: Apache-2.0
// One response: as text, as markdown, or as tokens colored by a value; conversations turn by turn.

import { html, useState } from "./vendor/htm-preact-3.1.1.min.js";
import { counted, shown } from "./api.js";
import { Made } from "./media.js";
import { Text, readable } from "./text.js";
import { Legend, Turns } from "./turns.js";

const MAX_TOKENS = 2000;
const FULL_COLOR = 5; // nats: a token this unlikely has the full color
export const COLORINGS = {
  "old log-prob": (row, index) => surprise(row.old_log_probs[index]),
  "rollout log-prob": (row, index) => surprise(row.rollout_log_probs[index]),
  "difference": (row, index) => surprise(-FULL_COLOR * 10 * Math.abs(difference(row, index))),
  "advantage": (row, index) => signed(row.advantages[index], row.largest),
};

export function Response({ row, run, prompt, look, coloring, mark }) {
  const rewards = Object.entries(row.reward_values).filter(([name]) => name !== "overall");
  return html`
    <article class=${mark || ""}>
      <h3>
        <span class="score">${shown(row.score)}</span>
        ${mark && html`<b class="badge">${mark}</b>`}
        ${row.is_masked && html`<b class="badge bad">masked</b>`}
        <small>response ${row.sample + 1}</small>
      </h3>
      ${row.picture && html`<${Made} picture=${row.picture} run=${run} />`}
      <p class="facts">
        ${[
          row.advantage !== null && `advantage ${shown(row.advantage)}`,
          counted(row.response_length, row.picture ? "step" : "token"), shown(row.finish_reason),
          row.turns && counted(row.num_turns, "turn"), row.turns && counted(row.num_calls, "call"),
          row.contexts?.length > 1 && `${row.contexts.length} contexts`,
          row.num_failures > 0 && `${row.num_failures} failed`,
          ...rewards.map(([name, value]) => `${name} ${shown(value)}`),
        ].filter(Boolean).join(" · ")}
      </p>
      ${look === "tokens"
        ? html`<${Legend} row=${row} /><${Tokens} row=${row} color=${COLORINGS[coloring]} />`
        : row.turns
          ? html`<${Turns} row=${row} run=${run} prompt=${prompt} isMarkdown=${look === "markdown"} />`
          : !row.picture && html`<${Text} text=${readable(row.response || "")} isMarkdown=${look === "markdown"} />`}
    </article>
  `;
}

function Tokens({ row, color }) {
  const [most, setMost] = useState(MAX_TOKENS);
  return html`
    <pre class="tokens">${row.tokens.slice(0, most).map((token, index) => html`
      <span title=${title(row, index)} class=${row.is_trained[index] === false ? "untrained" : ""} style=${{ background: color(row, index) }}>${token}</span>`)}</pre>
    ${row.tokens.length > most && html`
      <button class="fold" onClick=${() => setMost(row.tokens.length)}>show all ${row.tokens.length} tokens</button>`}
  `;
}

// Returns rows with the largest advantage of all, which gets the full color. A validation lacks some lists.
export function withScale(answer) {
  const rows = answer.map((row) => ({
    ...row,
    tokens: row.tokens || [],
    is_trained: row.is_trained || [],
    token_ids: row.token_ids || [],
    rollout_log_probs: row.rollout_log_probs || [],
    old_log_probs: row.old_log_probs || [],
    advantages: row.advantages || [],
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
    row.is_trained[index] === false && "not trained",
  ].filter(Boolean).join("\n");
}
