// The options panel: read from the form, kept in this browser (the API key only in this tab's session).

import { apiKey } from "./api.js";
import { byId, el, languageName } from "./dom.js";

const STORED = "stapes-settings";

const DEFAULTS = {
  model: "", language: "", task: "transcribe", words: true, prompt: "", hotwords: "", channels: "mix", vad: true, singleKeys: true,
};

// Whisper's languages.
const LANGUAGES = (
  "af am ar as az ba be bg bn bo br bs ca cs cy da de el en es et eu fa fi fo fr gl gu ha haw he hi hr ht hu hy id is it " +
  "ja jw ka kk km kn ko la lb ln lo lt lv mg mi mk ml mn mr ms mt my ne nl nn no oc pa pl ps pt ro ru sa sd si sk sl sn so " +
  "sq sr su sv sw ta te tg th tk tl tr tt uk ur uz vi yi yo yue zh"
).split(" ");

export class Settings extends EventTarget {
  constructor() {
    super();
    this.form = byId("settings-form");
    this.values = { ...DEFAULTS, ...stored() };
    this.#offerLanguages();
    for (const [name, value] of Object.entries(this.values)) {
      const field = this.form.elements[name];
      if (!field) continue;
      if (field.type === "checkbox") field.checked = Boolean(value);
      else field.value = value;
    }
    this.form.elements.key.value = apiKey.get();
    this.form.addEventListener("input", () => this.#read());
    this.form.addEventListener("submit", (event) => event.preventDefault());
  }

  /** Offer the served models; one alone needs no choice. Without an answer the field stays as it is. */
  offerModels(models) {
    const select = this.form.elements.model;
    const ids = models.map((model) => model.id);
    select.replaceChildren(...ids.map((id) => el("option", { value: id }, id)));
    select.value = ids.includes(this.values.model) ? this.values.model : (ids[0] ?? "");
    this.#read();
  }

  #offerLanguages() {
    const named = LANGUAGES.map((code) => [languageName(code === "jw" ? "jv" : code), code]);
    named.sort(([a], [b]) => a.localeCompare(b));
    this.form.elements.language.append(...named.map(([name, code]) => el("option", { value: code }, name)));
  }

  #read() {
    const { elements } = this.form;
    for (const name of Object.keys(DEFAULTS)) {
      const field = elements[name];
      this.values[name] = field.type === "checkbox" ? field.checked : field.value.trim();
    }
    elements.language.disabled = this.values.task === "translate";
    const key = elements.key.value.trim();
    const keyChanged = key !== apiKey.get();
    apiKey.set(key);
    try {
      localStorage.setItem(STORED, JSON.stringify(this.values));
    } catch {
      // storage is switched off: the settings last as long as the page
    }
    this.dispatchEvent(new Event("change"));
    if (keyChanged) this.dispatchEvent(new Event("key"));
  }
}

function stored() {
  try {
    const values = JSON.parse(localStorage.getItem(STORED) ?? "{}");
    return Object.fromEntries(Object.entries(values).filter(([name, value]) => typeof value === typeof DEFAULTS[name]));
  } catch {
    return {};
  }
}
