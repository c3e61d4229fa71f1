"""Keep the processor's threads for those who compute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_own_thread(function: Callable[[], T]) -> T:
    """Call ``function`` in a thread that ends with it, and return or raise what it does.

    OpenMP keeps helpers for each thread that ever computed in parallel, as long as that thread lives. Once there are
    more of them than cores, libgomp's no longer wait for each other awake: a step of Whisper base's decoder in one
    thread takes a quarter longer where another thread has loaded the model and is still there.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # whatever it is, it belongs to the caller
            result.set_exception(error)

    thread = threading.Thread(target=run, name="stapes-load", daemon=True)
    thread.start()
    found = result.result()
    thread.join()
    return found
