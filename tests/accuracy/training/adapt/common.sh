# Sourced by all parts. Each path can be set from outside for a dry run.
set -uo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
D=${D:-/tmp/d}; DATA=${DATA:-/tmp/data}; W=${W:-/tmp/stapes/adapt}; OUT=${OUT_DIR:-/tmp/out/adapt}
MODEL=${MODEL:-base}; STAPES=${STAPES:-"python3 -m stapes"}; PY=${PY:-python3}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
mkdir -p "$W" "$W/results" "$OUT"
say() { echo "$(date +%H:%M:%S) $*"; }
# limited SECONDS LOG command…: a hard end, output into a file, never an end of the script
limited() {
    local seconds=$1 log=$2; shift 2
    local begun=$SECONDS
    say "begin: $*"
    timeout -k 15 "$seconds" "$@" >> "$log" 2>&1; local rc=$?
    say "rc $rc after $((SECONDS - begun)) s: $(tail -1 "$log" | cut -c1-150)"
    return $rc
}
# evaluate MODEL MANIFEST NAME [more]: default options; nothing where its result is there already
evaluate() {
    local model=$1 manifest=$2 name=$3; shift 3
    if [ -f "$W/results/$name/result.json" ]; then say "$name is there"; return 0; fi
    limited "${EVALUATE_SECONDS:-240}" "$W/results/$name.log" $STAPES evaluate "$model" "$manifest" -o "$W/results/$name" \
        ${EVALUATE_MORE:-} "$@"
}
# train NAME RECIPE …: goes on where it stopped; nothing where it has ended
train() {
    local name=$1; shift
    if [ -f "$W/$name/metrics.jsonl" ] && grep -q '"kind": "result"' "$W/$name/metrics.jsonl"; then say "$name is there"; return 0; fi
    mkdir -p "$W/$name"
    local resume=(); [ -d "$W/$name/checkpoints" ] && resume=(--resume)
    echo "stapes train $* -o $W/$name" > "$W/$name.command"
    limited "${TRAIN_SECONDS:-400}" "$W/$name.log" $STAPES train "$@" -o "$W/$name" "${resume[@]}"
    local rc=$?
    home_run "$name"
    return $rc
}
home_run() {  # the log of a training, brought home
    mkdir -p "$OUT/runs/$1"
    cp -f "$W/$1/metrics.jsonl" "$OUT/runs/$1/" 2>/dev/null
    cp -f "$W/$1.command" "$W/$1.log" "$OUT/runs/" 2>/dev/null
    return 0
}
home_results() {  # results/NAME/{result.json,utterances.jsonl}: what `stapes compare` reads
    mkdir -p "$OUT/results" && cp -rf "$W"/results/. "$OUT/results/" 2>/dev/null
    return 0
}
