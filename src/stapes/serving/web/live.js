// A live session over WS /v1/realtime (OpenAI's Realtime transcription events): audio goes, captions come.
// A connection that breaks is made again with the session's id, and what the server had not acknowledged is sent again.

import { apiKey } from "./api.js";

const RATE = 24_000;
const SUBPROTOCOL = "openai-insecure-api-key.";
// The server keeps a session for 60 s after its connection broke.
const RESUME_SECONDS = 60;
const KEPT_SECONDS = 90;
const FINAL_SECONDS = 20; // for the last words, at most
const QUIET_SECONDS = 1; // without a new item after the last

/**
 * Events (`detail`): `state` {state: connecting|open|reconnecting|closed}; `caption` {id, text, provisional}: an item's
 * committed text and the words that may still change; `final` {id, text, start, end, words}; `latency` {ms};
 * `failed` {message}.
 */
export class LiveSession extends EventTarget {
  constructor(settings) {
    super();
    this.settings = settings;
    this.items = new Map();
    this.unacknowledged = []; // chunks that the server may not have, from `sentFrom`
    this.sentFrom = 0; // milliseconds of audio before the first of them
    this.clockStart = 0; // where the server's clock of this session began on ours, in milliseconds
    this.sessionId = null;
    this.over = false;
    this.tries = 0;
  }

  start() {
    this.#connect();
  }

  /** Send 16-bit PCM at 24 kHz. Kept until the server says that it has it. */
  feed(chunk) {
    this.unacknowledged.push(chunk);
    if (this.open) this.#append(chunk);
    this.#forgetBefore(this.fedMs - KEPT_SECONDS * 1000); // also where no acknowledgement ever comes
  }

  /** Milliseconds of audio fed since the beginning. */
  get fedMs() {
    return this.sentFrom + milliseconds(this.unacknowledged);
  }

  /** No more audio: wait for the last words, then close. Resolves when all are there, or after a while without. */
  async finish() {
    if (this.open) {
      this.#send({ type: "input_audio_buffer.commit" });
      await this.#settled();
    }
    this.close();
  }

  close() {
    this.over = true;
    clearTimeout(this.retryTimer);
    this.socket?.close(1000);
    this.#state("closed");
  }

