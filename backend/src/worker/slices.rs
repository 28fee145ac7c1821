//! Time of the card: the slices of this process's channel groups, by the guest's weight.
//!
//! The card gives each group that has work a slice in turn, so slices are shares. A program may
//! set its own (CUDA does), and reads back what it set; what the card is told is that, times
//! the guest's weight, within bounds ([`crate::budgets::slice`]).

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Mutex;

use nvguest_abi::FileKind;

use super::calls::{escape, u32_at, u64_at};
use super::objects::Holds;
use super::session::Session;
use crate::budgets::{slice, DEFAULT_WEIGHT};
use crate::errno::Errno;
use crate::marshal::control::Control;
use crate::marshal::scratch::Scratch;
use crate::marshal::Prepared;
use crate::sync::lock;
use crate::transport::link::{Kind, Outgoing};

/// `KEPLER_CHANNEL_GROUP_A`
const CHANNEL_GROUP: u32 = 0xa06c;
/// `NVA06C_CTRL_CMD_SET_TIMESLICE` and `_GET_TIMESLICE`: microseconds, 64 bits.
const SET: u32 = 0xa06c_0103;
const GET: u32 = 0xa06c_0104;

/// What is known of a channel group's slice, in µs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Group {
    /// What its program set.
    own: Option<u64>,
    /// What it had when it was made.
    default: Option<u64>,
}

/// The guest's weight, and what it takes to make calls of our own.
pub struct Slices {
    weight: AtomicU32,
    /// One such call at a time: the last one is of the last weight.
    scratch: Mutex<Scratch>,
}

impl Slices {
    /// With this weight from the start.
    pub fn new(weight: u32) -> Result<Self, Errno> {
        Ok(Self { weight: AtomicU32::new(weight), scratch: Mutex::new(Scratch::new()?) })
    }

    fn weight(&self) -> u32 {
        self.weight.load(Ordering::Acquire)
    }
}

/// What a program asked for, and the weight that was put in its place with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    own: u64,
    weight: u32,
}

/// What the call's new object has of the card's time.
pub(super) fn holds_time(prepared: &Prepared<'_>) -> Holds {
    let is_group = u32_at(prepared.argument(), 0xc) == CHANNEL_GROUP;
    match prepared.nr() {
        escape::ALLOC if is_group => Holds::Time(Group::default()),
        _ => Holds::Nothing,
    }
}

/// The control that a call is, if it is one.
fn command(prepared: &Prepared<'_>) -> Option<u32> {
    let is_rm = matches!(prepared.kind(), FileKind::Ctl | FileKind::Gpu);
    (is_rm && prepared.nr() == escape::CONTROL).then(|| u32_at(prepared.argument(), 8))
}

fn put(prepared: &mut Prepared<'_>, us: u64) {
    if let Some(field) = prepared.params_mut().and_then(<[u8]>::first_chunk_mut) {
        *field = us.to_le_bytes();
    }
}

impl Session {
    /// Puts the guest's slice in place of the one that a program sets, which is returned. None
    /// at all is left to RM to refuse.
    pub(super) fn put_slice(&self, prepared: &mut Prepared<'_>) -> Option<Asked> {
        if command(prepared)? != SET {
            return None;
        }
        let own = Some(u64_at(prepared.params()?, 0)).filter(|&own| own != 0)?;
        let weight = self.slices.weight();
        put(prepared, slice(own, weight));
        Some(Asked { own, weight })
    }

    /// What a call did for slices. `asked` is what [`Session::put_slice`] took out.
    pub(super) fn slices_follow(
        &self,
        prepared: &mut Prepared<'_>,
        asked: Option<Asked>,
        done: bool,
    ) {
        if let Some(asked) = asked {
            put(prepared, asked.own);
        }
        let command = command(prepared);
        let argument = prepared.argument();
        let object = u32_at(argument, if command.is_some() { 4 } else { 8 });
        let client = u32_at(argument, 0);
        match (done, command, asked) {
            (true, Some(SET), Some(asked)) => {
                if let Some(group) = lock(&self.objects).group(client, object) {
                    group.own = Some(asked.own);
                }
                // The weight may have changed before the card had this.
                if self.slices.weight() != asked.weight {
                    self.weigh(client, object);
                }
            }
            (true, Some(GET), _) => {
                let group = lock(&self.objects).group(client, object).copied();
                if let Some(us) = group.and_then(|group| group.own.or(group.default)) {
                    put(prepared, us);
                }
            }
            (true, None, _)
                if self.slices.weight() != DEFAULT_WEIGHT
                    && matches!(holds_time(prepared), Holds::Time(_)) =>
            {
                self.weigh(client, object);
            }
            _ => {}
        }
    }

