// SPDX-License-Identifier: Apache-2.0
// Keys of the views, and the dialog that lists them. Keys do nothing while something is typed.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact-3.1.1.min.js";

// Calls functions by key while a component is shown: `[["j", "next prompt", () => ...], ...]`.
export function useKeys(bindings) {
  const current = useRef(bindings);
  current.current = bindings;
  useEffect(() => {
    const press = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) {
        return;
      }
      if (event.target.closest("input, select, textarea")) {
        if (event.key === "Escape") {
          event.target.blur();
        }
        return;
      }
      const found = current.current.find(([key]) => key === event.key);
      if (found) {
        event.preventDefault();
        found[2]();
      }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}

// A button, and `?`, that list the keys of a view.
export function KeysHelp({ bindings }) {
  const [isOpen, setOpen] = useState(false);
  useKeys([["?", "list the keys", () => setOpen(true)]]);
  const all = [...bindings, ["?", "list the keys"]];
  return html`
    <button class="quiet keys-button" aria-label="Keys" title="Keys (?)" onClick=${() => setOpen(true)}>?</button>
    ${isOpen && html`
      <${Dialog} name="keys" close=${() => setOpen(false)}>
        <h2>Keys</h2>
        <dl>${all.map(([key, does]) => html`<dt><kbd>${key === "Escape" ? "esc" : key}</kbd></dt><dd>${does}</dd>`)}</dl>
      </${Dialog}>`}
  `;
}

// A modal dialog, closed by Escape, by a click beside its content, and by its button.
export function Dialog({ name, close, children }) {
  const dialog = useRef(null);
  useLayoutEffect(() => { // before the next key
    dialog.current.showModal();
  }, []);
  return html`
    <dialog class=${name} ref=${dialog} onClose=${close}
      onClick=${(event) => event.target === dialog.current && dialog.current.close()}>
      <button class="quiet close" aria-label="Close" onClick=${() => dialog.current.close()}>✕</button>
      ${children}
    </dialog>
  `;
}
