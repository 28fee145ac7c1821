//! Answers on standard output: text, tables, JSON.

use std::io::{ErrorKind, Write as _};

use anyhow::Result;
use serde::Serialize;

/// Says it. Who reads may have had enough.
pub fn say(text: &str) -> Result<()> {
    say_while_heard(text).map(drop)
}

/// Says it at once; whether anybody still reads.
pub fn say_while_heard(text: &str) -> Result<bool> {
    let mut stdout = std::io::stdout();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        outcome => Ok(outcome.map(|()| true)?),
    }
}

/// Says it as JSON.
pub fn json(value: &impl Serialize) -> Result<()> {
    say(&(serde_json::to_string_pretty(value)? + "\n"))
}

/// Rows under a head, in columns: the first to the left, numbers to the right.
pub fn table<const N: usize>(head: [&str; N], rows: &[[String; N]]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([head[column].len()]).max().unwrap_or(0)
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |cells: [&str; N]| {
        let mut line = String::new();
        for (column, cell) in cells.into_iter().enumerate() {
            let width = widths[column];
            let left = rows.iter().any(|row| !is_number(&row[column]));
            let cell = if left { format!("{cell:<width$}") } else { format!("{cell:>width$}") };
            line.push_str(&cell);
            line.push_str("  ");
        }
        line.trim_end().to_owned() + "\n"
    };
    let rows = rows.iter().map(|row| line(row.each_ref().map(String::as_str)));
    std::iter::once(line(head)).chain(rows).collect()
}

fn is_number(cell: &str) -> bool {
    cell.starts_with(|first: char| first.is_ascii_digit() || matches!(first, '-' | '<' | '>'))
}

/// Bytes with a binary unit.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["B", "KiB", "MiB", "GiB"];
    let unit = (0..3).take_while(|unit| bytes >> (10 * (unit + 1)) >= 10).count();
    format!("{} {}", bytes >> (10 * unit), UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_to_the_right_and_words_to_the_left() {
        let rows = [["a".into(), "1".into()], ["bcd".into(), "20".into()]];
        assert_eq!(table(["GUEST", "N"], &rows), "GUEST   N\na       1\nbcd    20\n");
    }

    #[test]
    fn bytes_keep_two_digits() {
        let shown = [0, 9999, 10_240, 64 << 20, 141 << 30, 9 << 30].map(bytes);
        assert_eq!(shown, ["0 B", "9999 B", "10 KiB", "64 MiB", "141 GiB", "9216 MiB"]);
    }
}
