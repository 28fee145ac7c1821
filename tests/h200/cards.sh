#!/usr/bin/env bash
# Two cards in one host: a guest of each, and a guest of both. About 100 s. As root: it unpacks a
# Vulkan loader into /.
# Usage: OUT=folder tests/h200/cards.sh [bundle [folder of loopback.sh --pack [nesprobe.sh --pack]]]
set -u
bundle=$(realpath "${1:-.bundle}")
loopback=$(realpath "${2:-.loopback}")
loaders=$(realpath "${3:-.nesprobe}")
out=${OUT:-out}
work=$(mktemp -d)
mkdir -p "$out"
exec > >(tee "$out/cards.txt") 2>&1
. "$(dirname "$0")/vulkan.sh" "$loaders"
smi=$nvidia/bin/nvidia-smi; [ -x "$smi" ] || smi=$(command -v nvidia-smi)
. "$(dirname "$0")/common.sh"
# A program as a guest of the cards that the first argument names.
guest() {
  local gpu=$1 options=()
  shift
  [ "$gpu" = all ] || options=(--backend-arg="--gpu=$gpu")
  timeout 60 "$loopback/nvguest-loopback" --host "${HOST:-nvidia}" "${options[@]}" -- "$@" 2>> "$out/stderr.txt"
}
fps() { sed -n 's/.*"fps":\([0-9.]*\).*/\1/p' "$1" | tail -1; }

section 'natively'
uname -srm; echo "bundle: $(cat "$bundle/commit" 2>/dev/null)"
"$smi" -L; "$loopback/nesprobe" --list
ls /dev/nvidia*
for gpu in 0 1 all; do
  section "a guest of $gpu"
  guest $gpu "$smi" -L; echo "exit $?"
  guest $gpu "$loopback/nesprobe" --list; echo "exit $?"
  guest $gpu "$loopback/rmprobe" > "$work/rmprobe-$gpu"; echo "rmprobe: exit $?, $(grep -c ^ok "$work/rmprobe-$gpu") ok"; grep ^FAIL "$work/rmprobe-$gpu"
  guest $gpu "$smi" topo -m 2>&1 | head -4
done
section 'one guest draws on each of its two cards'
for device in 0 1; do guest all "$loopback/nesprobe" --device $device --verify | tail -1; done
guest 1 "$loopback/nesprobe" --verify | tail -1

section 'two guests under QEMU, a card each, at the same time, beside native processes'
"$bundle/nvguest-run" path rmprobe > /dev/null
cost=$("$loopback/nesprobe" --calibrate 20 --seconds 0.5 --json | sed -n 's/.*"cost":\([0-9]*\).*/\1/p' | tail -1)
load="--cost $cost --seconds 5 --warmup 1 --json"
for gpu in 0 1; do
  "$bundle/nvguest-run" guest --host "${HOST:-nvidia}" --backend-arg=--gpu=$gpu --timeout 100 \
    --run "nvidia-smi -L; ls /dev/nvidia*; nesprobe --list; nesprobe $load" > "$work/qemu-$gpu" 2>&1 & pids[$gpu]=$!
done
wait "${pids[@]}"
for gpu in 0 1; do grep -vE '^\{' "$work/qemu-$gpu" | head -12; echo "guest of card $gpu: $(fps "$work/qemu-$gpu") fps"; done
for gpu in 0 1; do "$loopback/nesprobe" --device $gpu $load > "$work/native-$gpu" & pids[$gpu]=$!; done
wait "${pids[@]}"
for gpu in 0 1; do echo "native process on card $gpu: $(fps "$work/native-$gpu") fps"; done
section afterwards
"$smi" --query-gpu=index,memory.used --format=csv,noheader
tail -5 "$out/stderr.txt"
