// How loud a recording is, 100 values a second, for the waveform: read piece by piece, in memory that does not grow
// with the recording. PCM WAV is read by the worker alone; what needs a decoder is decoded in slices here (the
// browser does it off this thread) and measured by the worker.

import { sliceAudio } from "./slices.js";

export const PEAKS_PER_SECOND = 100;
const DECODE_RATE = 16_000;

/**
 * `onPeaks(Uint8Array)` with the next values. Resolves to true when the recording was read whole, false when this
 * browser cannot decode it.
 */
export async function readPeaks(file, { onPeaks, signal }) {
  const worker = new Worker(new URL("./peaks-worker.js", import.meta.url), { type: "module" });
  const stopped = new Promise((_, reject) => {
    worker.onerror = () => reject(new Error("the waveform could not be computed"));
    signal.addEventListener("abort", () => reject(signal.reason));
  });
  stopped.catch(() => {}); // heard where it is waited for
  const asked = (message, transfer = []) => {
    const answered = new Promise((resolve) => {
      worker.onmessage = ({ data }) => (data.peaks ? onPeaks(data.peaks) : resolve(data));
    });
    worker.postMessage(message, transfer);
    return Promise.race([answered, stopped]);
  };
  try {
    if ((await asked({ file })).isWav) return true;
    const context = new OfflineAudioContext(1, 1, DECODE_RATE);
    for await (const slice of sliceAudio(file)) {
      signal.throwIfAborted();
      const audio = await context.decodeAudioData(slice);
      const channels = Array.from({ length: audio.numberOfChannels }, (_, i) => audio.getChannelData(i).slice());
      await asked({ channels, sampleRate: DECODE_RATE }, channels.map((channel) => channel.buffer));
    }
    await asked({ end: true });
    return true;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return false;
  } finally {
    worker.terminate();
  }
}
