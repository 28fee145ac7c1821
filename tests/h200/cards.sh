#!/usr/bin/env bash
# Two cards in one host: a guest of each, and a guest of both. About 100 s. As root: it unpacks a
# Vulkan loader into /. With HOST=sim NVGUEST_SIM_CARDS=2, two simulated cards and what needs none
# of NVIDIA's libraries, in 15 s.
# Usage: OUT=folder tests/h200/cards.sh [bundle [folder of loopback.sh --pack [nesprobe.sh --pack]]]
set -u
bundle=$(realpath "${1:-.bundle}")
loopback=$(realpath "${2:-.loopback}")
loaders=$(realpath "${3:-.nesprobe}")
here=$(dirname "$0")
out=${OUT:-out}
host=${HOST:-nvidia}
work=$(mktemp -d)
mkdir -p "$out"
exec > >(tee "$out/cards.txt") 2>&1
. "$here/common.sh"
# A program as a guest of the cards that the first argument names.
guest() {
  local gpu=$1
  shift
  timeout 60 "$loopback/nvguest-loopback" --host "$host" --backend-arg="--gpu=$gpu" -- "$@" 2>> "$out/stderr.txt"
}
# rmprobe on one card of a guest: what it counted, and what it found wrong.
probe() {
  local gpu=$1 card=$2
  guest "$gpu" "$loopback/rmprobe" --card "$card" > "$work/rmprobe"
  echo "rmprobe on card $card: exit $?, $(grep -c ^ok "$work/rmprobe") ok"
  grep -E '^FAIL|^ok (cards|uuid):' "$work/rmprobe"
}
# Two guests under QEMU at once, a card each, which run the same; what they said is in qemu-0 and
# qemu-1.
both() {
  for gpu in 0 1; do
    "$bundle/nvguest-run" guest --host "$host" --backend-arg=--gpu=$gpu --timeout 100 --run "$1" \
      > "$work/qemu-$gpu" 2>&1 & pids[$gpu]=$!
  done
  for gpu in 0 1; do wait "${pids[$gpu]}"; echo "guest of card $gpu: exit $?"; done
}

section 'what each guest has of the cards'
uname -srm; echo "bundle: $(cat "$bundle/commit" 2>/dev/null)"
for gpu in 0 1; do
  echo "a guest of card $gpu"
  probe $gpu $gpu
  guest $gpu "$loopback/rmprobe" --card $((1 - gpu)) --only cards && echo 'the other card is there too'
done
echo 'a guest of both'
for card in 0 1; do probe all $card; done
"$bundle/nvguest-run" path rmprobe > /dev/null

if [ "$host" = sim ]; then
  section 'two guests under QEMU, a card each, at the same time'
  both 'ls /dev/nvidia*; rmprobe | grep -c ^ok; rmprobe --fill 16'
  for gpu in 0 1; do tail -5 "$work/qemu-$gpu"; done
  exit
fi

. "$here/vulkan.sh" "$loaders"
smi=$nvidia/bin/nvidia-smi; [ -x "$smi" ] || smi=$(command -v nvidia-smi)
fps() { sed -n 's/.*"fps":\([0-9.]*\).*/\1/p' "$1" | tail -1; }

section 'natively'
"$smi" -L; "$loopback/nesprobe" --list
ls /dev/nvidia*
for gpu in 0 1 all; do
  section "a guest of $gpu"
  guest $gpu "$smi" -L; echo "exit $?"
  guest $gpu "$loopback/nesprobe" --list; echo "exit $?"
  guest $gpu "$smi" topo -m 2>&1 | head -4
done
section 'one guest draws on each of its two cards'
for device in 0 1; do guest all "$loopback/nesprobe" --device $device --verify | tail -1; done
guest 1 "$loopback/nesprobe" --verify | tail -1

section 'two guests under QEMU, a card each, at the same time, beside native processes'
cost=$("$loopback/nesprobe" --calibrate 20 --seconds 0.5 --json | sed -n 's/.*"cost":\([0-9]*\).*/\1/p' | tail -1)
load="--cost $cost --seconds 5 --warmup 1 --json"
both "nvidia-smi -L; ls /dev/nvidia*; nesprobe --list; nesprobe $load"
for gpu in 0 1; do grep -vE '^\{' "$work/qemu-$gpu" | head -12; echo "guest of card $gpu: $(fps "$work/qemu-$gpu") fps"; done
for gpu in 0 1; do "$loopback/nesprobe" --device $gpu $load > "$work/native-$gpu" & pids[$gpu]=$!; done
wait "${pids[@]}"
for gpu in 0 1; do echo "native process on card $gpu: $(fps "$work/native-$gpu") fps"; done
section afterwards
"$smi" --query-gpu=index,memory.used --format=csv,noheader
tail -5 "$out/stderr.txt"
