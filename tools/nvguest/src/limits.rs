//! `nvguest limits`

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde_json::{json, Value};

use crate::guests;
use crate::out;

/// What a guest may have, and changes of it.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The guest's name, or the path of its admin socket.
    guest: String,
    /// Limits to change: all of them, or none if one is wrong. `process-KEY` is of one process.
    #[arg(value_name = "KEY=VALUE", value_parser = pair)]
    set: Vec<(String, String)>,
    /// Video memory that the guest may have.
    #[arg(long, value_name = "SIZE")]
    vram: Option<String>,
    /// The guest's part of the card's time beside others'.
    #[arg(long, value_name = "N")]
    weight: Option<String>,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("{text:?} has no ="))?;
    Ok((key.to_owned(), value.to_owned()))
}

impl Args {
    fn changes(&self) -> BTreeMap<&str, &str> {
        let words = self.set.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        let flags = [("vram", self.vram.as_deref()), ("weight", self.weight.as_deref())];
        words.chain(flags.into_iter().filter_map(|(key, value)| Some((key, value?)))).collect()
    }
}

/// Changes what is named, and says what holds.
pub fn run(args: &Args, json: bool) -> Result<()> {
    let guest = guests::named(&args.guest)?;
    let answer = guest.ask(json!({"request": "limits", "set": args.changes()}))?;
    if json {
        return out::json(&answer);
    }
    let limits = answer["limits"].as_object().context("the backend's answer has no limits")?;
    let cell = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let mut rows: Vec<[String; 4]> = limits
        .iter()
        .map(|(key, row)| {
            [key.clone(), cell(&row["guest"]), cell(&row["process"]), cell(&row["holds"])]
        })
        .collect();
    for key in ["processes", "vram", "weight"] {
        let value = if answer[key].is_null() { "none".into() } else { cell(&answer[key]) };
        rows.push([key.into(), value, "-".into(), "at once".into()]);
    }
    out::say(&out::table(["LIMIT", "GUEST", "A PROCESS", "A CHANGE HOLDS"], &rows))
}
