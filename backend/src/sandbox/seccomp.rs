//! Which system calls a process may make, by seccomp.
//!
//! A call that is not on the list raises SIGSYS, and is not made. The handler says which
//! one it was; then the call fails with EPERM, or the process ends, as [`Refusal`] has it.
//! Whoever had replaced the handler would still not have made the call.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use anyhow::{Context, Result};
use nix::libc::{self, c_int, c_void};
use seccompiler::{
    apply_filter_all_threads, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp,
    SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};

use super::calls::{Absent, Is, Row};

/// How a process that is ended for a call ends: 128 and SIGSYS.
pub const EXIT: c_int = 128 + libc::SIGSYS;
/// Refused calls that are said; a process that was taken over may make many.
const SAID: u32 = 8;

/// What becomes of a call that is not on the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It fails with EPERM.
    Fails,
    /// The process ends with [`EXIT`].
    Ends,
}

/// Whether this kernel filters.
pub fn is_there() -> bool {
    // SAFETY: the call reads one word, which is alive; it changes nothing.
    let known = unsafe {
        let action = libc::SECCOMP_RET_TRAP;
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const action)
    };
    known == 0
}

/// Lets every thread make the calls of `rows` and no other, for ever. Those of `absent` fail
/// without a word.
pub fn confine(rows: &[Row], absent: Absent, refusal: Refusal) -> Result<()> {
    catch(refusal).context("Catching SIGSYS failed")?;
    let mut listed = rules(rows)?;
    // Of several filters the strictest answer counts, and a trap is stricter than an error.
    for &(number, errno) in absent {
        let fails = SeccompAction::Errno(errno.unsigned_abs());
        apply(BTreeMap::from([(number, Vec::new())]), fails, SeccompAction::Allow)?;
        listed.insert(number, Vec::new());
    }
    apply(listed, SeccompAction::Allow, SeccompAction::Trap)
}

fn apply(calls: Rules, listed: SeccompAction, other: SeccompAction) -> Result<()> {
    let filter = SeccompFilter::new(calls, other, listed, TargetArch::x86_64)?;
    let program: BpfProgram = filter.try_into()?;
    Ok(apply_filter_all_threads(&program)?)
}

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// An empty list of rules for a call allows it whatever its arguments.
fn rules(rows: &[Row]) -> Result<Rules> {
    let mut calls = Rules::new();
    for &(number, conditions) in rows {
        let call = calls.entry(number).or_default();
        if !conditions.is_empty() {
            let conditions = conditions.iter().map(condition).collect::<Result<_>>()?;
            call.push(SeccompRule::new(conditions)?);
        }
    }
    Ok(calls)
}

fn condition(is: &Is) -> Result<SeccompCondition> {
    use SeccompCmpArgLen::{Dword, Qword};
    Ok(match *is {
        Is::Equal(argument, value) => {
            SeccompCondition::new(argument, Qword, SeccompCmpOp::Eq, value)?
        }
        Is::Bits(argument, mask, value) => {
            let op = SeccompCmpOp::MaskedEq(mask.into());
            SeccompCondition::new(argument, Dword, op, value.into())?
        }
    })
}

static ENDS: AtomicBool = AtomicBool::new(false);
static REFUSED: AtomicU32 = AtomicU32::new(0);

fn catch(refusal: Refusal) -> io::Result<()> {
    ENDS.store(refusal == Refusal::Ends, Ordering::Relaxed);
    // SAFETY: all zeroes are a valid sigaction; the mask is emptied by them.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = refused;
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler has the signature that SA_SIGINFO asks for and does only what a
    // signal handler may.
    match unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Says which call it was, in calls that are on every list and without a lock or memory.
extern "C" fn refused(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the kernel hands a handler with SA_SIGINFO the context that it will go back
    // to, and nothing else refers to it meanwhile.
    let result = unsafe { &mut (*context).uc_mcontext.gregs[libc::REG_RAX as usize] };
    let number = *result;
    *result = -i64::from(libc::EPERM);
    let ends = ENDS.load(Ordering::Relaxed);
    if REFUSED.fetch_add(1, Ordering::Relaxed) < SAID {
        say(number, ends);
    }
    if ends {
        // SAFETY: ends the process at once, running nothing of it.
        unsafe { libc::_exit(EXIT) };
    }
}

fn say(number: i64, ends: bool) {
    let mut line = Line::default();
    line.push(b"vhost-user-nvguest: the sandbox refused system call ");
    line.push_number(number.unsigned_abs());
    line.push(if ends { b", which ends this worker\n" } else { b"\n" });
    // SAFETY: the bytes are alive and initialised. Nobody could be told of a failure.
    let _ = unsafe { libc::write(libc::STDERR_FILENO, line.bytes.as_ptr().cast(), line.length) };
}

/// A line that takes no memory from anywhere.
struct Line {
    bytes: [u8; 128],
    length: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self { bytes: [0; 128], length: 0 }
    }
}

impl Line {
    fn push(&mut self, text: &[u8]) {
        for &byte in text {
            if let Some(place) = self.bytes.get_mut(self.length) {
                *place = byte;
                self.length += 1;
            }
        }
    }

    fn push_number(&mut self, number: u64) {
        if number >= 10 {
            self.push_number(number / 10);
        }
        // CAST: one digit.
        self.push(&[b'0' + (number % 10) as u8]);
    }
}
