//! Measures the kernel interface of NVIDIA's driver releases from their own open sources.
mod classes;
mod controls;
mod ctext;
mod dwarf;
mod embedded;
mod measure;
mod named;
mod others;
mod probe;
mod relocate;
mod strays;
mod tree;
mod write;

fn main() -> anyhow::Result<()> {
    let arg = std::env::args().nth(1).unwrap();
    let t = std::time::Instant::now();
    let tree = tree::Tree::from_dir(std::path::Path::new(&arg))?;
    let p = measure::measure(&tree)?;
    eprintln!(
        "{:?} controls {} classes {} escapes {} uvm {} nvkms {} drm {} structs {}",
        t.elapsed(),
        p.controls.len(),
        p.classes.len(),
        p.escapes.len(),
        p.uvm.len(),
        p.nvkms.len(),
        p.drm.len(),
        p.structs.len()
    );
    print!("{}", write::file(&p, None));
    Ok(())
}
