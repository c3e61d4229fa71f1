// Playing a recording: the browser's own media element (which streams, whatever the length), with its words followed.

import { byId, clock } from "./dom.js";

export class Player {
  /** `onTime(seconds, playing)` at every frame while it plays, and after each seek. */
  constructor({ onTime, onDuration }) {
    this.onTime = onTime;
    this.audio = byId("audio");
    this.button = byId("play");
    this.clock = byId("clock");
    this.rate = byId("rate");
    this.audio.addEventListener("loadedmetadata", () => {
      this.#show();
      if (Number.isFinite(this.audio.duration)) onDuration(this.audio.duration);
    });
    for (const event of ["play", "pause", "ended"]) this.audio.addEventListener(event, () => this.#playing());
    this.audio.addEventListener("seeked", () => this.#tick());
    this.audio.addEventListener("error", () => this.audio.src && this.#failed());
    this.button.addEventListener("click", () => this.toggle());
    this.rate.addEventListener("change", () => (this.audio.playbackRate = Number(this.rate.value)));
  }

  load(file) {
    this.unload();
    byId("player-error").hidden = true;
    this.button.disabled = !file;
    if (!file) return;
    this.url = URL.createObjectURL(file);
    this.audio.src = this.url;
    this.audio.playbackRate = Number(this.rate.value);
  }

  unload() {
    this.audio.pause();
    if (!this.url) return;
    this.audio.removeAttribute("src");
    this.audio.load();
    URL.revokeObjectURL(this.url);
    this.url = null;
  }

  toggle() {
    if (!this.url) return;
    if (this.audio.paused) this.audio.play().catch(() => this.#failed());
    else this.audio.pause();
  }

  /** Go to a place; `play` starts there. */
  seek(seconds, { play = false } = {}) {
    if (!this.url) return;
    this.audio.currentTime = seconds;
    if (play && this.audio.paused) this.toggle();
    this.#tick();
  }

  get time() {
    return this.audio.currentTime;
  }

  #playing() {
    const playing = !this.audio.paused;
    this.button.setAttribute("aria-label", playing ? "Pause" : "Play");
    this.button.classList.toggle("is-playing", playing);
    const follow = () => {
      this.#tick();
      if (!this.audio.paused) requestAnimationFrame(follow);
    };
    follow();
  }

  #tick() {
    this.#show();
    this.onTime(this.audio.currentTime, !this.audio.paused);
  }

  #show() {
    const { currentTime, duration } = this.audio;
    this.clock.textContent = Number.isFinite(duration) ? `${clock(currentTime)} / ${clock(duration)}` : clock(currentTime);
  }

  #failed() {
    byId("player-error").hidden = false;
    this.button.disabled = true;
  }
}

/** How long a file lasts, in seconds; null where the browser cannot tell. */
export function durationOf(file) {
  return new Promise((resolve) => {
    const probe = new Audio();
    const done = (seconds) => {
      URL.revokeObjectURL(probe.src);
      probe.removeAttribute("src");
      resolve(seconds);
    };
    probe.preload = "metadata";
    probe.onloadedmetadata = () => done(Number.isFinite(probe.duration) ? probe.duration : null);
    probe.onerror = () => done(null);
    probe.src = URL.createObjectURL(file);
  });
}
