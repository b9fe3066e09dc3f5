// SPDX-License-Identifier: Apache-2.0
// A conversation turn by turn: the policy's text, its calls, and their answers with pictures.

import { html } from "./vendor/htm-preact-3.1.1.min.js";
import { counted, shown } from "./api.js";
import { Media } from "./media.js";
import { Text, readable, turnsOf } from "./text.js";

const LONG_ARGUMENTS = 60; // characters: longer arguments have a line each
const ENDS = {
  stop: "the policy answered", done: "a tool ended it", tool: "a tool failed", length: "its tokens reached the limit",
  turns: "its turns reached the limit", images: "its images reached the limit", seconds: "its time was up",
};

// prompt is the one that the page shows above the responses, as JSON of its messages.
export function Turns({ row, run, prompt, isMarkdown }) {
  const contexts = contextsOf(row, prompt);
  return html`
    <${Legend} row=${row} />
    ${contexts.map(({ opening, media, turns }, number) => html`
      ${contexts.length > 1 && html`<p class="facts context"><b class="badge">context ${number + 1} of ${contexts.length}</b></p>`}
      ${opening && html`<${Opening} messages=${opening} media=${media} run=${run} isMarkdown=${isMarkdown} />`}
      ${turns.map(({ turn, number }) => html`
        <${Turn} turn=${turn} number=${number} row=${row} run=${run} isMarkdown=${isMarkdown} />`)}`)}
    <p class="facts end">ended: ${ENDS[row.stop_reason] || shown(row.stop_reason)}</p>
  `;
}

// Returns what the policy read and wrote in each context: { opening, media, turns: [{ turn, number }] }. The opening is
// null if it is the prompt of the page.
function contextsOf(row, prompt) {
  const numbered = row.turns.map((turn, number) => ({ turn, number }));
  const contexts = row.contexts?.length ? row.contexts : [{ num_turns: numbered.length }];
  let next = 0;
  return contexts.map((context, number) => ({
    opening: number > 0 || row.messages !== prompt ? turnsOf(context.messages)?.slice(0, context.num_opening) : null,
    media: number > 0 ? context.media || [] : row.media || [],
    turns: numbered.slice(next, next += context.num_turns),
  }));
}

// The messages with which a context begins.
function Opening({ messages, media, run, isMarkdown }) {
  return html`
    <section class="seen untrained opening" aria-label="messages">
      ${messages.map(({ role, text }) => html`
        <div class="turn" data-role=${role}>
          <b class="badge">${role}</b><div><${Text} text=${text} isMarkdown=${isMarkdown} /></div>
        </div>`)}
      <${Media} media=${media} run=${run} videoPath=${() => null} />
    </section>
  `;
}

// Explains what marks trained and other text; nothing if all of a response is trained or that is not known.
export function Legend({ row }) {
  if (row.is_trained.every(Boolean)) {
    return null;
  }
  const count = row.is_trained.filter(Boolean).length;
  const unit = row.picture ? "step" : "token";
  return html`
    <p class="facts trained-legend">
      ${count > 0 && html`<span class="trained">trained: ${counted(count, unit)}</span>`}
      <span class="untrained">not trained: ${counted(row.is_trained.length - count, unit)}</span>
    </p>
  `;
}

function Turn({ turn, number, row, run, isMarkdown }) {
  const isTrained = row.is_trained.slice(turn.start, turn.stop).some(Boolean);
  return html`
    <section class=${isTrained ? "said trained" : "said untrained"} aria-label=${`turn ${number + 1}`}>
      <p class="facts">
        <b class="badge">turn ${number + 1}</b>
        ${[
          `${turn.stop - turn.start} tokens`,
          turn.reward !== null && `reward ${shown(turn.reward)}`,
          turn.observations.length > 0 && `${shown(turn.seconds)} s for the answers`,
        ].filter(Boolean).join(" · ")}
      </p>
      <${Text} text=${readable(turn.text || "")} isMarkdown=${isMarkdown} />
      ${turn.calls.map((call) => html`<${Call} call=${call} isMade=${turn.observations.length > 0} />`)}
    </section>
    ${turn.observations.map((seen) => html`
      <${Observation} seen=${seen} isShown=${turn.is_shown} run=${run} isMarkdown=${isMarkdown} />`)}
  `;
}

function Call({ call, isMade }) {
  return html`
    <div class="call">
      <b>${shown(call.name) || "unreadable call"}</b>
      <pre class="plain">${pretty(call.arguments)}</pre>
      ${!isMade && html`<b class="badge">not made</b>`}
    </div>
  `;
}

function Observation({ seen, isShown, run, isMarkdown }) {
  const media = seen.media || [];
  const unseen = (seen.num_media || 0) - media.length;
  return html`
    <section class=${seen.failed ? "seen untrained failed" : "seen untrained"} aria-label="observation">
      <p class="facts">
        <b class="badge">observation</b>
        ${seen.failed && html`<b class="badge bad">failed</b>`}
        ${[
          seen.seconds !== null && `${shown(seen.seconds)} s`,
          !isShown && "not shown to the policy",
          unseen > 0 && `${unseen} ${unseen === 1 ? "picture" : "pictures"} not kept`,
        ].filter(Boolean).join(" · ")}
      </p>
      ${seen.text && html`<${Text} text=${seen.text} isMarkdown=${isMarkdown} />`}
      <${Media} media=${media} run=${run} videoPath=${() => null} />
    </section>
  `;
}

// Returns arguments as `box: [0, 0, 28, 28], image: 1`, one a line if they are long.
function pretty(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    return shown(text);
  }
  if (found === null || typeof found !== "object" || Array.isArray(found)) {
    return JSON.stringify(found);
  }
  const parts = Object.entries(found).map(
    ([name, value]) => `${name}: ${typeof value === "string" ? value : spaced(value)}`);
  const line = parts.join(", ");
  return line.length > LONG_ARGUMENTS || line.includes("\n") ? parts.join("\n") : line;
}

const spaced = (value) => JSON.stringify(value, null, 1).replace(/\s*\n\s*/g, " ").replace(/([[{]) | ([\]}])/g, "$1$2");
