// SPDX-License-Identifier: Apache-2.0
// Texts of prompts and responses: folded if long, as plain text or as markdown.
//
// Texts are untrusted: they go into text nodes and never into markup.

import { html, useState } from "./vendor/htm-preact-3.1.1.min.js";
import { shown } from "./api.js";
import { Markdown } from "./markdown.js";

const FOLDED = 1500; // characters: longer texts are folded
const SHOWN = 1200; // characters of a folded text
const MAX_MARKDOWN = 200000; // characters: longer texts stay plain
// As in rollout_index.py.
const SPECIAL_TOKEN =
  /<\|[^|<>\s]{1,40}\|>|<(?:start|end)_of_(?:turn|image)>|<\/?s>|<[be]os>|\[\/?INST\]/g;

// Returns a text without the tokens of chat templates.
export const readable = (text) => text.replace(SPECIAL_TOKEN, "");

export function Text({ text, isMarkdown = false }) {
  const [isWhole, setWhole] = useState(false);
  const value = shown(text);
  const isFolded = !isWhole && value.length > FOLDED;
  const visible = isFolded ? whole(value.slice(0, SHOWN)) : value;
  return html`
    ${isMarkdown && visible.length <= MAX_MARKDOWN
      ? html`<${Markdown} text=${visible} />`
      : html`<pre class="plain">${visible}</pre>`}
    ${value.length > FOLDED && html`
      <button class="fold" aria-expanded=${!isFolded} onClick=${() => setWhole(isFolded)}>
        ${isFolded ? `show all ${value.length.toLocaleString("en")} characters` : "show less"}</button>`}
  `;
}

// Leaves out half of a character at the end.
const whole = (text) => text.replace(/[\ud800-\udbff]$/, "");

// Returns the turns of a prompt, { role, text }; null if its messages were not kept.
export function turnsOf(messages) {
  try {
    return JSON.parse(messages).map(({ role, content }) => ({ role: String(role), text: contentText(content) }));
  } catch {
    return null;
  }
}

function contentText(content) {
  if (typeof content === "string") {
    return content;
  }
  return content.map((part) => part.text ?? `[${part.type}]`).join("");
}
