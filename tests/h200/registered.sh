#!/usr/bin/env bash
# Programs that register memory of their own (VK_EXT_external_memory_host and its like), natively and
# in a guest whose capabilities have `compute`; then in one whose have not. About 70 s. Run as root:
# it unpacks Vulkan and EGL loaders into /.
# Usage: OUT=folder [MIB=1024] tests/h200/registered.sh [bundle folder [folder with nesprobe and loaders]]
# The folders are filled by: cargo xtask bundle; tests/h200/nesprobe.sh --pack
set -u
bundle=$(realpath "${1:-.bundle}")
loaders=$(realpath "${2:-.nesprobe}")
out=${OUT:-out}
mib=${MIB:-1024}
work=$(mktemp -d)
mkdir -p "$out"
exec > >(tee "$out/log.txt") 2>&1

. "$(dirname "$0")/vulkan.sh" "$loaders"
. "$(dirname "$0")/common.sh"
guest() { TMPDIR="$work" "$bundle/nvguest-run" guest --host "${HOST:-nvidia}" --memory 4096 --timeout 200 "$@"; }
rmprobe=$("$bundle/nvguest-run" path rmprobe)
verdicts() { grep -E '^(ok|FAIL|skip) ' "$1" | sed -E 's/[0-9.]+(µ|m|n)?s\b/TIME/g'; }

section machine
uname -srm; echo "bundle: $(cat "$bundle/commit" 2>/dev/null), nesprobe: $(cat "$loaders/commit")"
nvidia-smi -L
used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader; }
# Pages that this machine's kernel keeps pinned.
pinned() { awk '/nr_foll_pin_acquired/ {n += $2} /nr_foll_pin_released/ {n -= $2} END {print n}' /proc/vmstat; }
echo "card: $(used); pinned here: $(pinned)"

section natively
"$rmprobe" --register "$mib" | tee "$out/rmprobe-native.txt"
"$loaders/nesprobe" --verify > "$out/verify-native.txt"; echo "nesprobe --verify: $?"

section 'a guest with the capability'
guest --backend-arg=--caps=utility,graphics,video,compute --logs "$out/logs" --run "
  rmprobe --register $mib; for i in \$(seq 10); do rmprobe --register 64 > /tmp/again || cat /tmp/again; done
  timeout -s KILL 1 rmprobe --register $mib --keep 9; echo == verify; nesprobe --verify; echo == rmprobe; rmprobe; sleep 1
  echo == vmstat; grep foll_pin /proc/vmstat; dmesg | tail -3" > "$out/guest.txt" 2>&1
sed '/^== verify/,$d' "$out/guest.txt" | grep -E '^(ok|FAIL|skip) ' | tee "$out/rmprobe-guest.txt"
sed -n '/^== verify/,/^== rmprobe/p' "$out/guest.txt" | grep -E '^(ok|FAIL|skip|[0-9])' > "$out/verify-guest.txt"
echo 'rmprobe --register, lines that differ from native:'
diff <(verdicts "$out/rmprobe-native.txt") <(verdicts "$out/rmprobe-guest.txt") && echo none
echo 'nesprobe --verify, lines that differ from native:'
diff "$out/verify-native.txt" "$out/verify-guest.txt" && echo none
echo 'rmprobe, lines that are not ok:'
sed -n '/^== rmprobe/,/^== vmstat/p' "$out/guest.txt" | grep -E '^(FAIL|skip) ' || echo none
sed -n '/^== vmstat/,$p' "$out/guest.txt"
echo "card: $(used); pinned here: $(pinned)"

section 'a guest without it'
guest --run 'nesprobe --verify; rmprobe --register 8' 2>&1 |
  grep -E 'external-host-memory|register-whole|failed|checks' | tee "$out/without.txt"
echo "card: $(used)"
