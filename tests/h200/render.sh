#!/usr/bin/env bash
# Guests that render, beside their host on the same card: pixels in one guest and in four, frame
# times by turns, what crosses while a frame is drawn, what it costs, and that nothing grows while each processor
# of the guest makes CYCLES devices.
# About 300 s; `SECTIONS=crossings` about 45, `SECTIONS=frames WAITS=wait=block` about 140. Run as root: it unpacks Vulkan and EGL loaders into /.
# Usage: OUT=folder [SECTIONS='pixels frames crossings growth four'] [CYCLES=40] tests/h200/render.sh [bundle folder
#        [folder with nesprobe and loaders]]
# The folders are filled by: cargo xtask bundle; tests/h200/nesprobe.sh --pack
set -u
bundle=$(realpath "${1:-.bundle}")
loaders=$(realpath "${2:-.nesprobe}")
out=${OUT:-out}
work=$(mktemp -d)
mkdir -p "$out" "$work/turns"
exec > >(tee "$out/log.txt") 2>&1

. "$(dirname "$0")/vulkan.sh" "$loaders"

has() { case " ${SECTIONS:-pixels frames crossings growth four} " in *" $1 "*) ;; *) return 1 ;; esac; }
. "$(dirname "$0")/common.sh"
nesprobe() { timeout 60 "$loaders/nesprobe" "$@"; }
guest() { TMPDIR="$work" "$bundle/nvguest-run" guest --host "${HOST:-nvidia}" --logs "$work/logs" --timeout 400 "$@"; }
field() { sed -n "s/.*\"$1\":\([0-9.]*\).*/\1/p" | head -1; }
# What the backend counted so far, as JSON.
status() { ask "$work"/nvguest-*/guest0/admin; }
# Nanoseconds of processor time that the threads of processes had.
spent() { cat $(printf '/proc/%s/task/*/schedstat ' "$@") 2>/dev/null | awk '{n += $1} END {printf "%.0f", n}'; }
# A command in the guest, in its turn. The count is a file: a pipe's side is a shell of its own.
turn() {
  local n=$(($(cat "$work/turn") + 1))
  echo $n > "$work/turn"
  printf '%s\n' "$*" > "$work/turns/$n.new" && mv "$work/turns/$n.new" "$work/turns/$n"
  await "$work/guest.txt" "^END $n " 100 || return 1
  sed -n "/^BEGIN $n\$/,/^END $n /p" "$work/guest.txt" | sed '1d;$d'
}

section machine
uname -srm; echo "bundle: $(cat "$bundle/commit" 2>/dev/null), nesprobe: $(cat "$loaders/commit")"
nvidia-smi -L
used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader; }
echo "card: $(used)"

section 'natively'
if has pixels || has four; then
  nesprobe --verify > "$out/verify-native.txt"; echo "verify: $?"
  nesprobe --gl > "$out/gl-native.txt"; echo "gl: $?"
  nesprobe --latency 2000
fi
ten=$(nesprobe --calibrate 10 --seconds 1 --json | field cost)
echo "cost of a 10 ms frame: $ten"

section 'one guest'
echo 0 > "$work/turn"
guest ${GUEST:-} --share "$work/turns:/mnt/turns" --share "$loaders/vk:/mnt/vk" --run '
  i=1
  while :; do
    until [ -e /mnt/turns/$i ]; do sleep 0.02; done
    command=$(cat /mnt/turns/$i); [ "$command" = end ] && break
    echo "BEGIN $i"; eval "$command"; echo "END $i $?"; i=$((i + 1))
  done' > "$work/guest.txt" 2>&1 &
