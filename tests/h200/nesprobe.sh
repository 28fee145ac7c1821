#!/usr/bin/env bash
# nesprobe natively, on a machine with a card: every check twice, OpenGL, latency, cycles and a
# calibrated load in each of its forms. Less than 60 s. Run as root: it unpacks loaders into /.
# Usage: OUT=folder tests/h200/nesprobe.sh [folder with the binary and the loaders' packages]
# The folder is filled by: tests/h200/nesprobe.sh --pack
set -u
if [ "${1:-}" = --pack ]; then
  cd "$(dirname "$0")/../.." || exit 1
  cargo build --release -p nesprobe || exit 1
  mkdir -p .nesprobe && rm -rf .nesprobe/*
  strip -o .nesprobe/nesprobe target/release/nesprobe || exit 1
  (cd .nesprobe && apt-get download -q libegl1 libglvnd0 libopengl0 libvulkan1 \
    libbsd0 libmd0 libx11-6 libxau6 libxcb1 libxdmcp6 libxext6) || exit 1
  # vulkaninfo with its libraries, but for the C library's, which every machine and guest has.
  dpkg -s vulkan-tools > /dev/null 2>&1 || apt-get install -qq -y vulkan-tools || exit 1
  mkdir .nesprobe/vk && cp /usr/bin/vulkaninfo .nesprobe/vk/ || exit 1
  ldd /usr/bin/vulkaninfo | awk '/=>/ {print $3}' | grep -vE '/(libc|libm|libdl|libpthread|ld-linux[^/]*)\.so' |
    xargs -I{} cp -L {} .nesprobe/vk/ || exit 1
  git describe --always --dirty > .nesprobe/commit
  du -sh .nesprobe
  exit
fi
bundle=$(realpath "${1:-.nesprobe}")
out=${OUT:-out}
mkdir -p "$out"
exec > >(tee "$out/log.txt") 2>&1

. "$(dirname "$0")/vulkan.sh" "$bundle"

section() { printf '\n== %s (%s)\n' "$1" "$(date -u +%T)"; }
# Runs nesprobe for at most so many seconds and says how it ended.
probe() { section "nesprobe ${*:2}"; timeout "$1" "$bundle/nesprobe" "${@:2}"; echo "status $?"; }

section machine
uname -a
echo "commit: $(cat "$bundle/commit" 2>/dev/null || echo unknown)"
nvidia-smi -L

probe 10 --list
probe 60 --verify | tee "$out/verify.txt"
probe 60 --verify > "$out/again.txt"
section 'verify, run again'
diff <(grep -v '^==' "$out/verify.txt") <(grep -v '^==' "$out/again.txt") && echo the same
rm "$out/again.txt"
probe 20 --gl | tee "$out/gl.txt"
probe 10 --latency 2000
probe 20 --cycles 20
probe 30 --calibrate 10 --seconds 5 --csv "$out/frames.csv" --json | tee "$out/calibrate.json"
cost=$(sed -n 's/.*"cost":\([0-9]*\).*/\1/p' "$out/calibrate.json")
probe 10 --cost "$cost" --seconds 2
probe 10 --cost "$cost" --seconds 2 --wait spin
probe 10 --cost "$cost" --seconds 2 --fps 60
probe 10 --cost "$cost" --seconds 2 --fps 90 --frames-in-flight 3
probe 10 --cost "$cost" --seconds 2 --frames-in-flight 2
probe 10 --cost 0 --width 64 --height 64 --seconds 1
(sleep 2; echo go) | probe 10 --cost "$cost" --seconds 1 --barrier --json
section 'nesprobe, ended by Ctrl-C after 3 s'
timeout -s INT 3 "$bundle/nesprobe" --cost "$cost" --seconds 60
sleep 0.2
