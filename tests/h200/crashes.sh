#!/usr/bin/env bash
# The crash matrix on a machine with a card: a guest process in its call, a worker, a guest's
# kernel, QEMU and the broker die, beside a guest that is to notice nothing. Says the seconds
# until all is back, and the card's memory before and after. Less than 120 s.
# Usage: OUT=folder [HOST=sim LIMIT=seconds] tests/h200/crashes.sh [bundle folder]
set -u
bundle=$(realpath "${1:-.bundle}")
out=${OUT:-out}
host=${HOST:-nvidia}
# A card's call takes a second at most.
block=900
[ "$host" != sim ] || block=3000
work=$(mktemp -d)
mkdir -p "$out" "$work/victim" "$work/bystander"
victim= bystander=
trap 'kill $victim $bystander 2>/dev/null; cp "$work/bystander.txt" "$out"; rm -rf "$work"' EXIT
exec > >(tee "$out/log.txt") 2>&1

. "$(dirname "$0")/common.sh"
# The card's memory in MiB; the simulated card's is what the backends count.
used() {
  if [ "$host" != sim ]; then
    nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits
    return
  fi
  python3 - "$work"/*/nvguest-*/guest*/admin <<'P'
import json, socket, sys
total = 0
for path in sys.argv[1:]:
    try:
        s = socket.socket(socket.AF_UNIX); s.connect(path)
        s.sendall(b'{"schema":1,"request":"status"}\n')
        total += json.loads(s.makefile().readline())["answer"]["vram"]["used"]
    except OSError:
        pass
print(total >> 20)
P
}
# A guest whose sockets and logs are in the named folder; only ever in the background.
guest() {
  local name=$1
  shift
  exec env TMPDIR="$work/$name" timeout "${LIMIT:-115}" "$bundle/nvguest-run" guest --host "$host" --memory 1024 "$@"
}
broker() { pgrep -f "vhost-user-nvguest --socket-path $work/$1/"; }
newest_worker() { for starter in $(pgrep -P "$(broker victim)"); do pgrep -nP "$starter"; done; }
workers() { for starter in $(pgrep -P "$(broker "$1")"); do pgrep -P "$starter"; done; }
qemu() { pgrep -f "qemu-system.*path=$work/$1/" | tail -1; }
begin() { start=$(date +%s%N); }
# Waits for at most 15 s until a command says so, and tells the time since begin.
until_now() {
  local what=$1
  shift
  until "$@"; do
    [ $(($(date +%s%N) - start)) -lt 15000000000 ] || { echo "  NOT within 15 s: $what"; return 1; }
    sleep 0.01
  done
  echo "  $what: $((($(date +%s%N) - start) / 1000000)) ms"
}
card_has() { [ "$(used)" -le "$1" ]; }
# Gone, or dead and not yet waited for.
are_gone() {
  local pid
  for pid in "$@"; do
    ! grep -q '^State:.[^ZX]' "/proc/$pid/status" 2>/dev/null || return 1
  done
}
has_workers() { [ "$(workers "$1" | wc -l)" = "$2" ]; }
said() { grep -q "$2" "$1"; }
# The program of the other guest looks at its memory, for the nth time.
looks=0
bystander_looks() {
  looks=$((looks + 1))
  echo "look $looks" >&5
  await "$work/bystander.txt" "look $looks: .* 0 words wrong" 20 && echo '  the other guest: 0 words wrong'
}

