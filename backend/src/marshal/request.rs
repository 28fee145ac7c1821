//! One IOCTL request, as it came: lengths add up, nothing else is known.

use zerocopy::little_endian::U32;
use zerocopy::FromBytes;

use crate::errno::Errno;
use crate::wire::{self, FdRecord, IoctlReq};

/// Descriptors that one call names at most; RM's layouts have one, UVM's one.
pub const MAX_FDS: usize = 4;

/// The parts of a request. Their meaning depends on the profile.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// The ioctl number that the caller used, or that an indirect call named.
    pub cmd: u32,
    /// The argument as the caller passed it, pointers and descriptors of its own in it.
    pub argument: &'a [u8],
    /// How long each buffer is that the guest gathered, depth first.
    pub(super) lengths: &'a [U32],
    /// A record for each descriptor that the guest found.
    pub(super) records: &'a [FdRecord],
    /// The bytes of the buffers that are read, one after another, each padded to 8.
    pub(super) data: &'a [u8],
}

impl<'a> Call<'a> {
    /// Takes apart what follows the header of an IOCTL request.
    ///
    /// EPROTO if it is not whole, EINVAL if it has more parts than HELLO allows.
    pub fn parse(body: &'a [u8]) -> Result<Self, Errno> {
        let (head, rest) = IoctlReq::ref_from_prefix(body).map_err(|_| Errno::EPROTO)?;
        if head.reserved.get() != 0 {
            return Err(Errno::EPROTO);
        }
        let nsegs = usize::from(head.nsegs.get());
        let nfds = usize::from(head.nfds.get());
        if nsegs > wire::MAX_SEGMENTS as usize || nfds > MAX_FDS {
            return Err(Errno::EINVAL);
        }
        let (lengths, rest) = split_padded(rest, nsegs * size_of::<U32>())?;
        let (records, rest) = split_padded(rest, nfds * size_of::<FdRecord>())?;
        let (argument, data) = split_padded(rest, head.arg_len.get() as usize)?;
        Ok(Self {
            cmd: head.cmd.get(),
            argument,
            lengths: FromBytes::ref_from_bytes(lengths).map_err(|_| Errno::EPROTO)?,
            records: FromBytes::ref_from_bytes(records).map_err(|_| Errno::EPROTO)?,
            data,
        })
    }
}

/// The first `length` bytes, and what follows their padding.
pub(super) fn split_padded(bytes: &[u8], length: usize) -> Result<(&[u8], &[u8]), Errno> {
    let whole = length.checked_next_multiple_of(8).ok_or(Errno::EPROTO)?;
    let (part, rest) = bytes.split_at_checked(whole).ok_or(Errno::EPROTO)?;
    Ok((part.get(..length).ok_or(Errno::EPROTO)?, rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zerocopy::IntoBytes;

    use super::*;

    fn head(arg_len: u32, nsegs: u16, nfds: u16) -> IoctlReq {
        IoctlReq {
            cmd: 0xc020_462a.into(),
            arg_len: arg_len.into(),
            nsegs: nsegs.into(),
            nfds: nfds.into(),
            reserved: 0.into(),
        }
    }

    #[test]
    fn parts_follow_one_another_each_padded_to_eight_bytes() {
        let mut body = head(3, 1, 1).as_bytes().to_vec();
        body.extend_from_slice(&[5, 0, 0, 0, 0, 0, 0, 0]);
        body.extend_from_slice(&[1, 0, 4, 0, 9, 0, 0, 0]);
        body.extend_from_slice(&[7, 7, 7, 0, 0, 0, 0, 0]);
        body.extend_from_slice(&[8; 8]);
        let call = Call::parse(&body).unwrap();
        assert_eq!(call.cmd, 0xc020_462a);
        assert_eq!(call.argument, [7; 3]);
        assert_eq!(call.lengths, [U32::new(5)]);
        assert_eq!(
            call.records,
            [FdRecord { segment: 1.into(), offset: 4.into(), file: 9.into() }]
        );
        assert_eq!(call.data, [8; 8]);
    }

    #[test]
    fn a_request_cut_short_anywhere_is_malformed() {
        let mut body = head(9, 2, 1).as_bytes().to_vec();
        body.resize(body.len() + 8 + 8 + 16, 0);
        assert!(Call::parse(&body).is_ok());
        for cut in 0..body.len() {
            assert_eq!(Call::parse(&body[..cut]).map(|_| ()), Err(Errno::EPROTO), "{cut}");
        }
    }

    #[test]
    fn a_reserved_field_that_is_not_zero_is_malformed() {
        let mut head = head(0, 0, 0);
        head.reserved = 1.into();
        assert_eq!(Call::parse(head.as_bytes()).map(|_| ()), Err(Errno::EPROTO));
    }

    #[test]
    fn more_parts_than_hello_allows_are_refused() {
        for head in [head(0, 8, 0), head(0, 0, 5), head(0, u16::MAX, u16::MAX)] {
            let mut body = head.as_bytes().to_vec();
            body.resize(1 << 20, 0);
            assert_eq!(Call::parse(&body).map(|_| ()), Err(Errno::EINVAL));
        }
    }

    #[test]
    fn a_length_beyond_the_request_is_malformed() {
        for arg_len in [1, 8, u32::MAX - 8, u32::MAX] {
            let head = head(arg_len, 0, 0);
            assert_eq!(Call::parse(head.as_bytes()).map(|_| ()), Err(Errno::EPROTO));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_parsing_panic(body in proptest::collection::vec(any::<u8>(), 0..256)) {
            if let Ok(call) = Call::parse(&body) {
                prop_assert!(call.argument.len() <= body.len());
            }
        }
    }
}
