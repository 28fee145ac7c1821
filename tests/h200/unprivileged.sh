#!/usr/bin/env bash
# A backend of an ordinary user with the sandbox on, on a machine with a card: nvidia-smi,
# rmprobe, what no guest may do, and nesprobe if it is there, natively and as a guest without
# a VM; and whether the card's settings are afterwards what they were. Less than 120 s.
# Usage, as root: OUT=folder [HOST=sim] tests/h200/unprivileged.sh [folder of tests/h200/loopback.sh --pack]
set -u
bundle=$(realpath "${1:-.loopback}")
out=${OUT:-out}
host=${HOST:-nvidia}
mkdir -p "$out"
exec > >(tee "$out/log.txt") 2>&1

user=61234
work=$(mktemp -d /tmp/nvguest-unprivileged.XXXXXX)
cp "$bundle"/* "$work"/ && chown -R $user:$user "$work" && chmod 0755 "$work"
smi=/usr/local/nvidia/bin/nvidia-smi
libraries=
manifest=$(ls /usr/local/nvidia/share/vulkan/icd.d/nvidia_icd.json /usr/share/vulkan/icd.d/nvidia_icd.json 2>/dev/null | head -1)
if [ -x "$smi" ]; then libraries=/usr/local/nvidia/lib64; else smi=$(command -v nvidia-smi); fi

. "$(dirname "$0")/common.sh"
# A command as the ordinary user: no group of root's, no capability, none to be had.
user() {
  (cd "$work" && setpriv --reuid=$user --regid=$user --clear-groups --bounding-set=-all \
    --inh-caps=-all --no-new-privs env -i HOME="$work" TMPDIR="$work" PATH="$PATH" \
    LD_LIBRARY_PATH="$libraries" VK_DRIVER_FILES="$manifest" "$@")
}
# A command as a guest's program, its backend confined or not started at all.
guest() {
  user timeout 60 "$work/nvguest-loopback" --host "$host" --backend-arg=--sandbox=on "$@"
}
# What of `nvidia-smi -q` is a setting or a counter of faults: what moves by itself is left out.
settings() {
  "$smi" -q | grep -vE 'Timestamp|Usage|Power Draw|Temp|Used|Free|Clocks|MHz|Tx |Rx |Utili|Gpu  |Memory  |Idle|Counter|Duration|us$|Active$'
}
compare() {
  echo 'verdicts that differ:'
  diff <(sed 's/:.*//' "$1") <(sed 's/:.*//' "$2") && echo none
}

section machine
uname -srm; id; echo "binaries: $(cat "$work/commit" 2>/dev/null)"
ls -l /dev/nvidia* 2>/dev/null
cat /sys/kernel/security/lsm 2>/dev/null || echo 'no list of security modules can be read'
user "$work/vhost-user-nvguest" --check --host "$host" --sandbox on; echo "check, sandbox on: exit $?"
user "$work/vhost-user-nvguest" --check --host "$host" --sandbox best-effort
"$work/vhost-user-nvguest" --host "$host" --socket-path "$work/refused"; echo "as root: exit $?"
settings > "$work/settings-before"

section rmprobe
user timeout 60 "$work/rmprobe" > "$out/rm-native.txt"; echo "natively: exit $?"
guest -- "$work/rmprobe" > "$out/rm-guest.txt" 2> "$out/rm-guest.err"; echo "as a guest: exit $?"
grep -c ^ok "$out/rm-native.txt" "$out/rm-guest.txt"
compare "$out/rm-native.txt" "$out/rm-guest.txt"
grep -h ^FAIL "$out/rm-guest.txt"; tail -5 "$out/rm-guest.err"

section 'what no guest may do'
user timeout 30 "$work/rmprobe" --hostile-native > "$out/hostile-native.txt"; echo "natively: exit $?"
guest -- "$work/rmprobe" --hostile > "$out/hostile-guest.txt" 2> "$out/hostile-guest.err"
echo "as a guest: exit $?, $(grep -c ^ok "$out/hostile-guest.txt") refused"
grep ^FAIL "$out/hostile-guest.txt"
grep 'a host answers' "$out/hostile-native.txt"

section nvidia-smi
user "$smi" > "$work/smi-native"; echo "natively: exit $?"
guest -- "$smi" > "$work/smi-guest"; echo "as a guest: exit $?"
diff "$work/smi-native" "$work/smi-guest" && echo 'no line differs'
user "$smi" -q > "$out/smi-q-native.txt"; echo "-q natively: exit $?"
guest -- "$smi" -q > "$out/smi-q-guest.txt"; echo "-q as a guest: exit $?"
diff "$out/smi-q-native.txt" "$out/smi-q-guest.txt" | head -30

section nesprobe
if [ -x "$work/nesprobe" ]; then
  user timeout 20 "$work/nesprobe" --verify > "$out/nesprobe-native.txt"; echo "natively: exit $?"
  guest -- "$work/nesprobe" --verify > "$out/nesprobe-guest.txt"; echo "as a guest: exit $?"
  diff "$out/nesprobe-native.txt" "$out/nesprobe-guest.txt"
else
  echo 'not in the bundle'
fi

section 'the processes, from outside'
user timeout 25 "$work/nvguest-loopback" --host "$host" --backend-arg=--sandbox=on -- \
  "$work/rmprobe" --hold 6 --size 16 < /dev/null > "$work/hold" 2>&1 &
holder=$!
until grep -q holding "$work/hold" || ! kill -0 $holder 2>/dev/null; do sleep 0.1; done
for pid in $(pgrep -u $user -f 'vhost-user-nvguest|--worker|--starter'); do
  echo "$pid $(tr '\0' ' ' < "/proc/$pid/cmdline" | cut -c1-60)"
  grep -E '^(Uid|CapPrm|CapEff|CapBnd|NoNewPrivs|Seccomp):' "/proc/$pid/status" | paste -sd' '
  echo "  nodes open: $(find "/proc/$pid/fd" -lname '/dev/nvidia*' 2>/dev/null | wc -l)"
done
# A bare wait would wait for tee as well.
wait $holder

section 'the card afterwards'
settings > "$work/settings-after"
diff "$work/settings-before" "$work/settings-after" && echo 'every setting is what it was'
# A backend ends a moment after its program.
for _ in $(seq 20); do pgrep -u $user > /dev/null || break; sleep 0.1; done
echo "processes of the user left: $(pgrep -cu $user)"
grep -h 'refused system call' "$out"/*.err "$work"/hold || echo 'the sandbox refused no call'
cp "$work/settings-before" "$work/settings-after" "$out"/
rm -rf "$work"
