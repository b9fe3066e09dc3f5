// SPDX-License-Identifier: Apache-2.0
// Markdown as elements: headings, lists, quotes, tables, code, bold, italic, and formulas.
//
// A text becomes elements with text nodes, so no markup in it is ever parsed. Links and images are shown with
// their addresses and cannot be opened: nothing that a model writes leads away from the page.

import { html } from "./vendor/htm-preact-3.1.1.min.js";
import { Formula } from "./formula.js";

const MAX_DEPTH = 6; // of lists, quotes and emphasis inside each other
const FENCE = /^\s{0,3}(```+|~~~+)\s*(\S*)/;
const HEADING = /^\s{0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s{0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^\s{0,3}>\s?(.*)$/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const DISPLAY_START = /^\s*(\$\$|\\\[)/;
const DISPLAY_ENDS = { "$$": "$$", "\\[": "\\]" };
// Lengths are limited, so that no text takes long to search.
const INLINE = new RegExp([
  /(?<escaped>\\[\\`*_{}#+.!~>|-])/,
  /(?<ticks>`{1,3})(?<code>[^`\n]{1,5000})\k<ticks>/,
  /\$\$(?<display>[^$]{1,5000})\$\$/,
  /\\\[(?<bracket>[^]{1,5000}?)\\\]/,
  /\\\((?<paren>[^]{1,2000}?)\\\)/,
  /\$(?<dollar>[^\s$](?:[^$\n]{0,1000}[^\s$])?)\$(?!\d)/,
  /\*\*(?<bold>[^\s*](?:[^*\n]|\*(?!\*)){0,5000})\*\*/,
  /\*(?<italic>[^\s*][^*\n]{0,5000})\*/,
  /(?<!\w)__(?<bold2>[^\s_][^\n]{0,1000}?)__(?!\w)/,
  /(?<!\w)_(?<italic2>[^\s_][^_\n]{0,1000})_(?!\w)/,
  /~~(?<struck>[^~\n]{1,1000})~~/,
  /!?\[(?<label>[^\]\n]{0,500})\]\((?<address>[^)\s]{1,2000})[^)\n]{0,200}\)/,
].map((part) => part.source).join("|"), "g");

export function Markdown({ text }) {
  return html`<div class="markdown">${blocks(text.split(/\r?\n/), 0)}</div>`;
}

function blocks(lines, depth) {
  const made = [];
  let at = 0;
  while (at < lines.length) {
    const [block, next] = blockAt(lines, at, depth);
    if (block) {
      made.push(block);
    }
    at = next;
  }
  return made;
}

// Returns the block that starts in a line, and the line after it.
function blockAt(lines, at, depth) {
  const line = lines[at];
  const heading = HEADING.exec(line);
  if (!line.trim()) {
    return [null, at + 1];
  }
  if (FENCE.test(line)) {
    return fencedAt(lines, at);
  }
  if (DISPLAY_START.test(line)) {
    const found = displayAt(lines, at);
    if (found) {
      return found;
    }
  }
  if (heading) {
    return [html`<${`h${Math.min(6, heading[1].length + 2)}`}>${inline(heading[2], depth)}</>`, at + 1];
  }
  if (RULE.test(line)) {
    return [html`<hr />`, at + 1];
  }
  if (depth < MAX_DEPTH && QUOTE.test(line)) {
    const end = endOf(lines, at, (one) => QUOTE.test(one));
    const inner = lines.slice(at, end).map((one) => QUOTE.exec(one)[1]);
    return [html`<blockquote>${blocks(inner, depth + 1)}</blockquote>`, end];
  }
  if (depth < MAX_DEPTH && ITEM.test(line)) {
    return listAt(lines, at, depth);
  }
  if (line.includes("|") && TABLE_RULE.test(lines[at + 1] ?? "") && lines[at + 1].includes("-")) {
    return tableAt(lines, at, depth);
  }
  const end = Math.max(at + 1, endOf(lines, at, (one, index) => index === at || !startsBlock(one, depth)));
  return [html`<p>${inline(lines.slice(at, end).join("\n"), depth)}</p>`, end];
}

function startsBlock(line, depth) {
  const patterns = depth < MAX_DEPTH ? [FENCE, HEADING, QUOTE, ITEM, DISPLAY_START] : [FENCE, HEADING, DISPLAY_START];
  return !line.trim() || patterns.some((pattern) => pattern.test(line));
}

