#!/usr/bin/env bash
# On a CPU. Parts, each a command that stands beside its figures in results/:
#   serve   the machine must be quiet: dynamic beside fixed:8 and single, base, 16 clients           ~10 min
#   beside  quiet: clips of 3 s beside ten minutes, base                                              ~3 min
#   stream  quiet: live streams of base: 1, 4, and on to as many as this CPU holds                    ~8 min
#   wer     4 streams of tiny.en that together say all of LibriSpeech test, and the same as files    ~12 min, quiet
#   exact   any time, busy or not: the test's figures over all of LibriSpeech test, engine never late ~40-90 min
# A part that runs into its limit keeps the cases that were done.
set -u
cd "$(dirname "$0")/../../../.."
OUT=${OUT:-results} PY=${PY:-python3} WORK=${WORK:-/tmp/stapes/serve}
CORPUS=${CORPUS:-librispeech:test} MODEL=${MODEL:-base} SMALL=${SMALL:-tiny.en}
mkdir -p "$OUT" "$WORK"; unset OMP_NUM_THREADS
say() { echo "$(date +%T) $*"; }
run() { # NAME LIMIT COMMAND…
    local name=$1 limit=$2 began=$SECONDS; shift 2
    say "$name: $*"
    timeout -s TERM -k 20 "$limit" "$@" >"$WORK/$name.log" 2>&1; local rc=$?
    sed "s/^/    /" "$WORK/$name.log"; say "DONE serve $name: rc $rc after $((SECONDS - began)) s"
}
serve() {
    run serve 2400 "$PY" -m stapes bench serve --model "$MODEL" --device cpu --batching dynamic,fixed:8,single --rates none \
        --requests "${REQUESTS:-32}" --rounds "${ROUNDS:-3}" --corpus "$CORPUS" -o "$OUT"
}
beside() {
    run beside 900 "$PY" -m stapes bench serve --model "$MODEL" --device cpu --clients none --rates none --rounds 1 \
        --beside "${BESIDE:-40}" --long-seconds "${LONG:-600}" --corpus "$CORPUS" -o "$OUT"
}
stream() {
    run stream 1800 "$PY" -m stapes bench stream --model "$MODEL" --device cpu --streams 1,4 --search --seconds "${EACH:-60}" \
        --corpus "$CORPUS" -o "$OUT"
}
wer() { # 4 × 560 s is all 214 recordings once and a few twice
    run wer 1800 "$PY" -m stapes bench stream --model "$SMALL" --device cpu --streams 4 --seconds "${WHOLE:-545}" \
        --corpus "$CORPUS" -o "$OUT"
}
exact() {
    STAPES_LIVE_CLIPS=${CLIPS:-214} run exact 7200 "$PY" -m pytest -s --no-header --accuracy \
        tests/accuracy/test_streaming_accuracy.py
}
for part in ${*:-serve beside stream wer}; do "$part"; done
