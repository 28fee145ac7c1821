//! Profile and policy into what a worker needs: rules, sizes, verdicts.

use crate::compiled::{ClassEntry, Compiled, ControlEntry, EscapeEntry, Verdict, ANY_SIZE};
use crate::policy::Policy;
use crate::profile::{Direction, File, Params, Pointer, Profile};
use crate::rules::{
    ioctl_flags, rule_flags, Case, Ioctl, Rule, Rules, NO_OFFSET, OP_BUFFER, OP_FD, OP_PAGES,
};
use crate::FileKind;

/// Bytes that RM takes at most through a pointer (`RMAPI_PARAM_COPY_MAX_PARAMS_SIZE`).
const MAX: u32 = 1 << 20;
/// Bytes that we take where RM sets no limit.
const UNBOUNDED_MAX: u32 = 16 << 20;
/// Where `NVOS54` has its pointer and its size, and `NVOS21`/`NVOS64` theirs: looked up, these
/// are the names.
const CONTROL_POINTER: (&str, &str) = ("params", "paramsSize");
const ALLOC_POINTER: &str = "pAllocParms";
/// Pages that one call registers at most: 4 GiB.
const MAX_PAGES: u32 = 1 << 20;
/// The calls that register memory: by class and by function of the heap.
const REGISTERING: [Registering; 2] = [
    Registering {
        escape: "NV_ESC_RM_ALLOC_MEMORY",
        layout: "nv_ioctl_nvos02_parameters_with_fd",
        select: "params.hClass",
        key: OS_DESCRIPTOR,
        address: "params.pMemory",
        limit: "params.limit",
    },
    Registering {
        escape: "NV_ESC_RM_VID_HEAP_CONTROL",
        layout: "NVOS32_PARAMETERS",
        select: "function",
        key: 27,
        address: "data.AllocOsDesc.descriptor",
        limit: "data.AllocOsDesc.limit",
    },
];
/// `NV01_MEMORY_SYSTEM_OS_DESCRIPTOR`
const OS_DESCRIPTOR: u32 = 0x71;
/// The one ioctl of nvidia-modeset: `_IOWR('m', 0, struct NvKmsIoctlParams)`.
const NVKMS_IOCTL: u32 = 0xc010_6d00;
/// `{u32 cmd, u32 size, u64 address}`.
const NVKMS_SIZE: u32 = 16;

/// A rule and the rules for what it gathers.
type Reach = (Rule, Vec<Rule>);

/// Where an escape says that it registers memory, and which.
struct Registering {
    escape: &'static str,
    layout: &'static str,
    /// The field that holds `key` then.
    select: &'static str,
    key: u32,
    address: &'static str,
    /// Bytes less one.
    limit: &'static str,
}

impl Profile {
    /// What a worker of a guest with these capabilities needs to know.
    pub fn compile(&self, capabilities: u32) -> Compiled {
        self.compile_with(Policy::built_in(), capabilities)
    }

    /// The same with another policy.
    pub fn compile_with(&self, policy: &Policy, capabilities: u32) -> Compiled {
        let mut compiler =
            Compiler { profile: self, policy, capabilities, rules: Rules::default() };
        let escapes = compiler.escapes();
        let mut rules = std::mem::take(&mut compiler.rules);
        rules.ioctls.sort_by_key(|e| (e.kind, e.nr.get(), e.size.get()));
        Compiled {
            release: self.release.clone(),
            profile: self.release.clone(),
            capabilities,
            rules,
            controls: compiler.controls(),
            classes: compiler.classes(),
            escapes,
        }
    }
}

struct Compiler<'a> {
    profile: &'a Profile,
    policy: &'a Policy,
    capabilities: u32,
    rules: Rules,
}

