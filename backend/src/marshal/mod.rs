//! One IOCTL request becomes one host call, and the call's results one reply.
//!
//! This is the only room that builds a host argument. Nothing of the guest's
//! address space reaches the driver: every pointer of the argument leads to a
//! block of our own [`scratch`] memory or is null, every descriptor is one of our
//! own files or none. What the guest gets back is what it sent, with RM's outputs
//! changed.
//!
//! Three stages, so that the session can look, and change, between them:
//! [`prepare`] walks the profile's rules over the bytes that arrived, compares
//! with what was gathered, and builds the call; [`Prepared::execute`] makes it;
//! [`Prepared::finish`] writes the reply.
//!
//! - [`request`]: the parts of a request
//! - `plan`: the walk over the rules
//! - `rm`: what RM itself reads from an argument
//! - [`prepare`](mod@prepare): gather, a request into a call
//! - [`reply`]: scatter, the results into a reply
//! - [`register`], [`control`]: calls that are not the guest's
//! - [`pages`]: memory that the guest's program registers
//! - [`scratch`]: the memory of all other calls. These two have the room's `unsafe`

#[forbid(unsafe_code)]
mod bounded;
#[forbid(unsafe_code)]
pub mod control;
pub mod pages;
#[forbid(unsafe_code)]
mod plan;
#[forbid(unsafe_code)]
pub mod prepare;
#[forbid(unsafe_code)]
pub mod register;
#[forbid(unsafe_code)]
pub mod reply;
#[forbid(unsafe_code)]
pub mod request;
#[forbid(unsafe_code)]
mod rm;
pub mod scratch;
#[cfg(any(test, feature = "fuzzing"))]
#[allow(missing_docs, reason = "what tests are made of")]
pub mod tests;

pub use prepare::{prepare, Files, Prepared, Refused};
pub use request::Call;
pub use scratch::{Frame, Scratch};
