#!/usr/bin/env bash
# Programs natively and as guests without a VM, on a machine with a card: rmprobe, nvidia-smi,
# vulkaninfo, what differs between the two, and what our own path costs. Less than 150 s; with QUICK=1 half of that.
# Usage: OUT=folder tests/h200/loopback.sh [folder with the binaries]
# The folder is filled by: tests/h200/loopback.sh --pack
set -u
if [ "${1:-}" = --pack ]; then
  cd "$(dirname "$0")/../.." || exit 1
  cargo build --release -p nvguest-loopback -p rmprobe -p nesprobe -p vhost-user-nvguest || exit 1
  mkdir -p .loopback && rm -f .loopback/*
  for file in rmprobe nesprobe vhost-user-nvguest nvguest-loopback loopback-measure libnvguest_loopback.so; do
    strip -o ".loopback/$file" "target/release/$file" || exit 1
  done
  git describe --always --dirty > .loopback/commit
  du -sh .loopback
  exit
fi
bundle=$(realpath "${1:-.loopback}")
out=${OUT:-out}
mkdir -p "$out"
exec > >(tee "$out/log.txt") 2>&1

smi=/usr/local/nvidia/bin/nvidia-smi
if [ -x "$smi" ]; then
  export LD_LIBRARY_PATH=/usr/local/nvidia/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
else
  smi=$(command -v nvidia-smi)
fi
section() { printf '\n== %s (%s)\n' "$1" "$(date -u +%T)"; }
# A command as a guest's program.
guest() { timeout 60 "$bundle/nvguest-loopback" --host nvidia "$@"; }
# Runs a command and says how it ended and how long it took.
timed() {
  local name=$1 into=$2 start end code
  shift 2
  start=$(date +%s%N)
  "$@" > "$into" 2>> "$out/stderr.txt"
  code=$?
  end=$(date +%s%N)
  echo "$name: exit $code, $(((end - start) / 1000000)) ms"
}
work=$(mktemp -d)

section machine
uname -srm
echo "binaries: $(cat "$bundle/commit")"
"$smi" -L
nproc

section rmprobe
timed native "$work/rm-native" timeout 60 "$bundle/rmprobe"
timed 'as a guest' "$work/rm-guest" guest -- "$bundle/rmprobe"
grep -c '^ok' "$work/rm-native" "$work/rm-guest"
echo 'verdicts that differ:'
diff <(sed 's/:.*//' "$work/rm-native") <(sed 's/:.*//' "$work/rm-guest") && echo none
grep -h ^FAIL "$work/rm-guest"

section nvidia-smi
timed native "$work/smi-native" "$smi"
timed 'as a guest' "$work/smi-guest" guest -- "$smi"
diff "$work/smi-native" "$work/smi-guest" && echo 'no line differs'

section 'nvidia-smi -q'
timed native "$out/smi-q-native.txt" "$smi" -q
timed 'as a guest' "$out/smi-q-guest.txt" guest -- "$smi" -q
timed 'natively again' "$work/smi-q-again" "$smi" -q
echo 'lines that differ from native run to native run:'
diff "$out/smi-q-native.txt" "$work/smi-q-again" | grep -c '^[<>]'
echo 'lines that differ as a guest:'
diff "$out/smi-q-native.txt" "$out/smi-q-guest.txt" && echo none

section 'calls of nvidia-smi -q that differ'
{
  echo '--- natively / as a guest'
  guest --compare -- "$smi" -q
  echo '--- as a guest twice: what differs from run to run'
  guest --compare --twice -- "$smi" -q
} > "$out/compare.txt" 2>&1
grep -E '^(---|differences|natively|as a guest|nvguest)' "$out/compare.txt"
guest --trace "$work/trace" -- "$smi" > /dev/null && gzip -c "$work/trace" > "$out/trace-smi.txt.gz"

section vulkaninfo
if vulkaninfo=$(command -v vulkaninfo); then
  timed native "$work/vk-native" timeout 30 "$vulkaninfo" --summary
  timed 'as a guest' "$work/vk-guest" guest -- "$vulkaninfo" --summary
  diff "$work/vk-native" "$work/vk-guest" && echo 'no line differs'
else
  echo 'not installed'
