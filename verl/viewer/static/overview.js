// SPDX-License-Identifier: Apache-2.0
// The runs side by side: a table of their results, their notes, and the options in which they differ.

import { html, useEffect, useState } from "./vendor/htm-preact-3.1.1.min.js";
import * as address from "./address.js";
import { fetchJson, sendJson } from "./api.js";
import { compact, duration } from "./numbers.js";

const DAY_S = 86400;
const LONG = 60; // characters of a value, from which it may wrap
const STATES = { // of a run: its text, its color
  running: ["running", "good"], finished: ["finished", ""], stopped: ["stopped early", ""], ended: ["ended", ""],
  killed: ["killed", "bad"], unknown: ["unknown", ""],
};
const COLUMNS = [ // key in the address, title, value to sort by, cell
  ["name", "run", ({ run }) => run.name, ({ run }) => html`<i style=${{ background: run.color }}></i>${run.name}`],
  ["state", "state", ({ line }) => line.state, ({ line }) => html`<${StateOf} line=${line} />`],
  ["step", "steps", ({ line }) => line.step, ({ line }) => progress(line)],
  ["reward", "reward", ({ line }) => line.reward?.last, ({ line }) => compact(line.reward?.last)],
  ["best", "best reward", ({ line }) => line.reward?.best, ({ line }) => best(line.reward)],
  ["val", "best validation", ({ line }) => line.validation?.best, ({ line }) => best(line.validation)],
  ["speed", "tokens/s", ({ line }) => line.tokens_per_s, ({ line }) => compact(line.tokens_per_s)],
  ["time", "time", ({ line }) => line.seconds, ({ line }) => (line.seconds === null ? "–" : duration(line.seconds))],
  ["started", "started", ({ line }) => line.started, ({ line }) => html`<${When} seconds=${line.started} />`],
  ["tags", "tags", ({ line }) => line.tags.join(), ({ line }) => html`<${Tags} tags=${line.tags} />`],
];
const NUMERIC = ["step", "reward", "best", "val", "speed", "time"];

export function Overview({ runs, numbers, version }) {
  const [saved, setSaved] = useState(0);
  const { value: lines, problem } = useJson("/api/overview", [], [runs.map((run) => run.version + run.state).join(" "), saved]);
  if (problem || !lines || lines.length !== runs.length) {
    return html`<p class="empty">${problem || "Loading …"}</p>`;
  }
  const rows = numbers.map((number) => ({ number, run: runs[number], line: lines[number] }));
  return html`
    <${Table} rows=${rows} />
    <${Exports} numbers=${numbers} />
    <${Configs} runs=${runs} numbers=${numbers} version=${version} />
    <${AllNotes} rows=${rows} onSaved=${() => setSaved(saved + 1)} />
  `;
}

function Table({ rows }) {
  const { params } = address.useAddress();
  const [by, isUp] = [params.get("by"), params.get("up") === "yes"];
  const column = COLUMNS.find(([key]) => key === by);
  const sorted = column ? [...rows].sort((one, other) => order(column[2](one), column[2](other), isUp)) : rows;
  const sort = (key) => address.set({ by: key, up: by === key && !isUp ? "yes" : null });
  return html`
    <div class="scroll"><table class="overview">
      <thead><tr>${COLUMNS.map(([key, title]) => html`
        <th class=${NUMERIC.includes(key) ? "number" : ""} aria-sort=${by === key ? (isUp ? "ascending" : "descending") : null}>
          <button onClick=${() => sort(key)}>${title}${by === key && (isUp ? " ▲" : " ▼")}</button></th>`)}</tr></thead>
      <tbody>${sorted.map((row) => html`
        <tr key=${row.run.name}>${COLUMNS.map(([key, , , cell]) => html`
          <td class=${NUMERIC.includes(key) ? "number" : ""}>${cell(row)}</td>`)}</tr>`)}</tbody>
    </table></div>`;
}

// Missing values come last in both orders.
function order(one, other, isUp) {
  const [isFirstEmpty, isSecondEmpty] = [one ?? "", other ?? ""].map((value) => value === "");
  if (isFirstEmpty || isSecondEmpty) {
    return isFirstEmpty - isSecondEmpty;
  }
  const sign = isUp ? 1 : -1;
  return sign * (typeof one === "string" ? one.localeCompare(other) : one - other);
}

function StateOf({ line }) {
  const [text, kind] = STATES[line.state];
  return html`<span class=${`state-of ${kind}`}>${text}</span>`;
}

const progress = ({ step, total_steps: total }) =>
  step === null ? "–" : `${step.toLocaleString("en")}${total === null || total === step ? "" : ` of ${total.toLocaleString("en")}`}`;

function best(course) {
  return course ? html`${compact(course.best)} <small>at ${course.best_step}</small>` : "–";
}

function When({ seconds }) {
  if (seconds === null) {
    return "–";
  }
  const date = new Date(1000 * seconds);
  const isRecent = Date.now() / 1000 - seconds < DAY_S;
  const text = isRecent
    ? date.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" })
    : date.toLocaleDateString("en-CA");
  return html`<time dateTime=${date.toISOString()} title=${date.toLocaleString("en-GB")}>${text}</time>`;
}