  #connect() {
    const url = new URL("v1/realtime", document.baseURI);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    url.searchParams.set("intent", "transcription");
    if (this.sessionId) url.searchParams.set("session_id", this.sessionId);
    this.#state(this.sessionId ? "reconnecting" : "connecting");
    const socket = new WebSocket(url, ["realtime", ...(apiKey.get() ? [SUBPROTOCOL + apiKey.get()] : [])]);
    this.socket = socket;
    this.resumes = Boolean(this.sessionId);
    socket.onmessage = ({ data }) => socket === this.socket && this.#event(JSON.parse(data));
    socket.onclose = (event) => socket === this.socket && this.#closed(event);
  }

  #closed({ code, reason }) {
    const wasOpen = this.open;
    this.open = false;
    if (this.over) return;
    if (code === 1008 || (!this.sessionId && !wasOpen && this.tries >= 2)) {
      this.#fail(reason || this.lastError || "The server refused the live session: check the API key under Options, and that it has a model for it.");
      return;
    }
    if (wasOpen) this.lostAt = performance.now();
    if (this.lostAt && performance.now() - this.lostAt > RESUME_SECONDS * 1000) {
      this.#fail("The connection was lost for over a minute. The recording goes on: it is transcribed when you stop.");
      return;
    }
    this.#state("reconnecting");
    this.retryTimer = setTimeout(() => this.#connect(), Math.min(5000, 250 * 2 ** this.tries));
    this.tries += 1;
  }

  #event(event) {
    switch (event.type) {
      case "session.created":
      case "transcription_session.created":
        this.#opened(event);
        break;
      case "input_audio_buffer.acknowledged":
        this.#forgetBefore(this.clockStart + event.audio_ms);
        break;
      case "input_audio_buffer.speech_started":
        this.#item(event.item_id).start = (this.clockStart + event.audio_start_ms) / 1000;
        break;
      case "input_audio_buffer.speech_stopped":
        this.#item(event.item_id).end = (this.clockStart + event.audio_end_ms) / 1000;
        break;
      case "conversation.item.input_audio_transcription.delta":
        this.#delta(event);
        break;
      case "conversation.item.input_audio_transcription.completed":
        this.#completed(event);
        break;
      case "conversation.item.input_audio_transcription.failed":
        this.#item(event.item_id).done = true;
        this.#settle();
        this.#tell("failed", { message: event.error?.message ?? "A part could not be transcribed.", fatal: false });
        break;
      case "error":
        this.#error(event.error ?? {});
        break;
    }
  }

  #opened({ session }) {
    const resumed = this.resumes && session.id === this.sessionId;
    this.sessionId = session.id;
    this.open = true;
    this.tries = 0;
    this.lostAt = null;
    if (resumed) this.#forgetBefore(this.clockStart + (session.audio_ms ?? 0));
    else this.#begin();
    for (const chunk of this.unacknowledged) this.#append(chunk);
    this.#state("open");
  }

  #begin() {
    this.clockStart = this.sentFrom;
    this.#send({ type: "session.update", session: this.#configuration() });
    if (this.resumes) this.#tell("failed", { message: "The session had to begin anew; some words may be missing.", fatal: false });
  }

  #configuration() {
    const { model, language, prompt, hotwords } = this.settings;
    const transcription = { model };
    if (language) transcription.language = language;
    if (prompt) transcription.prompt = prompt;
    if (hotwords) transcription.keywords = hotwords.split(",").map((word) => word.trim()).filter(Boolean);
    return {
      type: "transcription",
      audio: { input: { format: { type: "audio/pcm", rate: RATE }, transcription, turn_detection: { type: "server_vad" } } },
    };
  }

  #delta({ item_id: id, delta = "", provisional = "" }) {
    const item = this.#item(id);
    item.text += delta;
    item.provisional = provisional;
    this.#tell("caption", { id, text: item.text, provisional });
  }

  #completed({ item_id: id, transcript, words, start, end, languages }) {
    const item = this.#item(id);
    if (item.done) return;
    Object.assign(item, { done: true, text: transcript, provisional: "" });
    if (Number.isFinite(item.end)) this.#tell("latency", { ms: this.fedMs - 1000 * item.end });
    this.#tell("final", { id, text: transcript, start: start ?? item.start ?? 0, end: end ?? item.end ?? this.fedMs / 1000, words, language: languages?.[0]?.code });
    this.#settle();
  }

  #error({ message = "The live session failed.", code }) {
    this.lastError = message;
    if (code !== "input_audio_buffer_commit_empty") this.#tell("failed", { message, fatal: false });
    else {
      this.nothingToCommit = true;
      this.#settle();
    }
  }

  #item(id) {
    if (!this.items.has(id)) this.items.set(id, { text: "", provisional: "", done: false });
    return this.items.get(id);
  }

  /** After the last commit: until every item is done and none has begun for a moment. */
  #settled() {
    return new Promise((resolve) => {
      this.settledResolve = resolve;
      setTimeout(resolve, FINAL_SECONDS * 1000);
      this.#settle();
    });
  }

  #settle() {
    clearTimeout(this.settleTimer);
    if (!this.settledResolve || ![...this.items.values()].every((item) => item.done)) return;
    this.settleTimer = setTimeout(this.settledResolve, this.nothingToCommit ? 0 : QUIET_SECONDS * 1000);
  }

  #append(chunk) {
    this.#send({ type: "input_audio_buffer.append", audio: base64(chunk) });
  }

  #send(event) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(event));
  }

  #forgetBefore(ms) {
    while (this.unacknowledged.length && this.sentFrom + milliseconds([this.unacknowledged[0]]) <= ms) {
      this.sentFrom += milliseconds([this.unacknowledged.shift()]);
    }
  }

  #fail(message) {
    this.over = true;
    this.#tell("failed", { message, fatal: true });
    this.#state("closed");
  }

  #state(state) {
    this.#tell("state", { state });
  }

  #tell(type, detail) {
    this.dispatchEvent(new CustomEvent(type, { detail }));
  }
}

const milliseconds = (chunks) => (1000 * chunks.reduce((sum, chunk) => sum + chunk.length, 0)) / RATE;

function base64(chunk) {
  const bytes = new Uint8Array(chunk.buffer, chunk.byteOffset, chunk.byteLength);
  return btoa(String.fromCharCode(...bytes)); // little-endian, as every browser's machine is
}
