// SPDX-License-Identifier: Apache-2.0
// The table of rollouts, filtered, sorted and paginated by the server, with histograms of the same rows.
//
// Filters, order and page are in the address, so that "back" finds them again and a link shows the same rows.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact-3.1.1.min.js";
import * as address from "./address.js";
import { fetchJson, groupLink, shown } from "./api.js";
import { FILTERS, PAGE, TURN_FILTERS, filterQuery, offsetOf, orderOf } from "./filters.js";
import { Histogram } from "./histogram.js";
import { KeysHelp, useKeys } from "./keys.js";
import { Picture } from "./media.js";
import { readable } from "./text.js";

const WAIT_MS = 250; // after the last key press, before the request
const COLUMNS = [
  ["run", "run"], ["step", "step"], ["score", "score"], ["advantage", "advantage"], ["response_length", "tokens"],
  ["finish_reason", "finish"], ["data_source", "source"],
];
const TURN_COLUMNS = [["num_turns", "turns"], ["num_calls", "calls"], ["num_failures", "failed"]];
const TITLES = { score: "score", response_length: "response length (tokens)" };
const EMPTY = { rows: [], total: 0, choices: { kind: [], data_source: [], finish_reason: [], stop_reason: [] } };

export function Rollouts({ runs, numbers, version }) {
  const { params } = address.useAddress();
  const { answer, counts, problem } = useRows(numbers, version, params);
  const [current, setCurrent] = useState(-1); // row that j and k move
  const search = useRef(null);
  const bindings = tableKeys(answer.rows, runs, current, setCurrent, search);
  useKeys(bindings);
  const { sort, order } = orderOf(params);
  const hasTurns = answer.choices.stop_reason.length > 0 || TURN_FILTERS.some((name) => params.get(name));
  const columns = hasTurns ? [...COLUMNS, ...TURN_COLUMNS] : COLUMNS;
  const sortBy = (name) =>
    address.set({ sort: name, order: sort === name && order === "down" ? "up" : "down", offset: null });
  return html`
    <${Filters} params=${params} choices=${answer.choices} search=${search} hasTurns=${hasTurns}>
      <${KeysHelp} bindings=${bindings} />
    </${Filters}>
    ${problem && html`<p class="notice">${problem}</p>`}
    <section class="histograms">
      ${Object.entries(counts).filter(([, one]) => one.edges.length).map(([name, one]) => html`
        <${Histogram} key=${name} title=${TITLES[name]} edges=${one.edges} counts=${one.counts} runs=${runs}
          select=${(min, max) => setFilters({ [`${name}_min`]: rounded(min), [`${name}_max`]: rounded(max) })} />`)}
    </section>
    <${Pager} params=${params} numbers=${numbers} total=${answer.total} />
    <div class="scroll"><table class="rollouts">
      <thead><tr>
        ${columns.map(([name, title]) => html`
          <th aria-sort=${sort === name ? (order === "up" ? "ascending" : "descending") : null}>
            <button onClick=${() => sortBy(name)}>${title}${sort === name && (order === "up" ? " ▲" : " ▼")}</button>
          </th>`)}
        <th>prompt</th><th>response</th>
      </tr></thead>
      <tbody>${answer.rows.map((row, index) => html`
        <${Row} row=${row} runs=${runs} hasTurns=${hasTurns} isCurrent=${index === current} />`)}</tbody>
    </table></div>
  `;
}

function Row({ row, runs, hasTurns, isCurrent }) {
  const line = useRef(null);
  useEffect(() => isCurrent && line.current.scrollIntoView({ block: "nearest" }), [isCurrent]);
  return html`
    <tr ref=${line} class=${isCurrent ? "current" : ""} onClick=${() => openGroup(row, runs)}>
      <td class="run"><i style=${{ background: runs[row.run].color }}></i>${runs[row.run].name}</td>
      <td class="step"><a href=${groupLink(row, runs)} onClick=${(event) => event.stopPropagation()}>${row.step}</a>
        ${row.kind === "validation" && html` <b class="badge">val</b>`}</td>
      <td class="score">${shown(row.score)}</td>
      <td class="advantage">${shown(row.advantage)}</td>
      <td class="tokens">${row.response_length}</td>
      <td class="finish">${shown(row.finish_reason)}
        ${row.is_masked && html` <b class="badge bad" title="no token is trained">masked</b>`}</td>
      <td class="source">${shown(row.data_source)}</td>
      ${hasTurns && TURN_COLUMNS.map(([name, title]) => html`<td class=${title}>${shown(row[name])}</td>`)}
      <td class="text prompt-cell">
        ${row.thumbnail && html`<img loading="lazy" src=${`/media/${row.run}/${row.thumbnail}`} alt="" />`}
        <span>${row.question}</span>${row.num_media > 1 && html`<small>+${row.num_media - 1}</small>`}</td>
      <td class="text response-cell">
        ${row.picture_start && html`<${Picture} file=${row.picture_start} run=${row.run} alt="" loading="lazy" />`}
        <span>${readable(row.response_start || "").replace(/\s+/g, " ")}</span></td>
    </tr>
  `;
}

