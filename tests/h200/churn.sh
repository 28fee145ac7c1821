#!/usr/bin/env bash
# Eight guests that take video memory, and are killed at random: half of them under QEMU, half
# loop-back guests; whatever of one may die does: the program, a worker, the backend, the VMM. Does
# the card's memory come back to where it began?
# Usage: OUT=folder tests/h200/churn.sh [seconds [bundle [folder of loopback.sh --pack]]]
set -u
seconds=${1:-300}
bundle=$(realpath "${2:-.bundle}")
loopback=$(realpath "${3:-.loopback}")
out=${OUT:-out}
work=$(mktemp -d)
mkdir -p "$out"
exec > >(tee "$out/churn.txt") 2>&1
if [ -d /usr/local/nvidia ]; then export LD_LIBRARY_PATH=/usr/local/nvidia/lib64; fi
used() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | awk '{n += $1} END {print n}'; }
# Others on this machine are left alone.
ours="^($bundle|$loopback)/.*vhost-user-nvguest"
one() { pgrep "$@" | shuf -n1; }
# Workers are children of the starter, which is the backend's.
worker() { local broker; broker=$(one -f "$ours.*--socket-path"); [ -n "$broker" ] && one -P "$(pgrep -P "$broker" | head -1)"; }
size() { echo $((16 + RANDOM % 1500)); }

uname -srm; echo "bundle: $(cat "$bundle/commit" 2>/dev/null), $(date -u +%FT%TZ)"
nvidia-smi -L
"$bundle/nvguest-run" path rmprobe > /dev/null
begin=$(used); echo "card: $begin MiB used"
touch "$work/on"
# A guest of a number, started again whenever it ends.
under_qemu() {
  while [ -e "$work/on" ]; do
    "$bundle/nvguest-run" guest --host "${HOST:-nvidia}" --cpus 1 --memory 1024 --timeout 400 --backend-arg=--vram=2G \
      --run "while :; do rmprobe --hold 3 --size $(size) < /dev/null & rmprobe --fill 32; wait; done" > "$work/$1.log" 2>&1
    echo "$1" >> "$work/starts"
  done
}
by_loopback() {
  while [ -e "$work/on" ]; do
    "$loopback/nvguest-loopback" --host "${HOST:-nvidia}" --backend-arg=--vram=2G -- sh -c \
      "p=\$PPID; while kill -0 \$p 2> /dev/null; do '$loopback/rmprobe' --hold 2 --size $(size) < /dev/null & '$loopback/rmprobe' --fill 32; wait; done" > "$work/$1.log" 2>&1
    echo "$1" >> "$work/starts"
  done
}
for i in 0 1 2 3; do under_qemu $i 2> /dev/null & by_loopback $((i + 4)) 2> /dev/null & done
sleep 12
echo "card with eight guests: $(used) MiB"
end=$((SECONDS + seconds))
most=0
while [ $SECONDS -lt $end ]; do
  sleep 0.$((RANDOM % 5 + 1))
  case $((RANDOM % 12)) in
    0) what=qemu; victim=$(one -f "$bundle.*bin/qemu-system") ;;
    1) what=backend; victim=$(one -f "$ours.*--socket-path") ;;
    2) what='loop-back launcher'; victim=$(one -f "^$loopback/nvguest-loopback") ;;
    3 | 4 | 5 | 6) what=worker; victim=$(worker) ;;
    *) what=program; victim=$(one -f "^$loopback/rmprobe") ;;
  esac
  [ -n "$victim" ] && kill -9 "$victim" 2> /dev/null && echo "$what" >> "$work/kills"
  now=$(used); [ "$now" -gt $most ] && most=$now
done
echo "killed in $seconds s:"; sort "$work/kills" | uniq -c
echo "guests started again: $(wc -l < "$work/starts"); card's memory at most: $most MiB"
rm "$work/on"
for what in "$bundle/nvguest-run" "$loopback/nvguest-loopback" "$bundle.*bin/qemu-system"; do pkill -9 -f "^[^ ]*$what|^$what"; done
pkill -9 -f "^$loopback/rmprobe"
start=$(date +%s%N)
until [ "$(used)" = "$begin" ] || [ $(($(date +%s%N) - start)) -gt 20000000000 ]; do sleep 0.05; done
echo "card: $(used) MiB $((($(date +%s%N) - start) / 1000000)) ms after all were killed; before: $begin MiB"
sleep 1
echo "backends of ours left: $(pgrep -fc "$ours")"
"$loopback/rmprobe" | grep -c ^ok
"$loopback/nvguest-loopback" --host "${HOST:-nvidia}" -- "$loopback/rmprobe" 2> /dev/null | grep -c ^ok
nvidia-smi --query-gpu=memory.used,ecc.errors.uncorrected.volatile.total --format=csv,noheader
dmesg 2>/dev/null | grep -i xid | tail -5
