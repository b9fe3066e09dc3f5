// SPDX-License-Identifier: Apache-2.0
// One prompt with its images and frames, and its responses side by side.
//
// How they are shown is in the address: the next prompt is shown the same way.

import { html, useEffect, useState } from "./vendor/htm-preact-3.1.1.min.js";
import * as address from "./address.js";
import { fetchJson, shown } from "./api.js";
import { chosenRuns, filterQuery, orderOf } from "./filters.js";
import { KeysHelp, useKeys } from "./keys.js";
import { Media } from "./media.js";
import { OverSteps } from "./over_steps.js";
import { COLORINGS, Response, withScale } from "./response.js";
import { Text, turnsOf } from "./text.js";

const LOOKS = ["text", "markdown", "tokens"];
const ORDERS = {
  "as sampled": (row) => row.sample, "best first": (row) => -(row.score ?? -Infinity), "worst first": (row) => row.score ?? Infinity,
  "largest advantage": (row) => -(row.advantage ?? -Infinity), "shortest": (row) => row.response_length,
  "longest": (row) => -row.response_length, "most turns": (row) => -(row.num_turns ?? 1),
};

export function Group({ runs, run, kind, step, group }) {
  const { params } = address.useAddress();
  const { rows, problem } = useGroup(run, kind, step, group);
  const near = useNeighbors(runs, run, kind, step, group, params);
  const look = LOOKS.includes(params.get("look")) ? params.get("look") : "text";
  const state = {
    look,
    coloring: Object.hasOwn(COLORINGS, params.get("coloring")) ? params.get("coloring") : firstColoring(kind),
    order: Object.hasOwn(ORDERS, params.get("by")) ? params.get("by") : "as sampled",
    isPair: params.get("pair") === "1",
    isOverSteps: params.get("steps") === "1",
  };
  const bindings = groupKeys(runs, near, state);
  useKeys(bindings);
  return html`
    <${Bar} runs=${runs} run=${run} kind=${kind} step=${step} near=${near} bindings=${bindings} />
    ${problem || !rows.length
      ? html`<p class="notice">${problem || "Loading …"}</p>`
      : html`
        <${Prompt} first=${rows[0]} run=${run} isMarkdown=${look === "markdown"} />
        <${Controls} state=${state} rows=${rows} kind=${kind} />
        ${state.isOverSteps && html`
          <${OverSteps} runs=${runs} run=${run} kind=${kind} step=${step} group=${group} />`}
        <${Responses} rows=${rows} run=${run} state=${state} />`}
  `;
}

function Bar({ runs, run, kind, step, near, bindings }) {
  const to = (place) => (place ? address.link("group", placeOf(runs, place)) : null);
  return html`
    <section class="group-bar">
      <a class="back" href=${address.link("rollouts")}>‹ table</a>
      <strong><i style=${{ background: runs[run].color }}></i>${runs[run].name}, step ${step}</strong>
      ${kind === "validation" && html`<b class="badge">validation</b>`}
      <span class="steppers">
        ${near.position && html`<small>prompt ${near.position.toLocaleString("en")} of ${near.total.toLocaleString("en")}</small>`}
        <a class="button" aria-label="Previous prompt" aria-disabled=${!near.previous} href=${to(near.previous)}>↑ <kbd>k</kbd></a>
        <a class="button" aria-label="Next prompt" aria-disabled=${!near.next} href=${to(near.next)}>↓ <kbd>j</kbd></a>
        <${KeysHelp} bindings=${bindings} />
      </span>
    </section>
  `;
}

function Prompt({ first, run, isMarkdown }) {
  const [isRaw, setRaw] = useState(false);
  const turns = turnsOf(first.messages);
  return html`
    <section class="prompt">
      <h2>Prompt <small>${first.prompt_length} tokens</small>
        ${turns && html`
          <button class="quiet" aria-pressed=${isRaw} onClick=${() => setRaw(!isRaw)}>with template</button>`}</h2>
      ${isRaw || !turns
        ? html`<${Text} text=${first.prompt} />`
        : turns.map(({ role, text }) => html`
          <div class="turn" data-role=${role}>
            <b class="badge">${role}</b><div><${Text} text=${text} isMarkdown=${isMarkdown} /></div>
          </div>`)}
      <${Media} media=${first.media || []} run=${run} videoPath=${(number) =>
        `/videos/${run}/${first.kind}/${first.step}/${number}/${encodeURIComponent(first.group)}`} />
      <div class="turn truth">
        <b class="badge">ground truth</b><div><${Text} text=${first.ground_truth} isMarkdown=${isMarkdown} /></div>
      </div>
    </section>
  `;
}

