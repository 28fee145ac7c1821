#!/usr/bin/env bash
# A guest beside its host, on a machine with a card: nvidia-smi and rmprobe in both.
# Usage: OUT=folder tests/h200/first-guest.sh [bundle folder]
set -u
bundle=${1:-.bundle}
out=${OUT:-out}
mkdir -p "$out"
log=$out/log.txt
exec > >(tee "$log") 2>&1

section() { printf '\n== %s (%s)\n' "$1" "$(date -u +%T)"; }
native() { "$@" > "$out/native-$name.txt" 2>&1; echo "native-$name: exit $?"; }
guest() {
  "$bundle/nvguest-run" guest --host nvidia --logs "$out/logs" --timeout 240 "$@"
}

section machine
uname -a
nvidia-smi
probe=$("$bundle/nvguest-run" path rmprobe)

section native
name=smi native nvidia-smi
name=smi-L native nvidia-smi -L
name=smi-q native nvidia-smi -q
name=rmprobe native "$probe"
tail -3 "$out/native-rmprobe.txt"

section guest
mkdir -p "$out/logs"
guest --backend-arg=--log-level --backend-arg=info --run '
  echo "--- smi-L"; nvidia-smi -L
  echo "--- smi"; nvidia-smi
  echo "--- rmprobe"; rmprobe; echo "exit $?"
  echo "--- smi-q"; nvidia-smi -q
  echo "--- dmesg"; dmesg | grep -i nvg
' > "$out/guest.txt" 2>&1
echo "guest: exit $?"
head -60 "$out/guest.txt"
grep -E '^(FAIL|exit)' "$out/guest.txt"

section after
nvidia-smi --query-gpu=memory.used --format=csv
for file in "$out"/logs/*; do echo "--- $file"; tail -40 "$file"; done
tar -C "$out" -czf "$out/all.tar.gz" --exclude=all.tar.gz . 2>/dev/null
find "$out" -mindepth 1 -maxdepth 1 ! -name all.tar.gz ! -name log.txt -exec rm -rf {} +
