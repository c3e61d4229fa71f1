// AudioWorklet: the microphone at whatever rate it has, to mono 16-bit PCM at the rate the server takes.

import { Resampler } from "./resampler.js";

const TARGET_RATE = 24_000;
const CHUNK = TARGET_RATE / 10; // 100 ms

class PcmCapture extends AudioWorkletProcessor {
  constructor() {
    super();
    this.resampler = new Resampler(sampleRate, TARGET_RATE);
    this.chunk = new Int16Array(CHUNK);
    this.filled = 0;
    this.peak = 0;
    this.running = true;
    this.port.onmessage = () => this.stop();
  }

  process([channels]) {
    if (channels?.length) this.take(mono(channels));
    return this.running;
  }

  /** The last samples are sent too: no last word is lost in a half-filled chunk. */
  stop() {
    this.take(new Float32Array(this.resampler.delay));
    this.send(this.chunk.slice(0, this.filled));
    this.port.postMessage({ ended: true });
    this.running = false;
  }

  take(samples) {
    for (const sample of this.resampler.feed(samples)) {
      const limited = Math.max(-1, Math.min(1, sample));
      this.peak = Math.max(this.peak, Math.abs(limited));
      this.chunk[this.filled++] = Math.round(limited * 32767);
      if (this.filled === CHUNK) {
        this.send(this.chunk);
        this.chunk = new Int16Array(CHUNK);
        this.filled = 0;
      }
    }
  }

  send(chunk) {
    if (chunk.length) this.port.postMessage({ pcm: chunk.buffer, peak: this.peak }, [chunk.buffer]);
    this.peak = 0;
  }
}

function mono(channels) {
  if (channels.length === 1) return channels[0];
  return channels[0].map((_, i) => channels.reduce((sum, channel) => sum + channel[i], 0) / channels.length);
}

registerProcessor("pcm-capture", PcmCapture);
