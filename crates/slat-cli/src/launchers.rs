//! Recognises launchers: programs that start another program without LD_PRELOAD. The started program would use the
//! host's `/dev/kvm`, or find none.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Returns a warning for the user if `program` starts another program without LD_PRELOAD.
pub fn losing_preload(program: &OsStr, arguments: &[OsString]) -> Option<String> {
    let name = Path::new(program).file_name()?.to_str()?;
    // The launcher's own options come before the program that it starts. This code may mistake an option of that
    // program for an option of the launcher. Then a warning is missing or unnecessary, which is harmless.
    let has = |options: &[&str]| {
        let is = |word: &OsString| options.iter().any(|option| word == option);
        arguments.iter().any(is)
    };
    // These ways pass LD_PRELOAD on: `sudo LD_PRELOAD=...`, `sudo --preserve-env=LD_PRELOAD`,
    // `systemd-run -E LD_PRELOAD`.
    let passes_it = |word: &OsString| {
        let mut parts = word.as_bytes().windows(b"LD_PRELOAD".len());
        parts.any(|part| part == b"LD_PRELOAD")
    };
    let loses = match name {
        "sudo" | "doas" | "pkexec" => true,
        "su" | "runuser" => has(&["-", "-l", "--login"]),
        // A program in a scope is started by systemd-run itself, so it gets LD_PRELOAD. A program in a service is
        // started by the service manager.
        "systemd-run" => !has(&["--scope"]),
        _ => false,
    };
    (loses && !arguments.iter().any(passes_it)).then(|| {
        format!(
            "{name} starts its program without LD_PRELOAD, so slat does not reach it: have {name} start `slat run -- PROGRAM`"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_told_and_who_is_not() {
        for (line, told) in [
            ("sudo -u nobody prog", true),
            ("/usr/bin/sudo prog", true),
            ("sudo --preserve-env=LD_PRELOAD prog", false),
            ("su - nobody -c prog", true),
            ("su nobody -c prog", false),
            ("runuser -l nobody -c prog", true),
            ("runuser -u nobody -- prog", false),
            ("setpriv --reuid 65534 prog", false),
            ("systemd-run --wait prog", true),
            ("systemd-run --scope prog", false),
            ("prog -l", false),
        ] {
            let mut words = line.split(' ').map(OsString::from);
            let program = words.next().unwrap();
            let arguments: Vec<_> = words.collect();
            let sentence = losing_preload(&program, &arguments);
            assert_eq!(sentence.is_some(), told, "{line}");
        }
    }
}
