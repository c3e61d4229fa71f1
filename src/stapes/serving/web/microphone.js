// The microphone: chunks of 100 ms of 16-bit PCM at 24 kHz, and how loud it is.

import { wavFile } from "./wav.js";

export const SAMPLE_RATE = 24_000;

/** Why there is no microphone, in words. */
export class MicrophoneError extends Error {}

export class Microphone {
  /** `onChunk(Int16Array)` every 100 ms, `onLevel(peak from 0 to 1)` as often. */
  constructor({ onChunk, onLevel }) {
    Object.assign(this, { onChunk, onLevel, chunks: [], samples: 0 });
  }

  async start() {
    if (!navigator.mediaDevices?.getUserMedia) {
      throw new MicrophoneError("Browsers give the microphone only to pages over https or on localhost: open this page there.");
    }
    try {
      // Recognisers were trained on sound as it is; a browser's processing cuts words.
      const audio = { echoCancellation: false, noiseSuppression: false, autoGainControl: false };
      this.stream = await navigator.mediaDevices.getUserMedia({ audio });
      this.context = new AudioContext({ latencyHint: "interactive" });
      await this.context.resume();
      await this.context.audioWorklet.addModule(new URL("./pcm-worklet.js", import.meta.url));
    } catch (error) {
      this.#release();
      throw new MicrophoneError(inWords(error));
    }
    const source = this.context.createMediaStreamSource(this.stream);
    this.node = new AudioWorkletNode(this.context, "pcm-capture", { numberOfOutputs: 1 });
    this.node.port.onmessage = ({ data }) => this.#message(data);
    source.connect(this.node).connect(this.context.destination); // it writes silence; connected, it is run
    this.stream.getAudioTracks()[0].onended = () => this.onEnded?.();
  }

  get seconds() {
    return this.samples / SAMPLE_RATE;
  }

  /** Stop, and wait for the last samples. */
  async stop() {
    if (!this.node) return;
    const ended = new Promise((resolve) => (this.ended = resolve));
    this.node.port.postMessage("stop");
    await Promise.race([ended, new Promise((resolve) => setTimeout(resolve, 500))]);
    this.#release();
  }

  /** Everything so far as a WAV file. */
  recording() {
    return wavFile(this.chunks, SAMPLE_RATE);
  }

  #message({ pcm, peak, ended }) {
    if (ended) {
      this.ended?.();
      return;
    }
    const chunk = new Int16Array(pcm);
    this.samples += chunk.length;
    this.chunks.push(chunk);
    if (this.chunks.length >= 600) this.chunks = [new Blob(this.chunks)]; // a minute: the browser may keep it on disk
    this.onLevel?.(peak);
    this.onChunk?.(chunk);
  }

  #release() {
    this.stream?.getTracks().forEach((track) => track.stop());
    this.context?.close();
    this.node = null;
  }
}

function inWords(error) {
  switch (error.name) {
    case "NotAllowedError":
      return "The browser was not allowed to use the microphone: permit it for this page and try again.";
    case "NotFoundError":
      return "No microphone was found: connect one and try again.";
    case "NotReadableError":
      return "The microphone is in use by another program, or could not be opened.";
    default:
      return `The microphone could not be opened (${error.message}).`;
  }
}