runner=$!
turn true || tail -20 "$work/guest.txt"
backend=$(pgrep -fo 'vhost-user-nvguest')
qemu=$(pgrep -fo qemu-system)
if has pixels; then
LD_LIBRARY_PATH="$loaders/vk:${LD_LIBRARY_PATH:-}" "$loaders/vk/vulkaninfo" --summary > "$out/vulkaninfo-native.txt" 2>&1; echo "vulkaninfo natively: $?"
turn 'LD_LIBRARY_PATH=/mnt/vk:$LD_LIBRARY_PATH /mnt/vk/vulkaninfo --summary; echo "vulkaninfo in the guest: $?"' > "$out/vulkaninfo-guest.txt" 2>&1
tail -1 "$out/vulkaninfo-guest.txt"
status | python3 -c 'import json, sys; print(json.load(sys.stdin)["placements_peak"], "placements at most so far")'
diff "$out/vulkaninfo-native.txt" <(sed '$d' "$out/vulkaninfo-guest.txt") && echo 'vulkaninfo --summary: no line differs'
turn nesprobe --list
turn 'time nesprobe --verify' > "$out/verify-guest.txt" 2>&1; tail -6 "$out/verify-guest.txt"
echo 'checks that differ from the host:'
diff "$out/verify-native.txt" <(grep -E '^(ok|FAIL|skip|[0-9])' "$out/verify-guest.txt") && echo none
turn 'time nesprobe --gl' > "$out/gl-guest.txt" 2>&1
diff "$out/gl-native.txt" <(grep -vE '^(real|user|sys|$)' "$out/gl-guest.txt") && echo 'OpenGL: no line differs'
turn 'time nesprobe --latency 300'
echo "card: $(used)"
fi

if has frames; then
section 'frames, by turns'
: > "$out/frames.jsonl"
# Who is woken on the processor that the card interrupts need not wake another: once all that waits
# is left to the scheduler, and once it is there: the native program, or backend and QEMU's main
# thread. The guest's own processors spin elsewhere.
all=0-$(($(nproc --all) - 1))
home=$(home)
echo "the card interrupts processor $home of $all"
frames() {
  local where=$1 processors=$2 wait=$3 cost round way options line
  for cost in "$ten" $((ten * 2)); do
    for round in 1 2 3; do
      for way in native guest; do
        options="--cost $cost --seconds 2 --warmup 0.5 --$wait --json"
        if [ $way = native ]; then line=$(timeout 60 taskset -c "$processors" "$loaders/nesprobe" $options | tail -1)
        else line=$(turn nesprobe $options | tail -1); fi
        echo "{\"way\":\"$way\",\"wait\":\"$wait, $where\",\"round\":$round,\"cost\":$cost,\"result\":$line}" >> "$out/frames.jsonl"
      done
    done
  done
}
for wait in ${WAITS:-wait=block wait=spin frames-in-flight=2}; do frames 'left to the scheduler' "$all" "$wait"; done
place "$qemu" "$backend" "$home" "$(((home + 2) % $(nproc --all)))"
frames 'where the card interrupts' "$home" wait=block
place "$qemu" "$backend" "$all" "$all"
# A processor that halts takes its time to wake: what is only run when nothing else is keeps it awake.
spinners=()
for processor in $(seq 0 $(($(nproc --all) - 1))); do
  chrt --idle 0 taskset -c "$processor" sh -c 'while :; do :; done' & spinners+=($!)
done
frames 'no processor halts' "$all" wait=block
kill "${spinners[@]}"; wait "${spinners[@]}" 2> /dev/null
python3 - "$out/frames.jsonl" <<'P'
import collections, json, statistics, sys
frame, submit = collections.defaultdict(list), collections.defaultdict(list)
for line in open(sys.argv[1]):
    it = json.loads(line)
    key = it["cost"], it["wait"], it["way"]
    frame[key].append(it["result"]["frame_ms"]["p50"])
    submit[key].append(it["result"]["submit_ms"]["p50"])
for cost, wait in dict.fromkeys(key[:2] for key in frame):
    native, guest = (statistics.median(frame[cost, wait, way]) for way in ("native", "guest"))
    to = [round(statistics.median(submit[cost, wait, way]), 3) for way in ("native", "guest")]
    print(f"cost {cost}, {wait}: native {native:.3f} ms, guest {guest:.3f} ms, {guest / native:.4f}; to submit {to}; guest's rounds {frame[cost, wait, 'guest']}")
P
fi

