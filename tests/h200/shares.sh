#!/usr/bin/env bash
# What guests have of a card: time by their weights, by native processes' measure, and memory by
# their budgets. Guests are programs of the loop-back guest, at native speed, each with a backend
# of its own. Less than 150 s. Run as root: it unpacks a Vulkan loader into /.
# Usage: OUT=folder tests/h200/shares.sh [folder of loopback.sh --pack [folder of nesprobe.sh --pack]]
set -u
bundle=$(realpath "${1:-.loopback}")
loaders=$(realpath "${2:-.nesprobe}")
out=${OUT:-out}
work=$(mktemp -d)
mkdir -p "$out"
exec > >(tee "$out/log.txt") 2>&1

. "$(dirname "$0")/vulkan.sh" "$loaders"
smi=$(command -v nvidia-smi)
if [ -d "$nvidia" ]; then smi=$nvidia/bin/nvidia-smi; fi

. "$(dirname "$0")/common.sh"
used() { "$smi" --query-gpu=memory.used --format=csv,noheader,nounits; }
# A program as a guest's: options of its backend, --, the program.
guest() {
  local options=()
  while [ "$1" != -- ]; do options+=("--backend-arg=$1"); shift; done
  timeout 60 "$bundle/nvguest-loopback" --host "${HOST:-nvidia}" "${options[@]}" "$@"
}
nesprobe() { timeout 60 "$bundle/nesprobe" "$@"; }
# What the gathered guests' backends count: their video memory, and slices that were refused.
account() {
  local socket
  for socket in "$work"/admin-*; do
    [ -e "$socket" ] && ask "$socket" | python3 -c 'import json, sys
it = json.load(sys.stdin); print({key: it[key] for key in ("vram", "weight", "slice_refused")})'
  done
}

# Starts a process each of `native` or a guest's weight, all drawing frames of the cost, and waits
# until they are warm. Each waits for a line on a FIFO of its own, and has an admin socket.
gather() {
  local seconds=$1 i=0 way
  shift
  pids=(); gates=(); names=("$@")
  rm -f "$work"/{gate,frames,admin}-*
  for way in "$@"; do
    mkfifo "$work/gate-$i"
    # Open for both, so that neither side waits for the other.
    exec {gate}<>"$work/gate-$i"
    gates+=("$gate")
    load=(--cost "$ten" --passes $passes --seconds "$seconds" --warmup 0.5 --barrier --json)
    if [ "$way" = native ]; then
      nesprobe "${load[@]}" < "$work/gate-$i" > "$work/frames-$i" 2>> "$out/stderr.txt" &
    else
      guest "--weight=$way" "--admin-socket=$work/admin-$i" -- "$bundle/nesprobe" "${load[@]}" \
        < "$work/gate-$i" > "$work/frames-$i" 2>> "$out/stderr.txt" &
    fi
    pids+=($!); i=$((i + 1))
  done
  for i in "${!pids[@]}"; do await "$work/frames-$i" '^ready' 30 || return 1; done
}
# Lets them go, waits for them, and says what each had.
go() {
  local gate
  for gate in "${gates[@]}"; do echo go >&"$gate"; done
  wait "${pids[@]}"
  for gate in "${gates[@]}"; do exec {gate}>&-; done
  for i in "${!names[@]}"; do
    echo "{\"run\":\"$1\",\"way\":\"${names[$i]}\",\"result\":$(tail -1 "$work/frames-$i")}"
  done > "$work/run.jsonl"
  cat "$work/run.jsonl" >> "$out/runs.jsonl"
  python3 - "$work/run.jsonl" <<'P'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
fps = [line["result"]["fps"] for line in lines]
total = sum(fps)
spread = (max(fps) - min(fps)) / (total / len(fps))
shares = " ".join(f"{line['way']}={it:.2f}fps({it / total:.3f})" for line, it in zip(lines, fps))
p99 = " ".join(f"{line['result']['frame_ms']['p99']:.1f}" for line in lines)
print(f"{lines[0]['run']}: sum {total:.2f} fps, spread {spread:.3f} of the mean; {shares}; p99 ms {p99}")
P
}
run() {
  local name=$1 seconds=$2
  shift 2
  gather "$seconds" "$@" || return 1
  account > "$work/account"
  { echo "$name"; cat "$work/account"; } >> "$out/accounts.txt"
  go "$name"
}

section machine
uname -srm
echo "binaries: $(cat "$bundle/commit"), nesprobe's loaders: $(cat "$loaders/commit")"
"$smi" -L
echo "card: $(used) MiB used"
# Of many draws: a card goes from one program to another only where a draw ends.
passes=100
ten=$(nesprobe --cost 5 --calibrate 10 --passes $passes --seconds 1 --json | sed -n 's/.*"cost":\([0-9]*\).*/\1/p' | tail -1)
echo "cost of a 10 ms frame: $ten"

section 'alone: a guest has all of the card, whatever its weight'
run alone-native 3 native
run alone-10 3 10
run alone-1 3 1

section 'weights'
run weights-10-20-40 5 10 20 40
cat "$work/account"
run weights-20-40-80 5 20 40 80
run weights-1-2-4 5 1 2 4
run weight-10-beside-native 4 10 native

section 'equal guests, beside as many native processes'
for count in 2 4 8; do
  run "native-$count" 3 $(printf 'native %.0s' $(seq $count))
  run "guests-$count" 3 $(printf '10 %.0s' $(seq $count))
done

section 'what RM takes for itself: four guests with a Vulkan device and a picture, at rest'
before=$(used)
gather 0.1 10 10 10 10
with=$(used)
account
go at-rest > /dev/null
sleep 0.5
echo "card: $before MiB before, $with MiB with four guests, $(used) MiB after"
gather 0.1 native native native native
echo "card: $(used) MiB with four native processes"
go at-rest > /dev/null

section 'a budget: allocate until there is no more'
echo "512M:"; guest --vram=512M -- "$bundle/rmprobe" --fill 1
echo "8G:"; guest --vram=8G -- "$bundle/rmprobe" --fill 64
echo "8G, by 2 GiB:"; guest --vram=8G -- "$bundle/rmprobe" --fill 2048
echo "card: $(used) MiB"

section 'a budget that is the card'
profile=(--vram=8G --vram-mode=profile)
guest "${profile[@]}" -- "$bundle/rmprobe" --fill 64
guest "${profile[@]}" -- "$smi" | grep MiB
guest "${profile[@]}" -- "$smi" -q -d MEMORY | sed -n '/FB Memory/,/Free/p'
guest "${profile[@]}" -- "$smi" --query-gpu=memory.total,memory.used,memory.free --format=csv
echo 'Vulkan, natively and as a guest:'
nesprobe --list
guest "${profile[@]}" -- "$bundle/nesprobe" --list
echo "card: $(used) MiB"

section done
tail -5 "$out/stderr.txt" 2>/dev/null
