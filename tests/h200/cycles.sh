#!/usr/bin/env bash
# Devices made and destroyed by several processes of one loop-back guest: what does the backend hold
# at the beginning and at the end?
# Usage: OUT=folder tests/h200/cycles.sh [devices [processes [seconds at most [folder of loopback.sh --pack]]]]
set -u
devices=${1:-10000}
processes=${2:-12}
seconds=${3:-1800}
out=${OUT:-out}
mkdir -p "$out"
. "$(dirname "$0")/common.sh"
exec > >(tee "$out/cycles.txt") 2>&1
# A copy, so that what is killed beside it is told from it by its path.
work=$(mktemp -d)
cp "$(realpath "${4:-.loopback}")"/* "$work"
each=$(((devices + processes - 1) / processes))
echo "binaries: $(cat "$work/commit"), $(date -u +%FT%TZ), $processes processes, $each devices each"
"$work/nvguest-loopback" --host "${HOST:-nvidia}" --trusting --backend-arg=--admin-socket --backend-arg="$work/admin" -- sh -c "
  for i in \$(seq $processes); do timeout $seconds '$work/nesprobe' --cycles $each > '$work/cycles-'\$i 2> '$work/progress-'\$i & done
  wait; sleep 4; touch '$work/idle'; sleep 5" 2> "$out/cycles-stderr.txt" &
held() {
  local broker workers
  broker=$(pgrep -fo "$work/vhost-user-nvguest.* --socket-path")
  echo "$1: broker $(ls "/proc/$broker/fd" | wc -l) fds, $(wc -l < "/proc/$broker/maps") maps, $(grep RssAnon "/proc/$broker/status" | tr -s '\t ' ' ')"
  for workers in $(pgrep -P "$(pgrep -P "$broker" | head -1)"); do
    echo "  worker $workers: $(ls "/proc/$workers/fd" | wc -l) fds, $(wc -l < "/proc/$workers/maps") maps, $(grep RssAnon "/proc/$workers/status" | tr -s '\t ' ' ')"
  done
  ask "$work/admin" | python3 -c 'import json, sys
it = json.load(sys.stdin)
print("  placements", it["placements"], "window", it["window_bytes"], "arena", it["arena"], "workers", len(it["workers"]), "requests", sum(it["requests"].values()),
      "shares", {key: share["held"] for key, share in it["shares"].items() if share["held"]})'
}
sleep 20
while [ ! -e "$work/idle" ]; do
  held "$(date -u +%T)"; tail -qn1 "$work"/progress-* | sort | uniq -c
  for _ in $(seq 600); do [ -e "$work/idle" ] && break; sleep 0.1; done
done
held 'all ended'
wait $!
for i in $(seq "$processes"); do grep -E 'made and|after one|end ' "$work/cycles-$i"; done
cat "$work"/cycles-* | awk '/made and destroyed/ {n += $1} END {print n, "devices in all"}'
tail -3 "$out/cycles-stderr.txt"