if has crossings; then
section 'what crosses while frames are drawn'
turn "(nesprobe --cost $ten --seconds 22 --warmup 2 --json > /tmp/long; echo over >> /tmp/long) & sleep 1; echo started"
sleep 5
echo 'by name, from the 5th to the 11th second:'
"$("$bundle/nvguest-run" path nvguest)" trace --json --seconds 6 "$work"/nvguest-*/guest0/admin > "$out/trace.jsonl"
python3 - "$out/trace.jsonl" <<'P' | tee "$out/crossings.txt"
import collections, json, sys
calls = collections.Counter()
for line in open(sys.argv[1]):
    it = json.loads(line)
    if it.get("kind"): calls[" ".join(str(it[key]) for key in ("kind", "file", "what", "name", "number") if it.get(key))] += 1
for call, count in calls.most_common(): print(f"{count:6} {call}")
P
everyone() { echo "$backend" $(pgrep -f -- '--worker'); }
# What asking costs is outside of what is counted.
before=$(status); cpu=$(spent $(everyone)); vcpu=$(spent "$qemu"); start=$(date +%s%N)
sleep 6
cpu=$(($(spent $(everyone)) - cpu)); vcpu=$(($(spent "$qemu") - vcpu)); took=$(($(date +%s%N) - start)); after=$(status)
python3 - "$before" "$after" "$cpu" "$vcpu" "$took" "$ten" <<'P' | tee -a "$out/crossings.txt"
import json, sys
before, after = (json.loads(text) for text in sys.argv[1:3])
cpu, vcpu, ns = (int(word) for word in sys.argv[3:6])
frames = ns / 10e6
print(f"{frames:.0f} frames of 10 ms in {ns / 1e9:.2f} s")
for kind, count in after["requests"].items():
    print(f"{kind} {count - before['requests'][kind]}: {(count - before['requests'][kind]) / frames:.3f} a frame")
print(f"events {after['events'] - before['events']}: {(after['events'] - before['events']) / frames:.3f} a frame")
print(f"wakes of serving threads {after['wakes'] - before['wakes']}: {(after['wakes'] - before['wakes']) / frames:.3f} a frame")
print(f"backend: {cpu / 1e3 / frames:.1f} us of processor time a frame; QEMU {vcpu / 1e3 / frames:.0f} us (emulated)")
print(f"live placements of this process: {after['placements']} ({after['placements_peak']} at most), arena {after['arena']}")
P
turn 'until grep -q over /tmp/long; do sleep 0.1; done; cat /tmp/long'
sleep 4; before=$(spent $(everyone)); sleep 3; echo "backend while nothing renders: $(($(spent $(everyone)) - before)) ns in 3 s"
fi

if has growth; then
section 'nothing grows'
turn 'nesprobe --cycles 5' | tail -3
turn nproc | tee "$work/processors"
fds() { ls "/proc/$backend/fd" | wc -l; }
grown() { echo "fds $(fds), maps $(wc -l < "/proc/$backend/maps"), $(grep VmRSS "/proc/$backend/status"), QEMU maps $(wc -l < "/proc/$qemu/maps"), $(status | python3 -c 'import json, sys; it = json.load(sys.stdin); print(it["placements"], "placements, arena", it["arena"])')"
  turn 'grep -E "^S(Unreclaim|lab)|^PageTables" /proc/meminfo' | paste -sd' '; }
grown
turn "time sh -c 'for i in \$(seq $(cat "$work/processors")); do nesprobe --cycles ${CYCLES:-40} & done; wait'" | grep -E 'made|end|real'
sleep 3; grown
fi

turn 'dmesg | grep -iE "nvg|bug|oops|warn" | tail -5'
echo end > "$work/turns/$(($(cat "$work/turn") + 1))"
wait $runner; echo "guest: $?"; echo "card: $(used)"
tail -12 "$work/logs/guest0/backend.log"

has four || exit 0
section 'four guests at once'
guest --guests 4 --run 'nesprobe --verify' > "$work/four.txt" 2>&1; echo "exit $?"
for i in 0 1 2 3; do
  sed -n "s/^guest$i| //p" "$work/four.txt" | grep -E '^(ok|FAIL|skip)' > "$work/four-$i.txt"
  echo "guest $i: $(grep -c ^ok "$work/four-$i.txt") ok; lines that differ from the host: $(diff <(grep -E '^(ok|FAIL|skip)' "$out/verify-native.txt") "$work/four-$i.txt" | grep -c '^[<>]')"
done
cp "$work/four.txt" "$out/verify-four.txt"
echo "card: $(used)"
