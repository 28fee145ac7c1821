//! The window and the arena: in whatever order workers and guests let go, what two could
//! reach at once is nobody else's, and nothing stays.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use vhost::vhost_user::message::{VhostUserMMap, VhostUserSharedMsg};
use vhost::vhost_user::{Backend, FrontendReqHandler, HandlerResult, VhostUserFrontendReqHandler};
use vhost_user_nvguest::broker::arena::Arena;
use vhost_user_nvguest::broker::window::{Placing, Window};
use vhost_user_nvguest::limits::Live;
use vhost_user_nvguest::transport::link::FIRST_VIEW;
use vhost_user_nvguest::wire::{file_handle, Kind, ReqHeader, UnmapReq};
use zerocopy::IntoBytes;

use crate::input::Input;

const PAGE: u64 = 4096;
/// Bytes of the window and of the arena in it: small, so that they are full soon.
const WINDOW: u64 = 64 * PAGE;
const ARENA: u64 = 32 * PAGE;
const LIMITS: &str = "placements=12";
const WORKERS: usize = 3;
const MAX_STEPS: usize = 128;

/// A VMM: what it maps, by offset.
#[derive(Default)]
struct Vmm {
    live: Mutex<Maps>,
}

#[derive(Default)]
struct Maps {
    by_offset: HashMap<u64, u64>,
    /// It refuses the next map.
    refuses: bool,
}

impl Vmm {
    fn maps(&self) -> MutexGuard<'_, Maps> {
        self.live.lock().expect("a VMM that did not panic")
    }
}

impl VhostUserFrontendReqHandler for Vmm {
    fn shmem_map(&self, request: &VhostUserMMap, _: &dyn AsRawFd) -> HandlerResult<u64> {
        let mut maps = self.maps();
        if std::mem::take(&mut maps.refuses) {
            return Err(io::Error::from_raw_os_error(12));
        }
        let (at, end) = (request.shm_offset, request.shm_offset + request.len);
        let overlaps =
            maps.by_offset.iter().any(|(&other, &length)| other < end && at < other + length);
        // A panic here would end the thread alone: what cannot be is kept, and checked.
        maps.by_offset.insert(at, if overlaps { u64::MAX } else { request.len });
        Ok(0)
    }

    fn shmem_unmap(&self, request: &VhostUserMMap) -> HandlerResult<u64> {
        let (at, asked) = (request.shm_offset, request.len);
        match self.maps().by_offset.remove(&at) {
            Some(length) if length == asked => Ok(0),
            _ => Err(io::Error::from_raw_os_error(22)),
        }
    }

    fn shared_object_remove(&self, _: &VhostUserSharedMsg) -> HandlerResult<u64> {
        Err(io::Error::from_raw_os_error(2))
    }
}

/// The VMM, and the channel on which it is asked. There is one for the whole run.
fn vmm() -> &'static (Arc<Vmm>, Backend) {
    static VMM: OnceLock<(Arc<Vmm>, Backend)> = OnceLock::new();
    VMM.get_or_init(|| {
        let vmm = Arc::new(Vmm::default());
        let mut handler = FrontendReqHandler::new(Arc::clone(&vmm)).expect("a channel");
        handler.set_reply_ack_flag(true);
        // SAFETY: the handler keeps its end open during the call.
        let end = unsafe { BorrowedFd::borrow_raw(handler.get_tx_raw_fd()) };
        let backend = Backend::from_stream(end.try_clone_to_owned().expect("a duplicate").into());
        backend.set_reply_ack_flag(true);
        backend.set_shared_object_flag(true);
        backend.set_shmem_flag(true);
        std::thread::spawn(move || loop {
            // What it refused the window was told.
            if let Err(error) = handler.handle_request() {
                assert!(matches!(error, vhost::vhost_user::Error::ReqHandlerError(_)), "{error}");
            }
        });
        (vmm, backend)
    })
}

/// Runs a script of steps.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let (vmm, backend) = vmm();
    *vmm.maps() = Maps::default();
    let arena = Arena::create(ARENA, ARENA / 2).expect("an arena");
    let window = Window::new(WINDOW, Some(arena), Live::new(LIMITS.parse().expect("limits")));
    window.connect(backend.clone());
    let mut guest = Guest { window, vmm, placed: Vec::new(), taken: Vec::new(), views: Vec::new() };
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        guest.step(&mut input);
        guest.check();
    }
    guest.window.clear(None);
    (guest.placed, guest.taken, guest.views) = Default::default();
    assert_eq!(guest.window.usage(), (0, 0), "nothing stays");
    assert!(vmm.maps().by_offset.is_empty(), "nor does the VMM map anything");
}