section machine
uname -srm
echo "bundle: $(cat "$bundle/commit" 2>/dev/null || echo unknown), host: $host"
[ "$host" = sim ] || nvidia-smi -L
mkfifo "$work/input"
exec 5<>"$work/input"
guest bystander --shell < "$work/input" > "$work/bystander.txt" 2>&1 &
bystander=$!
echo 'rmprobe --hold 600 --size 16' >&5
await "$work/bystander.txt" holding 90 || exit 1
beside=$(used)
guest victim --run '
  mkfifo /tmp/input; exec 3<>/tmp/input
  rmprobe --hold 100 --size 16 > /tmp/beside 2>&1 < /tmp/input & beside=$!
  until grep -q holding /tmp/beside; do sleep 0.05; done
  rmprobe --block '"$block"' > /tmp/block 2>&1 < /dev/null & block=$!
  until grep -q blocking /tmp/block; do sleep 0.05; done
  echo BLOCKING; sleep 0.3; kill -9 $block; wait $block; echo "ENDED $?"; sleep 4
  rmprobe --watch 60 --size 32 > /tmp/watch 2>&1 & watch=$!
  until grep -q watching /tmp/watch; do sleep 0.05; done
  echo WATCHING; wait $watch; echo WOKEN; cat /tmp/watch
  echo look >&3; until grep look: /tmp/beside; do sleep 0.05; done
  rmprobe | grep -c ^ok; dmesg | grep -E "BUG|Oops|WARNING|Call Trace"
  sleep 1; echo PANIC; echo c > /proc/sysrq-trigger
' > "$out/victim.txt" 2>&1 &
victim=$!

section 'a guest process in its call'
if await "$out/victim.txt" BLOCKING 90; then
  target=$(newest_worker)
  await "$out/victim.txt" ENDED 20
  begin
  until_now 'its worker is gone, after the call and 2 s' are_gone "$target"
  grep ENDED "$out/victim.txt"
  bystander_looks
fi

section 'a worker, its process holding 32 MiB'
if await "$out/victim.txt" WATCHING 30; then
  echo "  card: $(used) MiB"
  target=$(newest_worker)
  begin
  kill -9 "$target"
  until_now 'its process is woken' said "$out/victim.txt" WOKEN
  until_now 'card has its memory back' card_has $((beside + 20))
  echo "  card: $(used) MiB"
  bystander_looks
fi

section 'a guest kernel (panic; QEMU ends with it)'
if await "$out/victim.txt" PANIC 40; then
  family="$(broker victim) $(workers victim)"
  begin
  until_now 'backend and workers gone' are_gone $family
  until_now 'card has its memory back' card_has "$beside"
  wait $victim
  sed -n '/^WOKEN/,/^PANIC/p' "$out/victim.txt"
  echo "  card: $(used) MiB, $beside before"
  bystander_looks
fi

section QEMU
guest victim --run 'rmprobe --hold 60 --size 32 < /dev/null' > "$out/qemu.txt" 2>&1 &
victim=$!
if await "$out/qemu.txt" holding 60; then
  echo "  card: $(used) MiB"
  family="$(broker victim) $(workers victim)"
  begin
  kill -9 "$(qemu victim)"
  until_now 'backend and workers gone' are_gone $family
  until_now 'card has its memory back' card_has "$beside"
  echo "  card: $(used) MiB, $beside before"
  wait $victim
  bystander_looks
fi

section 'the broker (its guest cannot be served again)'
guest victim --run '
  rmprobe --watch 60 --size 32 > /tmp/watch 2>&1 & watch=$!
  until grep -q watching /tmp/watch; do sleep 0.05; done
  echo WATCHING; wait $watch; echo WOKEN; cat /tmp/watch
  rmprobe --only ids; dmesg | grep -E "backend is gone|BUG|Oops|WARNING|Call Trace"
' > "$out/broker.txt" 2>&1 &
victim=$!
if await "$out/broker.txt" WATCHING 60; then
  echo "  card: $(used) MiB"
  family="$(broker victim) $(workers victim)"
  begin
  kill -9 ${family%% *}
  until_now 'workers gone' are_gone $family
  until_now 'card has its memory back, its QEMU still there' card_has "$beside"
  until_now 'its process is woken' said "$out/broker.txt" WOKEN
  wait $victim
  sed -n '/^WOKEN/,$p' "$out/broker.txt"
  echo "  card: $(used) MiB, $beside before"
  bystander_looks
fi

section 'the end'
kill $bystander; wait $bystander 2>/dev/null; sleep 1
echo "backends left: $(pgrep -fc "vhost-user-nvguest --socket-path $work/"), card: $(used) MiB"
bystander=
