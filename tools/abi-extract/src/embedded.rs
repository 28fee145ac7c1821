//! Controls whose parameters hold pointers: RM's own tables of which, and how long.
//!
//! Two files say it: `embedded_param_copy.c` for controls that RM still has in that form,
//! `rmapi_deprecated_control.c` for those it converts to a newer one.

use std::collections::BTreeMap;

use anyhow::{anyhow, bail, Context, Result};
use nvguest_abi::profile::{Direction, Pointer};

use crate::ctext;
use crate::dwarf::{Kind, Layout};
use crate::probe::{Answers, Probe, Type, Value};

/// A pointer, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reach {
    /// Path of the pointer.
    pub field: String,
    /// Path of the count, if the length is not constant.
    pub count: Option<String>,
    /// Bytes of an element as a C expression, times a constant count.
    pub elem: String,
    /// Which way.
    pub dir: Direction,
    /// The count is multiplied by itself.
    pub squared: bool,
    /// No limit of 1 MiB.
    pub unbounded: bool,
}

/// A control with pointers, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Case {
    /// Where it stands.
    pub label: String,
    /// The command's macro.
    pub command: String,
    /// The parameters' type.
    pub params: String,
    /// The newer command that RM converts it to.
    pub converted_to: Option<String>,
    /// Its pointers.
    pub reach: Vec<Reach>,
}

/// Handled by a function that picks a member of a union; the policy refuses it, and the
/// pointers are named so that they never pass as numbers.
const I2C_TRANSACTION: &str = "NV402C_CTRL_CMD_I2C_TRANSACTION";
/// Its length is a local variable: `gpuCount` times itself.
const P2P_CAPS: &str = "NV0000_CTRL_CMD_SYSTEM_GET_P2P_CAPS";

/// Reads `embeddedParamCopyIn`.
pub fn parse_copies(
    file: &str,
    text: &str,
    macros: &BTreeMap<String, String>,
) -> Result<Vec<Case>> {
    let text = ctext::resolve_conditionals(file, &ctext::without_comments(text), macros)?;
    let start = text
        .find("NV_STATUS embeddedParamCopyIn")
        .ok_or_else(|| anyhow!("{file}: no embeddedParamCopyIn"))?;
    let end = text[start..].find("\n}").map_or(text.len(), |end| start + end);
    let body = &text[start..end];
    let first_line = text[..start].matches('\n').count() + 1;
    let mut cases = Vec::new();
    let mut starts: Vec<usize> =
        body.match_indices("case ").map(|(at, _)| at).chain([body.len()]).collect();
    if let Some(default) = body.find("default:") {
        starts.retain(|&at| at < default);
        starts.push(default);
    }
    for pair in starts.windows(2) {
        let block = &body[pair[0] + "case ".len()..pair[1]];
        let line = first_line + body[..pair[0]].matches('\n').count();
        let (command, rest) =
            block.split_once(':').with_context(|| format!("{file}:{line}: no case label"))?;
        let label = format!("{file}:{line}");
        cases.push(copy_case(label, command.trim(), rest)?);
    }
    if cases.is_empty() {
        bail!("{file}: no case in embeddedParamCopyIn");
    }
    Ok(cases)
}

fn copy_case(label: String, command: &str, block: &str) -> Result<Case> {
    let params = ctext::calls(block, "CHECK_PARAMS_OR_RETURN")
        .first()
        .and_then(|(_, arguments)| arguments.get(1).cloned())
        .or_else(|| cast_type(block))
        .with_context(|| format!("{label}: {command}: type of the parameters not understood"))?;
    let mut reach = Vec::new();
    for (index, (_, arguments)) in ctext::calls(block, "RMAPI_PARAM_COPY_INIT").iter().enumerate() {
        let [_, _, pointer, count, elem] = &arguments[..] else {
            bail!("{label}: {command}: RMAPI_PARAM_COPY_INIT not understood");
        };
        let field = member(pointer)
            .with_context(|| format!("{label}: {command}: pointer not understood: {pointer}"))?;
        let flag = |name: &str| {
            block.contains(&format!("paramCopies[{index}].flags |= RMAPI_PARAM_COPY_FLAGS_{name};"))
        };
        let (count, squared) = match (member(count), ctext::literal(count)) {
            (Some(count), _) => (Some(count), false),
            (None, Some(1)) => (None, false),
            _ if command == P2P_CAPS && count == "numEntries" => (Some("gpuCount".into()), true),
            _ => bail!("{label}: {command}: count not understood: {count}"),
        };
        let dir = match (flag("SKIP_COPYIN"), flag("SKIP_COPYOUT")) {
            (false, false) => Direction::Inout,
            (true, false) => Direction::Out,
            (false, true) => Direction::In,
            (true, true) => Direction::None,
        };
        let unbounded = flag("DISABLE_MAX_SIZE_CHECK");
        reach.push(Reach { field, count, elem: elem.clone(), dir, squared, unbounded });
    }
    if command == I2C_TRANSACTION {
        reach = i2c_transaction();
    }
    if reach.is_empty() {
        bail!("{label}: {command}: no pointer understood");
    }
    Ok(Case { label, command: command.to_owned(), params, converted_to: None, reach })
}