function Controls({ state, rows, kind }) {
  const choice = (name, title, values, value) => html`
    <label>${title}
      <select name=${name} value=${value} onChange=${(event) => address.set({ [name]: event.target.value }, { replace: true })}>
        ${values.map((one) => html`<option value=${one} selected=${one === value}>${one}</option>`)}
      </select>
    </label>`;
  return html`
    <section class="filters controls">
      <div class="switch" role="group" aria-label="Show responses as">
        ${LOOKS.map((name) => html`
          <button aria-pressed=${state.look === name} onClick=${() => setLook(name)}>${name}</button>`)}
      </div>
      ${state.look === "tokens" && choice("coloring", "Color", coloringsOf(kind), state.coloring)}
      ${choice("by", "Order", Object.keys(ORDERS), state.order)}
      ${rows.length > 1 && html`
        <button aria-pressed=${state.isPair} onClick=${() => toggle("pair", state.isPair)}>best and worst</button>`}
      <button aria-pressed=${state.isOverSteps} onClick=${() => toggle("steps", state.isOverSteps)}>over the steps</button>
      <small>${summary(rows)}</small>
    </section>
  `;
}

function Responses({ rows, run, state }) {
  const key = ORDERS[state.order];
  const sorted = [...rows].sort((one, other) => key(one) - key(other) || one.sample - other.sample);
  const { best, worst } = extremes(rows);
  const visible = state.isPair && best ? [best, worst] : sorted;
  const markOf = (row) => (row === best ? "best" : row === worst ? "worst" : null);
  return html`
    <section class=${["responses", state.isPair && "pair", rows.some((row) => row.picture) && "pictures"].filter(Boolean).join(" ")}>
      ${visible.map((row) => html`
        <${Response} key=${row.sample} row=${row} run=${run} prompt=${rows[0].messages} look=${state.look} coloring=${state.coloring} mark=${markOf(row)} />`)}
    </section>
  `;
}

// Returns the responses with the highest and the lowest score; none if all scores are equal.
function extremes(rows) {
  const scored = rows.filter((row) => row.score !== null).sort((one, other) => other.score - one.score);
  const [best, worst] = [scored[0], scored.at(-1)];
  return scored.length > 1 && best.score > worst.score ? { best, worst } : { best: null, worst: null };
}

function summary(rows) {
  const scores = rows.map((row) => row.score).filter((score) => score !== null);
  const mean = scores.reduce((sum, score) => sum + score, 0) / scores.length;
  const count = rows.length === 1 ? "1 response" : `${rows.length} responses`;
  return scores.length ? `${count}, mean score ${shown(mean)}` : count;
}

function groupKeys(runs, near, state) {
  const open = (place) => place && address.go("group", placeOf(runs, place), {}, { replace: true });
  return [
    ["j", "next prompt of the table", () => open(near.next)],
    ["k", "previous prompt of the table", () => open(near.previous)],
    ["m", "text, markdown, tokens", () => setLook(LOOKS[(LOOKS.indexOf(state.look) + 1) % LOOKS.length])],
    ["b", "best and worst side by side", () => toggle("pair", state.isPair)],
    ["s", "this prompt over the steps", () => toggle("steps", state.isOverSteps)],
    ["/", "search the texts", () => { address.go("rollouts"); focusSearch(); }],
    ["Escape", "back to the table", () => address.go("rollouts")],
  ];
}

const focusSearch = () => requestAnimationFrame(() => document.querySelector("input[name=text]")?.focus());
const setLook = (look) => address.set({ look: look === "text" ? null : look }, { replace: true });
const toggle = (name, isOn) => address.set({ [name]: isOn ? null : "1" }, { replace: true });
const placeOf = (runs, { run, kind, step, group }) => [runs[run].name, kind, step, group];
const coloringsOf = (kind) => (kind === "validation" ? ["rollout log-prob"] : Object.keys(COLORINGS));
const firstColoring = (kind) => coloringsOf(kind)[0];

function useGroup(run, kind, step, group) {
  const [state, setState] = useState({ rows: [], problem: "" });
  useEffect(() => {
    let isCurrent = true;
    fetchJson(`/api/runs/${run}/groups/${kind}/${step}/${encodeURIComponent(group)}`).then(
      (answer) => isCurrent && setState({ rows: withScale(answer), problem: "" }),
      (error) => isCurrent && setState({ rows: [], problem: error.message }),
    );
    return () => { isCurrent = false; };
  }, [run, kind, step, group]);
  return state;
}

// Returns the prompts before and after this one in the table that the address describes.
function useNeighbors(runs, run, kind, step, group, params) {
  const [near, setNear] = useState({ position: null, total: 0, previous: null, next: null });
  const numbers = chosenRuns(runs, params);
  const query = [...filterQuery(numbers, params), ...Object.entries(orderOf(params))];
  const version = numbers.map((number) => runs[number].version).join(" ");
  useEffect(() => {
    let isCurrent = true;
    fetchJson(`/api/neighbors/${run}/${kind}/${step}/${encodeURIComponent(group)}`, query).then(
      (answer) => isCurrent && setNear(answer), () => {});
    return () => { isCurrent = false; };
  }, [run, kind, step, group, JSON.stringify(query), version]);
  return near;
}
