"""Options of jobs and of what is made of them; light to import, for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stapes.errors import UsageError


@dataclass(frozen=True, slots=True)
class Part:
    """A driver's share of a plan: the shards whose number leaves ``index`` when divided by ``count``."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < self.count:
            raise UsageError(
                f"--shard-index {self.index} --shard-count {self.count}: parts are counted from 0 to {self.count - 1}"
            )

    @property
    def suffix(self) -> str:
        """What names files of this part."""
        return "" if self.count == 1 else f"-{self.index}-of-{self.count}"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """How the work is shared out, and when it is given up."""

    workers: int | None = None
    """Processes that hold a model. Default: one a GPU, or one a processor socket; with --ray, one a GPU of the cluster,
    or one a node."""

    decoders: int | None = None
    """Processes that decode for each worker. Default: what the processors allow, 1 to 8."""

    shard_hours: float = 1.0
    """Hours of audio in a shard: what is lost at most of each worker's work when it dies."""

    shard_files: int = 5000
    """Most recordings in a shard."""

    shard_index: int = 0
    """Do only this part of --shard-count, counted from 0: one of several machines that share the folder."""

    shard_count: int = 1
    """In how many parts machines share the work."""

    max_errors: float = 0.1
    """Share of recordings that may fail before the job stops and says why."""

    max_seconds: float | None = None
    """Refuse longer recordings, as rows with an error."""

    decode_seconds: float = 120.0
    """End a decoder that gives no sound for so long."""

    add: bool = False
    """Look for recordings that are new in the inputs, or in further ones, and add them."""

    retry_failed: bool = False
    """Try again what failed before."""

    force: bool = False
    """Begin anew where the folder was begun with another model, other options or inputs; what is there is deleted."""

    ray: str | None = None
    """Work on the Ray cluster at this address; auto: the one that this machine is a part of."""

    def __post_init__(self) -> None:
        if not 0.0 < self.shard_hours <= 1000.0:
            raise UsageError(f"--shard-hours is {self.shard_hours}: give hours above 0, such as 1")
        if self.shard_files < 1:
            raise UsageError(f"--shard-files is {self.shard_files}: give 1 or more")
        if self.decoders is not None and self.decoders < 1:
            raise UsageError(f"--decoders is {self.decoders}: give 1 or more")
        if not self.decode_seconds > 0:
            raise UsageError(f"--decode-seconds is {self.decode_seconds}: give seconds above 0")
        if self.max_seconds is not None and not self.max_seconds > 0:
            raise UsageError(f"--max-seconds is {self.max_seconds}: give seconds above 0")
        if not 0.0 <= self.max_errors <= 1.0:
            raise UsageError(f"--max-errors is {self.max_errors}: give a share from 0 to 1, such as 0.05")
        Part(self.shard_index, self.shard_count)

    @property
    def part(self) -> Part:
        """The part that is done here."""
        return Part(self.shard_index, self.shard_count)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelOptions:
    """What is believed."""

    language: str | None = None
    """The language that all of it is to be in. Default: what the manifest says of each recording, else any."""

    second_pass: Path | None = None
    """Another job over the same inputs, by another model or with the language told: both must find one language."""

    min_language_probability: float = 0.7
    """Of the language, where it was detected."""

    max_seconds: float = 30.0
    """Longest utterance."""

    min_seconds: float = 0.5
    """Shortest utterance."""

    max_pause: float = 1.0
    """Segments with more seconds between them are not joined."""

    min_logprob: float = -0.8
    """Mean log-probability of the tokens of each segment, at least."""

    min_word_probability: float = 0.0
    """Mean probability of the words, where the job had --word-timestamps, at least."""

    max_no_speech: float = 0.6
    """No-speech probability of each segment, at most."""

    max_compression_ratio: float = 2.4
    """Of the text of each segment: more means that it repeats itself."""

    max_repeated: int = 1
    """Times that groups of four words (ten characters) may come again in an utterance."""

    min_characters_per_second: float = 1.0
    """Letters and digits: fewer mean that something was left out."""

    max_characters_per_second: float = 30.0
    """More cannot have been said."""

    phrases: Path | None = None
    """A file with a phrase a line that is not believed, beside those that are known."""

    def __post_init__(self) -> None:
        if not 0 < self.min_seconds < self.max_seconds:
            raise UsageError(
                f"--min-seconds {self.min_seconds} and --max-seconds {self.max_seconds}: give 0 < min < max"
            )
        for name in ("min_language_probability", "min_word_probability", "max_no_speech"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}: give a probability")
