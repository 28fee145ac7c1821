#!/bin/sh
# The compiler of `cargo xtask fuzz` (RUSTC_WRAPPER): instruments the crates that parse bytes of
# others. To instrument all that they depend on takes longer than to compile them.
crate=
target=
previous=
for word; do
  case $previous in
    --crate-name) crate=$word ;;
    --target) target=$word ;;
  esac
  previous=$word
done
# Build scripts and macros run here, and are compiled without a target.
[ -n "$target" ] || exec "$@"
case $crate in
  fuzz | nvguest_* | vhost_user_nvguest | vhost | virtio_queue | vm_memory) ;;
  *) exec "$@" ;;
esac
exec "$@" -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares -Zsanitizer=address
