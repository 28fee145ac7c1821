//! Records what a program asks of NVIDIA's kernel modules: loaded with LD_PRELOAD, it writes a
//! line for each open, ioctl, mmap and poll on their files, and forwards the call unchanged.
//!
//! ```text
//! NVRECORD=/tmp/smi.log LD_PRELOAD=libnvrecord.so nvidia-smi -q
//! ```
//!
//! A line is `SECONDS TID WORD key=value …`, e.g.
//! `12.003412 4711 control node=nvidiactl cmd=0x20800102 size=564 status=0x0 ret=0`.
//! Only numbers are written: no memory that a pointer leads to, so a recording can be sent with
//! a report. `control`, `class`, `escape` and `uvm` lines are what abi-profiles' tests read.
//!
//! - `files`: which descriptor is which of NVIDIA's nodes
//! - `line`: a line, built without allocating
//! - `decode`: what an ioctl's argument says
//! - `hooks`: the functions that the program calls

pub mod decode;
mod files;
// Not in tests: they would stand before the test's own libc.
#[cfg(not(test))]
mod hooks;
pub mod line;
