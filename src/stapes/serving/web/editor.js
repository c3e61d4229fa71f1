// The transcript as text one can read, follow and correct: a paragraph for each segment, a span for each word.

import { clock, el, prefersReducedMotion } from "./dom.js";
import { retime, wordAt, wordsOf } from "./words.js";

const UNSURE = 0.5; // words less probable than this are marked
const SCROLL_PAUSE = 4000; // milliseconds after the reader scrolled in which the text does not move by itself

export class Editor extends EventTarget {
  /** `root` is a list. Events: `edit`, and `seek` with `detail.time`. */
  constructor(root) {
    super();
    this.root = root;
    Object.assign(this, { segments: [], words: [], spans: [], current: null, editable: null });
    this.lastScroll = -SCROLL_PAUSE;
    for (const event of ["wheel", "touchmove"]) {
      addEventListener(event, () => (this.lastScroll = performance.now()), { passive: true });
    }
    root.addEventListener("click", (event) => this.#click(event));
    root.addEventListener("input", (event) => this.#input(event.target.closest(".text")));
    root.addEventListener("focusout", (event) => this.#leave(event.target.closest(".text")));
    root.addEventListener("keydown", (event) => this.#key(event));
  }

  /** Show a transcript; `editable` once it is complete. Paragraphs shown before stay where their segments do. */
  show(transcript, { editable }) {
    const { segments } = transcript;
    if (this.segments.some((each, i) => each !== segments[i])) {
      this.root.replaceChildren();
      this.segments = [];
      this.#index();
    }
    const added = segments.slice(this.segments.length).map((segment) => this.#paragraph(segment));
    this.root.append(...added);
    this.segments = [...segments];
    this.root.lang = transcript.task === "translate" ? "en" : (transcript.language ?? "");
    const texts = editable === this.editable ? added.map((item) => item.querySelector(".text")) : this.#texts();
    for (const text of texts) setEditable(text, editable);
    this.editable = editable;
    this.#indexMore(added.map((item) => item.querySelector(".text")));
  }

  /** Mark the word being said; bring it into view while playing, unless the reader has just scrolled. */
  highlight(time, playing) {
    const at = wordAt(this.words, time);
    const span = at >= 0 && this.words[at].end + 0.3 > time ? this.spans[at] : null;
    if (span === this.current) return;
    this.current?.classList.remove("now");
    this.current = span;
    span?.classList.add("now");
    if (span && playing && performance.now() - this.lastScroll > SCROLL_PAUSE) intoView(span);
  }

  /** Put the caret on the next word that the recogniser was not sure of; its time, or null when there is none. */
  nextUnsure() {
    const spans = [...this.root.querySelectorAll(".unsure")];
    const from = document.activeElement?.closest?.(".text") ? getSelection().anchorNode : null;
    const after = from ? spans.filter((each) => from.compareDocumentPosition(each) & Node.DOCUMENT_POSITION_FOLLOWING && !each.contains(from)) : spans;
    const span = after[0] ?? spans[0];
    if (!span) return null;
    span.closest(".text").focus();
    getSelection().selectAllChildren(span);
    intoView(span);
    return this.words[this.spans.indexOf(span)]?.start ?? null;
  }

  #paragraph(segment) {
    const time = clock(segment.start);
    const stamp = el("button", { type: "button", class: "stamp", "aria-label": `Play from ${time}` }, time);
    const text = el("p", { class: "text", role: "textbox", "aria-label": `Text at ${time}`, spellcheck: true, dir: "auto" });
    text.segment = segment;
    text.append(...spansOf(segment));
    const speaker = segment.speaker ? el("span", { class: "speaker" }, segment.speaker) : null;
    return el("li", { class: "segment" }, stamp, el("div", { class: "said" }, speaker, text));
  }

  #texts() {
    return [...this.root.querySelectorAll(".text")];
  }

  #index() {
    Object.assign(this, { words: [], spans: [] });
    this.current?.classList.remove("now");
    this.current = null;
    this.#indexMore(this.#texts());
  }

  #indexMore(texts) {
    for (const text of texts) {
      this.words.push(...wordsOf(text.segment));
      this.spans.push(...text.querySelectorAll(".word"));
    }
  }

  #click(event) {
    const stamp = event.target.closest(".stamp");
    const word = event.target.closest(".word");
    if (!stamp && !word) return;
    const time = stamp ? stamp.closest(".segment").querySelector(".text").segment.start : this.words[this.spans.indexOf(word)]?.start;
    if (time !== undefined) this.dispatchEvent(new CustomEvent("seek", { detail: { time, play: Boolean(stamp) } }));
  }

  #input(text) {
    if (!text) return;
    const { segment } = text;
    const typed = text.textContent.replace(/[\n\u00a0]/g, " ");
    const before = segment.text.match(/^\s*/)[0]; // Whisper's texts begin with a space; a trimmed one would join words
    const words = segment.words ?? null;
    segment.text = before + typed.trim();
    if (words) segment.words = retime(words, segment.text, segment);
    text.changed = true;
    this.dispatchEvent(new Event("edit"));
  }

  /** Words become spans again once the caret is gone. */
  #leave(text) {
    if (!text?.changed) return;
    text.changed = false;
    text.replaceChildren(...spansOf(text.segment));
    this.#index();
    this.dispatchEvent(new Event("words"));
  }

  #key(event) {
    const text = event.target.closest(".text");
    if (!text || event.isComposing) return;
    if (event.key === "Escape") text.blur();
    if (event.key !== "Enter") return;
    event.preventDefault(); // a segment is one line; the next one follows
    text.closest(".segment").nextElementSibling?.querySelector(".text").focus();
  }
}

/** A span for each word, with the spaces between them; none before the first, which would be seen. */
const spansOf = (segment) => wordsOf(segment).map((word, i) => spanOf(i ? word : { ...word, word: word.word.trimStart() }));

function spanOf(word) {
  const unsure = word.probability !== undefined && word.probability < UNSURE;
  const title = unsure ? `${Math.round(100 * word.probability)} % sure` : null;
  const said = word.word.trim();
  const [before, after] = word.word.split(said, 2);
  const span = el("span", { class: unsure ? "word unsure" : "word", title }, said);
  const fragment = document.createDocumentFragment();
  fragment.append(before ?? "", span, after ?? "");
  return fragment;
}

function setEditable(text, editable) {
  if (!editable) text.removeAttribute("contenteditable");
  else {
    try {
      text.contentEditable = "plaintext-only";
    } catch {
      text.contentEditable = "true"; // browsers before 2025
    }
  }
  text.setAttribute("aria-readonly", String(!editable));
}

function intoView(span) {
  const box = span.getBoundingClientRect();
  if (box.top > 80 && box.bottom < innerHeight - 120) return;
  span.scrollIntoView({ block: "center", behavior: prefersReducedMotion() ? "auto" : "smooth" });
}
