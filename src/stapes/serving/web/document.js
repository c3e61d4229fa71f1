// One recording opened: what is known of it, its waveform, its text, and what one can take away.

import { curlCommand } from "./api.js";
import { announce, byId, clock, el, languageName, save } from "./dom.js";
import { Editor } from "./editor.js";
import { FORMATS } from "./formats.js";
import { doing } from "./list.js";
import { readPeaks } from "./peaks.js";
import { Player } from "./player.js";
import { Waveform } from "./waveform.js";
import { confidence } from "./words.js";

export class DocumentView {
  constructor(queue, settings) {
    this.queue = queue;
    this.settings = settings;
    this.job = null;
    // Where a tap on a word would bring up the keyboard, correcting is switched on by hand.
    this.correcting = !matchMedia("(pointer: coarse)").matches;
    byId("correct").hidden = this.correcting;
    byId("correct").addEventListener("click", () => this.#correct());
    this.editor = new Editor(byId("segments"));
    this.waveform = new Waveform(byId("wave"), byId("overview"), { onSeek: (time) => this.player.seek(time) });
    this.player = new Player({
      onTime: (time, playing) => this.#time(time, playing),
      onDuration: (seconds) => this.#duration(seconds),
    });
    this.editor.addEventListener("seek", ({ detail }) => this.player.seek(detail.time, detail));
    this.editor.addEventListener("edit", () => this.#edited());
    this.editor.addEventListener("words", () => this.waveform.setWords(this.editor.words));
    queue.addEventListener("changed", ({ detail: { job } }) => job === this.job && this.#update());
    queue.addEventListener("segment", ({ detail: { job } }) => job === this.job && this.#update());
    byId("again").addEventListener("click", () => this.queue.again(this.job));
    byId("copy-text").addEventListener("click", (event) => this.#copy(FORMATS.txt.render(this.job.transcript), event.target));
    byId("copy-curl").addEventListener("click", (event) => this.#copy(byId("curl").textContent, event.target));
    for (const button of document.querySelectorAll("[data-format]")) {
      button.addEventListener("click", () => this.download(button.dataset.format));
    }
    settings.addEventListener("change", () => this.#curl());
    settings.addEventListener("key", () => this.#curl());
  }

  open(job) {
    this.reading?.abort();
    this.job = job;
    byId("document").hidden = !job;
    byId("welcome").hidden = Boolean(job);
    this.waveform.clear();
    this.player.load(job?.file ?? null);
    if (!job) return;
    byId("document-name").textContent = job.name;
    byId("player").hidden = !job.file;
    this.editor.show({ segments: [] }, { editable: false });
    this.#update();
    this.#curl();
    if (job.file) this.#readPeaks(job);
  }

  download(format) {
    const { job } = this;
    if (!job || !job.transcript.segments.length) return;
    const { render, type } = FORMATS[format];
    save(render(job.transcript), `${job.name.replace(/\.[^.]+$/, "")}.${format}`, type);
    job.saved = true;
  }

  /** Go to the next word that the recogniser was not sure of. */
  nextUnsure() {
    const time = this.job ? this.editor.nextUnsure() : null;
    if (time === null) announce("No unsure words");
    else this.player.seek(time);
  }

  #correct() {
    this.correcting = !this.correcting;
    byId("correct").setAttribute("aria-pressed", String(this.correcting));
    this.#update();
  }

  async #readPeaks(job) {
    this.reading = new AbortController();
    const { signal } = this.reading;
    byId("wave").hidden = false;
    try {
      const whole = await readPeaks(job.file, { signal, onPeaks: (peaks) => this.job === job && this.waveform.addPeaks(peaks) });
      if (!whole && !this.waveform.count) byId("wave").hidden = true; // the text and its times remain
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    }
  }

  #time(time, playing) {
    this.editor.highlight(time, playing);
    this.waveform.setTime(time);
  }

  #duration(seconds) {
    this.job.duration ??= seconds;
    byId("wave").setAttribute("aria-valuemax", String(Math.round(seconds)));
    this.waveform.setDuration(seconds);
    this.#facts();
  }

  #update() {
    const { job } = this;
    this.editor.show(job.transcript, { editable: !job.busy && this.correcting });
    this.waveform.setWords(this.editor.words);
    if (job.duration && !this.waveform.duration) this.waveform.setDuration(job.duration);
    this.#facts();
    const { segments } = job.transcript;
    byId("take").hidden = !segments.length;
    byId("again").hidden = job.busy || !job.file;
    byId("again").textContent = job.status === "done" ? "Transcribe again" : "Try again";
    byId("problem").hidden = !job.error;
    byId("problem-text").textContent = job.error?.message ?? "";
    byId("problem-key").hidden = job.error?.status !== 401;
    const quiet = job.status === "done" && !segments.length;
    byId("status").textContent = job.busy ? doing(job) : quiet ? "No speech was found in this recording." : "";
    byId("document").setAttribute("aria-busy", String(job.busy));
    const warnings = job.transcript.warnings ?? [];
    byId("warnings").replaceChildren(...warnings.map((warning) => el("li", {}, warning)));
  }

  #facts() {
    const { job } = this;
    const { language, language_probability: probability, segments, model } = job.transcript;
    const sure = confidence(segments);
    const percent = (value) => `${Math.round(100 * value)} %`;
    const took = job.status === "done" && job.startedAt ? (job.finishedAt - job.startedAt) / 1000 : null;
    const facts = [
      ["Length", job.duration ? clock(job.duration) : null],
      ["Language", language ? `${languageName(language)}${probability ? ` · ${percent(probability)}` : ""}` : null],
      ["Confidence", sure === null ? null : percent(sure)],
      ["Model", model ?? null],
      ["Speed", took && job.duration ? `${(job.duration / took).toFixed(job.duration / took < 10 ? 1 : 0)} × real time` : null],
    ].filter(([, value]) => value !== null);
    byId("facts").replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  #edited() {
    const { job } = this;
    job.saved = false;
    job.transcript.text = job.transcript.segments.map((segment) => segment.text).join("");
    if (job.edited) return;
    job.edited = true;
    this.queue.dispatchEvent(new CustomEvent("changed", { detail: { job } }));
  }

  #curl() {
    if (this.job) byId("curl").textContent = curlCommand(this.job.name, this.settings.values);
  }

  async #copy(text, button) {
    const label = button.textContent;
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
      announce("Copied");
    } catch {
      button.textContent = "Could not copy";
    }
    setTimeout(() => (button.textContent = label), 1500);
  }
}
