// Words and their times: found by time, and kept through an edit of the text.

// Media elements round the place that they were sent to: a word's start may come back a little earlier.
const ROUNDING = 0.005;

/** The index of the word being said at `time`, the one before it in a pause, -1 before the first. */
export function wordAt(words, time) {
  let low = 0;
  let high = words.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (words[middle].start <= time + ROUNDING) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** A segment's words; where the server sent none, its text by spaces with its time shared out by length. */
export function wordsOf(segment) {
  const words = (segment.words ?? []).filter(({ word }) => word.trim());
  return words.length ? words : spread(pieces(segment.text), segment.start, segment.end);
}

/**
 * Give an edited text the times of the words it keeps.
 *
 * Words at the beginning and at the end that did not change keep their times and probabilities; what was typed
 * between them shares the time that is left, by length, and has no probability: a person is sure.
 */
export function retime(words, text, segment) {
  const typed = pieces(text);
  const same = (word, piece) => word.word.trim() === piece.trim();
  let head = 0;
  while (head < typed.length && head < words.length && same(words[head], typed[head])) head += 1;
  let tail = 0;
  while (
    tail < typed.length - head &&
    tail < words.length - head &&
    same(words[words.length - 1 - tail], typed[typed.length - 1 - tail])
  ) tail += 1;

  const start = head ? words[head - 1].end : Math.min(segment.start, words[0]?.start ?? segment.start);
  const end = tail ? words[words.length - tail].start : Math.max(segment.end, words.at(-1)?.end ?? segment.end);
  const kept = (word, piece) => ({ ...word, word: piece });
  return [
    ...words.slice(0, head).map((word, i) => kept(word, typed[i])),
    ...spread(typed.slice(head, typed.length - tail), start, Math.max(start, end)),
    ...words.slice(words.length - tail).map((word, i) => kept(word, typed[typed.length - tail + i])),
  ];
}

/** The mean probability of a transcript's words, or of its segments where words have none; null when unknown. */
export function confidence(segments) {
  const known = (values) => values.filter((value) => Number.isFinite(value));
  let values = known(segments.flatMap((segment) => (segment.words ?? []).map((word) => word.probability)));
  if (!values.length) values = known(segments.map((segment) => segment.avg_logprob)).filter((v) => v < 0).map(Math.exp);
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

/** Words with the space before them; in scripts that write no spaces, single characters. */
function pieces(text) {
  return (text.match(/\s*\S+\s*$|\s*\S+/g) ?? []).flatMap((word) => (UNSPACED.test(word) ? [...word] : [word]));
}

const UNSPACED = /[\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}\p{Script=Lao}\p{Script=Khmer}\p{Script=Myanmar}]/u;

function spread(texts, start, end) {
  const total = texts.reduce((sum, text) => sum + text.length, 0);
  let done = 0;
  return texts.map((word) => {
    const from = start + ((end - start) * done) / total;
    done += word.length;
    return { word, start: from, end: start + ((end - start) * done) / total };
  });
}
