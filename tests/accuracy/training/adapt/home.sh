#!/usr/bin/env bash
# At home, with what was brought: home.sh OUT (/tmp/out/adapt as it came) [RESULTS folder]. Comparisons and records.
# Two records: line 4 has another "before" (the same student without a teacher) than lines 1 to 3.
set -uo pipefail
OUT=$(cd "$1" && pwd); RECORD=${2:-$OUT/record}; STAPES=${STAPES:-"python3 -m stapes"}
cd "$OUT"; mkdir -p compared "$RECORD"
there() { for each in "$@"; do [ -f "$each/result.json" ] && echo "$each"; done; }
options() { local name=$1; shift; for each in $(there "$@"); do echo "$name $each"; done; }
compare() { local name=$1; shift; local found; found=$(there "$@"); [ "$(echo $found | wc -w)" -ge 2 ] &&
    $STAPES compare $found --markdown "compared/$name.md" -o "compared/$name.html" --max-audio 0 --allow-different; }
compare so results/base-so results/full-so results/lora-so
compare so-forgotten results/base-ls results/full-ls results/lora-ls
compare student results/teacher-ls results/student-ls
compare ctc-ls results/alone-0-ls results/taught-0-ls
compare ctc-so results/alone-0-so results/taught-0-so
for lang in $(ls languages/results 2>/dev/null | sed -n 's/^base-//p'); do
    compare "lang-$lang" "languages/results/base-$lang" languages/results/lora-"$lang"-0-*
done
# Only seeds of which every fold was run.
complete=""
for seed in $(ls languages/results 2>/dev/null | sed -n 's/^lora-\(.*\)-[0-9]*$/\1/p' | sort -u); do
    folds=$(there languages/results/lora-"$seed"-*); [ "$(echo $folds | wc -w)" = "${FOLDS:-5}" ] && complete="$complete $folds"
done
rm -f "$RECORD"/*-adapted-*.json
$STAPES bench adapted $(there results/full-so results/lora-so results/student-ls) $complete \
    $(options --kept results/full-ls results/lora-ls languages/results/kept-*) $(options --drafted results/draft1-ls) \
    $(options --before results/base-so results/base-ls results/teacher-ls results/teacher1-ls languages/results/base-*) -o "$RECORD"
taught=$(there results/taught-*-ls results/taught-*-so)
[ -n "$taught" ] && $STAPES bench adapted $taught $(options --before results/alone-*-ls results/alone-*-so) -o "$RECORD"
echo "now: cp $RECORD/*-adapted-*.json results/ && stapes bench results"
