// The waveform: the whole recording in a thin strip, a few seconds around the playhead large, words below it.

import { clock } from "./dom.js";
import { PEAKS_PER_SECOND } from "./peaks.js";
import { wordAt } from "./words.js";

const PIXELS_PER_SECOND = 110;
const BAR = 3; // pixels, one of them a gap
const LABELS = 40; // pixels for two rows of words

export class Waveform {
  constructor(canvas, overview, { onSeek }) {
    Object.assign(this, { canvas, overview, onSeek });
    this.clear();
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    canvas.addEventListener("pointerdown", (event) => this.onSeek(this.#timeAt(event, canvas, this.#view())));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    const seekOverview = (event) => this.onSeek(this.#timeAt(event, overview, [0, this.duration]));
    overview.addEventListener("pointerdown", (event) => {
      overview.setPointerCapture(event.pointerId);
      seekOverview(event);
    });
    overview.addEventListener("pointermove", (event) => event.buttons && seekOverview(event));
  }

  clear() {
    this.peaks = new Uint8Array(0);
    this.count = 0;
    this.loudest = 24; // of 255: what is quieter than this is not blown up
    this.words = [];
    this.time = 0;
    this.duration = 0;
    this.first = 0; // where the large view begins
    this.draw();
  }

  /** The next values, after those before. */
  addPeaks(values) {
    if (this.count + values.length > this.peaks.length) {
      const larger = new Uint8Array(Math.max(2 * this.peaks.length, this.count + values.length));
      larger.set(this.peaks.subarray(0, this.count));
      this.peaks = larger;
    }
    this.peaks.set(values, this.count);
    for (const value of values) if (value > this.loudest) this.loudest = value;
    this.count += values.length;
    this.draw();
  }

  setWords(words) {
    this.words = words;
    this.draw();
  }

  setDuration(seconds) {
    this.duration = seconds;
    this.draw();
  }

  setTime(seconds) {
    this.time = seconds;
    const [begin, end] = this.#view();
    const span = end - begin;
    if (seconds < begin || seconds > begin + 0.85 * span) this.first = seconds - 0.15 * span; // turn the page
    this.canvas.setAttribute("aria-valuenow", String(Math.round(seconds)));
    this.canvas.setAttribute("aria-valuetext", `${clock(seconds)} of ${clock(this.duration)}`);
    this.draw();
  }

  /** Draw at the next frame, once, however much changed. */
  draw() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.#drawOverview();
      this.#drawLarge();
    });
  }

  #view() {
    const span = Math.min(this.duration || 1, this.canvas.clientWidth / PIXELS_PER_SECOND);
    const begin = Math.max(0, Math.min(this.first, this.duration - span));
    return [begin, begin + span];
  }

  #timeAt(event, canvas, [begin, end]) {
    const box = canvas.getBoundingClientRect();
    const part = Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
    return begin + part * (end - begin);
  }

  #key(event) {
    const step = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -30, PageUp: 30 }[event.key];
    if (event.key === "Home") this.onSeek(0);
    else if (event.key === "End") this.onSeek(this.duration);
    else if (step) this.onSeek(Math.max(0, Math.min(this.duration, this.time + step)));
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #drawLarge() {
    const pen = prepare(this.canvas);
    if (!pen) return;
    const { context, width, height, colour } = pen;
    const [begin, end] = this.#view();
    const x = (time) => ((time - begin) / (end - begin)) * width;
    const waveHeight = height - LABELS;
    const current = this.words[wordAt(this.words, this.time)];
    if (current && current.end > this.time) {
      context.fillStyle = colour("--accent-soft");
      context.beginPath();
      context.roundRect(x(current.start), 0, Math.max(2, x(current.end) - x(current.start)), waveHeight, 4);
      context.fill();
    }
    this.#bars(pen, begin, end, waveHeight);
    this.#labels(pen, begin, end, x, current);
    if (this.duration) {
      context.fillStyle = colour("--accent");
      context.fillRect(Math.round(x(this.time)) - 0.5, 0, 1.5, waveHeight);
    }
  }

  #drawOverview() {
    const [begin, end] = this.#view();
    this.overview.hidden = !(this.duration > end - begin + 0.5);
    const pen = this.overview.hidden ? null : prepare(this.overview);
    if (!pen) return;
    const { context, width, height, colour } = pen;
    context.fillStyle = colour("--line");
    context.beginPath();
    context.roundRect((begin / this.duration) * width, 0, Math.max(6, ((end - begin) / this.duration) * width), height, 4);
    context.fill();
    this.#bars(pen, 0, this.duration, height);
  }

  /** Bars from `begin` to `end` seconds across the whole width; what was played is in the accent colour. */
  #bars({ context, width, colour }, begin, end, height) {
    const middle = height / 2;
    const perBar = ((end - begin) / width) * BAR;
    const played = colour("--accent");
    const ahead = colour("--wave");
    for (let left = 0; left < width; left += BAR) {
      const from = begin + (left / BAR) * perBar;
      const loud = this.#loudest(from, from + perBar);
      if (loud === null) break;
      const half = Math.max(0.75, Math.sqrt(loud) * (middle - 3)); // square root: quiet speech is seen too
      context.fillStyle = from < this.time ? played : ahead;
      context.beginPath();
      context.roundRect(left, middle - half, BAR - 1, 2 * half, 1);
      context.fill();
    }
  }

  /** From 0 to 1; null beyond what has been read. */
  #loudest(from, to) {
    const begin = Math.floor(from * PEAKS_PER_SECOND);
    if (begin >= this.count) return null;
    const stop = Math.max(begin + 1, Math.min(this.count, Math.ceil(to * PEAKS_PER_SECOND)));
    let loudest = 0;
    for (let i = begin; i < stop; i += 1) if (this.peaks[i] > loudest) loudest = this.peaks[i];
    return loudest / this.loudest;
  }

  /** Words below the bars, in two rows where they would touch; what fits in neither is left out. */
  #labels({ context, width, height, colour, font }, begin, end, x, current) {
    context.font = font("0.75rem");
    context.textBaseline = "alphabetic";
    const free = [-Infinity, -Infinity];
    for (let i = Math.max(0, wordAt(this.words, begin)); i < this.words.length && this.words[i].start < end; i += 1) {
      const word = this.words[i];
      const text = word.word.trim();
      const room = context.measureText(text).width;
      const left = Math.max(0, Math.min(width - room, (x(word.start) + x(word.end) - room) / 2));
      const row = free.findIndex((taken) => left > taken + 6);
      if (row < 0) continue;
      free[row] = left + room;
      context.fillStyle = word === current ? colour("--accent") : colour("--muted");
      context.fillText(text, left, height - LABELS + 17 + 17 * row);
    }
  }
}

/** A canvas cleared and scaled to the screen, with the page's colours and font; null while it is not shown. */
function prepare(canvas) {
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (!width || !height) return null;
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(canvas);
  const pixels = (rem) => parseFloat(rem) * parseFloat(getComputedStyle(document.documentElement).fontSize);
  return {
    context,
    width,
    height,
    colour: (name) => style.getPropertyValue(name).trim(),
    font: (size) => `${pixels(size)}px ${style.fontFamily}`,
  };
}