fi

section 'a Vulkan program that renders and waits'
if timeout 20 "$bundle/nesprobe" --list; then
  timed native "$out/verify-native.txt" timeout 60 "$bundle/nesprobe" --verify
  timed 'as a guest' "$out/verify-guest.txt" guest --trusting -- "$bundle/nesprobe" --verify
  diff "$out/verify-native.txt" "$out/verify-guest.txt" && echo 'no line differs'
  # Interleaved, so that what drifts drifts for both.
  for round in 1 2 3; do
    echo "--- round $round"
    timeout 30 "$bundle/nesprobe" --latency 3000 --json | sed 's/^/native  /'
    guest --trusting --attentive -- "$bundle/nesprobe" --latency 3000 --json | sed 's/^/guest   /'
  done
else
  echo 'no Vulkan device: set LD_LIBRARY_PATH to a loader, VK_DRIVER_FILES to the driver'
fi

section "a device, by how long caller and worker look before they sleep"
for looks in '0 0' '30 30' '200 30' '500 30' '500 100' '1000 1000'; do
  set -- $looks
  for round in 1 2 3; do
    guest --trusting --attentive --poll-us "$1" --backend-arg="--poll-us=$2" -- "$bundle/nesprobe" --latency 1000 --json 2>> "$out/stderr.txt" |
      sed 's/.*"instance_ms"/"instance_ms"/; s/"first.*"p50"/"p50"/; s/,"p90".*//'
  done | sed "s/^/caller $1 us, worker $2 us: /"
done

section "where a device's time goes"
timeout 60 "$bundle/nvguest-loopback" --native --trace "$work/vk-native" -- "$bundle/nesprobe" --latency 10 > /dev/null
for how in '' --prompt; do
  guest --trusting --attentive $how --trace "$work/vk-guest$how" -- "$bundle/nesprobe" --latency 10 > /dev/null
done
"$(dirname "$0")/../loopback/where.py" "$work/vk-native" "$work/vk-guest--prompt" "$work/vk-guest" | tee "$out/where.txt"
cut -d' ' -f2- "$work/vk-guest" | gzip > "$out/trace-vk.txt.gz"

section 'what a warm program asks while it draws frames of 10 ms'
# Of the middle of the run: kinds of call, and how often.
warm() {
  awk 'NF > 2 { if (!n) start = $1; time[++n] = $1; kind[n] = $3; what[n] = $5 }
    END { for (i = 1; i <= n; i++) if (time[i] > start + 2.5 && time[i] < time[n] - 0.5) count[kind[i] " " what[i]]++
          for (it in count) print "  " count[it], it }' "$1" | sort -rn | head -8
}
load=(--cost 990 --seconds 6 --warmup 1)
timeout 60 "$bundle/nvguest-loopback" --native --trace "$work/warm-native" -- "$bundle/nesprobe" "${load[@]}" > /dev/null
guest --trusting --attentive --trace "$work/warm-guest" -- "$bundle/nesprobe" "${load[@]}" > /dev/null
echo natively:; warm "$work/warm-native"; echo 'as a guest:'; warm "$work/warm-guest"

section 'two hundred devices, one after another'
if [ -z "${QUICK:-}" ] && timeout 20 "$bundle/nesprobe" --list > /dev/null; then
  guest --trusting -- "$bundle/nesprobe" --cycles 200 > "$work/cycles" 2>&1 &
  runner=$!
  held() {
    local pid; pid=$(pgrep -fo -- '--worker') || return
    echo "worker: $(grep RssAnon "/proc/$pid/status"), $(ls "/proc/$pid/fd" | wc -l) fds, $(wc -l < "/proc/$pid/maps") maps"
  }
  sleep 8; held; sleep 20; held; wait $runner; tail -4 "$work/cycles"
fi

section 'what our own path costs'
timeout 60 "$bundle/nvguest-loopback" --host nvidia --backend-arg=--log-level=error --bench \
  --effort 50 --json "$out/bench.jsonl" | tee "$out/bench.txt"

section afterwards
pgrep -fc -- vhost-user-nvguest
"$smi" --query-gpu=memory.used --format=csv,noheader
tail -30 "$out/stderr.txt"
