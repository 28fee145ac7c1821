//! Marshalling: whatever a guest gathered, the driver finds no address and no descriptor in
//! its argument but ours. The driver here follows every pointer that the profile knows, and
//! fails on one that is not of the call's own memory.

use nvguest_abi::compiled::Compiled;
use nvguest_abi::FileKind::{self, Cap, Ctl, Gpu, Uvm};
use vhost_user_nvguest::errno::Errno;
use vhost_user_nvguest::marshal::tests::card::{Card, Session};
use vhost_user_nvguest::marshal::{prepare, Call, Scratch};
use vhost_user_nvguest::wire::MAX_RESPONSE;

use crate::input::Input;
use crate::profiles::measured;

/// The guest's files: their numbers on the wire and their kinds.
const FILES: [(u32, FileKind); 4] = [(1, Ctl), (2, Gpu), (3, Uvm), (4, Cap)];

/// One call: the profile, the kind of file, whether the driver fails, then the body of IOCTL.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let compiled = measured(input.u8());
    let kind = FileKind::ALL[input.below(FileKind::ALL.len())];
    let fails = input.u8() & 7 == 7;
    let Ok(call) = Call::parse(input.rest()) else { return };
    one(compiled, kind, &call, fails);
}

fn one(compiled: &Compiled, kind: FileKind, call: &Call<'_>, fails: bool) {
    let session = Session::new(&FILES);
    let mut scratch = Scratch::new().expect("address space");
    let mut reply = Vec::new();
    match prepare(compiled, kind, call, &session, &mut scratch) {
        Ok(mut prepared) => {
            let card = Card::new(compiled, kind);
            let result = prepared.execute(&card, &card.file());
            assert!(prepared.reply_len() <= MAX_RESPONSE as usize);
            let result = if fails { Err(Errno::EFAULT) } else { result };
            prepared.finish(result, &mut reply);
            assert!(fails || reply.len() == prepared.reply_len(), "as long as was said");
        }
        Err(refused) => drop(refused.finish(compiled, kind, call, &mut reply)),
    }
    assert!(reply.len() <= MAX_RESPONSE as usize);
}
