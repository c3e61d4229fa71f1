// The page put together: what is dropped, chosen or recorded becomes a job; keys; what is shown when.

import { ApiError, isReady, listModels } from "./api.js";
import { Captions } from "./captions.js";
import { announce, byId, isField } from "./dom.js";
import { DocumentView } from "./document.js";
import { describe, List } from "./list.js";
import { durationOf } from "./player.js";
import { Job, Queue } from "./queue.js";
import { Settings } from "./settings.js";

const READY_SECONDS = 20;

const settings = new Settings();
const queue = new Queue(settings);
const list = new List(queue);
const view = new DocumentView(queue, settings);
const captions = new Captions(settings);

// Files, from a drop, the file chooser or the clipboard.

let probing = Promise.resolve();

function addFiles(files) {
  for (const file of files) {
    const job = new Job(file.name, file);
    queue.add(job);
    probing = probing.then(async () => {
      job.duration ??= await durationOf(file);
      queue.dispatchEvent(new CustomEvent("changed", { detail: { job } }));
    });
  }
  if (files.length) announce(files.length === 1 ? `${files[0].name} was added` : `${files.length} recordings were added`);
}

const isFiles = (event) => event.dataTransfer?.types.includes("Files");

let depth = 0; // dragenter and dragleave come for every element passed
addEventListener("dragenter", (event) => isFiles(event) && document.body.classList.toggle("dropping", ++depth > 0));
addEventListener("dragleave", (event) => isFiles(event) && document.body.classList.toggle("dropping", --depth > 0));
addEventListener("dragover", (event) => isFiles(event) && event.preventDefault());
addEventListener("drop", (event) => {
  if (!isFiles(event)) return;
  event.preventDefault();
  depth = 0;
  document.body.classList.remove("dropping");
  addFiles([...event.dataTransfer.files]);
});
addEventListener("paste", (event) => event.clipboardData?.files.length && addFiles([...event.clipboardData.files]));

const chooser = byId("files");
byId("choose").addEventListener("click", () => chooser.click());
chooser.addEventListener("change", () => {
  addFiles([...chooser.files]);
  chooser.value = ""; // the same file may be chosen again
});

// What is shown.

list.addEventListener("select", ({ detail: { job, byHand } }) => {
  view.open(job);
  if (byHand && matchMedia("(max-width: 52rem)").matches) byId("document-name").scrollIntoView(); // it is below the list
});

queue.addEventListener("changed", ({ detail: { job } }) => {
  const busy = queue.jobs.filter((each) => each.busy).length;
  document.title = busy ? `${busy} to do · stapes` : "stapes";
  if (job.status === job.announced) return;
  job.announced = job.status;
  if (["done", "failed"].includes(job.status)) announce(`${job.name}: ${job.error?.message ?? describe(job)}`);
});

const showLive = (live) => {
  document.body.classList.toggle("listening", live);
  byId("live").hidden = !live;
  byId("document").hidden = live || !view.job;
  byId("welcome").hidden = live || Boolean(view.job);
  byId("start-live").disabled = byId("start-record").disabled = live;
};

captions.addEventListener("started", () => {
  view.player.audio.pause();
  showLive(true);
});
captions.addEventListener("finished", ({ detail: { job } }) => {
  showLive(false);
  if (!job) return byId("start-live").focus();
  queue.add(job);
  list.select(job);
  byId("document-name").focus();
});
byId("start-live").addEventListener("click", () => captions.start({ captions: true }));
byId("start-record").addEventListener("click", () => captions.start({ captions: false }));

// The server: its models, and whether it works.

async function meetServer() {
  try {
    settings.offerModels(await listModels());
    byId("key-hint").hidden = true;
  } catch (error) {
    byId("key-hint").hidden = !(error instanceof ApiError && error.status === 401);
  }
}

async function watchServer() {
  const ready = await isReady();
  byId("server").dataset.ready = String(ready);
  byId("server-text").textContent = ready ? "Ready" : "Not ready";
}

settings.addEventListener("key", meetServer);
meetServer();
watchServer();
setInterval(watchServer, READY_SECONDS * 1000);

// Dialogs.

const options = byId("options");
const help = byId("help");
for (const [button, dialog] of [["open-options", options], ["open-help", help], ["problem-key", options]]) {
  byId(button).addEventListener("click", () => dialog.showModal());
}
byId("key-hint").addEventListener("click", () => options.showModal());
for (const dialog of [options, help]) {
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // beside it
}

// Keys. Those of one letter can be switched off (WCAG 2.1.4), and are never taken from a text field.

const KEYS = {
  o: () => chooser.click(),
  l: () => captions.start({ captions: true }),
  r: () => captions.start({ captions: false }),
  " ": () => view.player.toggle(),
  j: () => list.move(1),
  k: () => list.move(-1),
  u: () => view.nextUnsure(),
  ",": () => options.showModal(),
  "?": () => help.showModal(),
};

addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || document.querySelector("dialog[open]")) return;
  if (event.altKey) {
    if (event.code === "Space" && view.job) {
      event.preventDefault(); // also while correcting the text
      view.player.toggle();
    }
    return;
  }
  if (event.key === "Escape" && captions.running) return captions.stop();
  if (!settings.values.singleKeys || isField(event.target)) return;
  if (event.key === " " && event.target.closest("button, summary, a, [role=slider]") && event.target.id !== "wave") return;
  const action = KEYS[event.key.toLowerCase()];
  if (!action) return;
  event.preventDefault();
  action();
});

addEventListener("beforeunload", (event) => {
  const unsaved = queue.jobs.some((job) => job.busy || (job.edited && !job.saved));
  if (unsaved || captions.running) event.preventDefault();
});
