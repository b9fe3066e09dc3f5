// SPDX-License-Identifier: Apache-2.0
// LaTeX as MathML, which browsers draw themselves. The converter is loaded with the first formula.

import { html, useEffect, useRef } from "./vendor/htm-preact-3.1.1.min.js";

const SOURCE = "vendor/temml-0.13.5.min.js";
const MAX_LENGTH = 5000; // characters
// Untrusted: no links, images or classes; few macro expansions.
const OPTIONS = { trust: false, throwOnError: true, strict: false, maxExpand: 200, maxSize: [20, 200] };

let loading = null;

function loadConverter() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = SOURCE;
    script.onload = () => resolve(window.temml);
    script.onerror = reject;
    document.head.append(script);
  });
  return loading;
}

// Shows its LaTeX until the converter is there, and if that cannot read it.
export function Formula({ tex, isDisplay }) {
  const place = useRef(null);
  useEffect(() => {
    let isCurrent = true;
    const element = place.current;
    element.textContent = tex;
    if (tex.length <= MAX_LENGTH) {
      loadConverter().then((temml) => {
        if (isCurrent) {
          convert(temml, tex, element, isDisplay);
        }
      }, () => {});
    }
    return () => { isCurrent = false; };
  }, [tex, isDisplay]);
  return html`<span class=${isDisplay ? "formula display" : "formula"} title=${tex} ref=${place}></span>`;
}

function convert(temml, tex, element, isDisplay) {
  try {
    temml.render(tex, element, { ...OPTIONS, displayMode: isDisplay });
  } catch { // no LaTeX
    element.textContent = tex;
    element.classList.add("unread");
  }
}
