#!/usr/bin/env bash
# On a machine with a card: what nvguest trace shows of nvidia-smi in a guest, and a guest whose
# broker is killed while a program holds the card's memory: nvguest recover, and programs again.
# Says the seconds. Less than 150 s.
# Usage: OUT=folder [HOST=sim] tests/h200/recover.sh [bundle folder]
set -u
bundle=$(realpath "${1:-.bundle}")
out=${OUT:-out}
host=${HOST:-nvidia}
smi=nvidia-smi
# The simulated card has no nvidia-smi.
[ "$host" != sim ] || smi='rmprobe --cycles 20'
work=$(mktemp -d)
mkdir -p "$out" "$work/nvguest/guest0"
guest=
trap 'kill $guest 2>/dev/null; cp "$work/guest.txt" "$out"; rm -rf "$work"' EXIT
exec > >(tee "$out/log.txt") 2>&1

. "$(dirname "$0")/common.sh"
nvguest=$("$bundle/nvguest-run" path nvguest)
backend=$("$bundle/nvguest-run" path vhost-user-nvguest)
used() { [ "$host" = sim ] || echo "  card: $(nvidia-smi --query-gpu=memory.used --format=csv,noheader)"; }
since() { echo "  $1: $((($(date +%s%N) - $2) / 1000000)) ms"; }
# Has the guest's shell do something, and shows what it says.
turn=0
tell() {
  turn=$((turn + 1))
  echo "echo BEGIN $turn; { $1; }; echo END $turn \$?" >&5
}
heard() {
  await "$work/guest.txt" "^END $turn " "${1:-40}" || return 1
  sed -n "/^BEGIN $turn\r*\$/,/^END $turn /p" "$work/guest.txt" | sed '1d;$d'
}
# Whether the guest's programs have the card.
works() {
  tell "$smi > /tmp/smi; echo \"$smi: exit \$?\"; rmprobe > /tmp/rm; echo \"rmprobe: exit \$?, \$(grep -c ^ok /tmp/rm) ok\"; grep ^FAIL /tmp/rm"
  heard
  [ "$host" = sim ] || { tell 'nesprobe --list; nesprobe --verify | tail -1'; heard 60; }
}
# The calls of a program in the guest, and how many lines of them there are.
traced() {
  local name=$1 tracer
  shift
  "$nvguest" trace "$admin" "$@" > "$out/trace-$name.txt" 2>&1 &
  tracer=$!
  sleep 1; tell "$smi > /dev/null; echo \"$smi: exit \$?\""; heard; sleep 1
  kill $tracer; wait $tracer 2>/dev/null
  echo "  trace $*: $(wc -l < "$out/trace-$name.txt") lines"; head -5 "$out/trace-$name.txt"
}

section machine
uname -srm
echo "bundle: $(cat "$bundle/commit" 2>/dev/null || echo unknown), host: $host"
[ "$host" = sim ] || nvidia-smi -L
used
mkfifo "$work/input"
exec 5<>"$work/input"
TMPDIR="$work" timeout 180 "$bundle/nvguest-run" guest --host "$host" --memory 1024 --hotpluggable --shell \
  < "$work/input" > "$work/guest.txt" 2>&1 &
guest=$!
tell 'dmesg | grep -c "host driver"'; heard 90 || { tail -5 "$work/guest.txt"; exit 1; }
folder=$(echo "$work"/nvguest-*/guest0)
admin=$folder/admin

section 'programs, before'
works

section 'calls of a program'
traced slow --slow 1ms
traced errors --errors

section 'the broker is killed'
tell 'rmprobe --watch 100 --size 32 > /tmp/held 2>&1 < /dev/null & until grep -q watching /tmp/held; do sleep 0.1; done'
heard
used
start=$(date +%s%N)
kill -9 "$(pgrep -f "vhost-user-nvguest --socket-path $folder/")"
# As the backend that died, but where nvguest finds a guest by its name.
root=()
[ "$(id -u)" != 0 ] || root=(--allow-root)
XDG_RUNTIME_DIR=$work "$nvguest" recover guest0 --qmp "$folder/qmp" -- "$backend" --host "$host" "${root[@]}" \
  --socket-path "$folder/backend" --admin-socket "$work/nvguest/guest0/admin.sock" --log-level info
echo "recover: exit $?"
since 'from the kill to the guest and its card' "$start"
admin=$work/nvguest/guest0/admin.sock
used

section 'programs, afterwards'
works
since 'from the kill to the end of these' "$start"
tell 'wait; cat /tmp/held; dmesg | grep -E "backend is gone|BUG|Oops|WARNING|Call Trace"'; heard
cp "$work/nvguest/guest0/backend.log" "$out/backend.log" 2>/dev/null

section 'needless, once it is well'
XDG_RUNTIME_DIR=$work "$nvguest" recover guest0 --qmp "$folder/qmp"; echo "recover: exit $?"

section 'the end'
echo exit >&5; wait $guest; guest=; sleep 1
echo "backends left: $(pgrep -fc "vhost-user-nvguest --.*$work/")"
used