impl Compiler<'_> {
    fn controls(&self) -> Vec<ControlEntry> {
        let mut entries: Vec<ControlEntry> = self
            .profile
            .controls
            .iter()
            .map(|(&command, control)| ControlEntry {
                command: command.into(),
                size: control.size.into(),
                verdict: self.policy.control(command, control, self.capabilities).0 as u8,
                reserved: [0; 3],
            })
            .collect();
        for command in self.policy.opaque_commands() {
            if !self.profile.controls.contains_key(&command) {
                entries.push(ControlEntry {
                    command: command.into(),
                    size: ANY_SIZE.into(),
                    verdict: self.policy.opaque(command, self.capabilities).0 as u8,
                    reserved: [0; 3],
                });
            }
        }
        entries.sort_by_key(|entry| entry.command.get());
        entries
    }

    fn classes(&self) -> Vec<ClassEntry> {
        let entries = self.profile.classes.iter().map(|(&number, class)| ClassEntry {
            class: number.into(),
            size: class.size.into(),
            verdict: self.policy.class(class, self.capabilities).0 as u8,
            params: class.params as u8,
            reserved: [0; 2],
        });
        entries.collect()
    }

    /// The escape table; their rules go into `self.rules`.
    fn escapes(&mut self) -> Vec<EscapeEntry> {
        let mut entries = Vec::new();
        for (key, escape) in &self.profile.escapes {
            let name = key.split('/').next().unwrap_or(key);
            let own = reaches(&escape.pointers, &escape.files);
            let registering = self.registering(name);
            let (own, mut cases) = match escape.select {
                Some(_) if escape.layout.starts_with("NVOS54") => self.control_rules(own),
                Some(_) if name == "NV_ESC_RM_ALLOC" => self.alloc_rules(&escape.layout, own),
                Some(_) => (own, self.refused_functions(name)),
                None => (own, Vec::new()),
            };
            let mut select = escape.select.unwrap_or(NO_OFFSET);
            if let Some(registering) = registering {
                select = self.field(registering.layout, registering.select).0;
                let mut rules = vec![(self.pages(registering), Vec::new())];
                rules.extend(own.iter().cloned());
                cases.push((registering.key, rules));
                cases.sort_by_key(|(key, _)| *key);
            }
            let flags =
                ioctl_flags::BY_NR | if escape.indirect { ioctl_flags::INDIRECT } else { 0 };
            let size = if escape.array { 0 } else { escape.size };
            let mut ioctl = self.ioctl(own, cases);
            ioctl.flags = flags;
            ioctl.select = select.into();
            ioctl.nr = escape.nr.into();
            ioctl.size = size.into();
            for kind in [FileKind::Ctl, FileKind::Gpu] {
                ioctl.kind = kind as u8;
                self.rules.ioctls.push(ioctl);
                entries.push(EscapeEntry {
                    kind: kind as u8,
                    verdict: self.policy.escape(name).0 as u8,
                    status: escape.status.unwrap_or(NO_OFFSET).into(),
                    nr: escape.nr.into(),
                    size: escape.size.into(),
                    array: u8::from(escape.array),
                    reserved: [0; 3],
                });
            }
        }
        self.uvm(&mut entries);
        self.nvkms(&mut entries);
        entries.sort_by_key(|e| (e.kind, e.nr.get(), e.size.get()));
        entries
    }

    fn uvm(&mut self, entries: &mut Vec<EscapeEntry>) {
        for (&number, command) in &self.profile.uvm {
            let mut ioctl = self.ioctl(reaches(&command.pointers, &command.files), Vec::new());
            ioctl.kind = FileKind::Uvm as u8;
            ioctl.select = NO_OFFSET.into();
            ioctl.nr = number.into();
            ioctl.size = command.size.into();
            self.rules.ioctls.push(ioctl);
            entries.push(EscapeEntry {
                kind: FileKind::Uvm as u8,
                verdict: self.policy.uvm(&command.name, self.capabilities).0 as u8,
                status: command.status.unwrap_or(NO_OFFSET).into(),
                nr: number.into(),
                size: command.size.into(),
                array: 0,
                reserved: [0; 3],
            });
        }
    }

    fn nvkms(&mut self, entries: &mut Vec<EscapeEntry>) {
        let mut params = buffer(8, rule_flags::IN | rule_flags::OUT | rule_flags::NULL_OK);
        params.count_off = 4.into();
        params.count_width = 4;
        params.elem = 1.into();
        params.max = MAX.into();
        let mut ioctl = self.ioctl(vec![(params, Vec::new())], Vec::new());
        ioctl.kind = FileKind::Modeset as u8;
        ioctl.select = NO_OFFSET.into();
        ioctl.nr = NVKMS_IOCTL.into();
        ioctl.size = NVKMS_SIZE.into();
        self.rules.ioctls.push(ioctl);
        entries.push(EscapeEntry {
            kind: FileKind::Modeset as u8,
            verdict: self.policy.modeset(self.capabilities).0 as u8,
            status: NO_OFFSET.into(),
            nr: NVKMS_IOCTL.into(),
            size: NVKMS_SIZE.into(),
            array: 0,
            reserved: [0; 3],
        });
    }

    /// `RM_CONTROL`: its params, and what the params of each command reach.
    fn control_rules(&self, own: Vec<Reach>) -> (Vec<Reach>, Vec<(u32, Vec<Reach>)>) {
        let (pointer, size) = CONTROL_POINTER;
        let mut params = self.params("NVOS54_PARAMETERS", pointer);
        let (count_off, width) = self.field("NVOS54_PARAMETERS", size);
        params.count_off = count_off.into();
        params.count_width = width;
        params.elem = 1.into();
        params.max = MAX.into();
        let with = |subs| {
            let mut rules = vec![(params, subs)];
            rules.extend(own.iter().cloned());
            rules
        };
        let controls = self.profile.controls.iter();
        let cases = controls.filter(|(_, c)| !c.pointers.is_empty() || !c.files.is_empty()).map(
            |(&command, c)| {
                let subs = reaches(&c.pointers, &c.files).into_iter().map(|(rule, _)| rule);
                (command, with(subs.collect()))
            },
        );
        (with(Vec::new()), cases.collect())
    }

    /// `RM_ALLOC`: the params of each class, as long as RM copies.
    fn alloc_rules(&self, layout: &str, own: Vec<Reach>) -> (Vec<Reach>, Vec<(u32, Vec<Reach>)>) {
        let classes = self.profile.classes.iter();
        let cases = classes.filter(|(_, c)| c.params != Params::None).map(|(&number, class)| {
            let mut params = self.params(layout, ALLOC_POINTER);
            params.add = class.size.into();
            params.max = class.size.into();
            let subs = reaches(&[], &class.files).into_iter().map(|(rule, _)| rule).collect();
            let mut rules = vec![(params, subs)];
            rules.extend(own.iter().cloned());
            (number, rules)
        });
        let cases = cases.collect();
        (own, cases)
    }

    /// Cases of functions that the policy refuses: a buffer that no call can satisfy.
    fn refused_functions(&self, escape: &str) -> Vec<(u32, Vec<Reach>)> {
        let functions = self.policy.refused_functions(escape, self.capabilities);
        let never = |at| {
            let mut rule = buffer(at, 0);
            rule.add = 1.into();
            rule
        };
        functions.into_iter().map(|function| (function, vec![(never(0), Vec::new())])).collect()
    }

    /// How the escape registers memory, if this guest may.
    fn registering(&self, escape: &str) -> Option<&'static Registering> {
        let class = self.profile.classes.get(&OS_DESCRIPTOR)?;
        let allowed = self.policy.class(class, self.capabilities).0 == Verdict::Allow;
        REGISTERING.iter().find(|known| allowed && known.escape == escape)
    }

    fn pages(&self, registering: &Registering) -> Rule {
        let (limit, width) = self.field(registering.layout, registering.limit);
        let mut rule = buffer(self.field(registering.layout, registering.address).0, 0);
        rule.op = OP_PAGES;
        rule.count_off = limit.into();
        rule.count_width = width;
        rule.add = 1.into();
        rule.max = MAX_PAGES.into();
        rule
    }

    fn params(&self, layout: &str, field: &str) -> Rule {
        let flags = rule_flags::IN | rule_flags::OUT | rule_flags::NULL_OK;
        buffer(self.field(layout, field).0, flags)
    }

    /// Offset and width of a field that every measured release has: [`crate::check`] and the
    /// tests over all profiles hold it.
    fn field(&self, layout: &str, path: &str) -> (u16, u8) {
        let found = self.profile.structs.get(layout).and_then(|layout| layout.field(path));
        let (offset, width) = found.unwrap_or((u32::from(NO_OFFSET), 0));
        (u16::try_from(offset).unwrap_or(NO_OFFSET), u8::try_from(width).unwrap_or(0))
    }

    fn ioctl(&mut self, own: Vec<Reach>, cases: Vec<(u32, Vec<Reach>)>) -> Ioctl {
        let first_case = index(self.rules.cases.len());
        let ncases = index(cases.len());
        let mut built = Vec::with_capacity(cases.len());
        for (key, reaches) in cases {
            let (first_rule, nrules) = self.block(reaches);
            built.push(Case {
                key: key.into(),
                first_rule: first_rule.into(),
                nrules: nrules.into(),
            });
        }
        let (first_rule, nrules) = self.block(own);
        self.rules.cases.extend(built);
        Ioctl {
            kind: 0,
            flags: 0,
            select: NO_OFFSET.into(),
            nr: 0.into(),
            size: 0.into(),
            first_case: first_case.into(),
            ncases: ncases.into(),
            first_rule: first_rule.into(),
            nrules: nrules.into(),
        }
    }

    /// Appends rules that lie together, what they gather first.
    fn block(&mut self, reaches: Vec<Reach>) -> (u32, u32) {
        let mut rules = Vec::with_capacity(reaches.len());
        for (mut rule, subs) in reaches {
            rule.first_sub = index(self.rules.rules.len()).into();
            rule.nsubs = index(subs.len()).into();
            self.rules.rules.extend(subs);
            rules.push(rule);
        }
        let first = index(self.rules.rules.len());
        let count = index(rules.len());
        self.rules.rules.extend(rules);
        (first, count)
    }
}

