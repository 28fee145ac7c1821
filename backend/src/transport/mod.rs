//! How bytes move: virtqueues in guest memory, and the socket between broker and worker.
//!
//! - [`ring`]: a virtqueue, requests from it and replies to it
//! - [`events`]: event records, coalesced
//! - [`counts`]: what is counted of requests
//! - [`trace`]: calls as they are served, while an admin looks
//! - [`page`]: what outlives the server of a slot's queues
//! - [`shared`]: memory files that several processes share
//! - [`link`]: the socket between broker and worker
//! - [`listen`]: where a broker waits for its VMM
//! - [`process`]: a process of the host by a descriptor

pub mod counts;
pub mod events;
pub mod link;
pub mod listen;
pub mod page;
pub mod process;
pub mod ring;
pub mod shared;
pub mod trace;
