//! Writes the preload library, which is embedded in this binary, to a file before a program starts.
//!
//! The library must be a real file, because a program may close every descriptor that it inherited, and its children
//! load the library again by the same path. No other user may be able to replace the file, so it is in a directory to
//! which only this user can write. If root starts a program, the program may change to another user (`setpriv`, `su`, a
//! VMM that drops its rights). Then that user must be able to read the file.

mod directory;
mod order;
mod processors;

use slat_process::file_size::{explained, limited};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions};
use std::hash::{DefaultHasher, Hasher};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{env, ptr};

use crate::output::complain;
pub use order::{Order, sanitizer_settings};
pub use processors::write_out as write_out_processors;

/// The library. cargo has built it together with this binary. (Under `cargo check`, it is empty; see build.rs.)
static LIBRARY: &[u8] = include_bytes!(concat!(
    env!("OUT_DIR"),
    "/../../../deps/libslat_preload.so"
));

/// The mode of the library's file: all users can read it and execute it, because the kernel also executes it as a
/// program.
const MODE: u32 = 0o755;

const PREFIX: &str = "libslat_preload-";

/// The age at which an unused library of an older slat is removed.
const UNUSED: Duration = Duration::from_secs(7 * 24 * 3600);

/// Writes the library to a file, unless the file already exists. Returns the file's path. Warns root if a program that
/// changes to another user could not read the file.
pub fn write_out() -> Result<PathBuf, String> {
    let is_root = directory::user() == 0;
    let (path, note) = write_to_first(&candidates(is_root), is_root)?;
    if let Some(note) = note {
        complain(&note);
    }
    Ok(path)
}

/// Writes the library to the first suitable directory in `directories`. Returns the file's path. In a suitable
/// directory, no other user can replace the file; if `for_all`, all users can also read it. If `for_all` and no such
/// directory is left, uses a directory that only this user can read, and also returns a warning.
fn write_to_first(
    directories: &[PathBuf],
    for_all: bool,
) -> Result<(PathBuf, Option<String>), String> {
    let mut refused = String::new();
    let (mut private, mut too_large) = (None, false);
    for directory in directories {
        match write_to(directory) {
            Ok(path) if !for_all || directory::is_open_to_all(&path) => return Ok((path, None)),
            Ok(path) => private = private.or(Some(path)),
            Err(e) => {
                too_large |= e.raw_os_error() == Some(libc::EFBIG);
                refused.push_str(&format!("\n  {}: {}", directory.display(), explained(&e)));
            }
        }
    }
    let path = private.ok_or_else(|| {
        let remedy = match too_large {
            true => "run `slat run -- true` once without the limit: the file stays",
            false => "set TMPDIR to a directory that is not mounted noexec",
        };
        format!("found no directory for the preload library ({remedy}):{refused}")
    })?;
    let note = format!(
        "only root can read {}: a program that becomes another user will not find slat (set TMPDIR to a directory that all users can read)",
        path.display()
    );
    Ok((path, Some(note)))
}

/// Returns the directories to try. Those whose files last longest come first. For root, its own cache directory comes
/// last, because other users cannot read it.
fn candidates(is_root: bool) -> Vec<PathBuf> {
    let from = |name| {
        env::var_os(name)
            .map(PathBuf::from)
            .filter(|p| p.is_absolute())
    };
    // All users share the system's temporary directories, so the name contains the user's number.
    let own = format!("slat-{}", directory::user());
    let system = is_root.then(|| PathBuf::from("/var/cache/slat"));
    let home = from("HOME").map(|home| home.join(".cache/slat"));
    let (early, late) = if is_root { (None, home) } else { (home, None) };
    [
        from("XDG_CACHE_HOME").map(|cache| cache.join("slat")),
        system,
        early,
        from("XDG_RUNTIME_DIR").map(|run| run.join("slat")),
        from("TMPDIR").map(|tmp| tmp.join(&own)),
        Some(Path::new("/tmp").join(&own)),
        Some(Path::new("/dev/shm").join(&own)),
        late,
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn write_to(directory: &Path) -> io::Result<PathBuf> {
    let directory = &directory::create(directory)?;
    // In LD_PRELOAD, colons and spaces separate libraries and cannot be escaped. So a path that contains them cannot be
    // used.
    if directory
        .as_os_str()
        .as_bytes()
        .iter()
        .any(|b| matches!(b, b':' | b' ' | b'\t' | b'\n' | b'$'))
    {
        return Err(io::Error::other(
            "LD_PRELOAD cannot name a path with this character in it",
        ));
    }
    let name = format!("{PREFIX}{:016x}.so", content_hash());
    let path = directory.join(&name);
    match is_our_library(&path) {
        Ok(true) => {}
        Ok(false) | Err(_) => place(directory, &path, LIBRARY, MODE)?,
    }
    let file = File::open(&path)?;
    if file.metadata()?.permissions().mode() & 0o777 != MODE {
        file.set_permissions(Permissions::from_mode(MODE))?;
    }
    allows_execution(&file)?;
    // The file's time only tells that the library is in use, so that it is not removed. So a failure to set the time is
    // ignored.
    let _ = file.set_modified(SystemTime::now());
    remove_unused(directory, PREFIX, OsStr::new(&name));
    Ok(path)
}

/// Returns a hash of the library for its file name, so that two versions of slat do not replace each other's file. (The
/// hash need not be secure, because the directory protects the file from other users.)
fn content_hash() -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(LIBRARY);
    hasher.finish()
}

fn is_our_library(path: &Path) -> io::Result<bool> {
    let mut file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)?;
    if file.metadata()?.len() != LIBRARY.len() as u64 {
        return Ok(false);
    }
    let mut content = Vec::with_capacity(LIBRARY.len());
    file.read_to_end(&mut content)?;
    Ok(content == LIBRARY)
}

