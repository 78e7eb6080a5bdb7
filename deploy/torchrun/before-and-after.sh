#!/usr/bin/env bash
# One machine: a script as it is and with a change, both captured, and whether the change was one for the better.
#   deploy/torchrun/before-and-after.sh traces 4 train.py -- --microbatches 8 -- --microbatches 16
# Takes a folder, the number of ranks and the script; then its words before, and after.
set -euo pipefail
folder=${1:?a folder for traces} ranks=${2:?how many ranks} script=${3:?a script}
shift 3
before=() after=() side=0
for word in "$@"; do
  if [ "$word" = -- ]; then side=$((side + 1)); continue; fi
  if [ "$side" = 1 ]; then before+=("$word"); else after+=("$word"); fi
done
debubble capture --wait 10 --steps 10 --out "$folder/before" -- \
  torchrun --standalone --nproc-per-node "$ranks" "$script" "${before[@]}"
debubble find "$folder/before"
debubble capture --wait 10 --steps 10 --out "$folder/after" -- \
  torchrun --standalone --nproc-per-node "$ranks" "$script" "${after[@]}"
debubble compare "$folder/before" "$folder/after" --fail-on worse,unsafe_memory
