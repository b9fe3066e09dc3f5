// SPDX-License-Identifier: Apache-2.0
// The page: selected runs, open view, and polling for changes.
//
// The page polls the state of the runs every two seconds; a view reloads its data when the version of a visible
// run has changed. To add a view: a component, and a line in VIEWS.

import { html, render, useEffect, useMemo, useState } from "./vendor/htm-preact-3.1.1.min.js";
import * as address from "./address.js";
import { fetchJson } from "./api.js";
import { colorsOf, useThemeVersion } from "./colors.js";
import { Curves } from "./curves.js";
import { chosenRuns } from "./filters.js";
import { Group } from "./group.js";
import { Overview } from "./overview.js";
import { Rollouts } from "./rollouts.js";

const POLL_MS = 2000;
const VIEWS = { curves: Curves, runs: Overview, rollouts: Rollouts };
const TAB_OF = { group: "rollouts" }; // views without a tab -> the tab that leads to them
const THEMES = { system: "◐", light: "☀", dark: "☾" };

function App() {
  const { runs, problem } = useRuns();
  const { view, path, params } = address.useAddress();
  if (!runs.length) {
    return html`<p class="notice">${problem || "Loading …"}</p>`;
  }
  const numbers = chosenRuns(runs, params);
  const version = numbers.map((number) => runs[number].version).join(" ");
  const tab = TAB_OF[view] || (Object.hasOwn(VIEWS, view) ? view : "curves");
  const View = VIEWS[tab];
  return html`
    <header>
      <nav aria-label="Views">
        ${Object.keys(VIEWS).map(
          (name) => html`<a href=${address.link(name)} class=${name === tab ? "open" : ""}
            aria-current=${name === tab ? "page" : null}>${name}</a>`,
        )}
      </nav>
      <${State} runs=${runs} problem=${problem} />
      <${ThemeButton} />
    </header>
    <${RunPicker} runs=${runs} numbers=${numbers} />
    <main>
      ${runs.flatMap((run) =>
        Object.entries(run.problems).map(
          ([file, reason]) => html`<p class="notice">${run.name}: ${file} is skipped: ${reason}</p>`,
        ),
      )}
      ${view === "group"
        ? html`<${OneGroup} runs=${runs} path=${path} />`
        : html`<${View} runs=${runs} numbers=${numbers} version=${version} />`}
    </main>
  `;
}

function OneGroup({ runs, path: [name, kind, step, group = ""] }) {
  const run = runs.findIndex((one) => one.name === name);
  return run < 0
    ? html`<p class="notice">The address names the run “${name}”, which is not open here.</p>`
    : html`<${Group} runs=${runs} run=${run} kind=${kind} step=${Number(step)} group=${group} />`;
}

function State({ runs, problem }) {
  if (problem) {
    return html`<span class="state lost">server not responding</span>`;
  }
  const numRunning = runs.filter((run) => run.state === "running").length;
  const isKnown = runs.every((run) => run.state !== "unknown"); // some file systems have no locks to ask for
  const text = numRunning > 1 ? `${numRunning} live` : numRunning ? "live" : isKnown ? "ended" : "state unknown";
  return html`<span class=${numRunning ? "state live" : "state"}>${text}</span>`;
}

function ThemeButton() {
  useThemeVersion();
  const choice = window.theme.choice();
  return html`<button class="quiet theme" aria-label=${`Colors: ${choice}`} title=${`Colors: ${choice}`}
    onClick=${window.theme.next}>${THEMES[choice]}</button>`;
}

function RunPicker({ runs, numbers }) {
  const toggle = (number) =>
    select(runs, numbers.includes(number) ? numbers.filter((one) => one !== number) : [...numbers, number]);
  return html`
    <div class="runs" role="group" aria-label="Runs">
      ${runs.map((run, number) => html`
        <label class=${numbers.includes(number) ? "chip" : "chip off"} title=${run.folder}
          style=${{ "--color": run.color }} onDblClick=${() => select(runs, [number])}>
          <input type="checkbox" checked=${numbers.includes(number)} onChange=${() => toggle(number)} />
          <span>${run.name}</span>
          ${run.state === "running" && html`<b class="dot" title="running"></b>`}
        </label>`)}
      ${runs.length > 1 && numbers.length < runs.length && html`
        <button class="quiet" onClick=${() => address.set({ run: null })}>all ${runs.length}</button>`}
    </div>
  `;
}

function select(runs, numbers) {
  const names = runs.map((run) => run.name).filter((_, number) => numbers.includes(number));
  address.set({ run: names.length === runs.length ? null : names.length ? names : [""] });
}

function useRuns() {
  const [state, setState] = useState({ runs: [], problem: "" });
  useEffect(() => {
    let timer = 0;
    const poll = async () => {
      try {
        const runs = await fetchJson("/api/runs");
        setState({ runs, problem: "" });
      } catch (error) {
        setState((old) => ({ runs: old.runs, problem: String(error) }));
      }
      timer = setTimeout(poll, POLL_MS);
    };
    poll();
    return () => clearTimeout(timer);
  }, []);
  return {
    problem: state.problem,
    runs: useMemo(() => {
      const colors = colorsOf(state.runs.map((run) => run.name));
      return state.runs.map((run) => ({ ...run, color: colors[run.name] }));
    }, [state.runs]),
  };
}

render(html`<${App} />`, document.body);
