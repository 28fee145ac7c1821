//! The preloaded half of the loop-back guest: it stands before libc's calls, and what a
//! program does with `/dev/nvidia*` goes as messages of the real protocol to the real
//! backend, on a queue of its own.
//!
//! - [`hooks`]: the functions that the program calls: open, ioctl, close, dup, stat
//! - [`maps`]: mmap and munmap
//! - [`wait`], [`epoll`]: poll, select, epoll
//! - [`process`]: this process as a guest process: its slot's queue, its launcher
//! - [`files`]: a guest file and the descriptors that stand for it
//! - [`schema`]: the guest module's own interpreter, compiled in
//! - [`trace`], [`line`]: what `--trace` and `--compare` read
//! - [`board`], [`talk`]: what is shared with the launcher, and how it is asked
//! - [`next`]: libc's own functions

#[allow(dead_code, reason = "each half uses its part")]
mod board;
mod epoll;
mod files;
mod hooks;
mod line;
mod maps;
mod next;
mod process;
mod schema;
#[allow(dead_code, reason = "each half uses its part")]
mod talk;
mod trace;
mod wait;
