// Small helpers around the document: elements without innerHTML, times and sizes in words.

/**
 * Make an element. Properties that the element has are set, the others become attributes; `on…` are listeners.
 * Text is always text: nothing here parses HTML.
 */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && !name.includes("-")) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** The element with this id; the page is wrong without it. */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`the page has no element #${id}`);
  return element;
}

/** 0:07, 12:30, 1:02:03. */
export function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds || 0));
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor(whole / 60) % 60;
  const rest = String(whole % 60).padStart(2, "0");
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

/** "8 s", "3 min", "1 h 20 min": how long something will take, no more exact than it is known. */
export function roughly(seconds) {
  if (seconds < 60) return `${Math.max(1, Math.round(seconds))} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function fileSize(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  if (bytes < 1024 * 1024) return `${Math.round(bytes / 1024)} KB`;
  return `${(bytes / 1024 / 1024).toFixed(1)} MB`;
}

const languageNames = new Intl.DisplayNames(undefined, { type: "language", fallback: "none" });

/** "German" for "de" (in the reader's own language); what the server said where the browser knows no name. */
export function languageName(code) {
  if (!code) return "";
  try {
    return languageNames.of(code) ?? code;
  } catch {
    return code; // already a name: "english"
  }
}

/** Tell a screen reader, politely, without showing anything. */
export function announce(text) {
  const region = byId("announcements");
  region.textContent = "";
  setTimeout(() => (region.textContent = text), 50); // a change is what is read out
}

/** Save text or a blob under a name. */
export function save(content, name, type) {
  const blob = content instanceof Blob ? content : new Blob([content], { type: `${type};charset=utf-8` });
  const link = el("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

export const prefersReducedMotion = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

/** Whether keys typed here are text. */
export function isField(target) {
  return target instanceof Element && target.matches("input, textarea, select, [contenteditable]:not([contenteditable=false])");
}
