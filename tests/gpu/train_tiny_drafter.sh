#!/usr/bin/env bash
# Train the tiny pair's drafter on one GPU, from the hidden states of its target's own server. Run in the repository root
# after `. tests/gpu/setup.sh BUNDLE`:
#   bash tests/gpu/train_tiny_drafter.sh TARGET PROMPTS.jsonl[.xz] OUT SCRATCH [BLOCK_SIZE [EPOCHS [SERVERS]]]
# OUT gets drafter-BLOCK_SIZE/ and its metrics, renewed at every checkpoint, so that a call that is cut off has a drafter
# to show; SCRATCH the data, about 2 KiB a token, the run and the logs. The next call goes on where the last one was; one
# with another BLOCK_SIZE or other EPOCHS trains a new run on the same data.
# Ten SERVERS at once: each is bound by its scheduler's Python. Four fifths of the texts are greedy, as served; greedy
# text of a small model soon loops, so it is short, and the rest is sampled.
set -euo pipefail
target=$(realpath "$1") prompts=$(realpath "$2")
mkdir -p "$3" "$4" && out=$(realpath "$3") scratch=$(realpath "$4")
block=${5:-8} epochs=${6:-6} parts=${7:-10}
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
            --cuda-graph-bs-decode "[64,128,256,384,512]" > "$scratch/prepare-$part.log" 2>&1 &&
            touch "$scratch/done-$part" || touch "$scratch/failed-$part"; } &
    done
    while [ "$(ls "$scratch"/done-* 2>/dev/null | wc -l)" != "$parts" ]; do
        sleep 5
        for failed in "$scratch"/failed-*; do
            [ ! -e "$failed" ] || { echo "$failed:"; tail -n 15 "$scratch/prepare-${failed##*-}.log"; exit 1; }
        done
        say "answers $(cat "$scratch"/data-*/answers.jsonl 2>/dev/null | wc -l)," \
            "shards $(ls "$scratch"/data-*/shard-*.safetensors 2>/dev/null | wc -l)"
    done
    touch "$scratch/prepared"
    say "prepared: $(du -sh "$scratch" | cut -f1)"
fi
for folder in "$scratch"/data-*; do data+=(--data "$folder"); done
name=$block-$epochs run=$scratch/run-$block-$epochs
sed "s/^epochs:.*/epochs: $epochs/; s/block_size: [0-9]*/block_size: $block/" train/recipes/tiny_drafter.yaml \
    > "$scratch/recipe-$name.yaml"
train fit --target "$target" "${data[@]}" --out "$run" --config "$scratch/recipe-$name.yaml" > "$scratch/fit-$name.log" 2>&1 &
fit=$!
exported=none
export_last() { # the last checkpoint, if it is another than the one exported
    local last
    last=$(ls -d "$run"/checkpoints/step-* 2>/dev/null | grep -v part | tail -n 1) || true
    [ -n "$last" ] && [ "$last" != "$exported" ] || return 0
    rm -rf "$scratch/drafter-$block"
    CUDA_VISIBLE_DEVICES= train export --run "$run" --out "$scratch/drafter-$block" > "$scratch/export-$name.log" 2>&1 || return 0
    rm -rf "$out/drafter-$block" && cp -r "$scratch/drafter-$block" "$out/drafter-$block"
    cp "$run/metrics.jsonl" "$out/metrics-$block.jsonl"
    exported=$last
    say "exported $(basename "$last")"
}
while sleep 10 && kill -0 $fit 2>/dev/null; do
    say "$(tail -n 1 "$run/metrics.jsonl" 2>/dev/null | cut -c1-110)"
    export_last
done
wait $fit || { tail -n 15 "$scratch/fit-$name.log"; exit 1; }
export_last
tail -n 1 "$out/metrics-$block.jsonl"
say "trained"
