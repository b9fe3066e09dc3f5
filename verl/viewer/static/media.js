// SPDX-License-Identifier: Apache-2.0
// Images, frames and sounds of a prompt, what the policy made, and a viewer over the page for one of them.

import { html, useEffect, useLayoutEffect, useState } from "./vendor/htm-preact-3.1.1.min.js";
import { Dialog } from "./keys.js";

const SMALL = 200; // pixels: smaller images are enlarged without smoothing
const FRAME_MS = 500; // per frame of a video whose times are unknown
const SPEED_LIMITS = [60, 2000]; // ms per frame

// videoPath(number) is the address of the file of the medium with this number, if it may be played.
export function Media({ media, run, videoPath }) {
  const [opened, setOpened] = useState(null); // { medium, index }
  return html`
    ${media.map((medium, number) => html`
      <${Medium} medium=${medium} run=${run} video=${medium.is_playable && videoPath(number)} open=${(index) => setOpened({ medium, index })} />`)}
    ${opened && html`<${Lightbox} ...${opened} run=${run} close=${() => setOpened(null)} />`}
  `;
}

// The picture or the video that the policy made.
export function Made({ picture, run }) {
  const media = [{ ...picture, is_playable: picture.whole !== null }];
  return html`<div class="made"><${Media} media=${media} run=${run} videoPath=${() => `/media/${run}/${picture.whole}`} /></div>`;
}

function Medium({ medium, run, video, open }) {
  const files = medium.files || [];
  const [time, setTime] = useState(null); // index of the shown frame while it plays
  const times = medium.times || [];
  useEffect(() => {
    if (time === null) {
      return undefined;
    }
    const timer = setTimeout(() => setTime(time + 1 < files.length ? time + 1 : null), pause(times, time));
    return () => clearTimeout(timer);
  }, [time]);
  const isVideo = medium.kind === "video";
  return html`
    <figure class="medium" data-kind=${medium.kind}>
      <div class=${isVideo ? "frames" : ""}>
        ${files.map((file, index) => html`
          <button class=${index === time ? "picture playing" : "picture"} onClick=${() => open(index)}
            aria-label=${`Enlarge ${medium.kind}${isVideo ? `, frame ${index + 1}` : ""}`}>
            <${Picture} file=${file} run=${run} alt=${medium.kind} />
            ${isVideo && html`<span>${times[index] === undefined ? index + 1 : `${times[index].toFixed(2)} s`}</span>`}
          </button>`)}
      </div>
      ${video && (medium.kind === "audio"
        ? html`<audio controls preload="metadata" src=${video}></audio>`
        : html`<video controls preload="metadata" src=${video}></video>`)}
      <figcaption>
        ${isVideo && !video && files.length > 1 && html`
          <button class="quiet" onClick=${() => setTime(time === null ? 0 : null)}>
            ${time === null ? "▶ play" : "■ stop"}</button> `}
        ${medium.kind}: ${medium.source} ${medium.problem && `(not shown: ${medium.problem})`}
      </figcaption>
    </figure>
  `;
}

// Milliseconds from a frame to the next.
function pause(times, index) {
  const seconds = times[index + 1] - times[index];
  const [least, most] = SPEED_LIMITS;
  return Number.isFinite(seconds) ? Math.min(most, Math.max(least, 1000 * seconds)) : FRAME_MS;
}

export function Picture({ file, run, alt, loading = "eager" }) {
  const enlarge = ({ target }) =>
    target.classList.toggle("small", Math.max(target.naturalWidth, target.naturalHeight) < SMALL);
  return html`<img loading=${loading} src=${`/media/${run}/${file}`} alt=${alt} onLoad=${enlarge} />`;
}

function Lightbox({ medium, index, run, close }) {
  const [shown, setShown] = useState(index);
  const [isLarge, setLarge] = useState(false);
  const files = medium.files;
  const move = (by) => setShown((old) => Math.min(files.length - 1, Math.max(0, old + by)));
  // At once: a key may be pressed before the next frame is painted.
  useLayoutEffect(() => {
    const press = ({ key }) => {
      if (key === "ArrowLeft" || key === "ArrowRight") {
        move(key === "ArrowRight" ? 1 : -1);
      }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
  const time = medium.times?.[shown];
  return html`
    <${Dialog} name=${isLarge ? "lightbox large" : "lightbox"} close=${close}>
      <div class="stage" onClick=${() => setLarge(!isLarge)}>
        <${Picture} key=${files[shown]} file=${files[shown]} run=${run} alt=${medium.kind} />
      </div>
      <p>
        ${files.length > 1 && html`
          <button aria-label="Previous frame" disabled=${shown === 0} onClick=${() => move(-1)}>‹</button>
          <output>${shown + 1} of ${files.length}</output>
          <button aria-label="Next frame" disabled=${shown === files.length - 1} onClick=${() => move(1)}>›</button>`}
        <small>${time === undefined ? "" : `${time.toFixed(2)} s · `}${medium.source}</small>
      </p>
    </${Dialog}>
  `;
}