function endOf(lines, at, belongs) {
  let end = at;
  while (end < lines.length && belongs(lines[end], end)) {
    end += 1;
  }
  return end;
}

function fencedAt(lines, at) {
  const [, fence] = FENCE.exec(lines[at]);
  const end = endOf(lines, at + 1, (one) => !one.trim().startsWith(fence));
  return [html`<pre class="code"><code>${lines.slice(at + 1, end).join("\n")}</code></pre>`, end + 1];
}

// A formula in lines of its own; null if it has no end.
function displayAt(lines, at) {
  const [, start] = DISPLAY_START.exec(lines[at]);
  const end = DISPLAY_ENDS[start];
  const first = lines[at].trimStart().slice(start.length);
  const last = first.includes(end) ? at : endOf(lines, at + 1, (one) => !one.includes(end));
  if (last >= lines.length) {
    return null;
  }
  const text = last === at ? first : [first, ...lines.slice(at + 1, last + 1)].join("\n");
  const [formula, rest] = [text.slice(0, text.indexOf(end)), text.slice(text.indexOf(end) + end.length)];
  return [html`<${Formula} tex=${formula} isDisplay=${true} />${rest.trim() && html`<p>${inline(rest, 0)}</p>`}`, last + 1];
}

function listAt(lines, at, depth) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(marker);
  const items = [];
  let next = at;
  while (next < lines.length) {
    const found = ITEM.exec(lines[next]);
    if (!found || found[1].length !== indent.length || /\d/.test(found[2]) !== isOrdered) {
      break;
    }
    const width = found[1].length + found[2].length + 1;
    const end = endOf(lines, next + 1, (one, index) => belongsToItem(lines, index, indent.length));
    const inner = lines.slice(next + 1, end).map((one) => one.slice(Math.min(width, one.search(/\S|$/))));
    items.push(html`<li>${itemContent([found[3], ...inner], depth)}</li>`);
    next = end;
  }
  return [isOrdered ? html`<ol start=${Number.parseInt(marker, 10)}>${items}</ol>` : html`<ul>${items}</ul>`, next];
}

// A line belongs to the item above if it is indented further, or empty before such a line.
function belongsToItem(lines, index, indent) {
  const content = lines[index].trim() ? lines[index] : lines[index + 1] ?? "";
  return content.trim() !== "" && content.search(/\S/) > indent;
}

function itemContent(lines, depth) {
  const isSimple = lines.every((line, index) => index === 0 || (line.trim() && !startsBlock(line, depth)));
  return isSimple ? inline(lines.join("\n"), depth) : blocks(lines, depth + 1);
}

function tableAt(lines, at, depth) {
  const end = endOf(lines, at, (one) => one.includes("|"));
  const [head, , ...rows] = lines.slice(at, end).map(cells);
  const width = head.length;
  return [html`<div class="table"><table>
    <thead><tr>${head.map((cell) => html`<th>${inline(cell, depth)}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`
      <tr>${row.slice(0, width).map((cell) => html`<td>${inline(cell, depth)}</td>`)}</tr>`)}</tbody>
  </table></div>`, end];
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function inline(text, depth) {
  const made = [];
  let last = 0;
  for (const match of text.matchAll(INLINE)) {
    made.push(text.slice(last, match.index), inlineElement(match, depth));
    last = match.index + match[0].length;
  }
  return [...made, text.slice(last)];
}

function inlineElement({ 0: source, groups }, depth) {
  if (depth >= MAX_DEPTH) {
    return source;
  }
  const inner = (text) => inline(text, depth + 1);
  const display = groups.display ?? groups.bracket;
  const formula = groups.paren ?? groups.dollar;
  const bold = groups.bold ?? groups.bold2;
  const italic = groups.italic ?? groups.italic2;
  if (groups.escaped) {
    return source[1];
  }
  if (groups.code !== undefined) {
    return html`<code>${groups.code}</code>`;
  }
  if (display !== undefined || formula !== undefined) {
    return html`<${Formula} tex=${display ?? formula} isDisplay=${display !== undefined} />`;
  }
  if (bold !== undefined) {
    return html`<strong>${inner(bold)}</strong>`;
  }
  if (italic !== undefined) {
    return html`<em>${inner(italic)}</em>`;
  }
  if (groups.struck !== undefined) {
    return html`<s>${inner(groups.struck)}</s>`;
  }
  return html`<span class="link"><u>${groups.label}</u> <small>${groups.address}</small></span>`;
}
