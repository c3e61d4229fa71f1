#!/usr/bin/env bash
# Line 2, all of it: folds, settings on another language, then the three languages at once.
# One process a language; each fold is 60–120 steps of 8 windows and a test of 6 clips. Alone about 70 s for `tune` and
# 70 s for `run` (three processes at once); beside others two to three times that.
source "$(dirname "$0")/common.sh"
LANGS=${LANGS:-"ka mn br"}; TUNE=${TUNE:-mt}; SEEDS=${SEEDS:-"0 1"}
export W OUT_DIR=$OUT MODEL MAX_SECONDS=${MAX_SECONDS:-240} OMP_NUM_THREADS=1
mkdir -p "$W/languages"
log=$W/languages
$PY "$HERE/2-languages.py" prepare "$DATA/commonvoice/manifest.jsonl" $LANGS $TUNE >> "$log/prepare.log" 2>&1; tail -1 "$log/prepare.log"
[ -f "$log/settings.json" ] || limited "$MAX_SECONDS" "$log/tune.log" $PY "$HERE/2-languages.py" tune $TUNE
cat "$log/settings.json" 2>/dev/null
for lang in $LANGS; do limited $((MAX_SECONDS + 60)) "$log/run-$lang.log" $PY "$HERE/2-languages.py" run "$lang" $SEEDS & done
wait
$PY "$HERE/2-languages.py" summary $LANGS | tail -2
cp -f "$log"/*.log "$OUT/languages/" 2>/dev/null
echo "DONE adapt 2-languages"
