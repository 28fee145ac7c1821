#!/usr/bin/env bash
# Fuzzes every target on a machine without a compiler, several processes at a time, from a
# folder that `cargo xtask fuzz --pack FOLDER` made. What is found and what fails lies in OUT.
# Usage: OUT=folder ./run.sh SECONDS PROCESSES [target...]
# Each target runs for so many seconds; with fewer processes than targets they take turns.
set -u
seconds=${1:?for how many seconds}
processes=${2:?how many processes at a time}
shift 2
here=$(cd "$(dirname "$0")" && pwd)
out=${OUT:-out}
mkdir -p "$out/log"
out=$(cd "$out" && pwd)
targets=("$@")
[ $# -gt 0 ] || mapfile -t targets < <(ls "$here/corpus")

export ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0
export LD_LIBRARY_PATH=$here/lib NVGUEST_GATHER=$here/gather

# One process of a target until the time is up: one that fails leaves its input, and is
# followed by another. Limits are of the clock, and a processor that others use makes
# seconds of nothing: only who hangs reaches a minute.
one() {
  local target=$1 log="$out/log/$1.$2" end=$((SECONDS + seconds)) left
  : > "$log"
  while left=$((end - SECONDS)); [ $left -gt 0 ]; do
    FUZZ_TARGET=$target "$here/fuzz" -max_total_time=$left -artifact_prefix="$out/failed/$target/" \
      -max_len=8192 -timeout=60 -report_slow_units=60 -rss_limit_mb=4096 -print_final_stats=1 \
      "$out/found/$target" "$here/corpus/$target" >> "$log" 2>&1 && break
    sleep 1
  done
}

# Processes of one target side by side: they take over what the others find.
all_of() {
  local target=$1 count=$2 number
  mkdir -p "$out/found/$target" "$out/failed/$target"
  TIMEFORMAT='%U %S'
  { time { for number in $(seq "$count"); do one "$target" "$number" & done; wait; }; } 2> "$out/log/$target.time"
}

# Executions, processor seconds, edges when the corpus was read and at the end, and inputs.
report() {
  local target=$1 executions processor first last
  executions=$(awk '/stat::number_of_executed_units:/ { sum += $2 } END { print sum + 0 }' "$out/log/$target".[0-9]*)
  processor=$(awk '{ printf "%.0f", $1 + $2 }' "$out/log/$target.time")
  first=$(grep -hm1 INITED "$out/log/$target.1" | sed -n 's/.* cov: \([0-9]*\).*/\1/p')
  last=$(sed -n 's/.* cov: \([0-9]*\).*/\1/p' "$out/log/$target".[0-9]* | sort -n | tail -1)
  printf '%-14s %12s %10s %8s %8s %8s %8s\n' "$target" "$executions" "$processor" "${first:-?}" \
    "${last:-?}" "$(find "$out/found/$target" -type f | wc -l)" "$(find "$out/failed/$target" -type f | wc -l)"
}

count=${#targets[@]}
each=$((processes / count)) more=$((processes % count)) running=0
for index in "${!targets[@]}"; do
  share=$((each + (index < more)))
  all_of "${targets[$index]}" $((share > 0 ? share : 1)) &
  running=$((running + 1))
  [ $each -gt 0 ] || [ $running -lt "$processes" ] || { wait -n; running=$((running - 1)); }
done
wait

echo "$(date -u +%F) $(nproc) processors, $processes processes, $seconds s a target, commit $(cat "$here/commit" 2>/dev/null)"
printf '%-14s %12s %10s %8s %8s %8s %8s\n' target executions 'CPU s' 'edges 0' 'edges 1' new failed
for target in "${targets[@]}"; do report "$target"; done | tee "$out/report"
[ -z "$(find "$out/failed" -type f -print -quit)" ]
