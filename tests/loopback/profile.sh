#!/usr/bin/env bash
# Where the time of a flat control's round trip goes, by perf's clock: a program that is a guest
# without a VM, its launcher, a broker and a worker on the simulated card, both sides sleeping.
# Usage: tests/loopback/profile.sh [microseconds that each side looks before it sleeps]
set -eu
cd "$(dirname "$0")/../.."
looks=${1:-0}
cargo build --quiet --release -p nvguest-loopback -p vhost-user-nvguest
bin=target/release
data=$(mktemp)
perf record --quiet -F 9999 -e cpu-clock -o "$data" -- "$bin/nvguest-loopback" --host sim \
  --trusting --poll-us "$looks" --backend-arg=--poll-us="$looks" --backend-arg=--log-level=error \
  -- "$bin/loopback-measure" control 500
perf report -i "$data" --stdio -g none --no-children -s comm,dso,sym 2> /dev/null |
  python3 -c '
import collections, re, sys
of = collections.Counter()
ours = ("loopback-measur", "serve-")
groups = [
    ("scheduling, wake-ups", r"switch|sched|wake|idle|rq_|_raw_spin_unlock|rseq|ttwu|enqueue|dequeue|pick_next|update_curr|hrtimer|timer"),
    ("epoll, eventfd", r"ep_|epoll|eventfd|poll"),
    ("entering the kernel", r"syscall|entry_|do_syscall|exit_to_user|fdget|vfs_|ksys|fsnotify|rw_verify|__get_user|security"),
]
for line in sys.stdin:
    m = re.match(r"\s*([\d.]+)%\s+(\S+)\s+(\S+)\s+\[(.)\]\s+(.*)", line)
    if not m or not m[2].startswith(ours): continue
    share, who, dso, where, symbol = float(m[1]), m[2], m[3], m[4], m[5].strip()
    side = "caller" if who.startswith("loopback") else "worker"
    if where == "k":
        name = next((name for name, pattern in groups if re.search(pattern, symbol)), "the rest of the kernel")
    else:
        name = "clock" if "vdso" in dso else "C library" if "libc" in dso else "our own code"
    of[side, name] += share
total = sum(of.values())
for (side, name), share in of.most_common():
    print(f"{side:7} {name:24} {100 * share / total:5.1f} %")
'
rm "$data"
