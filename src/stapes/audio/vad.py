"""Voice activity: where a recording has speech.

The network is Silero VAD for 16 kHz (https://github.com/snakers4/silero-vad, MIT licence), in plain PyTorch on the
weights that the ``silero-vad`` package carries. A frame is 512 samples; the network also sees the 64 samples before it.
Convolutions run over all frames at once and the LSTM over whole stretches, of several recordings together. Frames do
not look ahead, so a recording may arrive in pieces of any size.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from threading import Barrier

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from stapes.errors import ModelError, UsageError

SAMPLE_RATE = 16_000
FRAME = 512  # samples, 32 ms
CONTEXT = 64  # samples before each frame that the network sees too
HIDDEN = 128

# The convolutions are fastest on about this many frames at a time (their activations then fit the cache), and
# memory stays bounded however much audio one call brings.
FRAMES_AT_ONCE = 512


class SileroVad(nn.Module):
    """The network: a 256-point STFT magnitude, four convolutions, one LSTM step a frame, one output.

    Parameters carry the names of Silero's safetensors, except for those of the LSTM.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)  # windowed cosines, then sines
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, HIDDEN, 3, padding=1)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN)
        self.final_conv = nn.Conv1d(HIDDEN, 1, 1)

    @cached_property
    def _flat(self) -> list[tuple[Tensor, Tensor | None, int]]:
        """Weights of the last four convolutions, (outputs, taps × inputs), their biases and strides."""
        convs = (self.conv1, self.conv2, self.conv3, self.conv4)
        return [(conv.weight.transpose(1, 2).flatten(1).contiguous(), conv.bias, conv.stride[0]) for conv in convs]

    def encode(self, frames: Tensor) -> Tensor:
        """``(frames, 576)`` samples, context first → ``(frames, 128)``; every frame on its own.

        A frame is so short that convolutions are products over its unfolded windows. PyTorch's own take two to three
        times as long, and some milliseconds more for every number of frames that they have not seen before.
        """
        # All factors have two dimensions, which makes each a single product: (frames × 4, 256) to begin with.
        windows = F.pad(frames, (0, 64), "reflect").unfold(1, 256, 128).reshape(-1, 256)
        spectrum = F.linear(windows, self.stft_conv.weight.squeeze(1))
        cosine, sine = spectrum.chunk(2, dim=-1)
        x = (cosine.square() + sine.square()).sqrt().unflatten(0, (-1, 4))
        for weight, bias, stride in self._flat:
            count, length, channels = x.shape
            size = (count, (length - 1) // stride + 1, 3 * channels)
            unfolded = F.pad(x, (0, 0, 1, 1)).as_strided(size, ((length + 2) * channels, stride * channels, 1))
            x = F.relu(F.linear(unfolded.reshape(-1, 3 * channels), weight, bias)).unflatten(0, size[:2])
        return x.squeeze(1)

    def forward(self, frames: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Speech probabilities of consecutive frames.

        Args:
            frames: ``(frames, recordings, 576)`` samples.
            hidden: ``(recordings, 128)``, the LSTM's output after the frame before.
            cell: ``(recordings, 128)``.

        Returns:
            ``(frames, recordings)`` probabilities, and the new ``hidden`` and ``cell``.
        """
        x = self.encode(frames.flatten(0, 1)).unflatten(0, frames.shape[:2])
        x, (hidden, cell) = self.lstm(x, (hidden.unsqueeze(0), cell.unsqueeze(0)))
        # A convolution of width 1 over (frames, recordings) is a product with its only filter.
        logits = F.linear(F.relu(x), self.final_conv.weight.squeeze(-1), self.final_conv.bias)
        return logits.squeeze(-1).sigmoid(), hidden.squeeze(0), cell.squeeze(0)


def packaged_weights() -> Path:
    """Path of the weights that the ``silero-vad`` package carries, as TorchScript.

    These are the ones in the package's ONNX files. Its ``silero_vad_16k.safetensors`` (in 6.2.1 to 6.2.3) is another
    training of the same network, whose probabilities differ by up to 0.6 on clean speech; `load_network` reads it
    too. The package is located without importing it: the import pulls in much that is not needed here.

    Raises:
        ModelError: the package or its weights are missing.
    """
    spec = importlib.util.find_spec("silero_vad")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "data" / "silero_vad.jit"
        if path.is_file():
            return path
    raise ModelError(
        "The weights of the voice activity detector are missing; reinstall them (pip install --force-reinstall "
        "'silero-vad>=6.2') or switch the detector off (--no-vad)."
    )


# Silero's parameter names -> ours: in its TorchScript (whose other half is a network for 8 kHz) and safetensors.
_CONV = ("weight", "bias")
_LSTM = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
_TORCHSCRIPT_NAMES = {
    "_model.stft.forward_basis_buffer": "stft_conv.weight",
    **{f"_model.encoder.{i}.reparam_conv.{kind}": f"conv{i + 1}.{kind}" for i in range(4) for kind in _CONV},
    **{f"_model.decoder.rnn.{name}": f"lstm.{name}_l0" for name in _LSTM},
    **{f"_model.decoder.decoder.2.{kind}": f"final_conv.{kind}" for kind in _CONV},
}
_SAFETENSORS_NAMES = {f"lstm_cell.{name}": f"lstm.{name}_l0" for name in _LSTM}


def load_network(weights: Path) -> SileroVad:
    """Build the network from one of Silero's files, ``.jit`` (only its weights are used) or ``.safetensors``.

    Raises:
        ModelError: the file cannot be read or does not hold these parameters.
    """
    network = SileroVad()
    try:
        if weights.suffix == ".safetensors":
            tensors = {_SAFETENSORS_NAMES.get(name, name): tensor for name, tensor in load_file(weights).items()}
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript, in which Silero publishes
                published = torch.jit.load(weights, map_location="cpu").state_dict()
            tensors = {ours: published[name] for name, ours in _TORCHSCRIPT_NAMES.items()}
        network.load_state_dict(tensors)
    except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{weights} does not hold the weights of Silero VAD for 16 kHz ({reason}); reinstall silero-vad."
        ) from error
    return network.eval().requires_grad_(False)


@dataclass(slots=True, eq=False)
class VadState:
    """Where the detector is in one recording."""

    hidden: Tensor = field(default_factory=lambda: torch.zeros(HIDDEN))
    """``(128,)``, LSTM output."""

    cell: Tensor = field(default_factory=lambda: torch.zeros(HIDDEN))
    """``(128,)``, LSTM cell."""

    tail: np.ndarray = field(default_factory=lambda: np.zeros(CONTEXT, np.float32))
    """The 64 samples of context of the next frame, then the samples of it that have come so far (fewer than 512)."""

    finished: bool = False
    """The recording has ended."""


class VoiceActivityDetector:
    """Gives the probability of speech for every 32 ms of any number of recordings, on the CPU.

    Holds no state of a recording, so threads may share it.
    """

    def __init__(self, weights: Path | None = None, *, threads: int = 1) -> None:
        """Load the weights.

        Args:
            weights: a file of Silero's, see `load_network`; by default the one in the ``silero-vad`` package.
            threads: how many calls can run at the same time. Each runs on one core.

        Raises:
            ModelError: the weights are missing or damaged.
        """
        self._workers = _single_core_workers(threads)
        # In one of them: weights that the calling thread copies would leave helpers of OpenMP with it.
        self.network = self._workers.submit(load_network, weights or packaged_weights()).result()

    def state(self) -> VadState:
        """Return the state before the first sample of a recording."""
        return VadState()

    def probabilities(
        self, states: Sequence[VadState], pcm: Sequence[np.ndarray], *, final: Sequence[bool] | bool = False
    ) -> list[np.ndarray]:
        """Go on in several recordings at once.

        Args:
            states: where each recording is; brought up to date in place.
            pcm: for each recording its next ``(samples,)`` float32 at 16 kHz, any number of them, also none.
            final: whether this is the end of the recording, for all or for each: then a last partial frame is filled
                with zeros.

        Returns:
            For each recording the ``(frames,)`` float32 probabilities of the frames that have become complete.

        Raises:
            ValueError: the lengths of the lists differ, or a recording had already ended.
        """
        ends = [final] * len(states) if isinstance(final, bool) else final
        return self._workers.submit(self._probabilities, states, pcm, ends).result()

    @torch.inference_mode()
    def _probabilities(
        self, states: Sequence[VadState], pcm: Sequence[np.ndarray], ends: Sequence[bool]
    ) -> list[np.ndarray]:
        frames = [_frames(*arguments) for arguments in zip(states, pcm, ends, strict=True)]
        results = [np.empty(len(of_one), np.float32) for of_one in frames]

        # Recordings are cut at common places, so that every stretch is a full rectangle of frames × recordings:
        # nothing is padded, and a recording leaves the batch exactly where it ends.
        span = max(32, FRAMES_AT_ONCE // max(1, len(states)))
        lengths = {len(of_one) for of_one in frames}
        cuts = sorted(lengths | set(range(0, max(lengths, default=0), span)) | {0})
        for begin, end in pairwise(cuts):
            active = [i for i, of_one in enumerate(frames) if len(of_one) >= end]
            values, hidden, cell = self.network(
                torch.stack([frames[i][begin:end] for i in active], dim=1),
                torch.stack([states[i].hidden for i in active]),
                torch.stack([states[i].cell for i in active]),
            )
            for column, i in enumerate(active):
                results[i][begin:end] = values[:, column].numpy()
                states[i].hidden, states[i].cell = hidden[column], cell[column]
        return results


def _single_core_workers(count: int) -> ThreadPoolExecutor:
    """Threads in which PyTorch uses one core each.

    The work of one call is too fine to be shared out: beside a busy model, several cores mostly wait for one another
    (measured: four times the processor time). PyTorch's number of threads belongs to the thread that sets it, but is
    also what threads begun later start from; so all workers begin here, and then the old number is set again.
    """

    def begin() -> None:
        torch.get_num_threads()  # makes PyTorch set up this thread now, not after the next line
        torch.set_num_threads(1)

    inherited = torch.get_num_threads()
    workers = ThreadPoolExecutor(count, thread_name_prefix="vad", initializer=begin)
    together = Barrier(count)
    for started in [workers.submit(together.wait) for _ in range(count)]:
        started.result()
    torch.set_num_threads(inherited)
    return workers


def _frames(state: VadState, pcm: np.ndarray, final: bool) -> Tensor:
    """Put ``pcm`` behind the state's tail, take the complete frames ``(frames, 576)`` off and keep the rest."""
    if state.finished:
        raise ValueError("this recording has ended; a new one needs a new state")
    signal = np.concatenate([state.tail, pcm.astype(np.float32, copy=False)])
    partial = (len(signal) - CONTEXT) % FRAME
    if final and partial:
        signal = np.pad(signal, (0, FRAME - partial))
    count = (len(signal) - CONTEXT) // FRAME
    state.tail = signal[count * FRAME :].copy()
    state.finished = final
    if count == 0:
        return torch.empty(0, CONTEXT + FRAME)
    return torch.from_numpy(signal).unfold(0, CONTEXT + FRAME, FRAME)


@dataclass(frozen=True, kw_only=True, slots=True)
class VadOptions:
    """What counts as speech. Defaults suit transcription, where a missed word is worse than a little noise."""

    threshold: float = 0.5
    """A frame at or above this probability begins speech."""

    neg_threshold: float | None = None
    """Only frames below this end speech. None: 0.15 below the threshold, at least 0.01."""

    min_speech: float = 0.0
    """Seconds; speech that is not longer is dropped."""

    min_silence: float = 0.03
    """Seconds of silence that end a region. Short, because every pause is a place where windows may be parted;
    regions whose padding meets still lose no sample between them."""

    pad: float = 0.5
    """Seconds kept before and after speech, at most up to the middle of the pause."""

    max_speech: float = 29.0
    """Seconds; a region, padding included, that would become longer is cut at its best place."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise UsageError(f"The speech threshold is {self.threshold}; give a probability above 0 and at most 1.")
        if self.neg_threshold is not None and not 0 < self.neg_threshold <= self.threshold:
            raise UsageError(
                f"The silence threshold is {self.neg_threshold}; give one above 0, at most the speech threshold "
                f"({self.threshold})."
            )
        if min(self.min_speech, self.min_silence, self.pad) < 0:
            raise UsageError("Shortest speech, shortest silence and padding must be 0 or more seconds.")
        # The place for a cut is sought in the last third of a region, before the silence it may be in just now.
        least = 3 * (self.min_silence + self.min_speech + 2 * self.pad) + 1
        if self.max_speech < least:
            raise UsageError(
                f"The longest speech region is {self.max_speech} s; with these pauses and padding give at least "
                f"{least:g} s."
            )

    @property
    def silence_threshold(self) -> float:
        """The value that ``neg_threshold`` stands for."""
        return max(self.threshold - 0.15, 0.01) if self.neg_threshold is None else self.neg_threshold


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch with speech, padding included."""

    start: int
    """First sample in the recording."""

    end: int
    """Sample after the last."""

    pause: int = 0
    """Samples of silence before the speech, padding included: how good a place its beginning is to part windows."""

    peak: float = field(default=1.0, compare=False)
    """The highest speech probability of a frame in it: noise that is taken for speech barely passes the threshold."""


@dataclass(slots=True)
class _Speech:
    """Speech that is going on or whose end is not padded yet. Samples of the recording."""

    first: int
    """Where the speech begins, a multiple of a frame."""

    start: int
    """Where its region begins, padding included."""

    pause: int
    continued: bool = False
    """It was cut off the speech before, so it is kept however short it is."""

    probabilities: list[float] = field(default_factory=list)
    """From ``first`` on."""

    silence: int | None = None
    """First sample of the silence that may turn out to be its end."""


class SpeechSegmenter:
    """Turns the frame probabilities of one recording into regions of speech, as they come.

    The hysteresis is that of Silero's ``get_speech_timestamps``: same regions, but for those that become too long.
    These are cut in the last third, in the middle of the longest dip below the silence threshold, without one at the
    least probable frame; the halves abut. So every region is settled soon after it ended, at the latest when one
    cannot become longer.
    """

    def __init__(self, options: VadOptions | None = None) -> None:
        self.options = options or VadOptions()
        self._silence_threshold = self.options.silence_threshold
        self._min_speech = round(self.options.min_speech * SAMPLE_RATE)
        self._min_silence = round(self.options.min_silence * SAMPLE_RATE)
        self._pad = round(self.options.pad * SAMPLE_RATE)
        self._max_speech = round(self.options.max_speech * SAMPLE_RATE)
        self._samples = 0  # seen so far, whole frames
        self._settled = 0  # end of the last region given out
        self._speech_end = 0  # end of the last speech, without padding
        self._current: _Speech | None = None
        self._ended: _Speech | None = None  # over since _speech_end, waiting to learn how far it can be padded
        self._regions: list[Region] = []

    @property
    def position(self) -> int:
        """No later region begins before this sample."""
        if self._ended is not None:
            return self._ended.start
        if self._current is not None:
            return self._current.start
        return max(self._settled, self._samples - self._pad, 0)

    def feed(self, probabilities: np.ndarray, *, final: bool = False, samples: int | None = None) -> list[Region]:
        """Take the next frames.

        Args:
            probabilities: ``(frames,)``.
            final: the recording ends here.
            samples: with ``final``, the length of the recording, which may end within the last frame; regions are
                clipped to it.

        Returns:
            The regions that are settled now, in order, without overlap.
        """
        for probability in probabilities.tolist():
            self._step(probability)
        if final:
            self._finish(self._samples if samples is None else samples)
        regions, self._regions = self._regions, []
        return regions

    def _step(self, probability: float) -> None:
        """Take one frame."""
        frame = self._samples
        self._samples += FRAME
        speech = self._current
        if speech is None:
            if probability >= self.options.threshold:
                self._current = self._begin(frame, probability)
            elif self._samples - self._speech_end >= 2 * self._pad:
                self._settle(self._speech_end + self._pad)
            return
        speech.probabilities.append(probability)
        if probability >= self.options.threshold:
            speech.silence = None
            if frame - speech.first > self._min_speech:  # it stays, whatever comes
                self._settle(min(self._speech_end + self._pad, speech.start))
        elif probability < self._silence_threshold:
            if speech.silence is None:
                speech.silence = frame
            if frame - speech.silence >= self._min_silence:
                self._end(speech.silence)
                return
        if self._samples + self._pad - speech.start > self._max_speech:
            self._cut()

    def _begin(self, first: int, probability: float) -> _Speech:
        pause = first - self._speech_end
        pad = self._pad if self._ended is None else min(self._pad, pause // 2)
        return _Speech(first, max(0, first - pad), pause, probabilities=[probability])

    def _end(self, end: int) -> None:
        """The current speech ended at this sample: keep it if it is long enough."""
        speech, self._current = self._current, None
        assert speech is not None
        if end - speech.first > self._min_speech or speech.continued:
            # The speech before is padded up to where this one's padding begins.
            self._settle(min(self._speech_end + self._pad, speech.start))
            self._ended, self._speech_end = speech, end

    def _settle(self, end: int) -> None:
        """Give out the speech that has ended, as a region up to this sample."""
        if self._ended is not None:
            peak = max(self._ended.probabilities, default=1.0)
            self._regions.append(Region(self._ended.start, end, self._ended.pause, peak))
            self._ended, self._settled = None, end

    def _cut(self) -> None:
        """Part the current speech, which has become too long, at its best place."""
        speech = self._current
        assert speech is not None
        stop = len(speech.probabilities) if speech.silence is None else (speech.silence - speech.first) // FRAME
        begin = len(speech.probabilities) * 2 // 3
        place, dip = _best_cut(np.array(speech.probabilities[begin:stop]), self._silence_threshold)
        cut = speech.first + (begin + place) * FRAME
        self._end(cut)
        self._settle(cut)
        rest = speech.probabilities[begin + place :]
        self._current = _Speech(cut, cut, dip * FRAME, True, rest, speech.silence)

    def _finish(self, samples: int) -> None:
        """The recording has this many samples: settle everything."""
        if self._current is not None:
            self._end(samples)
        self._settle(self._speech_end + self._pad)
        self._regions = [Region(r.start, min(r.end, samples), r.pause, r.peak) for r in self._regions]
        self._settled = samples


def _best_cut(probabilities: np.ndarray, silence_threshold: float) -> tuple[int, int]:
    """Index of the frame to cut before, and the number of frames of the dip it is in the middle of.

    That is the longest run below the threshold, the last of equals; without one the least probable frame.
    """
    below = np.concatenate([[False], probabilities < silence_threshold, [False]])
    edges = np.flatnonzero(below[1:] != below[:-1])
    starts, ends = edges[::2], edges[1::2]
    if len(starts) == 0:
        return int(np.argmin(probabilities)), 0
    longest = len(starts) - 1 - int(np.argmax((ends - starts)[::-1]))
    return int(starts[longest] + ends[longest]) // 2, int(ends[longest] - starts[longest])


def speech_regions(probabilities: np.ndarray, samples: int, options: VadOptions | None = None) -> list[Region]:
    """Find the regions of speech of a whole recording.

    Args:
        probabilities: ``(frames,)``, of every frame.
        samples: length of the recording.
        options: what counts as speech.
    """
    return SpeechSegmenter(options).feed(probabilities, final=True, samples=samples)
