#!/usr/bin/env python3
"""Where the time of a program's calls goes: two or more runs of `nvguest-loopback --trace`, the first native.

Usage: where.py native.trace guest.trace [more…]    each kind of call, dearest difference first
"""
import collections
import re
import sys

KEY = {"control": "cmd", "class": "class", "escape": "nr"}


def read(path):
    """Microseconds and calls by kind, and from the first line to the last."""
    spent = collections.defaultdict(lambda: [0, 0])
    times = []
    for line in open(path, errors="replace"):
        words = line.split()
        if len(words) < 3:
            continue
        times.append(float(words[0]))
        fields = dict(word.split("=", 1) for word in words[3:] if "=" in word)
        if "us" not in fields:
            continue
        name = f"{words[2]} {fields.get(KEY.get(words[2], ''), '')} {fields.get('name', '')}"
        spent[name.strip()][0] += int(fields["us"])
        spent[name.strip()][1] += 1
    return spent, (times[-1] - times[0]) * 1e3 if times else 0


runs = [read(path) for path in sys.argv[1:]]
native = runs[0][0]
print("from first to last call, ms:", " ".join(f"{whole:.1f}" for _, whole in runs))
print("in calls, ms:", " ".join(f"{sum(us for us, _ in spent.values()) / 1e3:.1f}" for spent, _ in runs))
names = sorted(
    {name for spent, _ in runs for name in spent},
    key=lambda name: native[name][0] - runs[-1][0][name][0],
)
print("us and calls in each run:")
for name in names[:25]:
    print("  ".join(f"{spent[name][0]:>8} {spent[name][1]:>5}" for spent, _ in runs), re.sub(" +", " ", name))
