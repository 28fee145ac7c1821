#!/usr/bin/env bash
# What a process can do to the client and the memory of another: natively, as two processes of one
# guest, as processes of two guests, and against a process of the host's. Guests are loop-back
# guests, whose calls are a guest's. Less than 60 s. A simulated card is each guest's own: there the
# second half shows nothing.
# Usage: OUT=folder [HOST=sim] tests/h200/owners.sh [folder of loopback.sh --pack]
set -u
pack=$(realpath "${1:-.loopback}")
out=${OUT:-out}
work=$(mktemp -d)
mkdir -p "$out"
exec > >(tee "$out/owners.txt") 2>&1
. "$(dirname "$0")/common.sh"
if [ -d /usr/local/nvidia ]; then export LD_LIBRARY_PATH=/usr/local/nvidia/lib64; fi

natively() { "$@"; }
guest() { timeout 60 "$pack/nvguest-loopback" --host "${HOST:-nvidia}" -- "$@" 2>> "$work/stderr"; }
handles='s/.*memory, \(0x[0-9a-f]*:0x[0-9a-f]*\),.*/\1/p'
# Memory is held the first way, and tried to be had the second way.
between() {
  section "$3"
  "$1" "$pack/rmprobe" --hold 6 > "$work/held" < /dev/null &
  local holder=$!
  await "$work/held" holding 10 || return
  "$2" "$pack/rmprobe" --intrude "$(sed -n "$handles" "$work/held")"; echo "exit $?"
  wait $holder
  echo "the other process: $(tail -1 "$work/held")"
}

echo "binaries: $(cat "$pack/commit" 2>/dev/null), $(date -u +%FT%TZ)"
between natively natively 'natively'
section 'two processes of one guest'
guest sh -c "'$pack/rmprobe' --hold 6 > '$work/held' < /dev/null & holder=\$!
  until grep -q holding '$work/held'; do sleep 0.1; done
  '$pack/rmprobe' --intrude \$(sed -n '$handles' '$work/held'); echo exit \$?
  wait \$holder; echo \"the other process: \$(tail -1 '$work/held')\""
between guest guest 'processes of two guests'
between natively guest 'a guest, and a process of the host'
between guest natively 'a process of the host, and a guest'
