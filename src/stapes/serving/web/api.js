// The server's HTTP interface: models, transcription with progress as it is made, errors in words, and the same as curl.
// Addresses are relative to the page, so it works behind a reverse proxy under any path.

const KEY = "stapes-api-key";

/** The API key lives in this tab's session only: never in a file, a cookie or an address. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

export const address = (path) => new URL(path, document.baseURI).href;

/** What went wrong, in a sentence a person can act on. `retryAfter`: seconds, where trying again will help. */
export class ApiError extends Error {
  constructor(status, message, { code = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

const headers = () => (apiKey.get() ? { Authorization: `Bearer ${apiKey.get()}` } : {});

/** The models that are served: OpenAI's list. */
export async function listModels() {
  let response;
  try {
    response = await fetch(address("v1/models"), { headers: headers() });
  } catch {
    throw unreachable();
  }
  if (!response.ok) throw errorOf(response.status, await response.text(), response.headers.get("retry-after"));
  return (await response.json()).data ?? [];
}

/** Whether the server says it can work now. */
export async function isReady() {
  try {
    return (await fetch(address("readyz"))).ok;
  } catch {
    return false;
  }
}

/**
 * Send a recording; events arrive as the text is made.
 *
 * XMLHttpRequest, because fetch does not say how much of an upload has gone. Resolves when the stream has ended;
 * rejects with ApiError, or with a DOMException "AbortError" when `signal` fires: the server then drops the work.
 */
export function transcribe(file, name, settings, { signal, onUpload, onEvent }) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", address(endpoint(settings)));
    for (const [header, value] of Object.entries(headers())) request.setRequestHeader(header, value);
    const parse = eventParser((event) => {
      if (event.type === "error" || event.error) failure = errorOf(500, JSON.stringify(event));
      else onEvent(event);
      isWhole ||= event.type === "transcript.text.done";
    });
    let failure = null;
    let isWhole = false;
    let read = 0;
    const readMore = () => {
      if (request.status !== 200) return;
      parse(request.responseText.slice(read));
      read = request.responseText.length;
    };
    request.upload.onprogress = (event) => event.lengthComputable && onUpload?.(event.loaded / event.total);
    request.upload.onload = () => onUpload?.(1);
    request.onprogress = readMore;
    request.onload = () => {
      readMore();
      if (request.status !== 200) {
        reject(errorOf(request.status, request.responseText, request.getResponseHeader("retry-after")));
      } else if (failure) reject(failure);
      else if (!isWhole) reject(new ApiError(0, "The answer ended before the recording did. Try again."));
      else resolve();
    };
    request.onerror = () => reject(unreachable());
    request.onabort = () => reject(new DOMException("cancelled", "AbortError"));
    if (signal.aborted) return reject(new DOMException("cancelled", "AbortError"));
    signal.addEventListener("abort", () => request.abort());
    const form = new FormData();
    form.append("file", file, name);
    for (const [field, value] of fields(settings)) form.append(field, value);
    request.send(form);
  });
}

const endpoint = ({ task }) => (task === "translate" ? "v1/audio/translations" : "v1/audio/transcriptions");

/** The form fields for these settings, without the file: only what differs from the server's defaults. */
function fields({ model, language, task, words, prompt, hotwords, channels, vad }, { stream = true } = {}) {
  const pairs = [["model", model], ["response_format", "verbose_json"]];
  if (language && task !== "translate") pairs.push(["language", language]);
  if (prompt) pairs.push(["prompt", prompt]);
  for (const word of hotwords.split(",").map((each) => each.trim()).filter(Boolean)) pairs.push(["keywords[]", word]);
  pairs.push(["timestamp_granularities[]", "segment"]);
  if (words) pairs.push(["timestamp_granularities[]", "word"]);
  if (channels !== "mix") pairs.push(["channels", channels]);
  if (!vad) pairs.push(["vad", "false"]);
  if (stream) pairs.push(["stream", "true"]);
  return pairs;
}

/** The same request for a terminal. The key is named, never written out. */
export function curlCommand(name, settings) {
  const lines = [`curl ${address(endpoint(settings))}`];
  if (apiKey.get()) lines.push('-H "Authorization: Bearer $STAPES_API_KEY"');
  lines.push(`-F ${quoted(`file=@"${name.replace(/(["\\])/g, "\\$1")}"`)}`);
  for (const [field, value] of fields(settings, { stream: false })) {
    // --form-string: a value that begins with @ or < is still text
    lines.push(/^[@<]|;/.test(value) ? `--form-string ${quoted(`${field}=${value}`)}` : `-F ${quoted(`${field}=${value}`)}`);
  }
  return lines.join(" \\\n  ");
}

const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** Feed text of a server-sent event stream in any pieces; `data:` lines of one event are joined, [DONE] is none. */
export function eventParser(onEvent) {
  let rest = "";
  return (text) => {
    rest += text;
    const events = rest.split(/\r?\n\r?\n/);
    rest = events.pop();
    for (const event of events) {
      const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      const data = lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      if (data && data !== "[DONE]") onEvent(JSON.parse(data));
    }
  };
}

function unreachable() {
  return new ApiError(0, "The server does not answer. Is `stapes serve` still running?", { retryAfter: null });
}

/** The server's own sentence where it sent one, with what to do here. */
export function errorOf(status, body, retryAfter = null) {
  let error = {};
  try {
    error = JSON.parse(body).error ?? {};
  } catch {
    // a proxy's page, or nothing
  }
  const said = typeof error === "string" ? error : error.message;
  const usual = {
    401: "This server wants an API key: enter it under Options.",
    403: "The server does not accept requests from this address.",
    413: "The recording is larger than this server takes: split it, or compress it.",
    415: "This file could not be read as audio.",
    429: "The server is busy; this recording waits and is sent again.",
    502: "The server behind this address is not running.",
    503: "The server cannot work just now; try again in a moment.",
    504: "The server ran out of time; try again, or send a shorter recording.",
  };
  const message = status === 401 ? usual[401] : said || usual[status] || `The server answered with status ${status}.`;
  const seconds = Number(retryAfter);
  return new ApiError(status, message, { code: error.code ?? null, retryAfter: retryAfter && Number.isFinite(seconds) ? seconds : null });
}
