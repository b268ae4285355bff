#!/usr/bin/env bash
# Train the tiny pair's drafter on one GPU, from the hidden states of its target's own server. Run in the repository root
# after `. tests/gpu/setup.sh BUNDLE`:
#   bash tests/gpu/train_tiny_drafter.sh TARGET PROMPTS.jsonl[.xz] OUT [EPOCHS [SCRATCH [SERVERS]]]
# OUT gets drafter/, metrics.jsonl and logs; SCRATCH (default: OUT/scratch) the data, about 2 KiB a token, and the run. A
# call that was cut off goes on where it was; one with other EPOCHS trains a new run on the same data.
# Ten SERVERS at once: each is bound by its scheduler's Python. Four fifths of the texts are greedy, as served; greedy
# text of a small model soon loops, so it is short, and the rest is sampled.
set -euo pipefail
target=$(realpath "$1") prompts=$(realpath "$2") epochs=${4:-8}
mkdir -p "$3" && out=$(realpath "$3")
scratch=${5:-$out/scratch} parts=${6:-10}
packages=$(mktemp -d)
trap 'rm -rf "$packages"; kill $(jobs -p) 2>/dev/null || true' EXIT
mkdir "$packages/sglang_dflash"
ln -s "$PWD"/sglang_dflash/* "$packages/sglang_dflash/"
ln -s "$PWD/train" "$packages/sglang_dflash/train"
export PYTHONSAFEPATH=1 PYTHONPATH=$packages:${SITE:?source tests/gpu/setup.sh first} PYTHONUNBUFFERED=1
export OMP_NUM_THREADS=2
train() { python3 -m sglang_dflash.train "$@"; }
say() { echo "$(($(date +%s) - began)) s: $*"; }
began=$(date +%s)
data=()
if [ ! -e "$scratch/prepared" ]; then
    mkdir -p "$scratch"
    case $prompts in *.xz) xz -dc "$prompts" ;; *) cat "$prompts" ;; esac |
        split -n "r/$parts" -d -a 2 - "$scratch/prompts."
    rm -f "$scratch"/done-* "$scratch"/failed-*
    for number in $(seq 0 $((parts - 1))); do
        part=$(printf %02d "$number") sampling=(--max-new-tokens 144)
        [ $((number % 5)) != 4 ] || sampling=(--max-new-tokens 256 --temperature 0.7 --top-k 20)
        { train prepare --target "$target" --prompts "$scratch/prompts.$part" --out "$scratch/data-$part" \
            --layer-ids 1,3,5,6 --max-length 1024 "${sampling[@]}" -- --sampling-backend pytorch \
            --grammar-backend none --disable-prefill-cuda-graph --skip-tokenizer-init --mem-fraction-static 0.9 \
            --max-total-tokens 400000 --max-running-requests 512 --max-mamba-cache-size 600 \
            --cuda-graph-bs-decode "[64,128,256,384,512]" > "$out/prepare-$part.log" 2>&1 &&
            touch "$scratch/done-$part" || touch "$scratch/failed-$part"; } &
    done
    while [ "$(ls "$scratch"/done-* 2>/dev/null | wc -l)" != "$parts" ]; do
        sleep 5
        for failed in "$scratch"/failed-*; do
            [ ! -e "$failed" ] || { echo "$failed:"; tail -n 15 "$out/prepare-${failed##*-}.log"; exit 1; }
        done
        say "answers $(cat "$scratch"/data-*/answers.jsonl 2>/dev/null | wc -l)," \
            "shards $(ls "$scratch"/data-*/shard-*.safetensors 2>/dev/null | wc -l)"
    done
    touch "$scratch/prepared"
    say "prepared: $(du -sh "$scratch" | cut -f1)"
fi
for folder in "$scratch"/data-*; do data+=(--data "$folder"); done
sed "s/^epochs:.*/epochs: $epochs/" train/recipes/tiny_drafter.yaml > "$scratch/recipe-$epochs.yaml"
run=$scratch/run-$epochs
train fit --target "$target" "${data[@]}" --out "$run" --config "$scratch/recipe-$epochs.yaml" > "$out/fit.log" 2>&1 &
fit=$!
while sleep 10 && kill -0 $fit 2>/dev/null; do say "$(tail -n 1 "$run/metrics.jsonl" 2>/dev/null | cut -c1-110)"; done
wait $fit || { tail -n 15 "$out/fit.log"; exit 1; }
cp "$run/metrics.jsonl" "$scratch/recipe-$epochs.yaml" "$out/"
tail -n 1 "$out/metrics.jsonl"
say "trained"
train export --run "$run" --out "$out/drafter"
say "exported"
