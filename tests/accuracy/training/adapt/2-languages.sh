#!/usr/bin/env bash
# Line 2, all of it: folds, settings on three other languages that base handles as badly (one with Latin letters, one with
# Cyrillic, one with a script of its own, as the tested ones have), then those. A training is 60–200 steps of 8 windows, 8
# to 10 steps a second beside others, and its test of 6 clips 5 s. One process a setting, seven at once; then one a
# language and seed, six at once (SEEDS=0: three). Beside others about 15 s for the folds, 60–95 s for `tune`, 90–130 s for
# `run`; TUNE_SECONDS and RUN_SECONDS end what takes longer (the same command goes on).
source "$(dirname "$0")/common.sh"
LANGS=${LANGS:-"ka mn br"}; TUNE=${TUNE:-"mt tt pa-IN"}; SEEDS=${SEEDS:-"0 1"}
TUNE_SECONDS=${TUNE_SECONDS:-80}; RUN_SECONDS=${RUN_SECONDS:-130}
SETTINGS_TRIED=${SETTINGS_TRIED:-"base qv-1e-3-100 all-2e-4-120 all-2e-4-200 all-3e-4-120 all-3e-4-200 all-5e-4-60"}
export W OUT_DIR=$OUT MODEL OMP_NUM_THREADS=1
mkdir -p "$W/languages" "$OUT/languages"
log=$W/languages
program=$HERE/2-languages.py
$PY "$program" prepare "$DATA/commonvoice/manifest.jsonl" $LANGS $TUNE >> "$log/prepare.log" 2>&1; tail -1 "$log/prepare.log"
if [ ! -f "$log/settings.json" ]; then
    for name in $SETTINGS_TRIED; do
        MAX_SECONDS=$TUNE_SECONDS limited $((TUNE_SECONDS + 30)) "$log/tune-$name.log" $PY "$program" tune "$name" $TUNE &
    done
    wait
    $PY "$program" settle $TUNE
fi
cat "$log/settings.json" 2>/dev/null; echo
for lang in $LANGS; do
    first=1
    for seed in $SEEDS; do
        BESIDE=$((1 - first)) MAX_SECONDS=$RUN_SECONDS \
            limited $((RUN_SECONDS + 40)) "$log/run-$lang-$seed.log" $PY "$program" run "$lang" "$seed" &
        first=0
    done
done
wait
$PY "$program" summary $LANGS | tail -2
cp -f "$log"/*.log "$OUT/languages/" 2>/dev/null
echo "DONE adapt 2-languages"
