//! Prints the public API of a crate, a line for each item, out of the file that rustdoc has made of it.
//!
//! The exit status is 3 if the file is of another format than the one that is read, which changes with rustdoc.

use std::error::Error;
use std::process::ExitCode;

#[derive(serde::Deserialize)]
struct Format {
    format_version: u32,
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("public-api-list FILE")?;
    let Format { format_version } = serde_json::from_str(&std::fs::read_to_string(&path)?)?;
    if format_version != rustdoc_types::FORMAT_VERSION {
        eprintln!(
            "rustdoc writes format {format_version} of its JSON, and public-api reads {}",
            rustdoc_types::FORMAT_VERSION
        );
        return Ok(ExitCode::from(3));
    }
    // Which types are `Send` is checked where it is promised, and implementations for all types are not the crate's.
    let api = public_api::Builder::from_rustdoc_json(path)
        .omit_auto_trait_impls(true)
        .omit_blanket_impls(true)
        .build()?;
    let mut implementation = None;
    for item in api.items().map(ToString::to_string) {
        if item.starts_with("impl") {
            implementation = implementing(&item);
        }
        let is_demanded = |of: &String| item.contains(of) && !item.starts_with("pub type");
        if !item.contains("StructuralPartialEq")
            && !implementation.as_ref().is_some_and(is_demanded)
        {
            println!("{item}");
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns how items of the implementation of a trait begin. What the trait demands is not said again for each type; only types are.
fn implementing(item: &str) -> Option<String> {
    let (_, of) = item.split_once(" for ")?;
    let of = of.split_once(" where ").map_or(of, |(of, _)| of);
    Some(format!(" {}::", of.trim_start_matches('&')))
}
