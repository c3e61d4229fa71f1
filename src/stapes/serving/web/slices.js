// Cut a compressed recording into slices that a browser can decode one at a time, each a small file of its own.

const SLICE = 512 * 1024;
const LOOK_AHEAD = 128 * 1024; // a cut is found within this, whatever the format's frames are
const WHOLE = 16 * 1024 * 1024; // kinds that cannot be cut are decoded whole up to this size

/**
 * Slices in order, as ArrayBuffers: MPEG audio and AAC cut at frames; Ogg at pages, FLAC at frames and WebM at
 * clusters with the file's header before each. Other kinds (MP4) in one piece while they are small.
 *
 * @throws {RangeError} the kind cannot be cut and the file is too large to decode at once
 */
export async function* sliceAudio(file) {
  const begin = new Uint8Array(await file.slice(0, SLICE).arrayBuffer());
  const kind = kindOf(begin);
  if (file.size <= SLICE || !kind) {
    if (file.size > WHOLE) throw new RangeError("this kind of file cannot be decoded in pieces");
    yield await file.arrayBuffer();
    return;
  }
  const header = begin.slice(0, kind.headerLength(begin));
  for (let at = header.length; at < file.size; ) {
    const bytes = new Uint8Array(await file.slice(at, at + SLICE + LOOK_AHEAD).arrayBuffer());
    const isLast = at + bytes.length >= file.size;
    const cut = bytes.length <= SLICE ? bytes.length : nextStart(bytes, SLICE, kind);
    const slice = new Uint8Array(header.length + cut);
    slice.set(header);
    slice.set(bytes.subarray(0, cut), header.length);
    yield slice.buffer;
    at += cut;
    if (isLast && cut === bytes.length) return;
  }
}

function nextStart(bytes, from, kind) {
  for (let i = from; i < bytes.length; i += 1) if (kind.startsAt(bytes, i)) return i;
  return bytes.length;
}

const has = (bytes, at, ...values) => values.every((value, i) => bytes[at + i] === value);

const KINDS = [
  {
    // MPEG audio, perhaps after ID3; AAC in ADTS has the same sync word. Two headers in a row: not chance.
    is: (bytes) => has(bytes, 0, 0x49, 0x44, 0x33) || mpegFrame(bytes, 0) > 0 || adtsFrame(bytes, 0) > 0,
    headerLength: () => 0,
    startsAt: (bytes, i) => followed(bytes, i, mpegFrame) || followed(bytes, i, adtsFrame),
  },
  {
    is: (bytes) => has(bytes, 0, 0x4f, 0x67, 0x67, 0x53), // OggS
    headerLength: oggHeader,
    startsAt: (bytes, i) => has(bytes, i, 0x4f, 0x67, 0x67, 0x53, 0),
  },
  {
    is: (bytes) => has(bytes, 0, 0x66, 0x4c, 0x61, 0x43), // fLaC
    headerLength: flacHeader,
    startsAt: flacFrame,
  },
  {
    is: (bytes) => has(bytes, 0, 0x1a, 0x45, 0xdf, 0xa3), // EBML: WebM, Matroska
    headerLength: (bytes) => Math.max(0, nextStart(bytes, 0, { startsAt: isCluster })),
    startsAt: isCluster,
  },
];

const kindOf = (bytes) => KINDS.find((kind) => kind.is(bytes));

const followed = (bytes, i, frame) => {
  const length = frame(bytes, i);
  return length > 0 && i + length + 4 < bytes.length && frame(bytes, i + length) > 0;
};

const KBPS = {
  "3.3": [32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320],
  "3.2": [32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384],
  "2.3": [8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160],
};
KBPS["2.2"] = KBPS["2.3"];
const RATES = { 3: [44_100, 48_000, 32_000], 2: [22_050, 24_000, 16_000], 0: [11_025, 12_000, 8_000] };

/** The length of the MPEG layer II or III frame whose header is at `i`; 0 when there is none. */
function mpegFrame(bytes, i) {
  if (bytes[i] !== 0xff || (bytes[i + 1] & 0xe0) !== 0xe0) return 0;
  const version = (bytes[i + 1] >> 3) & 3; // 3: MPEG 1, 2: MPEG 2, 0: MPEG 2.5
  const layer = 4 - ((bytes[i + 1] >> 1) & 3);
  const kbps = KBPS[`${version === 3 ? 3 : 2}.${layer}`]?.[(bytes[i + 2] >> 4) - 1];
  const rate = RATES[version]?.[(bytes[i + 2] >> 2) & 3];
  if (!kbps || !rate) return 0;
  const bytesPerFrame = layer === 3 && version !== 3 ? 72_000 : 144_000;
  return Math.floor((bytesPerFrame * kbps) / rate) + ((bytes[i + 2] >> 1) & 1);
}

/** The same for a frame of AAC in ADTS. */
function adtsFrame(bytes, i) {
  if (bytes[i] !== 0xff || (bytes[i + 1] & 0xf6) !== 0xf0) return 0;
  return ((bytes[i + 3] & 3) << 11) | (bytes[i + 4] << 3) | (bytes[i + 5] >> 5);
}

/** Pages of the header have granule position 0: those at the beginning, until sound comes. */
function oggHeader(bytes) {
  let at = 0;
  while (at + 27 < bytes.length && has(bytes, at, 0x4f, 0x67, 0x67, 0x53) && bytes.subarray(at + 6, at + 14).every((b) => b === 0)) {
    const segments = bytes[at + 26];
    at += 27 + segments + bytes.subarray(at + 27, at + 27 + segments).reduce((sum, size) => sum + size, 0);
  }
  return at;
}

function flacHeader(bytes) {
  let at = 4;
  for (let last = false; !last && at + 4 < bytes.length; ) {
    last = (bytes[at] & 0x80) !== 0;
    at += 4 + ((bytes[at + 1] << 16) | (bytes[at + 2] << 8) | bytes[at + 3]);
  }
  return Math.min(at, bytes.length);
}

/** A FLAC frame's header ends in a CRC-8 of itself (RFC 9639 §9.1.8), so it is not found by chance. */
function flacFrame(bytes, i) {
  if (bytes[i] !== 0xff || (bytes[i + 1] & 0xfe) !== 0xf8 || i + 20 > bytes.length) return false;
  const lead = bytes[i + 4];
  const coded = lead < 0x80 ? 1 : Math.clz32(~(lead << 24)); // the frame's number, in UTF-8's way
  if (coded > 7 || (lead >= 0x80 && coded < 2)) return false;
  const size = { 6: 1, 7: 2 }[bytes[i + 2] >> 4] ?? 0;
  const rate = { 12: 1, 13: 2, 14: 2 }[bytes[i + 2] & 15] ?? 0;
  const end = i + 4 + coded + size + rate;
  let crc = 0;
  for (let k = i; k < end; k += 1) {
    crc ^= bytes[k];
    for (let bit = 0; bit < 8; bit += 1) crc = ((crc << 1) ^ (crc & 0x80 ? 0x07 : 0)) & 0xff;
  }
  return crc === bytes[end];
}

function isCluster(bytes, i) {
  return has(bytes, i, 0x1f, 0x43, 0xb6, 0x75);
}
