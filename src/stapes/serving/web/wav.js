// WAV: what recordings from the microphone are kept as.

/** A recording as a file: mono 16-bit PCM, chunks of samples (arrays or blobs) joined after one header. */
export function wavFile(chunks, sampleRate) {
  const bytes = chunks.reduce((sum, chunk) => sum + (chunk.byteLength ?? chunk.size), 0);
  const header = new DataView(new ArrayBuffer(44));
  const ascii = (offset, text) => [...text].forEach((c, i) => header.setUint8(offset + i, c.charCodeAt(0)));
  ascii(0, "RIFF");
  header.setUint32(4, 36 + bytes, true);
  ascii(8, "WAVEfmt ");
  header.setUint32(16, 16, true);
  header.setUint16(20, 1, true); // PCM
  header.setUint16(22, 1, true); // channels
  header.setUint32(24, sampleRate, true);
  header.setUint32(28, sampleRate * 2, true);
  header.setUint16(32, 2, true);
  header.setUint16(34, 16, true);
  ascii(36, "data");
  header.setUint32(40, bytes, true);
  return new Blob([header, ...chunks], { type: "audio/wav" });
}

/**
 * Where the samples of a WAV file are and what they look like; null when it is no WAV, or one of a kind that only a
 * decoder reads. `bytes` is the beginning of the file; sizes of 0 or too large (streamed files) mean: to the end.
 */
export function readWavHeader(bytes, fileSize) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const ascii = (offset) => String.fromCharCode(...bytes.subarray(offset, offset + 4));
  if (bytes.length < 44 || !["RIFF", "RF64"].includes(ascii(0)) || ascii(8) !== "WAVE") return null;
  let format = null;
  for (let at = 12; at + 8 <= bytes.length; ) {
    const size = view.getUint32(at + 4, true);
    if (ascii(at) === "fmt " && at + 24 <= bytes.length) {
      let code = view.getUint16(at + 8, true);
      if (code === 0xfffe && at + 34 <= bytes.length) code = view.getUint16(at + 32, true); // extensible: its first word
      const bits = view.getUint16(at + 22, true);
      format = { code, bits, channels: view.getUint16(at + 10, true), sampleRate: view.getUint32(at + 12, true) };
    } else if (ascii(at) === "data") {
      const start = at + 8;
      const end = size === 0 || start + size > fileSize ? fileSize : start + size;
      const readable = format && ((format.code === 1 && [8, 16, 24, 32].includes(format.bits)) || (format.code === 3 && format.bits === 32));
      return readable && format.channels && format.sampleRate ? { ...format, start, end } : null;
    }
    at += 8 + size + (size & 1);
  }
  return null;
}
