//! What a guest asks its broker on queue 0: any request is answered, honestly.

use std::sync::OnceLock;

use nvguest_frontend::wire::{Kind, ReqHeader, RespHeader, NO_SLOT};
use zerocopy::FromBytes;

use crate::hostile::Setup;
use crate::input::Input;

/// Requests of one script at most.
const MAX_REQUESTS: usize = 16;

/// Sends a script of requests: room for the reply, length, request. No process may be
/// started, so nothing is a worker's to answer.
pub fn run(data: &[u8]) {
    static SETUP: OnceLock<Setup> = OnceLock::new();
    let setup = SETUP.get_or_init(|| Setup::start("processes=0"));
    let mut input = Input::new(data);
    for _ in 0..MAX_REQUESTS {
        if input.is_empty() {
            break;
        }
        let (room, length) = (usize::from(input.u16()) % 4096, input.u16());
        let mut request = input.bytes(length.into()).to_vec();
        // A length that lies is refused before anything else is read: mostly it is honest.
        let honest = u32::try_from(request.len()).unwrap_or(0);
        if let Some(header) =
            ReqHeader::mut_from_prefix(&mut request).ok().filter(|_| length % 8 != 7)
        {
            header.0.len = honest.into();
        }
        let reply = setup.guest.request(NO_SLOT, &request, room).expect("an answer");
        if let Ok((header, body)) = RespHeader::read_from_prefix(&reply) {
            let whole = header.len.get() as usize == size_of::<RespHeader>() + body.len();
            let cut = header.len.get() as usize > room;
            assert!(whole || cut, "a reply says how long it is");
        }
        let asked = ReqHeader::read_from_prefix(&request).ok();
        let kind = asked.and_then(|(header, _)| Kind::from_number(header.kind.get()));
        assert!(kind != Some(Kind::Open) || reply.first() != Some(&0), "nobody can open");
    }
}
