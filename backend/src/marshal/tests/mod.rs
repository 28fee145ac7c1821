//! The specification of this room, each test a sentence.
//!
//! - `profile`: a small profile, built by hand
//! - `guest`: a guest that gathers and scatters by the schema, as the module does
//! - `card`: a driver that fails on anything that is not of our own
//! - `calls`, `refusals`, `hostile`: what is promised
//! - `measured`: the same over every measured release

mod calls;
mod card;
mod guest;
mod hostile;
mod measured;
mod profile;
mod refusals;
