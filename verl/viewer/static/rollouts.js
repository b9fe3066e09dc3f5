// SPDX-License-Identifier: Apache-2.0
// The table of rollouts, filtered, sorted and paginated by the server, with histograms of the same rows.

import { html, useEffect, useMemo, useState } from "./vendor/htm-preact-3.1.1.min.js";
import * as address from "./address.js";
import { fetchJson, groupLink, shown } from "./api.js";
import { Chart } from "./charts.js";

const PAGE = 100;
const WAIT_MS = 250; // after the last key press, before the request
const COLUMNS = [
  ["run", "run"], ["step", "step"], ["score", "score"], ["advantage", "advantage"], ["response_length", "tokens"],
  ["finish_reason", "finish reason"], ["data_source", "source"], ["num_media", "media"],
];
const EMPTY = { rows: [], total: 0, choices: { data_source: [], finish_reason: [] } };

export function Rollouts({ runs, numbers, version }) {
  const [filters, setFilters] = useState({});
  const [order, setOrder] = useState({ sort: "step", order: "down", offset: 0 });
  const { answer, counts, problem } = useRows(numbers, version, filters, order);
  const set = (name, value) => {
    setFilters({ ...filters, [name]: value });
    setOrder({ ...order, offset: 0 });
  };
  const sort = (name) =>
    setOrder({ sort: name, order: order.sort === name && order.order === "down" ? "up" : "down", offset: 0 });
  const histograms = useMemo(() => Object.entries(counts).map(([name, one]) => histogram(name, one, runs)), [counts]);
  return html`
    <${Filters} filters=${filters} choices=${answer.choices} set=${set} />
    ${problem && html`<p class="notice">${problem}</p>`}
    <section class="charts">
      ${histograms.map(({ name, lines }) => html`<${Chart} key=${name} title=${name} lines=${lines} bars=${true} />`)}
    </section>
    <${Pager} order=${order} total=${answer.total} setOrder=${setOrder} />
    <div class="scroll"><table class="rollouts">
      <thead><tr>
        ${COLUMNS.map(([name, title]) => html`
          <th><button onClick=${() => sort(name)}>${title}${order.sort === name && (order.order === "up" ? " ▲" : " ▼")}
          </button></th>`)}
        <th>prompt</th><th>response</th>
      </tr></thead>
      <tbody>${answer.rows.map((row) => html`<${Row} row=${row} runs=${runs} />`)}</tbody>
    </table></div>
  `;
}

function Row({ row, runs }) {
  return html`
    <tr onClick=${() => address.go("group", [runs[row.run].name, row.kind, row.step, row.group])}>
      <td><i style=${{ background: runs[row.run].color }}></i>${runs[row.run].name}</td>
      <td><a href=${groupLink(row, runs)} onClick=${(event) => event.stopPropagation()}>${row.step}</a></td>
      <td>${shown(row.score)}</td><td>${shown(row.advantage)}</td><td>${row.response_length}</td>
      <td>${shown(row.finish_reason)}</td><td>${shown(row.data_source)}</td><td>${row.num_media || ""}</td>
      <td class="text">${row.prompt_start}</td><td class="text">${row.response_start}</td>
    </tr>
  `;
}

function Filters({ filters, choices, set }) {
  const bound = (name, title) => html`
    <label>${title}
      <input type="number" step="any" name=${`${name}_min`} placeholder="from"
        onInput=${(event) => set(`${name}_min`, event.target.value)} />
      <input type="number" step="any" name=${`${name}_max`} placeholder="to"
        onInput=${(event) => set(`${name}_max`, event.target.value)} />
    </label>`;
  const choice = (name, title, values) => html`
    <label>${title}
      <select name=${name} value=${filters[name] || ""} onChange=${(event) => set(name, event.target.value)}>
        <option value="">all</option>
        ${values.map((value) => html`<option value=${value}>${value}</option>`)}
      </select>
    </label>`;
  return html`
    <section class="filters">
      <label>Text <input type="search" name="text" placeholder="in prompt, response or ground truth"
        onInput=${(event) => set("text", event.target.value)} /></label>
      ${bound("step", "Step")} ${bound("score", "Score")} ${bound("response_length", "Tokens")}
      ${choice("finish_reason", "Finish reason", choices.finish_reason)}
      ${choice("data_source", "Source", choices.data_source)} ${choice("media", "Media", ["yes", "no"])}
    </section>
  `;
}

function Pager({ order, total, setOrder }) {
  const last = Math.min(order.offset + PAGE, total);
  const move = (by) => setOrder({ ...order, offset: order.offset + by });
  return html`
    <section class="pager">
      <button disabled=${order.offset === 0} onClick=${() => move(-PAGE)}>previous</button>
      <output>${total ? order.offset + 1 : 0} to ${last} of ${total.toLocaleString("en")}</output>
      <button disabled=${last >= total} onClick=${() => move(PAGE)}>next</button>
    </section>
  `;
}

// Reloads after a change of the filters, the order or a run; only the last response counts.
function useRows(numbers, version, filters, order) {
  const [state, setState] = useState({ answer: EMPTY, counts: {}, problem: "" });
  useEffect(() => {
    let isCurrent = true;
    const load = async () => {
      const params = [...numbers.map((number) => ["run", number]), ...Object.entries(filters)];
      const rows = [...params, ...Object.entries(order), ["limit", PAGE]];
      try {
        const [answer, counts] = await Promise.all([fetchJson("/api/rollouts", rows), fetchJson("/api/distributions", params)]);
        if (isCurrent) {
          setState({ answer, counts, problem: "" });
        }
      } catch (error) {
        if (isCurrent) {
          setState((old) => ({ ...old, problem: error.message }));
        }
      }
    };
    const timer = setTimeout(load, Object.keys(filters).length ? WAIT_MS : 0);
    return () => { isCurrent = false; clearTimeout(timer); };
  }, [version, JSON.stringify(filters), JSON.stringify(order)]);
  return state;
}

function histogram(name, { edges, counts }, runs) {
  const lines = Object.entries(counts).map(([run, values]) => ({
    label: runs[run].name, color: runs[run].color, x: edges, y: [...values, 0],
  }));
  return { name: name.replace("_", " "), lines };
}