fn i2c_transaction() -> Vec<Reach> {
    let member = "smbusMultibyteRegisterData";
    vec![Reach {
        field: format!("transData.{member}.pMessage"),
        count: Some(format!("transData.{member}.messageLength")),
        elem: "1".to_owned(),
        dir: Direction::Inout,
        squared: false,
        unbounded: false,
    }]
}

fn cast_type(block: &str) -> Option<String> {
    let at = block.find("*)pParams)->")?;
    let open = block[..at].rfind('(')?;
    Some(block[open + 1..at].trim().to_owned())
}

/// The path in `((T*)pParams)->path` or `pFoo->path`.
fn member(expression: &str) -> Option<String> {
    let (_, path) = expression.rsplit_once("->")?;
    let path = path.trim();
    let plain = path.chars().all(|c| ctext::is_word(c) || c == '.');
    (plain && !path.is_empty()).then(|| path.to_owned())
}

/// Reads the converters of older controls.
pub fn parse_converters(file: &str, text: &str) -> Result<Vec<Case>> {
    let text = ctext::without_comments(text);
    let table_at = text
        .find("rmapiDeprecatedControl")
        .or_else(|| text.find("NvU32                       cmd"))
        .unwrap_or(0);
    let mut cases = Vec::new();
    for row in converter_rows(&text[table_at.min(text.len())..]) {
        let function = format!("static NV_STATUS V2_CONVERTER(_{row})\n(");
        let at =
            text.find(&function).ok_or_else(|| anyhow!("{file}: converter of {row} not found"))?;
        let end = text[at..].find("\n}").map_or(text.len(), |end| at + end);
        let line = text[..at].matches('\n').count() + 1;
        cases.push(converter_case(format!("{file}:{line}"), &row, &text[at..end])?);
    }
    if cases.is_empty() {
        bail!("{file}: no converter understood");
    }
    Ok(cases)
}

/// Commands of rows of the form `{ COMMAND, V2_CONVERTER(_COMMAND) }`.
fn converter_rows(text: &str) -> Vec<String> {
    let mut rows = Vec::new();
    for (at, _) in text.match_indices("V2_CONVERTER(_") {
        let before = text[..at].trim_end().trim_end_matches(',').trim_end();
        let name: String = before
            .chars()
            .rev()
            .take_while(|&c| ctext::is_word(c))
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
            .collect();
        let head = before[..before.len() - name.len()].trim_end();
        if head.ends_with('{') && text[at..].starts_with(&format!("V2_CONVERTER(_{name})")) {
            rows.push(name);
        }
    }
    rows
}

fn converter_case(label: String, command: &str, body: &str) -> Result<Case> {
    let mut calls = ctext::calls(body, "CONVERT_TO_V2");
    calls.extend(ctext::calls(body, "CONVERT_TO_V2_EX"));
    let Some((_, arguments)) = calls.first() else { return hand_converter(label, command) };
    if arguments.len() < 10 {
        bail!("{label}: {command}: converter of {} arguments", arguments.len());
    }
    let elem = match arguments[6].as_str() {
        "NV_TRUE" => format!("sizeof({})", arguments[7]),
        "NV_FALSE" => "1".to_owned(),
        other => bail!("{label}: {command}: not a truth value: {other}"),
    };
    let dir = match (arguments[8].as_str(), arguments[9].as_str()) {
        ("NV_TRUE", "NV_TRUE") => Direction::Inout,
        ("NV_TRUE", "NV_FALSE") => Direction::In,
        ("NV_FALSE", "NV_TRUE") => Direction::Out,
        other => bail!("{label}: {command}: direction not understood: {other:?}"),
    };
    Ok(Case {
        label,
        command: command.to_owned(),
        params: arguments[1].clone(),
        converted_to: Some(arguments[0].clone()),
        reach: vec![Reach {
            field: arguments[3].clone(),
            count: Some(arguments[5].clone()),
            elem,
            dir,
            squared: false,
            unbounded: false,
        }],
    })
}

