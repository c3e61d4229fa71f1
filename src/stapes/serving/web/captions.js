// Live captions from the microphone: committed words plain, words that may still change dim. And plain recording.

import { announce, byId, clock, el } from "./dom.js";
import { LiveSession } from "./live.js";
import { Microphone, MicrophoneError } from "./microphone.js";
import { Job } from "./queue.js";

const KEPT_LINES = 200; // shown; all of them are in the transcript

const STATES = {
  connecting: "Connecting …",
  open: "Listening",
  reconnecting: "Connection lost. Reconnecting; your words are kept …",
  closed: "Ended",
};

/** `finished` with `detail.job` when a recording is over, `started` when it begins. */
export class Captions extends EventTarget {
  constructor(settings) {
    super();
    this.settings = settings;
    this.panel = byId("live");
    this.lines = byId("captions");
    byId("live-stop").addEventListener("click", () => this.stop());
  }

  get running() {
    return Boolean(this.microphone);
  }

  /** Begin: with captions, or only to record. */
  async start({ captions }) {
    if (this.running) return;
    this.session = null;
    this.finals = [];
    this.language = null;
    this.incomplete = false;
    this.rows = new Map();
    this.lines.replaceChildren();
    this.#say(captions ? "Connecting …" : "Recording");
    byId("live-error").hidden = true;
    byId("live-title").textContent = captions ? "Live captions" : "Recording";
    byId("live-latency").textContent = "";
    byId("live-stop").disabled = false;
    this.panel.classList.toggle("only-recording", !captions);
    this.microphone = new Microphone({ onChunk: (chunk) => this.#chunk(chunk), onLevel: (peak) => this.#level(peak) });
    this.microphone.onEnded = () => this.stop(); // unplugged, or permission withdrawn
    this.dispatchEvent(new Event("started"));
    if (captions) this.#openSession();
    try {
      await this.microphone.start();
    } catch (error) {
      this.session?.close();
      this.microphone = null;
      this.#error(error instanceof MicrophoneError ? error.message : String(error));
      this.#say("");
      byId("live-stop").textContent = "Close";
      return;
    }
    this.wakeLock = await navigator.wakeLock?.request("screen").catch(() => null); // a phone would go to sleep
    byId("live-stop").textContent = "Stop";
    byId("live-stop").focus();
    announce(captions ? "Live captions have begun" : "Recording has begun");
  }

  async stop() {
    if (!this.microphone) {
      this.dispatchEvent(new CustomEvent("finished", { detail: { job: null } }));
      return;
    }
    const { microphone, session } = this;
    byId("live-stop").disabled = true;
    this.#say(session ? "Waiting for the last words …" : "");
    await microphone.stop();
    await session?.finish();
    this.microphone = null;
    this.wakeLock?.release();
    this.#level(0);
    const job = microphone.samples ? this.#job(microphone) : null;
    announce(job ? "The recording has ended" : "Nothing was recorded");
    this.dispatchEvent(new CustomEvent("finished", { detail: { job } }));
  }

  #openSession() {
    this.session = new LiveSession({ ...this.settings.values });
    this.session.addEventListener("state", ({ detail }) => this.#say(STATES[detail.state], detail.state));
    this.session.addEventListener("caption", ({ detail }) => this.#caption(detail));
    this.session.addEventListener("final", ({ detail }) => this.#final(detail));
    this.session.addEventListener("failed", ({ detail }) => {
      this.incomplete = true;
      this.#error(detail.message);
    });
    this.session.addEventListener("latency", ({ detail }) => {
      byId("live-latency").textContent = `${(detail.ms / 1000).toFixed(1)} s behind`;
    });
    this.session.start();
  }

  #chunk(chunk) {
    this.session?.feed(chunk);
    byId("live-clock").textContent = clock(this.microphone?.seconds ?? 0);
  }

  #level(peak) {
    const level = Math.sqrt(peak); // as loud as it seems
    byId("live-level").setAttribute("aria-valuenow", String(Math.round(100 * level)));
    byId("live-level").firstElementChild.style.transform = `scaleX(${level})`;
  }

  #caption({ id, text, provisional }) {
    const row = this.#row(id);
    row.committed.textContent = text.trimStart();
    row.provisional.textContent = text ? provisional : provisional.trimStart();
    row.item.hidden = !text.trim() && !provisional.trim();
    this.#follow();
  }

  #final({ id, text, start, end, words, language }) {
    this.language ??= language;
    this.#caption({ id, text, provisional: "" });
    if (!text.trim()) return;
    this.finals.push({ id: this.finals.length, start, end, text: /^\s/.test(text) ? text : ` ${text}`, ...(words?.length ? { words } : {}) });
    byId("live-finals").append(el("p", {}, text)); // read out, once, when it is certain
    while (byId("live-finals").children.length > 20) byId("live-finals").firstChild.remove();
    while (this.lines.children.length > KEPT_LINES) this.lines.firstChild.remove();
  }

  #row(id) {
    if (!this.rows.has(id)) {
      const committed = el("span", { class: "committed" });
      const provisional = el("span", { class: "provisional" });
      const item = el("p", { class: "caption" }, committed, provisional);
      this.rows.set(id, { item, committed, provisional });
      this.lines.append(item);
      if (this.rows.size > KEPT_LINES) this.rows.delete(this.rows.keys().next().value);
    }
    return this.rows.get(id);
  }

  #follow() {
    this.lines.scrollTop = this.lines.scrollHeight;
  }

  #job(microphone) {
    const now = new Date();
    const two = (number) => String(number).padStart(2, "0");
    const day = `${now.getFullYear()}-${two(now.getMonth() + 1)}-${two(now.getDate())}`;
    const name = `${day} ${two(now.getHours())}.${two(now.getMinutes())}.${two(now.getSeconds())}.wav`;
    const file = microphone.recording();
    // Where words may be missing, the recording has them: it is transcribed like any file.
    if (this.incomplete || !this.finals.length) return new Job(name, file);
    const segments = this.finals.sort((a, b) => a.start - b.start);
    const text = segments.map((segment) => segment.text).join("");
    const { language, model } = this.session.settings;
    const known = { language: language || this.language || null, language_probability: null, model };
    return new Job(name, file, { text, ...known, duration: microphone.seconds, segments });
  }

  #say(text, state = "") {
    byId("live-state").textContent = text;
    this.panel.dataset.state = state;
  }

  #error(message) {
    byId("live-error").textContent = message;
    byId("live-error").hidden = false;
  }
}
