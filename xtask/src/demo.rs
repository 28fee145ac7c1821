//! Boots a guest and runs the main job in it.

use std::process::ExitCode;

use anyhow::Result;
use nvguest_rig::cli::{guest, GuestArgs};
use nvguest_rig::{nvidia, Assets};

/// `nvidia-smi` on a machine with a card, else `rmprobe`.
pub fn demo(assets: &Assets) -> Result<ExitCode> {
    let has_card = nvidia::has_card();
    let line = if has_card { "nvidia-smi" } else { "rmprobe" };
    let args = GuestArgs::running(line);
    let begin = std::time::Instant::now();
    let code = guest(assets, &args)?;
    let outcome = if code == ExitCode::SUCCESS { "ran" } else { "failed" };
    println!();
    println!(
        "`{line}` {outcome} in a guest under QEMU, on {}, {:.0} s with the boot.",
        args.card(),
        begin.elapsed().as_secs_f64()
    );
    println!("Try next:");
    println!("  cargo xtask guest --shell                      look around in a guest");
    println!("  cargo xtask guest --guests 2 --run '{line}'    two guests, one card, at once");
    if has_card {
        println!("  cargo xtask guest --run rmprobe                the raw driver interface, check by check");
    }
    println!("  cargo xtask test                               every test");
    Ok(code)
}
