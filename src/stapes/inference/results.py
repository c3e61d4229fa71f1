"""The transcript of a job that is done: all its channels on the recording's own clock."""

from __future__ import annotations

import time

from stapes.inference.ingest import Job, name_of
from stapes.transcript import Segment, Transcript


def make_transcript(job: Job, model: str) -> Transcript:
    """Put the segments of all channels together; a job that failed halfway keeps what it had, with a warning."""
    recordings = job.channels
    segments: list[Segment] = []
    for number, recording in enumerate(recordings, 1):
        for segment in recording.sorted_segments():
            segment.speaker = f"Speaker {number}" if len(recordings) > 1 else None
            segments.append(segment)
    if len(recordings) > 1:
        segments.sort(key=lambda segment: (segment.start, segment.end))
    for index, segment in enumerate(segments):
        shift(segment, job.offset)
        segment.id = index
    first = max(recordings, key=lambda recording: len(recording.segments), default=None)
    warnings = list(job.warnings)
    if job.error is not None and segments:
        warnings.append(job.error)
    silent = [recording.skipped() for recording in recordings]
    return Transcript(
        text="".join(segment.text for segment in segments).strip() if len(recordings) < 2 else _dialogue(segments),
        language=first.language if first else None,
        language_probability=first.language_probability if first else None,
        duration=job.duration + job.offset if recordings else 0.0,
        segments=segments,
        error=job.error if not segments else None,
        path=name_of(job.source),  # as given; job.name is the printable form that messages use
        model=model,
        timings={"total": time.perf_counter() - job.started},
        skipped=[(a + job.offset, b + job.offset) for a, b in _in_all(silent)],
        warnings=warnings,
        damaged=job.damaged or (job.error is not None and bool(segments)),
        drafted=sum(recording.drafted for recording in recordings),
        agreed=sum(recording.agreed for recording in recordings),
    )


def _in_all(channels: list[list[tuple[float, float]]]) -> list[tuple[float, float]]:
    """What the sorted stretches of all channels have in common."""
    common = channels[0] if channels else []
    for stretches in channels[1:]:
        pairs = [(max(a, c), min(b, d)) for a, b in common for c, d in stretches]
        common = [(start, end) for start, end in pairs if start < end]
    return common


def shift(segment: Segment, seconds: float) -> None:
    """Move a segment and its words to later."""
    segment.seek += round(seconds * 100)
    segment.start += seconds
    segment.end += seconds
    for word in segment.words or []:
        word.start += seconds
        word.end += seconds


def _dialogue(segments: list[Segment]) -> str:
    """The text of speakers in turn, a line each."""
    lines: list[str] = []
    for before, segment in zip([None, *segments], segments, strict=False):
        if before is not None and before.speaker == segment.speaker:
            lines[-1] += segment.text
        else:
            lines.append(f"{segment.speaker}:{segment.text}")
    return "\n".join(line.strip() for line in lines)
