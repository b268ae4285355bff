#!/usr/bin/env bash
# Train the tiny pair's target on one GPU. Run in the repository root:
#   bash tests/gpu/train_tiny_target.sh PACK OUT [SECONDS]
# PACK     folder that `python -m sglang_dflash.train.recipes pack` wrote (at most 55 MiB)
# OUT      folder for the target (a Hugging Face directory, about 12 MB) and train.log
# SECONDS  of training (default 240). Start-up comes on top: imports, decompression and compilation.
# Needs only torch and transformers 5.17 to 5.19: neither SGLang nor fla.
set -euo pipefail
pack=$(realpath "$1") out=$2 seconds=${3:-240}
# The package as it is installed: `train/` is `sglang_dflash.train`.
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
mkdir "$packages/sglang_dflash"
ln -s "$PWD"/sglang_dflash/* "$packages/sglang_dflash/"
ln -s "$PWD/train" "$packages/sglang_dflash/train"
mkdir -p "$out"
PYTHONSAFEPATH=1 PYTHONPATH=$packages PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 \
    python3 -m sglang_dflash.train.recipes target --pack "$pack" --out "$out/target" --seconds "$seconds" --device cuda \
    2>&1 | tee "$out/train.log"
