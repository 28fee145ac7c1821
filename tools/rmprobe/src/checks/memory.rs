//! Memory: allocate, map, write, read back another way.

use std::os::fd::AsRawFd;

use nix::libc;

use super::{check, Check};
use rmclient::abi::{self, class, escape};
use rmclient::sys::Mapping;
use rmclient::{call, io, wrong, Card, Failure, Mapped, Outcome, Place, Result, Session};

pub const CHECKS: &[Check] = &[
    check(
        "video-memory",
        "what is written is read back through a second map and a second mmap",
        video,
    ),
    check("system-memory", "the same in the machine's memory", system),
    check("heap-memory", "the older call allocates and frees too", heap),
    check(
        "heap-system-memory",
        "the machine's memory as Vulkan allocates it: two maps, and one outlives the handle",
        heap_system,
    ),
    check("map-part", "a part of memory is mapped at its offset", part),
    check("map-armed-twice", "an armed file is not armed again", armed_twice),
    check("map-length", "no other length than the armed one is mapped", length),
    check("map-unarmed", "a file that is not armed maps nothing", unarmed),
    check("map-past-free", "a mapping outlives its memory's handle", past_free),
    check("map-many", "64 mappings at once are 64 different memories", many),
    check("unmap", "a mapping is undone once", unmap),
    check("update-mapping", "RM takes a program's own address for a mapping", update),
    check("usermode-page", "the page that work is submitted with is mapped", usermode),
];

const SIZE: u64 = 2 << 20;

fn video(card: &Card) -> Result<String> {
    round_trip(card, Place::Video)
}

fn system(card: &Card) -> Result<String> {
    round_trip(card, Place::System)
}

fn round_trip(card: &Card, place: Place) -> Result<String> {
    let session = Session::open(card)?;
    let memory = session.memory(place, SIZE)?;
    let one = session.map(place, memory, SIZE)?;
    one.mapping.fill(1, one.mapping.bytes());
    same(&one.mapping, 1, "the map that wrote")?;
    let again = Mapping::new(&one.file, one.mapping.bytes())
        .map_err(io("a second mmap of an armed file"))?;
    same(&again, 1, "a second mmap")?;
    let two = session.map(place, memory, SIZE)?;
    same(&two.mapping, 1, "a second map")?;
    two.mapping.fill(2, two.mapping.bytes());
    same(&one.mapping, 2, "the first map after the second wrote")?;
    let caching = one.armed.caching;
    session.unmap(memory, one)?;
    session.unmap(memory, two)?;
    session.client.free(session.device, memory).ok("freeing memory")?;
    Ok(format!("{SIZE} bytes, caching {caching}"))
}

fn same(mapping: &Mapping, seed: u64, what: &str) -> Result<()> {
    match mapping.wrong(seed, mapping.bytes()) {
        0 => Ok(()),
        words => {
            wrong(format!("{words} of {} words are wrong through {what}", mapping.bytes() / 8))
        }
    }
}

fn heap(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let handle = session.client.fresh();
    let mut heap = abi::Heap {
        client: session.client.handle,
        parent: session.device,
        function: 2,
        owner: session.client.handle,
        memory: handle,
        // NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED
        flags: 0x4000,
        size: 256 << 10,
        ..Default::default()
    };
    let control = |heap: &mut abi::Heap| {
        call(&session.client.ctl, escape::RM_VID_HEAP_CONTROL, heap, None, |heap| heap.status)
    };
    control(&mut heap).ok("VID_HEAP_CONTROL (allocate)")?;
    let mapped = session.map(Place::Video, handle, 256 << 10)?;
    mapped.mapping.fill(3, 65536);
    match mapped.mapping.wrong(3, 65536) {
        0 => session.unmap(handle, mapped)?,
        words => return wrong(format!("{words} words are wrong")),
    }
    let mut free = abi::Heap {
        client: session.client.handle,
        parent: session.device,
        function: 3,
        owner: session.client.handle,
        memory: handle,
        // NVOS32_FREE_FLAGS_MEMORY_HANDLE_PROVIDED
        kind: 1,
        ..Default::default()
    };
    control(&mut free).ok("VID_HEAP_CONTROL (free)")?;
    Ok("allocated and freed".into())
}

fn heap_system(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let mut sizes = Vec::new();
    // NVOS32_ATTR_COHERENCY: cached and write-combined.
    for (coherency, asked) in [(1, 4096), (1, 77_000), (2, 4 << 20)] {
        let handle = session.client.fresh();
        let mut heap = abi::Heap {
            client: session.client.handle,
            parent: session.device,
            function: 2,
            owner: session.client.handle,
            memory: handle,
            // NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED
            flags: 0x4000,
            // NVOS32_ATTR_LOCATION_PCI
            attr: coherency << 29 | 1 << 25,
            size: asked,
            ..Default::default()
        };
        call(&session.client.ctl, escape::RM_VID_HEAP_CONTROL, &mut heap, None, |heap| heap.status)
            .ok("VID_HEAP_CONTROL (allocate)")?;
        let size = heap.size;
        if size != asked.next_multiple_of(4096) {
            return wrong(format!("asked for {asked} bytes, got {size}"));
        }
        let one = session.map(Place::System, handle, size)?;
        let two = session.map(Place::System, handle, size)?;
        one.mapping.fill(asked, one.mapping.bytes());
        same(&two.mapping, asked, "a second map")?;
        session.unmap(handle, two)?;
        session.client.free(session.device, handle).ok("freeing memory that is mapped")?;
        same(&one.mapping, asked, "a map of what was freed")?;
        sizes.push(size.to_string());
    }
    Ok(format!("{} bytes", sizes.join(", ")))
}

