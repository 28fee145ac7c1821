//! The protocol, spoken by a fake frontend over a real socket to the real backend.
//!
//! - `messages`: every message and its errors
//! - `chains`: descriptor chains, whole and broken
//! - `calls`: what an IOCTL carries, and the files that it names
//! - `processes`: workers and slots, their life and their death
//! - `mappings`: the window
//! - `arena`: system memory that costs no placement
//! - `readiness`: ARM and events
//! - `vmm`: what the VMM sets up and takes away
//! - `sandbox`: what the processes may not do
//! - `limits`: what a guest may have
//! - `floods`: a million of what is malformed, and nothing dies or grows
//! - `budgets`: what it has of the card
//! - `clients`: those of other processes, named in calls
//! - `cards`: several cards in one host, and guests of some of them
//! - `admin`: what an admin asks and sets, and the same in metrics
//! - `trace`: calls as an admin watches them
//! - `endurance`: many of anything leave nothing behind

mod admin;
mod arena;
mod budgets;
mod calls;
mod cards;
mod chains;
mod clients;
mod common;
mod endurance;
mod floods;
mod limits;
mod mappings;
mod messages;
mod processes;
mod readiness;
mod registered;
mod sandbox;
mod trace;
mod vmm;
