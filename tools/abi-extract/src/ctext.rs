//! The little of C's text that NVIDIA's tables need: comments, conditionals, macro calls.

use std::collections::BTreeMap;

use anyhow::{bail, Result};

/// `text` with each comment made a blank, line breaks kept.
pub fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(['/', '"']) {
        out.push_str(&rest[..start]);
        rest = &rest[start..];
        let (kept, length) = if rest.starts_with("/*") {
            let end = rest.find("*/").map_or(rest.len(), |end| end + 2);
            (rest[..end].chars().filter(|&c| c == '\n').collect(), end)
        } else if rest.starts_with("//") {
            (String::new(), rest.find('\n').unwrap_or(rest.len()))
        } else if rest.starts_with('"') {
            let end = string_end(rest);
            (rest[..end].to_owned(), end)
        } else {
            ("/".to_owned(), 1)
        };
        out.push_str(&kept);
        if length > 1 && rest.starts_with("/*") {
            out.push(' ');
        }
        rest = &rest[length..];
    }
    out.push_str(rest);
    out
}

fn string_end(text: &str) -> usize {
    let mut escaped = false;
    for (index, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            b'\\' if !escaped => escaped = true,
            b'"' if !escaped => return index + 1,
            b'\n' => return index,
            _ => escaped = false,
        }
    }
    text.len()
}

/// Drops what `#ifdef` and `#ifndef` exclude. An `#if` that asks for a debug build is taken
/// as false; any other is an error, since guessing would be silent.
pub fn resolve_conditionals(
    file: &str,
    text: &str,
    macros: &BTreeMap<String, String>,
) -> Result<String> {
    let mut out = String::new();
    let mut stack: Vec<bool> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let trimmed = line.trim_start();
        let Some(directive) = trimmed.strip_prefix('#').map(str::trim_start) else {
            if stack.iter().all(|&kept| kept) {
                out.push_str(line);
            }
            out.push('\n');
            continue;
        };
        out.push('\n');
        let (word, rest) = directive.split_once(char::is_whitespace).unwrap_or((directive, ""));
        match word {
            "ifdef" => stack.push(macros.contains_key(rest.trim())),
            "ifndef" => stack.push(!macros.contains_key(rest.trim())),
            "if" if rest.contains("defined(DEBUG)") => stack.push(false),
            "if" => bail!("{file}:{}: condition not understood: {line}", number + 1),
            "else" => match stack.last_mut() {
                Some(kept) => *kept = !*kept,
                None => bail!("{file}:{}: #else without #if", number + 1),
            },
            "endif" => {
                stack.pop();
            }
            _ => {}
        }
    }
    Ok(out)
}

/// The calls of macro or function `name` in `text`: line number and the arguments' text.
pub fn calls(text: &str, name: &str) -> Vec<(usize, Vec<String>)> {
    let mut found = Vec::new();
    let mut from = 0;
    while let Some(at) = text[from..].find(name).map(|at| at + from) {
        from = at + name.len();
        let before = text[..at].chars().next_back();
        if before.is_some_and(is_word) {
            continue;
        }
        let Some(inner) = parenthesised(&text[from..]) else { continue };
        let line = text[..at].matches('\n').count() + 1;
        found.push((line, arguments(inner)));
    }
    found
}

/// What stands in the parenthesis that `text` begins with, blanks aside.
pub fn parenthesised(text: &str) -> Option<&str> {
    let open = text.len() - text.trim_start().len();
    if !text[open..].starts_with('(') {
        return None;
    }
    let mut depth = 0usize;
    for (index, c) in text[open..].char_indices() {
        match c {
            '(' => depth += 1,
            ')' => {
                depth -= 1;
                if depth == 0 {
                    return Some(&text[open + 1..open + index]);
                }
            }
            _ => {}
        }
    }
    None
}

/// Splits at commas outside any parenthesis or brace; blanks collapse.
pub fn arguments(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut depth = 0i32;
    for c in text.chars() {
        match c {
            '(' | '{' => depth += 1,
            ')' | '}' => depth -= 1,
            _ => {}
        }
        match parts.last_mut() {
            Some(last) if c != ',' || depth != 0 => last.push(c),
            _ => parts.push(String::new()),
        }
    }
    parts.iter().map(|part| part.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// Whether a letter can be part of a name.
pub fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Whether `word` stands in `text` as a whole word.
pub fn has_word(text: &str, word: &str) -> bool {
    text.match_indices(word).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

/// A literal number as macros spell it: `0x20800102`, `(0x1U)`, `(42)`.
pub fn literal(body: &str) -> Option<u64> {
    let mut text = body.trim();
    while let Some(inner) = text.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')) {
        text = inner.trim();
    }
    let text = text.trim_end_matches(['u', 'U', 'l', 'L']);
    match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_go_and_strings_and_lines_stay() {
        let text = "a /* b\n */ c // d\ne \"/* f */\" g / h";
        assert_eq!(without_comments(text), "a \n  c \ne \"/* f */\" g / h");
    }

    #[test]
    fn a_call_over_several_lines_is_split_at_its_own_commas() {
        let text = "x ENTRY(A,\n  LIST(b, c),\n D)";
        assert_eq!(
            calls(text, "ENTRY"),
            [(1, vec!["A".to_owned(), "LIST(b, c)".to_owned(), "D".to_owned()])]
        );
    }

    #[test]
    fn a_name_inside_another_name_is_no_call() {
        assert!(calls("MY_ENTRY(a)", "ENTRY").is_empty());
        assert!(!has_word("NV_ESC_RM_ALLOC_MEMORY", "NV_ESC_RM_ALLOC"));
    }

    #[test]
    fn a_debug_only_block_is_dropped_and_an_unknown_condition_is_an_error() {
        let macros = BTreeMap::from([("HAVE".to_owned(), String::new())]);
        let text = "#ifdef HAVE\na\n#else\nb\n#endif\n#if X && (defined(DEBUG))\nc\n#endif\nd";
        let kept = resolve_conditionals("t.h", text, &macros).unwrap();
        assert_eq!(kept.split_whitespace().collect::<Vec<_>>(), ["a", "d"]);
        let error = resolve_conditionals("t.h", "\n#if FOO > 2\n#endif", &macros).unwrap_err();
        assert!(error.to_string().contains("t.h:2"), "{error}");
    }

    #[test]
    fn literals_lose_their_parentheses_and_suffixes() {
        assert_eq!(literal("((0x20800102U))"), Some(0x2080_0102));
        assert_eq!(literal("(42)"), Some(42));
        assert_eq!(literal("(A | B)"), None);
    }
}
