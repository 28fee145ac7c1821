# Sourced: what the scripts here say and wait with.
section() { printf '\n== %s (%s)\n' "$1" "$(date -u +%T)"; }
# Waits for the first line of a file that matches, for so many seconds at most.
await() {
  local until=$((SECONDS + $3))
  until grep -q "$2" "$1" 2>/dev/null; do
    [ $SECONDS -lt $until ] || { echo "no '$2' in $1 within $3 s"; return 1; }
    sleep 0.02
  done
}
# Asks a backend's admin socket, a request as JSON, and prints the answer.
ask() {
  python3 -c 'import json, socket, sys
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])
s.sendall(json.dumps({"schema": 1} | json.loads(sys.argv[2])).encode() + b"\n")
answer = json.load(s.makefile())
print(json.dumps(answer.get("answer", answer)))' "$1" "${2:-{\"request\":\"status\"\}}"
}
# The processor that the card interrupts most.
home() {
  awk '/nvidia/ {for (i = 2; i <= NF && $i ~ /^[0-9]+$/; i++) n[i - 2] += $i}
    END {for (i in n) if (n[i] > n[best]) best = i; print best + 0}' /proc/interrupts
}
# Keeps a backend, all that it starts and its VMM's main thread on some processors, the VMM's virtual ones on others.
place() {
  local qemu=$1 backend=$2 pid task
  for pid in "$qemu" "$backend" $(pgrep -P "$backend"); do taskset -acp "$3" "$pid" > /dev/null; done
  for task in "/proc/$qemu/task"/*; do
    case $(cat "$task/comm") in CPU*) taskset -cp "$4" "${task##*/}" > /dev/null ;; esac
  done
}
