#!/usr/bin/env bash
# Two builds by turns, and natively: a Vulkan device and an empty submission as a loop-back guest.
# About 4 s a turn. Usage: OUT=folder [TURNS=8] tests/h200/versus.sh OLD NEW [folder with loaders]
# OLD and NEW are folders that tests/h200/loopback.sh --pack filled, of two commits.
set -u
old=$(realpath "$1")
new=$(realpath "$2")
out=${OUT:-out}
mkdir -p "$out"
. "$(dirname "$0")/vulkan.sh" "${3:-.nesprobe}"
guest() { "$1/nvguest-loopback" --host nvidia --trusting --attentive -- "$1/nesprobe" --latency 1000 --json; }
for turn in $(seq "${TURNS:-8}"); do
  for way in native old new; do
    case $way in
      native) line=$("$new/nesprobe" --latency 1000 --json) ;;
      *) line=$(guest "${!way}" 2>> "$out/stderr.txt") ;;
    esac
    echo "{\"turn\":$turn,\"way\":\"$way\",\"result\":$(echo "$line" | tail -1)}"
  done
done > "$out/versus.jsonl"
echo "old: $(cat "$old/commit"), new: $(cat "$new/commit")"
python3 - "$out/versus.jsonl" <<'P'
import json, statistics, sys
runs = [json.loads(line) for line in open(sys.argv[1])]
for way in ("native", "old", "new"):
    of = [run["result"] for run in runs if run["way"] == way]
    median = lambda pick: statistics.median(map(pick, of))
    print(f"{way:7} instance {median(lambda it: it['instance_ms']):6.1f} ms, device {median(lambda it: it['device_ms']):6.1f} ms, submit and wait p50 {median(lambda it: it['submit_us']['p50']):5.1f} us  (medians of {len(of)})")
P
