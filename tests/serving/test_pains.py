"""What users of other servers suffered from, and the tests here that name it: each has one, or a reason why not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from shared_data import DATA

TESTS = Path(__file__).parents[1]

HOSTILE, PROCESS, REALTIME = "serving/test_hostile.py", "serving/test_engine_process.py", "serving/test_realtime.py"
SDK, STREAMING, PARTS = "serving/test_openai_sdk.py", "inference/test_streaming.py", "inference/test_scheduler_parts.py"
LEAVES = "test_a_client_that_leaves_cancels_its_work"
KILLED = "test_a_killed_engine_comes_back_and_requests_are_run_again"
THREE_SECONDS = "test_three_seconds_do_not_wait_for_ten_minutes"
BOMBS = "test_bombs_are_413_by_decoded_seconds"
CONTAINERS = "test_containers_are_known_by_content"
SIZE_ZERO = "test_sizes_of_zero_in_a_header_are_no_silence"
DEAF = "test_a_client_that_reads_nothing_and_idle_ones_hurt_nobody"
MADE_UP = "test_what_makes_no_sense_is_400_and_names_the_field"
LAST_WORD = "test_no_last_word_is_lost_where_the_sound_ends_in_it"
TEN_HOURS = "test_ten_hours_take_no_more_memory_than_one"
SHARE = "test_many_at_once_share_batches"
UNKNOWN_MODEL = "test_an_unknown_model_is_404_and_nothing_is_fetched"

# Number in the collection of reports, project and thread, file and test.
TABLE: list[tuple[int, str, str, str]] = [
    (1, "vLLM PR #44970", HOSTILE, BOMBS),
    (2, "PR #45908", HOSTILE, BOMBS),
    (3, "vLLM #57157", HOSTILE, "test_addresses_are_not_fetched"),
    (4, "whisper-asr-webservice #377", HOSTILE, "test_garbage_is_refused_with_a_sentence"),
    (4, "whisper-asr-webservice #377", HOSTILE, "test_keys_are_checked_before_anything_is_read"),
    (5, "LocalAI #9395", SDK, UNKNOWN_MODEL),
    (5, "vllm-mlx #68", SDK, UNKNOWN_MODEL),
    (6, "whisper.cpp #1803", PROCESS, THREE_SECONDS),
    (6, "whisper.cpp #1803", PARTS, "test_three_seconds_beside_ten_minutes_take_less_than_twice_as_long"),
    (7, "gnome-speech2text #6", PROCESS, "test_an_engine_that_hangs_is_found_out"),
    (8, "open-webui #24169", PROCESS, THREE_SECONDS),
    (9, "vLLM PR #44612", PROCESS, THREE_SECONDS),
    (10, "FunASR #3528", PROCESS, SHARE),
    (11, "sglang-omni #1470", PROCESS, SHARE),
    (11, "sglang-omni #1470", PROCESS, KILLED),
    (10, "#3529", PROCESS, SHARE),
    (12, "faster-whisper #1055", PROCESS, SHARE),
    (12, "#660", PROCESS, SHARE),
    (12, "whisperX #972", PROCESS, SHARE),
    (13, "wenet #2716", REALTIME, "test_there_is_no_work_left_of_clients_that_have_gone"),
    (14, "speaches #129", PROCESS, LEAVES),
    (14, "sglang-omni #2111", PROCESS, LEAVES),
    (14, "oh-my-pi #4097", PROCESS, LEAVES),
    (15, "whisper_streaming #106", PROCESS, LEAVES),
    (15, "whisper_streaming #106", REALTIME, DEAF),
    (16, "TranscriptionSuite #239", REALTIME, "test_a_broken_connection_loses_nothing"),
    (17, "FunASR #3101", "serving/test_patience.py", "test_a_silent_websocket_outlives_the_time_for_a_request"),
    (18, "WhisperLive #267", STREAMING, TEN_HOURS),
    (18, "WhisperLive PR #36", STREAMING, "test_many_sessions_share_batches"),
    (19, "vLLM #18385", HOSTILE, CONTAINERS),
    (19, "speakr #156", HOSTILE, CONTAINERS),
    (19, "Whisper-WebUI #492", HOSTILE, CONTAINERS),
    (19, "#2039", HOSTILE, CONTAINERS),
    (20, "hermes-agent #68719", HOSTILE, CONTAINERS),
    (21, "daymade PR #257", SDK, MADE_UP),
    (22, "minutes #519", HOSTILE, SIZE_ZERO),
    (22, "VoiceInk #393", HOSTILE, SIZE_ZERO),
    (23, "i-dot-ai/minute #91", HOSTILE, "test_a_truncated_recording_says_so"),
    (24, "WhisperLiveKit #372", STREAMING, TEN_HOURS),
    (25, "#195", STREAMING, TEN_HOURS),
    (25, "PR #196", STREAMING, TEN_HOURS),
    (26, "WhisperLive #270", STREAMING, "test_words_come_while_somebody_speaks"),
    (27, "whisper_streaming #102", STREAMING, "test_the_prompt_is_what_was_said_last"),
    (27, "#157", "inference/test_streaming_load.py", "test_a_few_streams_are_heard_as_often_as_may_be"),
    (28, "pipecat #5621", STREAMING, LAST_WORD),
    (28, "teamclu #1470", STREAMING, LAST_WORD),
    (28, "transcribe.cpp #71", STREAMING, LAST_WORD),
    (29, "speaches #58", SDK, "test_verbose_json_without_granularities_has_segments"),
    (29, "speaches #29", SDK, "test_granularities"),
    (30, "meetily #605", STREAMING, "test_text_without_spaces_is_agreed_on_by_characters"),
    (30, "meetily PR #605", "inference/test_agreement.py", "test_committed_words_never_change"),
    (31, "OpenWhispr #2150", SDK, "test_stream_of_a_long_recording_comes_as_it_is_done"),
    (32, "Chatterbox-TTS PR #136", HOSTILE, "test_names_are_for_messages_alone"),
    (32, "#147", HOSTILE, "test_names_are_for_messages_alone"),
]


@pytest.mark.parametrize(("number", "report", "file", "test"), TABLE)
def test_every_pain_has_a_test_that_names_it(number: int, report: str, file: str, test: str) -> None:
    source = (TESTS / file).read_text(encoding="utf-8")
    found = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef) and each.name == test]
    assert len(found) == 1
    assert report in (ast.get_source_segment(source, found[0]) or "")


def test_no_pain_was_forgotten() -> None:
    collection = DATA.parent / "research" / "serving.md"
    if not collection.is_file():
        pytest.skip(f"{collection} is not here")
    section = collection.read_text(encoding="utf-8").split("## 4.")[1].split("## 5.")[0]
    numbers = {int(number) for number in re.findall(r"(?:^|\| )(\d+) [A-Za-z]", section, re.MULTILINE)}
    assert len(numbers) >= 32
    assert numbers <= {number for number, *_ in TABLE}
    named = {thread for _, report, *_ in TABLE for thread in re.findall(r"#\d+", report)}
    assert set(re.findall(r"#\d+", section)) <= named
