#!/usr/bin/env bash
# A guest beside its host, on a machine with a card: nvidia-smi and rmprobe in both,
# cycles, the map race, and what goes back when something is killed.
# Usage: OUT=folder tests/h200/guest.sh [bundle folder]
set -u
bundle=${1:-.bundle}
out=${OUT:-out}
work=$(mktemp -d)
mkdir -p "$out"
exec > >(tee "$out/log.txt") 2>&1

. "$(dirname "$0")/common.sh"
used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader; }
workers() { pgrep -f -- '--worker' | tr '\n' ' '; }
guest() { "$bundle/nvguest-run" guest --host nvidia --logs "$work/logs" --timeout 280 "$@"; }

section machine
uname -a
echo "bundle: $(cat "$bundle/commit" 2>/dev/null || echo unknown)"
nvidia-smi -L
probe=$("$bundle/nvguest-run" path rmprobe)

section native
nvidia-smi > "$out/native-smi.txt"; echo "nvidia-smi: $?"
nvidia-smi -q > "$work/native-smi-q.txt"; echo "nvidia-smi -q: $?"
"$probe" > "$out/native-rmprobe.txt" 2>&1; echo "rmprobe: $?"

section guest
guest --run '
  echo "--- smi-L"; nvidia-smi -L; echo "exit $?"
  echo "--- smi"; nvidia-smi; echo "exit $?"
  echo "--- rmprobe"; rmprobe; echo "exit $?"
  echo "--- cycles"; rmprobe --cycles 1000; echo "exit $?"
  echo "--- race"; rmprobe --map-race 2000; echo "exit $?"
  echo "--- smi-q"; nvidia-smi -q; echo "exit $?"
  echo "--- dmesg"; dmesg | grep -i nvg
' > "$out/guest.txt" 2>&1
echo "guest: exit $?"
sed -n '/--- smi-L/,/--- rmprobe/p' "$out/guest.txt"
grep -E '^(FAIL|ok cycles|ok map-race|exit)' "$out/guest.txt"
echo "verdicts that differ from the host's:"
diff <(sed 's/:.*//' "$out/native-rmprobe.txt") \
  <(sed -n '/--- rmprobe/,/^exit/p' "$out/guest.txt" | grep -E '^(ok|FAIL)' | sed 's/:.*//') \
  && echo none
echo "lines of nvidia-smi -q that differ:"
diff "$work/native-smi-q.txt" <(sed -n '/--- smi-q/,/^exit/p' "$out/guest.txt" | sed '1d;$d')
tail -25 "$work/logs/guest0/backend.log"

section 'a worker is killed'
echo "card before: $(used)"
guest --run '
  rmprobe --hold 12 --size 64 > /tmp/a 2>&1 < /dev/null & A=$!
  rmprobe --hold 20 --size 32 > /tmp/b 2>&1 < /dev/null & B=$!
  until grep -q holding /tmp/a && grep -q holding /tmp/b; do sleep 0.1; done
  echo HELD; cat /tmp/a /tmp/b
  wait $A; echo "one ended: $?"; wait $B; echo "the other ended: $?"; cat /tmp/a /tmp/b
  rmprobe --only ids; echo "afterwards: $?"
  echo "--- a caller is killed in its call"
  rmprobe --block 900 > /dev/null & sleep 0.4; kill -9 $!; wait; cut -d" " -f1 /proc/uptime
  rmprobe | grep -c ^ok; dmesg | grep -iE "nvg|bug|oops" | tail -5
' > "$out/killed-worker.txt" 2>&1 &
guest=$!
if await "$out/killed-worker.txt" HELD 60; then
  echo "card while held: $(used); workers: $(workers)"
  victim=$(pgrep -fo -- '--worker'); kill -9 "$victim"; start=$(date +%s%N)
  while kill -0 "$victim" 2>/dev/null && [ "$(pgrep -fo -- '--worker')" = "$victim" ]; do :; done
  echo "killed $victim; gone after $((($(date +%s%N) - start) / 1000)) us"
  sleep 1; echo "card a second later: $(used); workers: $(workers)"
fi
wait $guest; cat "$out/killed-worker.txt"; echo "card after: $(used)"

section 'QEMU is killed'
guest --run 'rmprobe --hold 60 --size 64 < /dev/null' > "$work/killed-qemu.txt" 2>&1 &
guest=$!
if await "$work/killed-qemu.txt" holding 60; then
  echo "card while held: $(used); workers: $(workers)"
  pkill -9 qemu-system; start=$(date +%s%N)
  while pgrep -f 'vhost-user-nvguest' > /dev/null && [ $(($(date +%s%N) - start)) -lt 10000000000 ]
  do sleep 0.01; done
  echo "backend and workers gone after $((($(date +%s%N) - start) / 1000000)) ms: $(pgrep -fc vhost-user-nvguest) left"
  echo "card: $(used)"
fi
wait $guest; tail -5 "$work/killed-qemu.txt"

section 'Vulkan: is a device found?'
if [ -d "$bundle/vk" ]; then
  vk='VK_DRIVER_FILES=/usr/local/nvidia/share/vulkan/icd.d/nvidia_icd.json'
  env "$vk" LD_LIBRARY_PATH="$bundle/vk:/usr/local/nvidia/lib64" \
    "$bundle/vk/vulkaninfo" --summary > "$work/native-vk.txt" 2>&1; echo "natively: $?"
  guest --share "$(realpath "$bundle/vk"):/mnt/vk" --backend-arg=--log-level --backend-arg=info --run "
    export $vk LD_LIBRARY_PATH=/mnt/vk:\$LD_LIBRARY_PATH
    time timeout 100 /mnt/vk/vulkaninfo --summary; echo exit \$?
  " > "$out/vulkan.txt" 2>&1
  tail -30 "$out/vulkan.txt"
  diff "$work/native-vk.txt" "$out/vulkan.txt" | head -40
  tail -12 "$work/logs/guest0/backend.log"
fi

section 'benchmarks without a VM'
if [ -x "$bundle/round_trip" ]; then
  NVGUEST_BACKEND=$("$bundle/nvguest-run" path vhost-user-nvguest) timeout 100 \
    "$bundle/round_trip" --bench > "$out/round-trip.txt" 2>&1
  head -40 "$out/round-trip.txt"
fi
if [ -x "$bundle/marshal" ]; then
  timeout 60 "$bundle/marshal" --bench > "$work/marshal.txt" 2>&1
  grep -A1 -E '^[a-z].*time:|time:' "$work/marshal.txt" | tee -a "$out/round-trip.txt"
fi
cp "$work/native-smi-q.txt" "$out/"
cp "$work/logs/guest0/backend.log" "$out/backend.log" 2>/dev/null
