// Recordings waiting, being transcribed, done: what each is doing, how far it is and how long it will take.

import { ApiError, transcribe } from "./api.js";

// The server computes requests together, so a few at a time finish sooner than one by one.
const AT_ONCE = 3;
const TRIES = 5;

let lastId = 0;

/**
 * One recording and its transcript. `status`: waiting, uploading, working, done, failed, cancelled.
 * `file` null: only the text is here. A transcript grows while it is made.
 */
export class Job {
  constructor(name, file, transcript = null) {
    this.id = ++lastId;
    this.name = name;
    this.file = file;
    this.transcript = transcript ?? emptyTranscript();
    this.status = transcript ? "done" : "waiting";
    this.duration = transcript?.duration || null;
    this.uploaded = 0;
    this.error = null;
    this.edited = false;
    this.startedAt = null;
    this.finishedAt = null;
    this.tries = 0;
    this.note = "";
  }

  get busy() {
    return ["waiting", "uploading", "working"].includes(this.status);
  }

  /** Seconds of the recording that are done. */
  get doneSeconds() {
    return this.transcript.segments.at(-1)?.end ?? 0;
  }

  /** From 0 to 1; null while it is not known. */
  get progress() {
    if (this.status === "uploading") return null;
    if (this.status !== "working" || !this.duration) return null;
    return Math.min(1, this.doneSeconds / this.duration);
  }

  /** Seconds until it is done, at the pace so far; null until there is one. */
  get timeLeft() {
    const progress = this.progress;
    if (!progress || progress < 0.02) return null;
    const elapsed = (performance.now() - this.workingSince) / 1000;
    return elapsed < 0.5 ? null : (elapsed / progress) * (1 - progress);
  }
}

export const emptyTranscript = () => ({ text: "", language: null, language_probability: null, duration: 0, segments: [] });

/** Starts jobs in order, a few at a time. Events, all with `detail.job`: `added`, `changed`, `segment`, `removed`. */
export class Queue extends EventTarget {
  constructor(settings) {
    super();
    this.settings = settings;
    this.jobs = [];
    this.running = new Map();
  }

  add(job) {
    this.jobs.push(job);
    this.#tell("added", job);
    this.#next();
  }

  /** Stop a job; the server drops its work. What was transcribed so far stays. */
  cancel(job) {
    if (!job.busy) return;
    const abort = this.running.get(job);
    clearTimeout(job.retryTimer);
    job.retryTimer = null;
    job.status = "cancelled";
    this.#tell("changed", job);
    abort?.abort();
    this.#next();
  }

  remove(job) {
    this.cancel(job);
    this.jobs = this.jobs.filter((each) => each !== job);
    this.#tell("removed", job);
  }

  /** Transcribe again, with the settings of now. */
  again(job) {
    if (!job.file || job.busy) return;
    job.tries = 0;
    this.#wait(job);
    this.#next();
  }

  #wait(job) {
    Object.assign(job, {
      status: "waiting", error: null, transcript: emptyTranscript(), edited: false, uploaded: 0, note: "",
    });
    this.#tell("changed", job);
  }

  #next() {
    for (const job of this.jobs) {
      if (this.running.size >= AT_ONCE) return;
      if (job.status === "waiting" && !job.retryTimer && !this.running.has(job)) this.#run(job);
    }
  }

  async #run(job) {
    const abort = new AbortController();
    this.running.set(job, abort);
    job.status = "uploading";
    job.settings = { ...this.settings.values };
    job.startedAt = performance.now();
    this.#tell("changed", job);
    try {
      await transcribe(job.file, job.name, job.settings, {
        signal: abort.signal,
        onUpload: (fraction) => this.#uploaded(job, fraction),
        onEvent: (event) => this.#event(job, event),
      });
      job.status = "done";
    } catch (error) {
      this.#failed(job, error);
    } finally {
      job.finishedAt = performance.now();
      this.running.delete(job);
      this.#tell("changed", job);
      this.#next();
    }
  }

  #uploaded(job, fraction) {
    if (job.status !== "uploading") return;
    job.uploaded = fraction;
    if (fraction === 1) {
      job.status = "working";
      job.workingSince = performance.now();
    }
    this.#tell("changed", job);
  }

  #event(job, event) {
    if (!job.busy) return;
    if (job.status === "uploading") this.#uploaded(job, 1);
    const { transcript } = job;
    if (event.type === "transcript.text.segment") {
      transcript.segments.push(segmentOf(event, transcript.segments.length, job.settings));
      this.#tell("segment", job);
    } else if (event.type === "transcript.text.done") this.#done(job, event);
    this.#tell("changed", job);
  }

  /** The end of the stream: the whole text, and what the server knows only now. */
  #done(job, { type, logprobs, usage, languages, segments, ...known }) {
    const { transcript } = job;
    Object.assign(transcript, known);
    transcript.language ??= languages?.[0]?.code ?? null;
    job.duration = transcript.duration ||= job.duration ?? 0;
    if (segments) transcript.segments = segments.map((segment, i) => segmentOf(segment, i, job.settings));
    if (!transcript.segments.length && transcript.text.trim()) {
      transcript.segments = [{ id: 0, start: 0, end: transcript.duration, text: transcript.text }];
    }
    transcript.model ??= job.settings.model;
    transcript.task = job.settings.task;
  }

  #failed(job, error) {
    if (error.name === "AbortError") return; // `cancel` has said so already
    job.tries += 1;
    const wait = error instanceof ApiError && [429, 503].includes(error.status) ? (error.retryAfter ?? 2 ** job.tries) : null;
    if (wait !== null && job.tries < TRIES) {
      this.#wait(job);
      job.note = error.message;
      job.retryTimer = setTimeout(() => {
        job.retryTimer = null;
        job.note = "";
        this.#next();
      }, wait * 1000);
      return;
    }
    job.status = "failed";
    job.error = error instanceof ApiError ? error : new ApiError(0, `The answer could not be read (${error.message}).`);
  }

  #tell(type, job) {
    this.dispatchEvent(new CustomEvent(type, { detail: { job } }));
  }
}

/** A segment of the stream as openai/whisper's: numbered, its text after a space so that segments can be joined. */
function segmentOf({ type, logprobs, speaker, ...segment }, index, { channels }) {
  if (speaker && channels === "separate") segment.speaker = speaker; // else it is the same for all
  const text = segment.words?.map(({ word }) => word).join("") ?? segment.text ?? "";
  return { ...segment, id: index, text: /^\s/.test(text) || !text ? text : ` ${text}` };
}
