// Band-limited resampling of a stream, in pieces of any length without seams.

const ZERO_CROSSINGS = 16;
const TABLE = 512; // filter positions between two input samples

/**
 * Windowed-sinc interpolation (J. O. Smith, "Digital audio resampling"): a low-pass at the lower of both rates'
 * halves, tabulated at TABLE positions between samples.
 */
export class Resampler {
  constructor(from, to) {
    this.step = from / to;
    const cutoff = Math.min(1, to / from) * 0.95; // the rest is the filter's slope
    this.half = Math.ceil(ZERO_CROSSINGS / cutoff);
    this.delay = this.half + 1; // input samples that must follow before one can be computed
    this.filters = Array.from({ length: TABLE + 1 }, (_, i) => kernel(i / TABLE, this.half, cutoff));
    this.kept = new Float32Array(this.half); // silence before the beginning
    this.position = this.half; // of the next output, in `kept`
  }

  /** The outputs that these samples complete. */
  feed(samples) {
    const input = new Float32Array(this.kept.length + samples.length);
    input.set(this.kept);
    input.set(samples, this.kept.length);
    const last = input.length - this.half - 1;
    const output = [];
    for (; this.position < last; this.position += this.step) {
      const whole = Math.floor(this.position);
      const filter = this.filters[Math.round((this.position - whole) * TABLE)];
      const begin = whole - this.half + 1;
      let sum = 0;
      for (let i = 0; i < filter.length; i += 1) sum += filter[i] * input[begin + i];
      output.push(sum);
    }
    const drop = Math.max(0, Math.floor(this.position) - this.half);
    this.kept = input.slice(drop);
    this.position -= drop;
    return output;
  }
}

/** Weights of the 2·half samples around a position `fraction` after the half-th; they add up to 1. */
function kernel(fraction, half, cutoff) {
  const weights = new Float32Array(2 * half);
  let sum = 0;
  for (let i = 0; i < weights.length; i += 1) {
    const x = i - half + 1 - fraction;
    const window = Math.abs(x) < half ? 0.42 + 0.5 * Math.cos((Math.PI * x) / half) + 0.08 * Math.cos((2 * Math.PI * x) / half) : 0;
    weights[i] = window * (x === 0 ? cutoff : Math.sin(Math.PI * cutoff * x) / (Math.PI * x));
    sum += weights[i];
  }
  return weights.map((weight) => weight / sum);
}
