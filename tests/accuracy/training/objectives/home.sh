#!/usr/bin/env bash
# At home, with what train.sh brought: home.sh OUT (the folder with runs/ and results/). Tables, tests, the record.
set -euo pipefail
OUT=$(cd "$1" && pwd); PYTHON=${PYTHON:-python3}; HERE=$(cd "$(dirname "$0")" && pwd); STAPES="$PYTHON -m stapes"
mkdir -p "$OUT/judged"
for tar in "$OUT"/results/*.tar.gz; do tar xzf "$tar" -C "$OUT/judged"; done
cd "$OUT/judged"
for corpus in ls so; do
    $STAPES compare $corpus/base-ctc-* $corpus/base-attention-* $corpus/base-hybrid-* --markdown "$OUT/compare-$corpus-base.md"
    $STAPES compare $corpus/base-ctc-* $corpus/base-attention-* $corpus/base-hybrid-* --json > "$OUT/compare-$corpus-base.json"
    $STAPES compare $corpus/scratch-* --markdown "$OUT/compare-$corpus-scratch.md"
done
$PYTHON "$HERE/pooled.py" "$OUT/judged" | tee "$OUT/pooled.txt"
rm -rf "$OUT/record"
$STAPES bench objectives ls/base-* ls/scratch-* so/base-* so/scratch-* -o "$OUT/record"
echo "now: cp $OUT/record/*.json results/ && make results (stapes bench results)"
