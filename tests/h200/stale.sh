#!/usr/bin/env bash
# The stale-window attack, on a machine with a card. A process's worker is killed while it reads
# and writes video memory; a newcomer takes that memory (the rest of the card is taken, so there
# is none else), and reads and writes it too. The old address must show what it had, zero, or
# SIGBUS, and the newcomer what it wrote itself. With two processes of one guest, then of two
# guests. Less than 60 s. A simulated card is each guest's own: there the second part shows only
# that another guest goes on.
# Usage: OUT=folder [HOST=sim] tests/h200/stale.sh [bundle folder]
set -u
bundle=${1:-.bundle}
out=${OUT:-out}
host=${HOST:-nvidia}
work=$(mktemp -d)
mkdir -p "$out"
exec > >(tee "$out/log.txt") 2>&1

step=1024
if [ "$host" = sim ]; then
  step=64
  # What is freed is given out again as it is, so that a stale read would show it.
  export NVGUEST_SIM_MEMORY=256M NVGUEST_SIM_KEEP_MEMORY=1
fi

section() { printf '\n== %s (%s)\n' "$1" "$(date -u +%T)"; }
guest() { "$bundle/nvguest-run" guest --host "$host" --timeout 100 "$@"; }
# HELD in a file, as long as the process that writes it lives.
await() {
  until grep -q HELD "$1" 2>/dev/null; do
    kill -0 "$2" 2>/dev/null || { echo "$1 ended without HELD"; return 1; }
    sleep 0.1
  done
}
# The workers below a process of ours, the oldest first.
workers() { below "$1" | sort -n; }
below() {
  local child
  for child in $(pgrep -P "$1"); do
    if tr '\0' ' ' < "/proc/$child/cmdline" 2>/dev/null | grep -q -- ' --worker'; then echo "$child"; fi
    below "$child"
  done
}
kill_first_worker() {
  local victim
  victim=$(workers "$1" | head -1)
  [ -n "$victim" ] || { echo 'no worker to kill'; return 1; }
  kill -9 "$victim" && echo "killed worker $victim"
}

victim='
  rmprobe --stale 80 --size 32 > /tmp/victim 2>&1 < /dev/null & V=$!
  until grep -qE "holding|FAIL" /tmp/victim; do sleep 0.1; done
'
newcomer='
  mkfifo /tmp/go
  rmprobe --stale 8 --size 32 --wait > /tmp/newcomer 2>&1 < /tmp/go & N=$!
  exec 3> /tmp/go
  until grep -qE "ready|FAIL" /tmp/newcomer; do sleep 0.1; done
'
hog="
  rmprobe --fill $step --size 32 --keep 60 > /tmp/hog 2>&1 < /dev/null & H=\$!
  until grep -qE 'keeping|FAIL' /tmp/hog; do sleep 0.1; done; cat /tmp/hog
"
go='
  echo go >&3; sleep 0.5
  echo "the newcomer has memory before the kill: $(grep -c holding /tmp/newcomer)"; echo HELD
'
ends='wait $N; echo "newcomer ended: $?"; sed "s/^/newcomer: /" /tmp/newcomer'

section machine
uname -srm; echo "bundle: $(cat "$bundle/commit" 2>/dev/null || echo unknown)"
[ "$host" = sim ] || nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used --format=csv,noheader

section 'two processes of one guest'
guest --run "$victim $newcomer $hog $go $ends
  wait \$V; echo \"victim ended: \$?\"; sed 's/^/victim: /' /tmp/victim; kill \$H; wait \$H
  dmesg | grep -E 'BUG:|Oops' | tail -5" > "$out/one-guest.txt" 2>&1 &
one=$!
if await "$out/one-guest.txt" $one; then kill_first_worker $one; fi
wait $one; cat "$out/one-guest.txt"

section 'two guests'
guest --run "$victim echo HELD; wait \$V; echo \"victim ended: \$?\"; sed 's/^/victim: /' /tmp/victim" \
  > "$out/two-guests.txt" 2>&1 &
one=$!
if await "$out/two-guests.txt" $one; then
  if [ "$host" = sim ]; then hog=; fi
  guest --run "$newcomer $hog $go $ends; ${hog:+kill \$H; wait \$H}" > "$work/newcomer" 2>&1 &
  other=$!
  if await "$work/newcomer" $other; then kill_first_worker $one; fi
  wait $other
fi
wait $one; cat "$work/newcomer" >> "$out/two-guests.txt" 2>/dev/null; cat "$out/two-guests.txt"

section verdict
failed=0
for part in one-guest two-guests; do
  lost=$(grep -cE '^victim: ok stale: lost: .* 0 of somebody else' "$out/$part.txt")
  kept=$(grep -cE '^newcomer: ok stale: kept: .* 0 zero, 0 SIGBUS, 0 of somebody else' "$out/$part.txt")
  if [ "$lost" = 1 ] && [ "$kept" = 1 ]; then echo "ok $part"; else echo "FAIL $part"; failed=1; fi
done
[ "$host" = sim ] || nvidia-smi --query-gpu=memory.used --format=csv,noheader
rm -rf "$work"
exit $failed