fn index(n: usize) -> u32 {
    u32::try_from(n).expect("INVARIANT: a profile has fewer than 2^32 rules")
}

fn buffer(at: u16, flags: u8) -> Rule {
    Rule {
        op: OP_BUFFER,
        flags,
        offset: at.into(),
        count_off: NO_OFFSET.into(),
        count_width: 0,
        fd_width: 0,
        elem: 0.into(),
        add: 0.into(),
        max: 0.into(),
        first_sub: 0.into(),
        nsubs: 0.into(),
        fd_kinds: 0.into(),
    }
}

fn reaches(pointers: &[Pointer], files: &[File]) -> Vec<Reach> {
    let pointers = pointers.iter().map(|pointer| (pointer_rule(pointer), Vec::new()));
    pointers.chain(files.iter().map(|file| (file_rule(file), Vec::new()))).collect()
}

fn pointer_rule(pointer: &Pointer) -> Rule {
    let direction = match pointer.dir {
        Direction::In => rule_flags::IN,
        Direction::Out => rule_flags::OUT,
        Direction::Inout => rule_flags::IN | rule_flags::OUT,
        Direction::None => 0,
    };
    let mut rule = buffer(pointer.at, direction | rule_flags::NULL_OK);
    match (pointer.count_at, pointer.count_width) {
        (Some(at), Some(width)) => {
            rule.count_off = at.into();
            rule.count_width = width;
            rule.elem = pointer.elem.into();
            // A rule cannot square: one card's worth passes, which is a guest's.
            let max = match (pointer.squared, pointer.unbounded) {
                (true, _) => pointer.elem,
                (false, true) => UNBOUNDED_MAX,
                (false, false) => MAX,
            };
            rule.max = max.into();
        }
        _ => {
            rule.add = pointer.elem.into();
            rule.max = pointer.elem.into();
        }
    }
    rule
}

fn file_rule(file: &File) -> Rule {
    let mut rule = buffer(file.at, 0);
    rule.op = OP_FD;
    rule.fd_width = file.width;
    rule.flags = file.none.split_whitespace().fold(0, |flags, word| {
        flags
            | match word {
                "negative" => rule_flags::NEGATIVE_NONE,
                "zero" => rule_flags::ZERO_NONE,
                "foreign" => rule_flags::FOREIGN_OK,
                _ => 0,
            }
    });
    let kinds = file.kinds.split_whitespace().fold(0, |kinds, word| {
        kinds
            | match word {
                "ctl" => FileKind::Ctl.bit(),
                "gpu" => FileKind::Gpu.bit(),
                "uvm" => FileKind::Uvm.bit(),
                "modeset" => FileKind::Modeset.bit(),
                "cap" => FileKind::Cap.bit(),
                _ => 0,
            }
    });
    rule.fd_kinds = kinds.into();
    rule
}
