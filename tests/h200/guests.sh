#!/usr/bin/env bash
# Several guests under QEMU on one card: equal shares beside as many native processes, shares by
# weight, budgets. The guests are booted once and get their weights and budgets while they run.
# About 230 s on 16 processors; `GUESTS=3 SECTIONS=weights` 75. GUEST has further words for every guest
# (`--append idle=poll`), ONLY a pattern of the runs' names. With PLACED=1 the one guest of GUESTS=1, and the native program
# beside it, are woken on the processor that the card interrupts (as in render.sh). Run as root: it unpacks Vulkan loaders into /.
# Usage: OUT=folder [SECTIONS='equal weights budgets'] tests/h200/guests.sh [bundle folder [folder with nesprobe and loaders]]
# The folders are filled by: cargo xtask bundle; tests/h200/nesprobe.sh --pack
set -u
bundle=$(realpath "${1:-.bundle}")
loaders=$(realpath "${2:-.nesprobe}")
out=${OUT:-out}
guests=${GUESTS:-8}
work=$(mktemp -d)
mkdir -p "$out"
exec > >(tee "$out/log.txt") 2>&1

. "$(dirname "$0")/vulkan.sh" "$loaders"

has() { case " ${SECTIONS:-equal weights budgets} " in *" $1 "*) ;; *) return 1 ;; esac; }
. "$(dirname "$0")/common.sh"
used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits; }
nesprobe() { timeout 90 ${placed:-} "$loaders/nesprobe" "$@"; }
admin() { echo "$work/$1"/nvguest-*/guest0/admin; }
limit() { ask "$(admin "$1")" "{\"request\":\"limits\",\"set\":{$2}}" > /dev/null; }
account() { ask "$(admin "$1")" | python3 -c 'import json, sys
it = json.load(sys.stdin); print({key: it[key] for key in ("vram", "weight", "slice_refused")})'; }

# A guest that does what the files 1, 2, 3, … in its folder say, one after another.
boot() {
  local i=$1
  shift
  mkdir -p "$work/$i/turns" && echo 0 > "$work/$i/turn"
  TMPDIR="$work/$i" "$bundle/nvguest-run" guest --host "${HOST:-nvidia}" --logs "$work/$i/logs" --timeout 500 --cpus 1 --memory 1536 ${GUEST:-} \
    --share "$work/$i/turns:/mnt/turns" "$@" --run '
    i=1
    while :; do
      until [ -e /mnt/turns/$i ]; do sleep 0.02; done
      command=$(cat /mnt/turns/$i); [ "$command" = end ] && break
      echo "BEGIN $i"; eval "$command"; echo "END $i $?"; i=$((i + 1))
    done' > "$work/$i/out" 2>&1 &
}
# Tells a guest its next command.
order() {
  local i=$1 n
  shift
  n=$(($(cat "$work/$i/turn") + 1))
  echo $n > "$work/$i/turn"
  printf '%s\n' "$*" > "$work/$i/turns/$n.new" && mv "$work/$i/turns/$n.new" "$work/$i/turns/$n"
}
# What its last command said, once that has ended.
outcome() {
  local n; n=$(cat "$work/$1/turn")
  await "$work/$1/out" "^END $n " "${2:-60}" || return 1
  sed -n "/^BEGIN $n\$/,/^END $n /p" "$work/$1/out" | sed '1d;$d'
}
turn() { order "$@"; outcome "$1"; }

# Waits until a guest's program is warm.
warm() {
  local until=$((SECONDS + 40)) n; n=$(cat "$work/$1/turn")
  until sed -n "/^BEGIN $n\$/,\$p" "$work/$1/out" | grep -q '^ready'; do
    [ $SECONDS -lt $until ] || { echo "guest $1 is not ready: $(tail -2 "$work/$1/out")"; return 1; }
    sleep 0.05
  done
}

# Draws for so many seconds in each of `native` and numbers of guests, begun together once all are warm.
run() {
  local name=$1 seconds=$2 i=0 way gate gates=() pids=() ways
  [[ $name =~ ${ONLY:-} ]] || return 0
  shift 2
  ways=("$@")
  go=$((${go:-0} + 1))
  local load="$options --seconds $seconds --warmup 0.5 --barrier --json"
  for way in "${ways[@]}"; do
    if [ "$way" = native ]; then
      rm -f "$work/gate-$i"; mkfifo "$work/gate-$i"
      # Open for both, so that neither side waits for the other.
      exec {gate}<>"$work/gate-$i"; gates+=("$gate")
      nesprobe $load < "$work/gate-$i" > "$work/frames-$i" 2>> "$out/stderr.txt" & pids+=($!)
      await "$work/frames-$i" '^ready' 30 || return 1
    else
      order "$way" "(until [ -e /mnt/turns/go-$go ]; do sleep 0.01; done; echo) | nesprobe $load"
    fi
    i=$((i + 1))
  done
  for way in "${ways[@]}"; do
    [ "$way" = native ] && continue
    warm "$way" || return 1
  done
  for way in "${ways[@]}"; do [ "$way" = native ] || touch "$work/$way/turns/go-$go"; done
  for gate in "${gates[@]}"; do echo go >&"$gate"; done
  [ ${#pids[@]} -eq 0 ] || wait "${pids[@]}"
  for gate in "${gates[@]}"; do exec {gate}>&-; done
  for i in "${!ways[@]}"; do
    way=${ways[$i]}
    if [ "$way" = native ]; then line=$(tail -1 "$work/frames-$i"); weight=null
    else line=$(outcome "$way" | grep '^{' | tail -1); weight=$(cat "$work/$way/weight" 2>/dev/null || echo 10); fi
    echo "{\"run\":\"$name\",\"way\":\"$way\",\"weight\":$weight,\"result\":$line}"
  done > "$work/run.jsonl"
  cat "$work/run.jsonl" >> "$out/runs.jsonl"
  python3 - "$work/run.jsonl" <<'P'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
fps = [line["result"]["fps"] for line in lines]
total = sum(fps)
shares = " ".join(f"{line['way']}{'' if line['weight'] is None else ':' + str(line['weight'])}={it:.2f}({it / total:.3f})" for line, it in zip(lines, fps))
p50, p99 = (" ".join(f"{line['result']['frame_ms'][name]:.1f}" for line in lines) for name in ("p50", "p99"))
print(f"{lines[0]['run']}: sum {total:.2f} fps, spread {(max(fps) - min(fps)) / (total / len(fps)):.3f} of the mean; {shares}; p50 ms {p50}; p99 ms {p99}", flush=True)
P
}
weigh() { limit "$1" "\"weight\":\"$2\""; echo "$2" > "$work/$1/weight"; }
weights() { local i=0 weight; for weight in "$@"; do weigh $i "$weight"; i=$((i + 1)); done; }
these() { seq -s ' ' 0 $(($1 - 1)); }
natives() { printf 'native %.0s' $(seq "$1"); }
# Of many draws, each a small one: a card goes from one program to another only where a draw ends.
small="--width 640 --height 360"
calibrated() { nesprobe --cost 50 --calibrate 10 --seconds 0.5 --passes $* --json | sed -n 's/.*"cost":\([0-9]*\).*/\1/p' | tail -1; }

section machine
uname -srm
echo "bundle: $(cat "$bundle/commit" 2>/dev/null), nesprobe: $(cat "$loaders/commit")"
nvidia-smi -L
echo "card: $(used) MiB used"
# Unpacked once, before several want it.
"$bundle/nvguest-run" path rmprobe > /dev/null
last=$((guests - 1))
for i in $(seq 0 $((guests - 2))); do boot "$i"; done
boot $last --backend-arg=--vram=16G --backend-arg=--vram-mode=profile
for i in $(seq 0 $last); do
  turn "$i" true || { tail -5 "$work/$i/out"; pkill -x nvguest-run; exit 1; }
done
echo "$guests guests are up after $SECONDS s; card: $(used) MiB"
one=$(calibrated 1); passes=100; many=$(calibrated $passes $small)
echo "cost of a 10 ms frame: $one in one pass, $many in each of $passes"

if [ -n "${PLACED:-}" ]; then
  home=$(home)
  placed="taskset -c $home"
  place "$(pgrep -fo qemu-system)" "$(pgrep -fo vhost-user-nvguest)" "$home" $(((home + 2) % $(nproc --all)))
  echo "the card interrupts processor $home"
fi

if has equal; then
section 'equal guests, beside as many native processes: frames of one draw'
options="--cost $one"
for count in 1 2 4 8; do
  [ $count -le "$guests" ] || continue
  # So long that a frame more or less is no spread.
  run "native-$count" $((3 + count)) $(natives $count)
  run "guests-$count" $((3 + count)) $(these $count)
done
section 'the same, two frames in flight: what a program that does not wait for each frame has'
options="--cost $one --frames-in-flight 2"
for count in 1 4; do
  run "native-$count-queued" 3 $(natives $count)
  run "guests-$count-queued" 3 $(these $count)
done
fi

if has weights; then
section "weights: frames of $passes draws"
options="--cost $many --passes $passes $small"
run weights-native 3 native native native
weights 10 20 40; run weights-10-20-40 4 0 1 2
for i in 0 1 2; do account $i; done
weights 20 40 80; run weights-20-40-80 4 0 1 2
weights 1 2 4; run weights-1-2-4 3 0 1 2
section "weights: two frames of $passes draws in flight"
options="--cost $many --passes $passes $small --frames-in-flight 2"
weights 10 20 40; run weights-10-20-40-queued 4 0 1 2
weights 20 40 80; run weights-20-40-80-queued 4 0 1 2
section 'weights: frames of one draw, which the card does not leave in the middle'
options="--cost $one"
weights 10 20 40; run weights-10-20-40-one-draw 3 0 1 2
weights 10 10 10
fi

if has budgets; then
section 'a budget given while the guest runs: allocate until there is no more'
limit 0 '"vram":"2G"'; turn 0 'rmprobe --fill 8'; account 0
limit 0 '"vram":"1G"'; turn 0 'rmprobe --fill 1'
limit 0 '"vram":"none"'

section 'a budget of 16 GiB that is the card'
turn $last 'nvidia-smi | grep MiB; nvidia-smi --query-gpu=memory.total,memory.used,memory.free --format=csv,noheader; nesprobe --list; rmprobe --fill 64'
account $last
echo "card: $(used) MiB"

fi

section afterwards
python3 - "$out/runs.jsonl" > "$out/runs.csv" <<'P'
import json, sys
print("run,way,weight,frames,seconds,fps,p50_ms,p90_ms,p99_ms,max_ms,gpu_ms,cpu_s")
for line in open(sys.argv[1]):
    it = json.loads(line); seen, ms = it["result"], it["result"]["frame_ms"]
    print(it["run"], it["way"], it["weight"] or "", seen["frames"], seen["seconds"], seen["fps"],
          *(ms[name] for name in ("p50", "p90", "p99", "max")), seen["gpu_ms"], seen["cpu_s"], sep=",")
P
for i in $(seq 0 $last); do order "$i" 'dmesg | grep -E "BUG:|Oops|WARNING:" | head -3'; done
for i in $(seq 0 $last); do outcome "$i"; order "$i" end; done
sleep 3; pkill -x nvguest-run; sleep 1
echo "card: $(used) MiB; backends left: $(pgrep -fc vhost-user-nvguest)"
tail -3 "$out/stderr.txt" 2>/dev/null