/// Writes a file under a temporary name, and then renames it, so that no process ever sees an incomplete file. The
/// temporary name contains this process's id.
fn place(directory: &Path, path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let temporary = directory.join(format!(".{PREFIX}{}", std::process::id()));
    // An earlier process with the same id may have died before it renamed its temporary file.
    let _ = fs::remove_file(&temporary);
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&temporary)
        .and_then(|mut file| {
            limited(|| file.write_all(content))?;
            // The umask may have removed rights that other users need.
            file.set_permissions(Permissions::from_mode(mode))
        })
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Checks that the file system is not mounted noexec. On a noexec file system, the dynamic linker cannot map the
/// library as executable.
fn allows_execution(file: &File) -> io::Result<()> {
    const LENGTH: usize = 4096;
    // SAFETY: the call makes a new private mapping of an open file, at an address that the kernel chooses.
    let mapped = unsafe {
        libc::mmap(
            ptr::null_mut(),
            LENGTH,
            libc::PROT_READ | libc::PROT_EXEC,
            libc::MAP_PRIVATE,
            file.as_raw_fd(),
            0,
        )
    };
    if mapped == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the mapping was made above, and no pointer to it exists any more.
    unsafe { libc::munmap(mapped, LENGTH) };
    Ok(())
}

fn remove_unused(directory: &Path, prefix: &str, current: &OsStr) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_such = name.as_bytes().starts_with(prefix.as_bytes());
        let unused = || {
            let modified = entry.metadata().and_then(|m| m.modified()).ok()?;
            Some(modified.elapsed().ok()? > UNUSED)
        };
        if is_such && name != current && unused() == Some(true) {
            // A failure is ignored: another slat may have removed the file at the same time.
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Creates an empty directory that all users can read, whatever the umask is.
    pub fn scratch(name: &str) -> PathBuf {
        let directory = env::temp_dir().join(format!("slat-test-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&directory);
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, Permissions::from_mode(0o755)).unwrap();
        directory
    }

    #[test]
    fn the_embedded_library_is_a_shared_object() {
        assert!(LIBRARY.starts_with(b"\x7fELF"));
    }

    #[test]
    fn a_limit_of_file_sizes_is_named() {
        let scratch = scratch("limited");
        let directory = scratch.join("slat");
        // SAFETY: the child calls only functions that take no lock, and the allocator, which the C library keeps usable
        // after a fork. The child ends by `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let limit = libc::rlimit {
                rlim_cur: 100 << 10,
                rlim_max: 100 << 10,
            };
            // SAFETY: the arguments are numbers and a live struct.
            unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) };
            let refused = write_to_first(std::slice::from_ref(&directory), false);
            let named = refused.is_err_and(|why| {
                why.contains("RLIMIT_FSIZE (ulimit -f)") && why.contains("once without the limit")
            });
            // SAFETY: the call ends only the child.
            unsafe { libc::_exit(i32::from(!named)) };
        }
        let mut status = 0;
        // SAFETY: the child was made above.
        unsafe { libc::waitpid(child, &mut status, 0) };
        assert_eq!(status, 0, "a status, or SIGXFSZ");
        assert_eq!(fs::read_dir(&directory).unwrap().count(), 0);
        fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn a_library_that_was_changed_is_replaced() {
        let scratch = scratch("changed");
        let directory = scratch.join("slat");
        let path = write_to(&directory).unwrap();
        assert_eq!(fs::read(&path).unwrap(), LIBRARY);
        let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path), MODE);
        fs::write(&path, b"something else").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert_eq!(write_to(&directory).unwrap(), path);
        assert_eq!(fs::read(&path).unwrap(), LIBRARY);
        assert_eq!(mode(&path), MODE);
        fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn roots_library_is_where_all_can_read_it_or_root_is_told() {
        let scratch = scratch("all");
        let set_mode = |path: &Path, mode| {
            fs::create_dir_all(path).unwrap();
            fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        };
        let (private, public) = (scratch.join("private"), scratch.join("public"));
        set_mode(&private, 0o700);
        set_mode(&public, 0o755);
        let directories = [private.join("slat"), public.join("slat")];
        let write = |directories, for_all| write_to_first(directories, for_all).unwrap();
        let (path, note) = write(&directories, true);
        assert!(path.starts_with(&public) && note.is_none(), "{note:?}");
        let (path, note) = write(&directories, false);
        assert!(path.starts_with(&private) && note.is_none(), "{note:?}");
        let (path, note) = write(&directories[..1], true);
        assert!(path.starts_with(&private) && note.unwrap().lines().count() == 1);
        fs::remove_dir_all(scratch).unwrap();
    }

    #[test]
    fn a_path_that_ld_preload_cannot_name_is_refused() {
        let scratch = scratch("with space");
        assert!(write_to(&scratch.join("slat")).is_err());
        fs::remove_dir_all(scratch).unwrap();
    }
}
