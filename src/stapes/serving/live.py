"""Calls of the kind "live", in the engine process: sound as it comes, events as they happen."""

from __future__ import annotations

from typing import Any

from stapes.audio.pcm import PcmDecoder
from stapes.inference.live_events import Event, event_to_dict
from stapes.inference.turns import TurnOptions
from stapes.options import TranscribeOptions
from stapes.recognizer import Recognizer
from stapes.serving.engine_worker import WorkerCall


def run(call: WorkerCall, recognizer: Recognizer, message: dict[str, Any]) -> None:
    """Listen to one session.

    message: ``options`` and ``turns`` by name; ``format`` and ``rate`` of the sound. Takes ``audio`` (bytes),
    ``commit``, ``clear`` and ``turns``. Sends ``event`` (`event_to_dict`), and ``heard`` with the bytes that were
    taken so far, about once a second: whoever sends faster than they are heard is to wait. Raises StapesError.
    """

    def tell(event: Event) -> None:
        call.send({"type": "event", "event": event_to_dict(event)})

    decoder = PcmDecoder(message["format"], message["rate"])
    session = recognizer.stream(
        TranscribeOptions(**message["options"]), turns=TurnOptions(**message["turns"]), on_event=tell
    )
    heard = told = 0
    with call.cancellation.calling(session.close), session:
        while (received := call.receive()) is not None:
            what, data = received
            match what["type"]:
                case "audio":
                    session.feed(decoder.feed(data))
                    heard += len(data)
                    if heard - told >= message["rate"]:
                        told = heard
                        call.send({"type": "heard", "bytes": heard})
                case "commit":
                    session.commit()
                case "clear":
                    session.clear()
                case "turns":
                    session.configure(TurnOptions(**what["turns"]))
        session.feed(decoder.finish())
        session.finish()
