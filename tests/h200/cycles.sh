#!/usr/bin/env bash
# Devices made and destroyed for some time by several processes of one loop-back guest: what does the
# backend hold at the beginning and at the end?
# Usage: OUT=folder tests/h200/cycles.sh [seconds [processes [folder of loopback.sh --pack]]]
set -u
seconds=${1:-300}
processes=${2:-6}
out=${OUT:-out}
mkdir -p "$out"
. "$(dirname "$0")/common.sh"
exec > >(tee "$out/cycles.txt") 2>&1
# A copy, so that what is killed beside it is told from it by its path.
work=$(mktemp -d)
cp "$(realpath "${3:-.loopback}")"/* "$work"
echo "binaries: $(cat "$work/commit"), $(date -u +%FT%TZ), $processes processes"
"$work/nvguest-loopback" --host "${HOST:-nvidia}" --trusting --backend-arg=--admin-socket --backend-arg="$work/admin" -- sh -c "
  for i in \$(seq $processes); do '$work/nesprobe' --cycles 100000 > '$work/cycles-'\$i 2>&1 & pids=\"\$pids \$!\"; done
  sleep $seconds; touch '$work/ending'; kill -TERM \$pids; wait; sleep 4; touch '$work/idle'; sleep 2" 2> "$out/cycles-stderr.txt" &
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
await_file() { until [ -e "$1" ]; do sleep 0.1; done; }
sleep 20; held 'after 20 s'
while [ ! -e "$work/ending" ]; do
  for _ in $(seq 600); do [ -e "$work/ending" ] && break; sleep 0.1; done
  [ -e "$work/ending" ] || held 'later'
done
await_file "$work/idle"; held 'all ended'
wait $!
for i in $(seq "$processes"); do grep -E 'made and|after one|end ' "$work/cycles-$i"; done
cat "$work"/cycles-* | awk '/made and destroyed/ {n += $1} END {print n, "devices in all"}'
tail -3 "$out/cycles-stderr.txt"