const Tags = ({ tags }) => tags.map((tag) => html`<span class="tag">${tag}</span>`);

function Exports({ numbers }) {
  const query = new URLSearchParams(numbers.map((number) => ["run", number])).toString();
  return html`<p class="exports">Metrics of the selected runs:
    <a href=${`/api/metrics.csv?${query}`} download>CSV</a> <a href=${`/api/metrics.jsonl?${query}`} download>JSONL</a></p>`;
}

function Configs({ runs, numbers, version }) {
  const { params } = address.useAddress();
  const [isAll, wanted] = [params.get("all") === "yes" || numbers.length < 2, params.get("option") || ""];
  const query = [...numbers.map((number) => ["run", number]), ...(isAll ? [["all", "yes"]] : [])];
  const { value, problem } = useJson("/api/configs", query, [version, JSON.stringify(query)]);
  const rows = (value || []).filter((row) => row.option.includes(wanted) && row.values.length === numbers.length);
  return html`
    <section class="configs">
      <h2>${isAll ? "Options" : "Options that differ"} <small>${rows.length}</small></h2>
      <div class="filters">
        <label><input type="search" name="option" placeholder="Find an option …" aria-label="Find an option" value=${wanted}
          onInput=${(event) => address.set({ option: event.target.value }, { replace: true })} /></label>
        ${numbers.length > 1 && html`<label><input type="checkbox" name="all" checked=${isAll}
          onChange=${(event) => address.set({ all: event.target.checked ? "yes" : null })} /> equal ones too</label>`}
      </div>
      ${problem && html`<p class="notice">${problem}</p>`}
      ${value && !rows.length && html`<p class="empty">${wanted ? "No option has this in its name." : "No option differs."}</p>`}
      ${rows.length > 0 && html`<div class="scroll"><table class="options">
        <thead><tr><th>option</th>${numbers.map((number) => html`
          <th><i style=${{ background: runs[number].color }}></i>${runs[number].name}</th>`)}</tr></thead>
        <tbody>${rows.map(({ option, values }) => html`
          <tr key=${option}><td>${option}</td>${values.map((one) => html`
            <td class=${classOf(one, values)}>${one ?? "not there"}</td>`)}</tr>`)}</tbody>
      </table></div>`}
    </section>`;
}

function classOf(value, values) {
  return [value === null && "missing", value !== values[0] && "other", value?.length > LONG && "long"].filter(Boolean).join(" ");
}

function AllNotes({ rows, onSaved }) {
  const { value: session } = useJson("/api/session", [], []);
  return html`
    <section class="all-notes">
      <h2>Notes</h2>
      ${session?.reason && html`<p class="notice">Notes cannot be changed: ${session.reason}.</p>`}
      <div class="notes">
        ${session && rows.map(({ number, run, line }) => html`
          <${NotesOf} key=${run.name} number=${number} run=${run} line=${line} session=${session} onSaved=${onSaved} />`)}
      </div>
    </section>`;
}

function NotesOf({ number, run, line, session, onSaved }) {
  const [draft, setDraft] = useState(null); // null: nothing is being changed
  const [problem, setProblem] = useState("");
  const shown = draft || { note: line.note, tags: line.tags.join(", ") };
  const change = (name) => (event) => setDraft({ ...shown, [name]: event.target.value });
  const save = async () => {
    const tags = shown.tags.split(",").map((tag) => tag.trim()).filter(Boolean);
    try {
      await sendJson(`/api/runs/${number}/notes`, { note: shown.note, tags }, session.key);
      setDraft(null);
      setProblem("");
      onSaved();
    } catch (error) {
      setProblem(error.message);
    }
  };
  const isOff = session.key === null;
  return html`
    <div class="card" data-run=${run.name}>
      <h3><i style=${{ background: run.color }}></i>${run.name}</h3>
      <input name="tags" aria-label=${`Tags of ${run.name}`} placeholder="Tags, separated by commas" value=${shown.tags}
        disabled=${isOff} onInput=${change("tags")} />
      <textarea name="note" rows="3" aria-label=${`Note on ${run.name}`} placeholder="What was tried, what came out"
        value=${shown.note} disabled=${isOff} onInput=${change("note")}></textarea>
      ${(problem || line.problem) && html`<p class="notice">${problem || line.problem}</p>`}
      ${draft && html`<p class="actions">
        <button class="main" onClick=${save}>Save</button> <button onClick=${() => setDraft(null)}>Discard</button></p>`}
    </div>`;
}

// Returns a response, requested again when one of the values changes; the last one stays until the next is there.
function useJson(path, params, changes) {
  const [state, setState] = useState({ value: null, problem: "" });
  useEffect(() => {
    let isCurrent = true;
    fetchJson(path, params)
      .then((value) => isCurrent && setState({ value, problem: "" }))
      .catch((error) => isCurrent && setState((old) => ({ ...old, problem: String(error) })));
    return () => { isCurrent = false; };
  }, changes);
  return state;
}
