// SPDX-License-Identifier: Apache-2.0
// The page: selected runs, open view, and polling for changes.
//
// The page polls the state of the runs every two seconds; a view reloads its data when the version of a visible
// run has changed. To add a view: a component, and a line in VIEWS.

import { html, render, useEffect, useState } from "./vendor/htm-preact-3.1.1.min.js";
import { fetchJson, colorOf } from "./api.js";
import { Curves } from "./curves.js";
import { Group } from "./group.js";
import { Rollouts } from "./rollouts.js";

const POLL_MS = 2000;
const VIEWS = { curves: Curves, rollouts: Rollouts };

function App() {
  const { runs, problem } = useRuns();
  const [hidden, setHidden] = useState([]);
  const [view, ...path] = useHash();
  if (!runs.length) {
    return html`<p class="notice">${problem || "Loading …"}</p>`;
  }
  const numbers = runs.map((_, number) => number).filter((number) => !hidden.includes(number));
  const version = numbers.map((number) => runs[number].version).join(" ");
  const toggle = (number) =>
    setHidden(hidden.includes(number) ? hidden.filter((one) => one !== number) : [...hidden, number]);
  const View = Object.hasOwn(VIEWS, view) ? VIEWS[view] : Curves;
  return html`
    <header>
      <nav>
        ${Object.keys(VIEWS).map(
          (name) => html`<a href="#${name}" class=${VIEWS[name] === View && view !== "group" ? "open" : ""}>${name}</a>`,
        )}
      </nav>
      <div class="runs">
        ${runs.map(
          (run, number) => html`
            <label title=${run.folder}>
              <input type="checkbox" checked=${!hidden.includes(number)} onChange=${() => toggle(number)} />
              <i style=${{ background: colorOf(number) }}></i>${run.name}
              <small>${run.num_rollouts.toLocaleString("en")} rollouts</small>
            </label>
          `,
        )}
      </div>
      <span class=${problem ? "state lost" : "state"}>${problem ? "server not responding" : "live"}</span>
    </header>
    ${runs.flatMap((run) =>
      Object.entries(run.problems).map(
        ([file, reason]) => html`<p class="notice">${run.name}: ${file} is skipped: ${reason}</p>`,
      ),
    )}
    ${view === "group"
      ? html`<${Group} runs=${runs} run=${Number(path[0])} step=${Number(path[1])}
          group=${decodeURIComponent(path[2] || "")} />`
      : html`<${View} runs=${runs} numbers=${numbers} version=${version} />`}
  `;
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
  return state;
}

function useHash() {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const change = () => setHash(location.hash);
    addEventListener("hashchange", change);
    return () => removeEventListener("hashchange", change);
  }, []);
  return hash.slice(1).split("/");
}

render(html`<${App} />`, document.body);
