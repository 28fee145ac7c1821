//! Whom a guest may let have its objects (`NV_ESC_RM_SHARE`).
//!
//! RM can share with everybody on the host, or with whoever runs as the same user; a
//! guest may only mean itself. By default RM shares with the same process, which is a
//! process of the guest: that needs no call.
#![forbid(unsafe_code)]

use nvguest_abi::rules::read_uint;

/// `sharePolicy.target`, `.type` and `.action` of `NVOS57_PARAMETERS` (`nvos.h`,
/// `rs_access.h`; the same in every release since 535).
const TARGET: u16 = 8;
const TYPE: u16 = 16;
const ACTION: u16 = 18;

/// `RS_SHARE_TYPE_*`.
mod share {
    pub const NONE: u64 = 0;
    pub const ALL: u64 = 1;
    pub const OS_SECURITY_TOKEN: u64 = 2;
    pub const CLIENT: u64 = 3;
    pub const PID: u64 = 4;
    pub const FM_CLIENT: u64 = 7;
}
/// `RS_SHARE_ACTION_FLAG_REVOKE | RS_SHARE_ACTION_FLAG_REQUIRE`: takes rights away, or asks
/// for one more condition.
const NARROWS: u64 = 1 | 2;
/// These and `RS_SHARE_ACTION_FLAG_COMPOSE`.
const ACTIONS: u64 = NARROWS | 4;

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// It is RM's to answer.
    AsAsked,
    /// It is made for everybody of the same user, which is nobody but the guest.
    WithUser,
    /// It would reach past the guest.
    Refused,
}

/// Looks at the argument of a call. `own_user`: no other guest's backend runs as this
/// user; `own_client`: whether a client is of the calling process.
pub fn judge(argument: &[u8], own_user: bool, own_client: impl Fn(u32) -> bool) -> Sharing {
    let field = |offset, width| read_uint(argument, offset, width).unwrap_or(u64::MAX);
    let (kind, action) = (field(TYPE, 2), field(ACTION, 1));
    if action & !ACTIONS != 0 {
        return Sharing::Refused;
    }
    let narrows = action & NARROWS != 0;
    match kind {
        share::NONE | share::PID => Sharing::AsAsked,
        share::CLIENT if u32::try_from(field(TARGET, 4)).is_ok_and(own_client) => Sharing::AsAsked,
        share::ALL..=share::FM_CLIENT if narrows => Sharing::AsAsked,
        share::ALL if own_user => Sharing::WithUser,
        share::OS_SECURITY_TOKEN if own_user => Sharing::AsAsked,
        _ => Sharing::Refused,
    }
}

/// Writes into the argument with whom it is shared: the user, or everybody as the guest asked.
pub fn set_type(argument: &mut [u8], user: bool) {
    let kind = if user { share::OS_SECURITY_TOKEN } else { share::ALL };
    let start = usize::from(TYPE);
    if let Some(field) = argument.get_mut(start..start + 2) {
        field.copy_from_slice(&kind.to_le_bytes()[..2]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REVOKE: u8 = 1;
    const REQUIRE: u8 = 2;
    const COMPOSE: u8 = 4;

    fn argument(kind: u64, action: u8, target: u32) -> [u8; 24] {
        let mut argument = [0; 24];
        argument[8..12].copy_from_slice(&target.to_le_bytes());
        argument[16..18].copy_from_slice(&kind.to_le_bytes()[..2]);
        argument[18] = action;
        argument
    }

    fn judged(kind: u64, action: u8, own_user: bool) -> Sharing {
        judge(&argument(kind, action, 0xc1d0_0001), own_user, |_| false)
    }

    #[test]
    fn nothing_is_shared_past_the_guest() {
        for kind in [share::ALL, share::OS_SECURITY_TOKEN, share::CLIENT, 5, 6] {
            for action in [0, COMPOSE] {
                assert_eq!(judged(kind, action, false), Sharing::Refused, "{kind} {action}");
            }
        }
        for kind in [5, 6, share::FM_CLIENT, 8, 0xffff] {
            assert_eq!(judged(kind, 0, true), Sharing::Refused, "{kind}");
        }
        assert_eq!(judged(share::PID, 8, true), Sharing::Refused);
        assert_eq!(judge(&[], true, |_| true), Sharing::Refused);
    }

    #[test]
    fn a_guest_with_a_user_of_its_own_shares_with_itself() {
        assert_eq!(judged(share::ALL, COMPOSE, true), Sharing::WithUser);
        assert_eq!(judged(share::OS_SECURITY_TOKEN, 0, true), Sharing::AsAsked);
        let mut asked = argument(share::ALL, 0, 0);
        set_type(&mut asked, true);
        assert_eq!(asked, argument(share::OS_SECURITY_TOKEN, 0, 0));
        set_type(&mut asked, false);
        assert_eq!(asked, argument(share::ALL, 0, 0));
    }

    #[test]
    fn what_only_takes_away_is_rm_s_to_answer() {
        for kind in share::NONE..=share::FM_CLIENT {
            for action in [REVOKE, REQUIRE, REVOKE | COMPOSE, REQUIRE | COMPOSE] {
                assert_eq!(judged(kind, action, false), Sharing::AsAsked, "{kind} {action}");
            }
        }
    }

    #[test]
    fn a_process_shares_with_its_own_clients() {
        let own = judge(&argument(share::CLIENT, 0, 7), false, |client| client == 7);
        assert_eq!(own, Sharing::AsAsked);
        assert_eq!(judged(share::NONE, 0, false), Sharing::AsAsked);
        assert_eq!(judged(share::PID, 0, false), Sharing::AsAsked);
    }
}