    /// Another weight, from now on; [`Session::weigh_all`] makes it hold for groups that live.
    pub fn set_weight(&self, weight: u32) {
        self.slices.weight.store(weight, Ordering::Release);
    }

    /// Gives every channel group the slice that is its own by the guest's weight.
    pub fn weigh_all(&self) {
        let groups = lock(&self.objects).groups();
        for (client, object) in groups {
            self.weigh(client, object);
        }
    }

    /// Gives a group the slice that is its own by the guest's weight.
    fn weigh(&self, client: u32, object: u32) {
        let scratch = &mut lock(&self.slices.scratch);
        let Some(group) = lock(&self.objects).group(client, object).copied() else { return };
        let outcome = match group.own.or(group.default) {
            Some(us) => Ok(us),
            None => self.ask(scratch, (client, object), GET, 0).inspect(|&us| {
                if let Some(group) = lock(&self.objects).group(client, object) {
                    group.default = Some(us);
                }
            }),
        };
        let outcome = outcome.and_then(|own| {
            self.ask(scratch, (client, object), SET, slice(own, self.slices.weight()))
        });
        match outcome {
            Ok(us) => tracing::debug!(object, us, "a channel group has another time slice"),
            Err(status) => self.slice_refused(status),
        }
    }

    /// A call of our own on a channel group, by the file of its client.
    fn ask(
        &self,
        scratch: &mut Scratch,
        (client, object): (u32, u32),
        command: u32,
        us: u64,
    ) -> Result<u64, Option<u32>> {
        let owner = lock(&self.objects).owner(client);
        let file = owner.and_then(|owner| self.file(owner)).ok_or(None)?;
        let control = Control { client, object, command };
        control.ask(&*self.host, file.host(), scratch, us)
    }

    /// The card keeps its own slices, and an admin wants to know. A group that was freed
    /// meanwhile has none to keep.
    fn slice_refused(&self, status: Option<u32>) {
        let Some(status) = status.filter(|&s| s != nvguest_abi::status::OBJECT_NOT_FOUND) else {
            return;
        };
        let words = [u64::from(status), 0, 0, 0];
        if let Err(error) =
            self.upstream.tell(Kind::Sliced, Outgoing { words, ..Outgoing::default() })
        {
            tracing::debug!(%error, "a refused time slice did not reach the broker");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Caller, OpenReq};
    use crate::worker::rig::session;
    use crate::worker::session::GuestFile;
    use zerocopy::IntoBytes;

    /// RM_ALLOC, `NVOS64_PARAMETERS`; the new object's handle.
    fn allocate(session: &Session, file: &GuestFile, words: [u32; 4]) -> u32 {
        let mut bytes = [0; 48];
        bytes[..16].copy_from_slice(words.as_bytes());
        let mut scratch = Scratch::new().unwrap();
        let mut frame = scratch.frame();
        let argument = frame.block_of(&bytes, 0).unwrap();
        let params = frame.block(64).unwrap();
        frame.point(argument, 0x10, params).unwrap();
        session.host.ioctl(file.host(), 0xc030_462b, &mut frame).unwrap();
        assert_eq!(u32_at(frame.bytes(argument), 0x28), 0, "RM's status");
        u32_at(frame.bytes(argument), 8)
    }

    /// A channel group that the session knows: its client and it.
    fn group(session: &Session) -> (u32, u32) {
        let [file, _card] = [0, 1].map(|node| {
            let request = OpenReq { node: node.into(), ..OpenReq::default() };
            let opened = session.open(&Caller::default(), request.as_bytes()).unwrap();
            session.file(opened.file.get()).unwrap()
        });
        let client = allocate(session, &file, [0, 0, 0, 0x41]);
        let device = allocate(session, &file, [client, client, 7, 0x80]);
        let group = allocate(session, &file, [client, device, 8, CHANNEL_GROUP]);
        let mut objects = lock(&session.objects);
        objects.client(client, file.handle);
        objects.made(client, group, device, Holds::Time(Group::default()));
        (client, group)
    }

    fn on_card(session: &Session, group: (u32, u32)) -> u64 {
        session.ask(&mut Scratch::new().unwrap(), group, GET, 0).unwrap()
    }

    #[test]
    fn another_weight_holds_for_live_groups_at_once_and_can_be_taken_back() {
        let session = session();
        let group = group(&session);
        assert_eq!(on_card(&session, group), 1024);
        for (weight, us) in [(40, 4096), (5, 512), (100, 10_240), (1, 102), (10, 1024)] {
            session.set_weight(weight);
            session.weigh_all();
            assert_eq!(on_card(&session, group), us, "{weight}");
        }
        lock(&session.objects).group(group.0, group.1).unwrap().own = Some(2048);
        session.set_weight(20);
        session.weigh_all();
        assert_eq!(on_card(&session, group), 4096);
    }
}
