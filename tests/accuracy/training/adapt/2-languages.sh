#!/usr/bin/env bash
# Line 2, all of it: folds, settings on another language, then the three languages. Each fold is 60–120 steps of 8
# windows and a test of 6 clips, 8–12 s with its start. One process a setting, then one a language and seed: six at once
# (SEEDS=0: three). Alone about 10 s for the folds, 30 s for `tune`, 70 s for `run`; beside others twice that, and
# TUNE_SECONDS and RUN_SECONDS end what takes longer (the same command goes on).
source "$(dirname "$0")/common.sh"
LANGS=${LANGS:-"ka mn br"}; TUNE=${TUNE:-mt}; SEEDS=${SEEDS:-"0 1"}
TUNE_SECONDS=${TUNE_SECONDS:-80}; RUN_SECONDS=${RUN_SECONDS:-140}
export W OUT_DIR=$OUT MODEL OMP_NUM_THREADS=1
mkdir -p "$W/languages" "$OUT/languages"
log=$W/languages
program=$HERE/2-languages.py
$PY "$program" prepare "$DATA/commonvoice/manifest.jsonl" $LANGS $TUNE >> "$log/prepare.log" 2>&1; tail -1 "$log/prepare.log"
if [ ! -f "$log/settings.json" ]; then
    for name in ${SETTINGS_TRIED:-qv-1e-3-60 all-5e-4-60 all-1e-3-60 all-1e-3-120}; do
        MAX_SECONDS=$TUNE_SECONDS limited $((TUNE_SECONDS + 30)) "$log/tune-$name.log" $PY "$program" tune "$TUNE" "$name" &
    done
    wait
    $PY "$program" settle "$TUNE"
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