/// The two converters that are written out instead of made by the macro.
fn hand_converter(label: String, command: &str) -> Result<Case> {
    let reach = |field: &str, count: Option<&str>, elem: &str, dir| Reach {
        field: field.to_owned(),
        count: count.map(str::to_owned),
        elem: elem.to_owned(),
        dir,
        squared: false,
        unbounded: false,
    };
    let (params, to, reach) = match command {
        "NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION" => (
            "NV0000_CTRL_SYSTEM_GET_BUILD_VERSION_PARAMS",
            "NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION_V2",
            ["pDriverVersionBuffer", "pVersionBuffer", "pTitleBuffer"]
                .map(|field| reach(field, Some("sizeOfStrings"), "1", Direction::Out))
                .to_vec(),
        ),
        "NV0073_CTRL_CMD_DP_SET_MSA_PROPERTIES" => (
            "NV0073_CTRL_CMD_DP_SET_MSA_PROPERTIES_PARAMS",
            "NV0073_CTRL_CMD_DP_SET_MSA_PROPERTIES_V2",
            vec![reach(
                "pFeatureDebugValues",
                None,
                "sizeof(NV0073_CTRL_DP_MSA_PROPERTIES_VALUES)",
                Direction::Inout,
            )],
        ),
        _ => bail!("{label}: {command}: a converter of a form not understood"),
    };
    Ok(Case {
        label,
        command: command.to_owned(),
        params: params.to_owned(),
        converted_to: Some(to.to_owned()),
        reach,
    })
}

/// Cases, asked of the compiler.
pub struct Asked(Vec<(Case, Value, Type, Vec<Value>)>);

/// A control's pointers, measured.
pub struct Measured {
    /// The case as text.
    pub case: Case,
    /// The command.
    pub command: u32,
    /// Size and fingerprint of the parameters.
    pub layout: (u32, String),
    /// Its pointers.
    pub pointers: Vec<Pointer>,
}

impl Asked {
    /// Asks for commands, structs and element sizes.
    pub fn ask(cases: Vec<Case>, probe: &mut Probe) -> Self {
        Self(
            cases
                .into_iter()
                .map(|case| {
                    let command = probe.value(&case.label, &case.command);
                    let kind = probe.layout(&case.label, &case.params);
                    let elems =
                        case.reach.iter().map(|r| probe.value(&case.label, &r.elem)).collect();
                    (case, command, kind, elems)
                })
                .collect(),
        )
    }

    /// The pointers with their offsets.
    pub fn finish(self, answers: &Answers) -> Result<Vec<Measured>> {
        let mut measured = Vec::new();
        for (case, command, kind, elems) in self.0 {
            let layout = answers.layout(kind);
            let mut pointers = Vec::new();
            for (reach, elem) in case.reach.iter().zip(elems) {
                pointers.push(
                    pointer(layout, reach, answers.value32(elem)?)
                        .with_context(|| format!("{}: {}", case.label, case.command))?,
                );
            }
            let layout = (layout.size, layout.fingerprint());
            measured.push(Measured { command: answers.value32(command)?, case, layout, pointers });
        }
        Ok(measured)
    }
}

/// A pointer of a measured struct.
pub fn pointer(layout: &Layout, reach: &Reach, elem: u32) -> Result<Pointer> {
    let find = |path: &str| {
        layout.field(path).ok_or_else(|| anyhow!("the struct has no field {path} any more"))
    };
    let field = find(&reach.field)?;
    if field.kind == Kind::Compound || field.size != 8 {
        bail!("field {} is no pointer of 8 bytes", reach.field);
    }
    let count = reach.count.as_deref().map(find).transpose()?;
    Ok(Pointer {
        field: reach.field.clone(),
        at: u16::try_from(field.offset)?,
        dir: reach.dir,
        elem,
        count: reach.count.clone(),
        count_at: count.map(|count| u16::try_from(count.offset)).transpose()?,
        count_width: count.map(|count| u8::try_from(count.size)).transpose()?,
        squared: reach.squared,
        unbounded: reach.unbounded,
    })
}