function Filters({ params, choices, search, hasTurns, children }) {
  const field = (name, type, hint) => html`
    <input type=${type} step="any" name=${name} placeholder=${hint} value=${params.get(name) || ""}
      ref=${name === "text" ? search : null} onInput=${(event) => setFilters({ [name]: event.target.value }, true)} />`;
  const bound = (name, title) => html`
    <label>${title} ${field(`${name}_min`, "number", "from")} ${field(`${name}_max`, "number", "to")}</label>`;
  const choice = (name, title, values) => {
    const chosen = params.get(name) || "";
    const offered = !chosen || values.includes(chosen) ? values : [...values, chosen];
    return html`
      <label>${title}
        <select name=${name} value=${chosen} onChange=${(event) => setFilters({ [name]: event.target.value })}>
          <option value="">all</option>
          ${offered.map((value) => html`<option value=${value} selected=${value === chosen}>${value}</option>`)}
        </select>
      </label>`;
  };
  return html`
    <section class="filters">
      <label class="search">Text ${field("text", "search", "in prompt, response or ground truth")}</label>
      ${choice("kind", "Kind", ["train", "validation"])}
      ${bound("step", "Step")} ${bound("score", "Score")} ${bound("response_length", "Tokens")}
      ${choice("finish_reason", "Finish", choices.finish_reason)}
      ${choice("data_source", "Source", choices.data_source)} ${choice("media", "Media", ["yes", "no"])}
      ${hasTurns && html`
        ${bound("num_turns", "Turns")} ${bound("num_calls", "Calls")} ${bound("num_failures", "Failed calls")}
        ${choice("stop_reason", "End", choices.stop_reason)}`}
      ${FILTERS.some((name) => params.get(name)) && html`
        <button class="quiet" onClick=${() => setFilters(Object.fromEntries(FILTERS.map((name) => [name, null])))}>
          clear filters</button>`}
      ${children}
    </section>
  `;
}

function Pager({ params, numbers, total }) {
  const offset = offsetOf(params);
  const last = Math.min(offset + PAGE, total);
  const move = (by) => address.set({ offset: offset + by || null });
  const file = (format) =>
    `/api/export?${new URLSearchParams([["format", format], ...filterQuery(numbers, params)])}`;
  return html`
    <section class="pager">
      <button disabled=${offset === 0} onClick=${() => move(-PAGE)}>previous</button>
      <output>${total ? offset + 1 : 0} to ${last} of ${total.toLocaleString("en")}</output>
      <button disabled=${last >= total} onClick=${() => move(PAGE)}>next</button>
      <span class="export">Export ${["jsonl", "csv"].map((format) => html`
        <a href=${file(format)} download=${`rollouts.${format}`}>${format.toUpperCase()}</a>`)}</span>
    </section>
  `;
}

function tableKeys(rows, runs, current, setCurrent, search) {
  const move = (by) => setCurrent(Math.min(rows.length - 1, Math.max(0, current + by)));
  return [
    ["/", "search the texts", () => search.current.focus()],
    ["j", "next row", () => move(1)],
    ["k", "previous row", () => move(-1)],
    ["Enter", "open the row's prompt", () => rows[current] && openGroup(rows[current], runs)],
    ["Escape", "leave the search", () => setCurrent(-1)],
  ];
}

const openGroup = (row, runs) => address.go("group", [runs[row.run].name, row.kind, row.step, row.group]);

// Typing replaces the address, a choice adds an entry to the history.
const setFilters = (changes, replace = false) => address.set({ ...changes, offset: null }, { replace });

const rounded = (value) => String(Number(value.toPrecision(4)));

// Reloads after a change of the filters, the order or a run; only the last response counts.
function useRows(numbers, version, params) {
  const [state, setState] = useState({ answer: EMPTY, counts: {}, problem: "" });
  const filters = filterQuery(numbers, params);
  const order = [...Object.entries(orderOf(params)), ["offset", offsetOf(params)], ["limit", PAGE]];
  useEffect(() => {
    let isCurrent = true;
    const load = async () => {
      try {
        const [answer, counts] = await Promise.all([
          fetchJson("/api/rollouts", [...filters, ...order]), fetchJson("/api/distributions", filters),
        ]);
        if (isCurrent) {
          setState({ answer, counts, problem: "" });
        }
      } catch (error) {
        if (isCurrent) {
          setState((old) => ({ ...old, problem: error.message }));
        }
      }
    };
    const timer = setTimeout(load, params.get("text") ? WAIT_MS : 0);
    return () => { isCurrent = false; clearTimeout(timer); };
  }, [version, JSON.stringify(filters), JSON.stringify(order)]);
  return state;
}
