//! The names of guest code, from the symbols of an ELF file such as `vmlinux`, or from the text of `System.map`.
//!
//! The addresses of symbols are those in the file. So a guest kernel must not relocate itself (KASLR): it needs the
//! option `nokaslr`.

use crate::messages;
use crate::policy;
use object::{Object, ObjectSymbol, SymbolKind};
use slat_process::once::Computed;
use std::path::Path;

/// The assumed size, in bytes, of a symbol that has no size and that no other symbol follows.
const LAST: u64 = 4096;

/// Names of code, by address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Symbols(Vec<Symbol>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Symbol {
    start: u64,
    end: u64,
    name: Box<str>,
}

impl Symbols {
    /// Reads the symbols of a file.
    ///
    /// # Errors
    /// A message that names the file.
    pub fn read(path: &Path) -> Result<Self, String> {
        let failed = |why: String| format!("guest symbols: {}: {why}", path.display());
        let bytes = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
        Self::parse(&bytes).map_err(failed)
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, String> {
        // Each element is an address, a size (0 if unknown) and a name.
        let mut found: Vec<(u64, u64, &str)> = Vec::new();
        match object::File::parse(bytes) {
            Ok(file) => found.extend(file.symbols().filter_map(|symbol| {
                let is_code = symbol.kind() == SymbolKind::Text && symbol.is_definition();
                let name = symbol.name().ok()?;
                is_code.then_some((symbol.address(), symbol.size(), name))
            })),
            Err(_) => {
                let text = std::str::from_utf8(bytes).ok();
                found.extend(text.into_iter().flat_map(str::lines).filter_map(of_line));
            }
        }
        if found.is_empty() {
            return Err("is neither an ELF file with symbols nor a System.map".to_owned());
        }
        // If several symbols have the same address, a symbol with a size is kept.
        found.sort_by_key(|(start, size, _)| (*start, std::cmp::Reverse(*size)));
        found.dedup_by_key(|(start, ..)| *start);
        let starts = found.iter().map(|(start, ..)| *start);
        let ends = starts.skip(1).map(Some).chain([None]);
        let symbols = found.iter().zip(ends).map(|((start, size, name), next)| {
            let end = match size {
                0 => next.unwrap_or(start.saturating_add(LAST)),
                size => start.saturating_add(*size),
            };
            Symbol {
                start: *start,
                end,
                name: (*name).into(),
            }
        });
        Ok(Symbols(symbols.collect()))
    }

    /// Returns the symbol of an address, and the offset in the symbol. `None`: the file has no symbol for the address.
    pub fn find(&self, address: u64) -> Option<(&str, u64)> {
        let after = self.0.partition_point(|symbol| symbol.start <= address);
        let symbol = &self.0[after.checked_sub(1)?];
        (address < symbol.end).then(|| (&*symbol.name, address - symbol.start))
    }
}

/// Parses a line of `System.map`. `None`: the line names no code.
fn of_line(line: &str) -> Option<(u64, u64, &str)> {
    let mut words = line.split_ascii_whitespace();
    let start = u64::from_str_radix(words.next()?, 16).ok()?;
    let kind = words.next()?;
    let name = words.next()?;
    // nm(1) uses these letters for code (`t`, `T`) and weak symbols (`w`, `W`).
    ["t", "T", "w", "W"]
        .contains(&kind)
        .then_some((start, 0, name))
}

/// Returns the symbols that `slat run --guest-symbols` names. `None`: the option is missing, or the symbols cannot be
/// read. The first call reads the file, and reports an error to the user. So make the first call before the client can
/// forbid slat to open files.
pub(crate) fn of_guests() -> Option<&'static Symbols> {
    static SYMBOLS: Computed<Option<Result<Symbols, String>>> = Computed::new();
    let read = || {
        let path = policy::current().ok()?.guest_symbols.as_deref()?;
        Some(Symbols::read(path))
    };
    let found = SYMBOLS.get_or_init_then(read, |found| {
        if let Some(Err(message)) = found {
            messages::say(format_args!("{message}"));
        }
    });
    found.as_ref()?.as_ref().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "0000000000001000 A a_constant\nffffffff81000000 T _text\nffffffff81000000 T startup_64\n\
        ffffffff81000040 t helper\nffffffff81000050 D data\nffffffff81000080 W weak\n";

    #[test]
    fn a_system_map_names_code() {
        let symbols = Symbols::parse(MAP.as_bytes()).unwrap();
        let text = 0xffff_ffff_8100_0000;
        assert_eq!(symbols.find(text), Some(("_text", 0)));
        assert_eq!(symbols.find(text + 0x3f), Some(("_text", 0x3f)));
        assert_eq!(symbols.find(text + 0x52), Some(("helper", 0x12)));
        assert_eq!(symbols.find(text + 0x81), Some(("weak", 1)));
        assert_eq!(symbols.find(text + 0x80 + LAST), None);
        for address in [0, 0x1000, text - 1, u64::MAX] {
            assert_eq!(symbols.find(address), None, "{address:#x}");
        }
    }

    #[test]
    fn an_elf_file_names_code() {
        let own = std::env::current_exe().unwrap();
        let symbols = Symbols::read(&own).unwrap();
        let main = symbols.0.iter().find(|symbol| &*symbol.name == "main");
        let main = main.expect("every program has one");
        assert_eq!(symbols.find(main.start + 1), Some(("main", 1)));
    }

    #[test]
    fn a_file_without_names_is_refused_by_its_name() {
        let error = Symbols::read(Path::new("/dev/null")).unwrap_err();
        assert!(error.contains("/dev/null: is neither"), "{error}");
        assert!(Symbols::read(Path::new("/nowhere")).is_err());
    }
}