/// A placement as its worker and its guest know it.
struct Placed {
    worker: u16,
    id: u32,
    at: u64,
    length: u64,
    live: bool,
}

/// A range of the arena, and who may reach it.
struct Taken {
    at: u64,
    length: u64,
    holders: Vec<u16>,
}

/// A guest and its workers, and what they should have.
struct Guest {
    window: Window,
    vmm: &'static Vmm,
    placed: Vec<Placed>,
    taken: Vec<Taken>,
    /// Worker, view, range.
    views: Vec<(u16, u32, u64)>,
}

impl Guest {
    fn arena(&self) -> &Arena {
        self.window.arena().expect("it was made with one")
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let step = input.below(16);
        let worker = 1 + input.below(WORKERS) as u16;
        let number = input.u8();
        match step {
            0 if !self.arena().is_placed() => self.window.place_arena(),
            0 => {}
            1..=3 => self.place(worker, number),
            4 => self.unplace(worker, number, false),
            5 => self.unplace(worker, number, true),
            6 => self.unmapped(worker, number, input.flag()),
            7 => self.die(worker),
            8 => self.vmm.maps().refuses = true,
            9..=11 => self.take(worker, number),
            12 => self.give(worker, number),
            13 => self.share(worker, number, 1 + input.below(WORKERS) as u16),
            14 => self.show(worker, number, input.u8()),
            _ => self.hide(worker, number),
        }
    }

    fn place(&mut self, worker: u16, number: u8) {
        let length = u64::from(number % 16) * PAGE;
        let file = || OwnedFd::from(std::fs::File::open("/dev/zero").expect("a file"));
        let (offset, writable) = (u64::from(number >> 7) * 7, number & 64 != 0);
        let placing = Placing { fd: file(), owner: file(), offset, length, writable };
        let Ok((id, at)) = self.window.place(worker, placing) else { return };
        assert!(at >= ARENA && at + length <= WINDOW, "it lies behind the arena, in the window");
        for other in &self.placed {
            let apart = other.at + other.length <= at || at + length <= other.at;
            assert!(apart, "a range that a guest may still reach was given out");
            assert_ne!(other.id, id);
        }
        self.placed.push(Placed { worker, id, at, length, live: true });
    }

    /// One of the placements by its index, or a number that is perhaps of none.
    fn id(&self, number: u8) -> u32 {
        match self.placed.get(usize::from(number) % (self.placed.len() + 1)) {
            Some(placed) => placed.id,
            None => number.into(),
        }
    }

    fn unplace(&mut self, worker: u16, number: u8, keep: bool) {
        let id = self.id(number);
        let found = self.placed.iter().position(|p| (p.id, p.worker) == (id, worker));
        let done = self.window.unplace(worker, id, keep);
        assert_eq!(done.is_ok(), found.is_some(), "each speaks of its own");
        match found {
            Some(index) if keep => self.placed[index].live = false,
            Some(index) => drop(self.placed.swap_remove(index)),
            None => {}
        }
    }

    /// The guest lets go of something of a worker that is gone.
    fn unmapped(&mut self, worker: u16, number: u8, view: bool) {
        if view {
            return self.hide_by_guest(worker, number);
        }
        let id = self.id(number);
        let found =
            self.placed.iter().position(|p| (p.id, p.worker, p.live) == (id, worker, false));
        let done = self.window.unmapped(&unmap(worker, id));
        assert_eq!(done.is_ok(), found.is_some(), "only a hole of a dead worker's is free");
        found.map(|index| self.placed.swap_remove(index));
    }

    fn die(&mut self, worker: u16) {
        self.window.clear(Some(worker));
        self.placed.iter_mut().filter(|p| p.worker == worker).for_each(|p| p.live = false);
        for taken in &mut self.taken {
            taken.holders.retain(|&holder| holder != worker);
        }
        self.forget();
    }

    fn take(&mut self, worker: u16, number: u8) {
        let length = u64::from(number % 8) * PAGE;
        let Ok(at) = self.arena().take(worker, length) else { return };
        assert!(at + length <= ARENA && length > 0);
        for other in &self.taken {
            let apart = other.at + other.length <= at || at + length <= other.at;
            assert!(apart, "memory that somebody has was given out");
        }
        let mut bytes = vec![1; usize::try_from(length).expect("it is small")];
        self.arena().file().read_exact_at(&mut bytes, at).expect("it is in the file");
        assert!(bytes.iter().all(|&byte| byte == 0), "memory of somebody else's");
        self.arena().file().write_all_at(&[0xaa; 64], at).expect("it is in the file");
        self.taken.push(Taken { at, length, holders: vec![worker] });
    }

