//! The specification of this room, each test a sentence.
//!
//! What the tests are made of is for `tests/fuzz` too.
//!
//! - `profile`: a small profile, built by hand
//! - `guest`: a guest that gathers and scatters by the schema, as the module does
//! - `furnish`: arguments with all that they reach
//! - `card`: a driver that fails on anything that is not of our own
//! - `calls`, `refusals`, `hostile`: what is promised
//! - `measured`: the same over every measured release
//! - `any`: any call, honest or not, of any measured release

#[cfg(test)]
mod any;
#[cfg(test)]
mod calls;
pub mod card;
pub mod furnish;
pub mod guest;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod measured;
#[cfg(test)]
mod profile;
#[cfg(test)]
mod refusals;
