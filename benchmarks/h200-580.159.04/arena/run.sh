#!/usr/bin/env bash
# The arena on a card: what RM does (ask), sharing between processes, programs
# natively and through the loop-back guest with and without the arena, and the same in an emulated
# guest under QEMU. OUT=folder run.sh. Less than 110 s.
set -u
here=$(realpath "$(dirname "$0")"); gl=$(realpath "$here/../.gl"); out=${OUT:-out}; w=$(mktemp -d); mkdir -p "$out"
exec > >(tee "$out/log.txt") 2>&1
section() { printf '\n== %s (%s)\n' "$1" "$(date -u +%T)"; }
export LD_LIBRARY_PATH=/usr/local/nvidia/lib64:$gl/vk VK_DRIVER_FILES=/usr/local/nvidia/share/vulkan/icd.d/nvidia_icd.json
export __EGL_VENDOR_LIBRARY_FILENAMES=/usr/local/nvidia/share/glvnd/egl_vendor.d/10_nvidia.json
for deb in "$gl"/*.deb; do dpkg -x "$deb" / 2>/dev/null; done; ldconfig 2>/dev/null
b=$here/bundle; smi=/usr/local/nvidia/bin/nvidia-smi; [ -x $smi ] || smi=$(command -v nvidia-smi)
section machine; uname -srm; nproc; cat "$b/commit"; $smi -L
# The emulated guests run beside the rest: they take their time.
cp -L "$gl"/vk/* "$here/g/"; cp -L /usr/lib/x86_64-linux-gnu/libvulkan.so.1 "$here/vkfill" "$gl/nesprobe" "$here/share" "$b/rmprobe" "$here/g/"
guest() { # name arena
  "$here/rig/nvguest-run" guest --host nvidia --logs "$w/logs-$1" --timeout 45 --share "$here/g:/mnt/g" --backend-arg=--arena=$2 --run '
    export VK_DRIVER_FILES=/usr/local/nvidia/share/vulkan/icd.d/nvidia_icd.json LD_LIBRARY_PATH=/mnt/g:$LD_LIBRARY_PATH
    nvidia-smi -L; /mnt/g/rmprobe | grep -vc ^ok; /mnt/g/rmprobe --only memory | grep system; /mnt/g/share
    for i in 1 2 3; do timeout 20 /mnt/g/vkfill; echo "exit $?"; done
    dmesg | grep -iE "nvg|bug|oops|warn" | tail -5' > "$out/guest-$1.txt" 2>&1
  echo "guest $1: exit $?"; grep -h 'the guest is gone' "$w/logs-$1"/*/backend.log | sed 's/.*status=//;s/"refusals":\[[^]]*\],//' | cut -c1-420
}
section ask; timeout 25 "$here/ask" > "$out/ask.txt" 2>&1; echo "exit $?"; grep -A3 'free while' "$out/ask.txt"
section 'native'
timeout 10 "$here/share"; for i in 1 2 3; do timeout 20 "$here/vkfill"; done
timeout 30 "$gl/nesprobe" --verify > "$w/nes-native" 2>&1; echo "nesprobe --verify $?"; tail -3 "$w/nes-native"
timeout 20 "$gl/nesprobe" --latency 2000; timeout 15 "$gl/nesprobe" --gl > "$w/gl-native" 2>&1; echo "nesprobe --gl $?"; tail -2 "$w/gl-native"
timeout 20 "$gl/vk/vulkaninfo" > "$w/vkfull-native" 2>/dev/null; echo "vulkaninfo $?"
trace=--backend-arg=--log-level=info,vhost_user_nvguest::worker::arena=trace
run() { local name=$1 arena=$2; shift 2; local s=$(date +%s%N); timeout 30 "$b/nvguest-loopback" --host nvidia $trace --backend-arg=--arena=$arena -- "$@" > "$w/$name" 2> "$w/$name.err"; local c=$?; echo "$name: exit $c, $((($(date +%s%N)-s)/1000000)) ms"; grep -h 'the guest is gone' "$w/$name.err" | sed 's/.*status=//;s/"refusals":\[[^]]*\],//' | cut -c1-250; grep -h "WARN\|ERROR" "$w/$name.err" | cut -c1-200 | head -3; }
for arena in 0 4G; do
  section "loop-back, arena $arena"
  run rmprobe-$arena $arena "$b/rmprobe"; grep -c ^ok "$w/rmprobe-$arena"; grep ^FAIL "$w/rmprobe-$arena"; grep -h 'system-memory' "$w/rmprobe-$arena"
  run share-$arena $arena "$here/share"; cat "$w/share-$arena"
  for i in 1 2 3 4 5; do run vkfill-$arena-$i $arena "$here/vkfill"; cat "$w/vkfill-$arena-$i"; done
  run nes-$arena $arena "$gl/nesprobe" --verify; diff "$w/nes-native" "$w/nes-$arena" > "$out/nes-diff-$arena.txt" && echo 'verify: the same as natively'; tail -2 "$w/nes-$arena"
  run lat-$arena $arena "$gl/nesprobe" --latency 2000; cat "$w/lat-$arena"
  run gl-$arena $arena "$gl/nesprobe" --gl; tail -2 "$w/gl-$arena"
  run vkfull-$arena $arena "$gl/vk/vulkaninfo"; diff "$w/vkfull-native" "$w/vkfull-$arena" | head -5
  run smi-$arena $arena $smi -L; tail -1 "$w/smi-$arena"
done
section 'kinds'
sed 's/\x1b\[[0-9;]*m//g' "$w"/*4G*.err | grep -h 'system memory' | sed 's/.*arena: //' | sed -E 's/client: [0-9]+, parent: [0-9]+, handle: [0-9]+, //; s/ handle=.*//' | sort | uniq -c | sort -rn > "$out/kinds.txt"; head -50 "$out/kinds.txt"
section 'guests'
guest without 0; guest with 4G
tail -25 "$out/guest-without.txt"; echo ----; tail -25 "$out/guest-with.txt"
section afterwards; pgrep -fc vhost-user-nvguest; $smi --query-gpu=memory.used --format=csv,noheader; dmesg 2>/dev/null | grep -iE 'xid' | tail -5