    fn at(&self, number: u8) -> u64 {
        let found = self.taken.get(usize::from(number) % (self.taken.len() + 1));
        found.map_or(u64::from(number) * PAGE / 2, |taken| taken.at)
    }

    fn held(&self, worker: u16, at: u64) -> Option<usize> {
        self.taken.iter().position(|t| t.at == at && t.holders.contains(&worker))
    }

    fn give(&mut self, worker: u16, number: u8) {
        let at = self.at(number);
        let found = self.held(worker, at);
        assert_eq!(self.arena().give(worker, at).is_ok(), found.is_some());
        if let Some(index) = found {
            let holders = &mut self.taken[index].holders;
            let place = holders.iter().position(|&h| h == worker).expect("it was just found");
            holders.swap_remove(place);
        }
        self.forget();
    }

    fn share(&mut self, worker: u16, number: u8, other: u16) {
        let at = self.at(number);
        let found = self.held(worker, at);
        let length = self.arena().share(worker, at, other).ok();
        assert_eq!(length, found.map(|index| self.taken[index].length));
        if let Some(index) = found {
            self.taken[index].holders.push(other);
        }
    }

    fn show(&mut self, worker: u16, number: u8, view: u8) {
        let at = self.at(number);
        let view = u32::from(view) | if view & 1 == 0 { FIRST_VIEW } else { 0 };
        let is_new = !self.views.iter().any(|&(w, v, _)| (w, v) == (worker, view));
        let may = view >= FIRST_VIEW && is_new && self.held(worker, at).is_some();
        assert_eq!(self.arena().show(worker, at, view).is_ok(), may);
        if may {
            self.views.push((worker, view, at));
        }
    }

    fn view(&self, number: u8) -> u32 {
        let found = self.views.get(usize::from(number) % (self.views.len() + 1));
        found.map_or(FIRST_VIEW | u32::from(number), |&(_, view, _)| view)
    }

    fn hide(&mut self, worker: u16, number: u8) {
        let view = self.view(number);
        let done = self.arena().hide(worker, view).is_ok();
        self.hidden(worker, view, done);
    }

    fn hide_by_guest(&mut self, worker: u16, number: u8) {
        let view = self.view(number);
        let done = self.window.unmapped(&unmap(worker, view)).is_ok();
        self.hidden(worker, view, done);
    }

    fn hidden(&mut self, worker: u16, view: u32, done: bool) {
        let found = self.views.iter().position(|&(w, v, _)| (w, v) == (worker, view));
        assert_eq!(done, found.is_some());
        found.map(|index| self.views.swap_remove(index));
        self.forget();
    }

    /// What nobody reaches any more can be given out again.
    fn forget(&mut self) {
        let views = &self.views;
        self.taken.retain(|t| !t.holders.is_empty() || views.iter().any(|&(_, _, at)| at == t.at));
    }

    fn check(&self) {
        let live: u32 = self.placed.iter().map(|placed| u32::from(placed.live)).sum();
        let bytes = self.placed.iter().map(|placed| placed.length).sum::<u64>();
        assert_eq!(self.window.usage(), (live, bytes));
        let taken = self.taken.iter().map(|taken| taken.length).sum::<u64>();
        assert_eq!(self.arena().usage(), (self.taken.len(), taken));
        let mut maps = self.vmm.maps().by_offset.clone();
        if self.arena().is_placed() {
            assert_eq!(maps.remove(&0), Some(ARENA));
        }
        for placed in self.placed.iter().filter(|placed| placed.live) {
            assert_eq!(maps.remove(&placed.at), Some(placed.length), "what is live is mapped");
        }
        assert!(maps.is_empty(), "what is not live is not mapped: {maps:?}");
    }
}

/// UNMAP, as a guest sends it.
fn unmap(worker: u16, placement: u32) -> Vec<u8> {
    let body = UnmapReq { placement: placement.into(), reserved: 0.into() };
    let length = size_of::<ReqHeader>() + size_of::<UnmapReq>();
    let header = ReqHeader {
        kind: (Kind::Unmap as u32).into(),
        file: file_handle(worker, 1).into(),
        // CAST: a few bytes.
        len: (length as u32).into(),
        ..ReqHeader::default()
    };
    [header.as_bytes(), body.as_bytes()].concat()
}
