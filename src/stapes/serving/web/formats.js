// Transcripts as txt, srt, vtt and json: the same bytes that `stapes transcribe` writes with its default layout.

export const FORMATS = {
  txt: { render: toText, type: "text/plain" },
  srt: { render: toSrt, type: "application/x-subrip" },
  vtt: { render: toVtt, type: "text/vtt" },
  json: { render: toJson, type: "application/json" },
};

/** `[HH:]MM:SS.mmm`; srt wants the hours always and a comma. */
export function timestamp(seconds, { hours = false, marker = "." } = {}) {
  let milliseconds = Math.max(0, roundHalfEven(seconds * 1000));
  const h = Math.floor(milliseconds / 3_600_000);
  milliseconds -= h * 3_600_000;
  const m = Math.floor(milliseconds / 60_000);
  milliseconds -= m * 60_000;
  const two = (number) => String(number).padStart(2, "0");
  const rest = `${two(Math.floor(milliseconds / 1000))}${marker}${String(milliseconds % 1000).padStart(3, "0")}`;
  return `${hours || h ? `${two(h)}:` : ""}${two(m)}:${rest}`;
}

export function toText({ segments }) {
  return spoken(segments)
    .map((segment) => `${segment.speaker ? `[${segment.speaker}] ` : ""}${plain(segment)}\n`)
    .join("");
}

export function toSrt({ segments }) {
  const time = (seconds) => timestamp(seconds, { hours: true, marker: "," });
  return spoken(segments)
    .map((segment, index) => {
      const text = `${segment.speaker ? `[${segment.speaker}] ` : ""}${plain(segment)}`;
      const [start, end] = cueTimes(segment);
      return `${index + 1}\n${time(start)} --> ${time(end)}\n${withoutArrows(text)}\n\n`;
    })
    .join("");
}

export function toVtt({ segments }) {
  const escape = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;");
  const cues = spoken(segments).map((segment) => {
    const voice = segment.speaker ? `<v ${escape(segment.speaker).replaceAll(">", "&gt;")}>` : "";
    const [start, end] = cueTimes(segment);
    return `${timestamp(start)} --> ${timestamp(end)}\n${voice}${withoutArrows(escape(plain(segment)))}\n\n`;
  });
  return `WEBVTT\n\n${cues.join("")}`;
}

/** openai/whisper's shape; `text` is what the segments say now, after any edit. */
export function toJson(transcript) {
  const { segments, ...rest } = transcript;
  const text = segments.map((segment) => segment.text).join("");
  return `${JSON.stringify({ ...rest, text, segments }, null, 2)}\n`;
}

const spoken = (segments) => segments.filter((segment) => plain(segment));

const plain = (segment) => oneLine(segment.text).trim();

/** A line break, with the white space around it, becomes one space: a blank line would end a cue. */
const oneLine = (text) => text.replace(/\s*[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]\s*/g, " ");

const withoutArrows = (text) => text.replace(/-{2,}>/g, "->");

/** A cue lasts from its first word to its last where words are known, else as long as its segment. */
function cueTimes({ start, end, words }) {
  const said = (words ?? []).filter(({ word }) => word.trim());
  return said.length ? [said[0].start, Math.max(said.at(-1).start, said.at(-1).end)] : [start, Math.max(start, end)];
}

/** Python's round, so that both write the same millisecond. */
function roundHalfEven(number) {
  const floor = Math.floor(number);
  if (number - floor !== 0.5) return Math.round(number);
  return floor % 2 ? floor + 1 : floor;
}