fn part(card: &Card) -> Result<String> {
    const OFFSET: u64 = 128 << 10;
    let session = Session::open(card)?;
    for place in [Place::Video, Place::System] {
        let memory = session.memory(place, SIZE)?;
        let whole = session.map(place, memory, SIZE)?;
        let file = session.map_file(place)?;
        let (outcome, armed) =
            session.client.arm(session.subdevice, memory, (OFFSET, 65536), file.as_raw_fd());
        outcome.ok("RM_MAP_MEMORY of a part")?;
        let mapping = Mapping::new(&file, 65536).map_err(io("mapping a part"))?;
        mapping.fill(4, 65536);
        let first = (OFFSET / 8) as usize;
        if (0..8192).any(|index| whole.mapping.read(first + index) != mapping.read(index)) {
            return wrong(format!("a part of {place:?} memory is not where the whole has it"));
        }
        let part = Mapped { mapping, armed, file };
        session.unmap(memory, part)?;
        session.unmap(memory, whole)?;
    }
    Ok("video and system memory".into())
}

fn armed_twice(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    for place in [Place::Video, Place::System] {
        let memory = session.memory(place, 65536)?;
        let file = session.map_file(place)?;
        let arm = || session.client.arm(session.subdevice, memory, (0, 65536), file.as_raw_fd()).0;
        arm().ok("RM_MAP_MEMORY")?;
        arm().expect(super::errors::IN_USE, "a second RM_MAP_MEMORY on a file")?;
    }
    Ok("once".into())
}

fn length(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    for (place, lengths, errno) in [
        (Place::Video, &[65536, SIZE * 2][..], libc::ENXIO),
        (Place::System, &[SIZE * 2][..], libc::ERANGE),
    ] {
        let memory = session.memory(place, SIZE)?;
        let mapped = session.map(place, memory, SIZE)?;
        for &length in lengths {
            match Mapping::new(&mapped.file, length as usize) {
                Err(error) if error.raw_os_error() == Some(errno) => (),
                Err(source) => {
                    return Err(Failure::Io { what: format!("{length} of {SIZE} bytes"), source })
                }
                Ok(_) => {
                    return wrong(format!(
                        "{length} of {SIZE} bytes of {place:?} memory could be mapped"
                    ))
                }
            }
        }
        session.unmap(memory, mapped)?;
    }
    Ok("refused".into())
}

fn unarmed(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    for place in [Place::Video, Place::System] {
        match Mapping::new(&session.map_file(place)?, 4096) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => (),
            Err(source) => {
                return Err(Failure::Io { what: "mapping an unarmed file".into(), source })
            }
            Ok(_) => return wrong("a file that was not armed could be mapped"),
        }
    }
    Ok("refused".into())
}

fn past_free(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let memory = session.memory(Place::System, 65536)?;
    let mapped = session.map(Place::System, memory, 65536)?;
    mapped.mapping.fill(5, 65536);
    session.client.free(session.device, memory).ok("freeing memory that is mapped")?;
    match mapped.mapping.wrong(5, 65536) {
        0 => Ok("readable".into()),
        words => wrong(format!("{words} words are wrong")),
    }
}

fn many(card: &Card) -> Result<String> {
    const COUNT: u64 = 64;
    let session = Session::open(card)?;
    let mut all = Vec::new();
    for seed in 0..COUNT {
        let place = if seed % 2 == 0 { Place::Video } else { Place::System };
        let memory = session.memory(place, 65536)?;
        let mapped = session.map(place, memory, 65536)?;
        mapped.mapping.fill(seed, 4096);
        all.push((seed, memory, mapped));
    }
    for (seed, memory, mapped) in all {
        match mapped.mapping.wrong(seed, 4096) {
            0 => session.unmap(memory, mapped)?,
            words => return wrong(format!("{words} words of mapping {seed} are another's")),
        }
        session.client.free(session.device, memory).ok("freeing memory")?;
    }
    Ok(format!("{COUNT} mappings"))
}

fn unmap(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let memory = session.memory(Place::System, 65536)?;
    let mapped = session.map(Place::System, memory, 65536)?;
    let linear = mapped.armed.linear;
    session.unmap(memory, mapped)?;
    session
        .client
        .unmap(session.subdevice, memory, linear)
        .expect(super::errors::NO_OBJECT, "a second RM_UNMAP_MEMORY")?;
    Ok("once".into())
}

fn update(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let memory = session.memory(Place::System, 65536)?;
    let mapped = session.map(Place::System, memory, 65536)?;
    let own = 0x7000_0000_0000;
    let mut argument = abi::UpdateMapping {
        client: session.client.handle,
        device: session.subdevice,
        memory,
        old: mapped.armed.linear,
        new: own,
        ..Default::default()
    };
    call(&session.client.ctl, escape::RM_UPDATE_DEVICE_MAPPING_INFO, &mut argument, None, |a| {
        a.status
    })
    .ok("RM_UPDATE_DEVICE_MAPPING_INFO")?;
    session
        .client
        .unmap(session.subdevice, memory, own)
        .ok("RM_UNMAP_MEMORY by the program's address")?;
    Ok("taken".into())
}

fn usermode(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let handle = session.client.fresh();
    let made = class::USERMODE.into_iter().find(|&class| {
        let names = (session.subdevice, handle);
        session.client.alloc_on(&session.client.ctl, names, class, Some(&mut [0; 2])) == Outcome::OK
    });
    let Some(class) = made else { return wrong("no class of this page could be made") };
    let mapped = session.map(Place::Video, handle, 65536)?;
    // The page holds registers: this one (NVC361_TIME_0) only tells the time.
    let _ = mapped.mapping.read(0x80 / 8);
    let caching = mapped.armed.caching;
    session.unmap(handle, mapped)?;
    Ok(format!("class {class:#x}, caching {caching}"))
}
