#!/usr/bin/env bash
# On a GPU: `bench serve` and `bench stream`, turbo shape, random weights. One after the
# other, never at once: both measure the whole machine. Parts (seconds with the Triton cache warm; cold, some 30 more):
#   serve   ~60   dynamic, fixed:8, single on one engine; clips of 3 s beside ten minutes
#   stream  ~45   200 speakers at once
#   more    ~80   280 and 360, if 200 keep to 0.5 s
#   wer    ~110   base with its real weights: WER live beside files, all of LibriSpeech test, 40 speakers
# `gpu.sh` alone does serve and stream. A part that runs into its limit keeps the cases that were done.
#   DEVICE=cpu SIZE=tiny PRECISION=fp32 TRY=1 gpu.sh: the same commands, small, here.
set -u
OUT=${OUT:-/tmp/out/serve} WORK=${WORK:-/tmp/stapes/serve} D=${D:-/tmp/d}
PY=${PY:-python3} DEVICE=${DEVICE:-cuda} SIZE=${SIZE:-turbo} PRECISION=${PRECISION:-bf16}
mkdir -p "$OUT" "$WORK"
say() { echo "$(date +%T) $*"; }

CORPUS=$D/ls/test.jsonl.gz SHORT=$WORK/short.jsonl
# Speakers of `stream` say whole recordings: short ones, so that all of them speak about as long.
[ -s "$SHORT" ] || "$PY" - "$CORPUS" "$SHORT" <<'P'
import gzip, json, sys
with gzip.open(sys.argv[1], "rt") as cuts, open(sys.argv[2], "w") as out:
    for cut in map(json.loads, cuts):
        if 3.0 <= cut["duration"] <= 8.0:
            row = {"audio": cut["recording"]["sources"][0]["source"], "text": cut["supervisions"][0]["text"]}
            out.write(json.dumps(row | {"duration": cut["duration"]}) + "\n")
P

if [ -n "${TRY:-}" ]; then
    CLIENTS=4 REQUESTS=8 ROUNDS=1 BATCH=8 BESIDE=2 LONG=45 DECODERS=1 STREAMS=1,2 SECONDS_EACH=4 MORE=2
else
    CLIENTS=${CLIENTS:-96} REQUESTS=${REQUESTS:-240} ROUNDS=${ROUNDS:-1} BATCH=${BATCH:-64} BESIDE=${BESIDE:-24}
    LONG=600 DECODERS=8 STREAMS=${STREAMS:-200} SECONDS_EACH=${SECONDS_EACH:-12} MORE=${MORE:-280,360}
fi
COMMON=(--random-weights "$SIZE" --device "$DEVICE" --precision "$PRECISION" -o "$OUT")

run() { # NAME LIMIT COMMAND…; at the limit it is told to end, and writes what is whole
    local name=$1 limit=$2 began=$SECONDS; shift 2
    say "$name: $*"
    timeout -s TERM -k 20 "$limit" "$PY" -m stapes "$@" >"$WORK/$name.log" 2>&1; local rc=$?
    sed "s/^/    /" "$WORK/$name.log"; cp "$WORK/$name.log" "$OUT/"
    say "DONE serve $name: rc $rc after $((SECONDS - began)) s"
}
serve() { # dynamic, fixed:8 and one by one on one engine, in turn; then clips of 3 s beside ten minutes
    run serve "${SERVE_SECONDS:-170}" bench serve "${COMMON[@]}" --corpus "$CORPUS" --batching dynamic,fixed:8,single \
        --clients "$CLIENTS" --rates none --requests "$REQUESTS" --rounds "$ROUNDS" --max-batch "$BATCH" \
        --decoders "$DECODERS" --beside "$BESIDE" --long-seconds "$LONG"
}
stream() { # speakers at once, whose networks work for real and say what the recordings' text is
    run stream "${STREAM_SECONDS:-130}" bench stream "${COMMON[@]}" --corpus "$SHORT" --streams "$STREAMS" \
        --seconds "$SECONDS_EACH"
}
more() { # where `stream` kept to its target: how many more
    run more "${MORE_SECONDS:-150}" bench stream "${COMMON[@]}" --corpus "$SHORT" --streams "$MORE" \
        --seconds "$SECONDS_EACH"
}
wer() { # real weights: all of LibriSpeech test spoken live by 40 at once, and the same as files; ~110 s
    run wer 170 bench stream --model "${MODEL:-base}" --device "$DEVICE" -o "$OUT" --offline --corpus "$CORPUS" \
        --streams "${WER_STREAMS:-40}" --seconds "${WER_EACH:-60}"
}
for part in ${*:-serve stream}; do "$part"; done
