// Worker: the loudest sample of every hundredth of a second, from 0 to 255.

import { readWavHeader } from "./wav.js";

const PER_SECOND = 100;
const PIECE = 1 << 20; // bytes of a WAV file read at a time

let peak = 0;
let samples = 0; // since the beginning
let peaks = 0; // finished since the beginning

self.onmessage = async ({ data }) => {
  if (data.file) self.postMessage({ isWav: await readWav(data.file) });
  else {
    if (data.channels) measure(data.channels, data.sampleRate);
    self.postMessage({ taken: true });
  }
};

function measure(channels, sampleRate) {
  const length = channels[0].length;
  const found = new Uint8Array(Math.ceil((length * PER_SECOND) / sampleRate) + 1);
  let count = 0;
  let boundary = ((peaks + 1) * sampleRate) / PER_SECOND;
  for (let i = 0; i < length; i += 1) {
    for (const channel of channels) {
      const value = Math.abs(channel[i]);
      if (value > peak) peak = value;
    }
    samples += 1;
    if (samples >= boundary) {
      found[count++] = Math.min(255, Math.round(peak * 255));
      peaks += 1;
      boundary = ((peaks + 1) * sampleRate) / PER_SECOND;
      peak = 0;
    }
  }
  self.postMessage({ peaks: found.slice(0, count) });
}

async function readWav(file) {
  const wav = readWavHeader(new Uint8Array(await file.slice(0, 65_536).arrayBuffer()), file.size);
  if (!wav) return false;
  const frame = (wav.channels * wav.bits) / 8;
  const step = Math.floor(PIECE / frame) * frame;
  for (let at = wav.start; at + frame <= wav.end; at += step) {
    const bytes = await file.slice(at, Math.min(wav.end, at + step)).arrayBuffer();
    measure(toChannels(new DataView(bytes), wav), wav.sampleRate);
  }
  return true;
}

const READERS = {
  8: (view, at) => (view.getUint8(at) - 128) / 128,
  16: (view, at) => view.getInt16(at, true) / 32_768,
  24: (view, at) => ((view.getUint16(at, true) | (view.getInt8(at + 2) << 16)) / 8_388_608),
  32: (view, at) => view.getInt32(at, true) / 2_147_483_648,
};

function toChannels(view, { channels, bits, code }) {
  const read = code === 3 ? (data, at) => data.getFloat32(at, true) : READERS[bits];
  const width = bits / 8;
  const frames = Math.floor(view.byteLength / (width * channels));
  return Array.from({ length: channels }, (_, channel) => {
    const out = new Float32Array(frames);
    for (let i = 0; i < frames; i += 1) out[i] = read(view, (i * channels + channel) * width);
    return out;
  });
}
