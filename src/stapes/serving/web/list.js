// The list of recordings: one row each, with what it is doing; arrow keys walk it.

import { byId, clock, el, fileSize, languageName, roughly } from "./dom.js";

export class List extends EventTarget {
  constructor(queue) {
    super();
    this.queue = queue;
    this.root = byId("jobs");
    this.rows = new Map();
    this.selected = null;
    queue.addEventListener("added", ({ detail: { job } }) => this.#add(job));
    queue.addEventListener("changed", ({ detail: { job } }) => this.#update(job));
    queue.addEventListener("removed", ({ detail: { job } }) => this.#remove(job));
    setInterval(() => this.#tick(), 1000); // time left runs on between events
  }

  select(job, { byHand = false } = {}) {
    this.selected = job;
    for (const [each, row] of this.rows) row.open.setAttribute("aria-current", String(each === job));
    this.dispatchEvent(new CustomEvent("select", { detail: { job, byHand } }));
  }

  /** The recording `step` rows away from the selected one. */
  move(step) {
    const { jobs } = this.queue;
    const to = jobs[Math.max(0, Math.min(jobs.length - 1, jobs.indexOf(this.selected) + step))];
    if (!to) return;
    this.select(to);
    this.rows.get(to).open.focus();
  }

  #add(job) {
    const title = el("span", { class: "job-name" }, job.name);
    const detail = el("span", { class: "job-detail" });
    const bar = el("progress", { class: "job-bar", max: 1, "aria-label": `Progress of ${job.name}` });
    const open = el("button", { type: "button", class: "job-open", onclick: () => this.select(job, { byHand: true }) }, title, detail);
    const stop = el("button", { type: "button", class: "icon job-stop", onclick: () => this.#stop(job) }, "×");
    const item = el("li", { class: "job" }, open, stop, bar);
    this.rows.set(job, { item, open, detail, bar, stop });
    this.root.append(item);
    byId("jobs-section").hidden = false;
    this.#update(job);
    if (!this.selected) this.select(job);
  }

  #stop(job) {
    if (job.busy) this.queue.cancel(job);
    else if (!job.edited || confirm(`Remove ${job.name}? Its edited text has not been saved.`)) this.queue.remove(job);
  }

  #remove(job) {
    const place = [...this.rows.keys()].indexOf(job);
    this.rows.get(job).item.remove();
    this.rows.delete(job);
    byId("jobs-section").hidden = this.rows.size === 0;
    if (job !== this.selected) return;
    const { jobs } = this.queue;
    const next = jobs[Math.min(place, jobs.length - 1)] ?? null;
    this.select(next);
    (next ? this.rows.get(next).open : byId("choose")).focus();
  }

  #update(job) {
    const row = this.rows.get(job);
    if (!row) return;
    row.item.dataset.status = job.status;
    row.detail.textContent = describe(job);
    row.bar.hidden = !["uploading", "working"].includes(job.status);
    const fraction = job.status === "uploading" ? job.uploaded : job.progress;
    if (fraction === null) row.bar.removeAttribute("value");
    else row.bar.value = fraction;
    row.stop.setAttribute("aria-label", `${job.busy ? "Cancel" : "Remove"} ${job.name}`);
    row.stop.title = job.busy ? "Cancel" : "Remove";
  }

  #tick() {
    for (const job of this.rows.keys()) if (job.status === "working") this.#update(job);
  }
}

/** What a row says: one short line. */
export function describe(job) {
  const length = job.duration ? clock(job.duration) : job.file ? fileSize(job.file.size) : "";
  if (job.status === "failed") return "Failed";
  if (job.busy || job.status === "cancelled") return `${length} · ${doing(job)}`;
  return [length, languageName(job.transcript.language), job.edited ? "edited" : ""].filter(Boolean).join(" · ");
}

/** What is being done with a recording. */
export function doing(job) {
  const { status, progress, timeLeft } = job;
  if (status === "waiting") return job.note ? "Server busy, trying again" : "Waiting";
  if (status === "uploading") return `Sending ${Math.round(job.uploaded * 100)} %`;
  if (status === "cancelled") return "Cancelled";
  if (progress === null || !job.doneSeconds) return "Transcribing";
  return `${Math.floor(progress * 100)} %${timeLeft === null ? "" : `, ${roughly(timeLeft)} left`}`;
}
